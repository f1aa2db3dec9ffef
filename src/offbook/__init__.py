"""offbook: post-train a coding agent until it no longer needs the hint. From Python: offbook.api."""

__version__ = "0.1.0"
