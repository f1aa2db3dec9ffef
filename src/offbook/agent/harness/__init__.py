"""The agent loop and its tools, and the runner for a user's own agent command."""

from offbook.agent.harness.agent import Harness, record_crash, run_agent
from offbook.agent.harness.command import Door, run_command
from offbook.agent.harness.own import more_tools
from offbook.agent.harness.tool import ToolFailed
from offbook.agent.harness.toolsets import make_toolset
