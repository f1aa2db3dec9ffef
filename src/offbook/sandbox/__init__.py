"""A box with a working tree: run commands in it, read and write its files, see what changed."""

from offbook.sandbox.box import Box, ExecResult, PathRefused
from offbook.sandbox.process import ProcessBox

__all__ = ["Box", "ExecResult", "PathRefused", "ProcessBox"]
