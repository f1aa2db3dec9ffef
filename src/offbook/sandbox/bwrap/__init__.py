"""Boxes of namespaces, made by bubblewrap over a stack of folders."""

from offbook.sandbox.bwrap.bwrap_box import BwrapBox
from offbook.sandbox.bwrap.isolation import isolation, require_isolation

__all__ = ["BwrapBox", "isolation", "require_isolation"]
