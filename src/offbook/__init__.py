"""offbook: post-train a coding agent until it no longer needs the hint."""

__version__ = "0.1.0"
