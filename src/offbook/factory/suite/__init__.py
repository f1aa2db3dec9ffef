"""A repository's own test suite in a box: how its tests go, and which functions each of them enters."""
