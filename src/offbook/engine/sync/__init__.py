"""Weights through a store: a publisher writes what changed, readers get exactly the same bits (docs/sync.md)."""

from offbook.engine.sync.codec import Damaged
from offbook.engine.sync.publisher import Publisher
from offbook.engine.sync.reader import Reader
from offbook.engine.sync.stores import FolderStore, Missing, Store, open_store
