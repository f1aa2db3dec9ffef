"""Annotators: they turn rollouts into samples. A new method is a new annotator, not a new trainer."""

from offbook.algo.baseline import Carried, baselines
from offbook.algo.corrections import correction_sample
from offbook.algo.group_advantage import group_advantage, rl_samples
from offbook.algo.opd import OTHER, opd_branches
from offbook.algo.opsd import opsd_branches, reference_block
from offbook.algo.response import first_sampled
from offbook.algo.sdft import demonstration_block, sdft_branches
from offbook.algo.sdpo import sdpo_branches
from offbook.algo.sft import dft_sample, in_place, sft_sample
from offbook.algo.targeted import anchor_sample, hint_block, hint_branch, hint_weight, target_key
