"""Tasks from two releases of a package: the newer one's tests, and the hunks of its source that they need."""
