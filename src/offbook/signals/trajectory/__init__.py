"""What an agent did in a rollout, ours or another's: calls with answers, files, commands, tests, how it ended."""

from offbook.signals.trajectory.shell import Command, relative
from offbook.signals.trajectory.tool_calls import At, ToolUse, shown, spoken, with_siblings
from offbook.signals.trajectory.trajectory import Trajectory
