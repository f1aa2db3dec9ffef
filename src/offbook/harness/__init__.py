"""The agent at work: its loop and its tools."""

from offbook.harness.agent import run_agent
from offbook.harness.tools import TOOLS, Tool

__all__ = ["TOOLS", "Tool", "run_agent"]
