"""Weights through a store: a publisher writes what changed, readers land on exactly the same bits (docs/sync.md)."""

from offbook.sync.codec import Damaged
from offbook.sync.publisher import Publisher
from offbook.sync.reader import Reader
from offbook.sync.stores import FolderStore, MemoryStore, Missing, Store, open_store
