"""Other agents' work as rollouts: ATIF files and OpenAI-format messages. They have no tokens to train on."""

from offbook.trajectories.read import Loaded, read_trajectories

__all__ = ["Loaded", "read_trajectories"]
