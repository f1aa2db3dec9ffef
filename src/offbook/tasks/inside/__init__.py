"""What runs inside a sandbox, in the repository's own interpreter. suite.py sends it as one text."""
