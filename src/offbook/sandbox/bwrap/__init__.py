"""Sandboxes of namespaces, made by bubblewrap over a stack of folders."""
