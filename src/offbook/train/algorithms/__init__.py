"""Annotators: they turn rollouts into samples. A new method is a new annotator, not a new trainer."""

from offbook.train.algorithms.baseline import baselines
from offbook.train.algorithms.group_advantage import group_advantage, has_gradient, rl_samples
from offbook.train.algorithms.opd import OTHER, opd_branches
from offbook.train.algorithms.opsd import opsd_branches, reference_block
from offbook.train.algorithms.response import first_sampled
from offbook.train.algorithms.sdft import demonstration_block, sdft_branches
from offbook.train.algorithms.sdpo import sdpo_branches
from offbook.train.algorithms.sft import dft_sample, sft_sample
from offbook.train.algorithms.targeted import hint_block, hint_branch, target_key
