"""What a rollout earned."""

from offbook.rewards.compose import Part, RewardFunction, Rewards, compose
from offbook.rewards.outcome import Grader
