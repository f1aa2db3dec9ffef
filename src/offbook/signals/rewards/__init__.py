"""What a rollout earned."""

from offbook.signals.rewards.compose import Part, RewardFunction, Rewards, compose
from offbook.signals.rewards.outcome import Grader
