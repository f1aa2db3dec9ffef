"""The agent at work: its loop and its tools, or the command that is another agent."""

from offbook.harness.agent import Harness, Midway, record_crash, run_agent
from offbook.harness.command import Door, run_command
from offbook.harness.own import own_tools
from offbook.harness.tool import ToolFailed
from offbook.harness.toolsets import make_toolset
