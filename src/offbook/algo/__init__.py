"""Annotators: they turn rollouts into samples. A new method is a new annotator, not a new trainer."""

from offbook.algo.group_advantage import group_advantage, rl_samples
from offbook.algo.hint_kl import add_branch, anchor_sample, hint_block, hint_weight, target_key
from offbook.algo.sft import sft_sample

__all__ = [
    "add_branch",
    "anchor_sample",
    "group_advantage",
    "hint_block",
    "hint_weight",
    "rl_samples",
    "sft_sample",
    "target_key",
]
