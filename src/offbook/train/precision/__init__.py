"""How the linear layers of a model compute: in the model's own precision, in FP8, or as NVFP4 would. Trainer and engine
use the same ones."""

from offbook.train.precision.experts import experts_of
from offbook.train.precision.layers import compute_linears, plainly, refuse_lacking

__all__ = ["compute_linears", "experts_of", "plainly", "refuse_lacking"]
