"""The agent at work: its loop and its tools."""

from offbook.harness.agent import Harness, run_agent
from offbook.harness.toolsets import make_toolset

__all__ = ["Harness", "make_toolset", "run_agent"]
