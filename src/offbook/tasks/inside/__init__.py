"""What runs inside a box, in the repository's own interpreter. suite.py sends it as one text."""
