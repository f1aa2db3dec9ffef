"""The circle: the only room that knows all the others."""
