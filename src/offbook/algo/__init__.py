"""Annotators: they turn rollouts into samples. A new method is a new annotator, not a new trainer."""

from offbook.algo.baseline import Carried, baselines
from offbook.algo.group_advantage import group_advantage, rl_samples
from offbook.algo.sdpo import sdpo_branches
from offbook.algo.sft import in_place, sft_sample, up_to
from offbook.algo.targeted import anchor_sample, hint_block, hint_branch, hint_weight, target_key

__all__ = [
    "Carried",
    "anchor_sample",
    "baselines",
    "group_advantage",
    "hint_block",
    "hint_branch",
    "hint_weight",
    "in_place",
    "rl_samples",
    "sdpo_branches",
    "sft_sample",
    "target_key",
    "up_to",
]
