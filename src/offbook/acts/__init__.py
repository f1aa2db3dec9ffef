"""What an agent did in a rollout, ours or another's: calls with answers, files, commands, tests, how it ended."""

from offbook.acts.acts import Acts
from offbook.acts.exchanges import At, Exchange, shown, spoken, with_siblings
from offbook.acts.shell import Command, relative
