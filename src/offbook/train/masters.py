"""What the optimizer steps on: float32 masters of the parameters that are trained.

A parameter in float32 is its own master. One in bfloat16 is a working copy: bfloat16 has 8 bits of mantissa, so a step
of a small learning rate is rounded away (at 1e-6 under 2% of the entries move in ten steps). Its gradient goes into
the master's float32 one as soon as the backward pass has it, so that gradients of many micro-batches add up in float32.
A trained parameter then takes 18 bytes: 2 here, 4 as master, 4 of gradient, 8 of AdamW's state. A part of the loss that
is bounded stays with the working copy, at 2 bytes more (balance.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from offbook.train.optim.units import local
from offbook.train.parallel.ranks import total_norm

HOOK = "_hands_gradient_over"  # of a working copy: what takes its gradient


class Masters:
    def __init__(self, model: nn.Module):
        """Of the parameters of `model` that are trained; those that are tied count once."""
        self.named: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}  # the parameters that are not their own masters
        self._hands_over = True
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.named[name] = parameter
            if parameter.dtype != torch.float32:
                self.named[name], self.copies[name] = nn.Parameter(parameter.detach().float()), parameter
                self._take_from(parameter, self.named[name])

    @torch.no_grad()
    def write_back(self) -> None:
        """After a step: each working copy is its master, rounded."""
        if self.copies:
            masters = [local(self.named[name]) for name in self.copies]
            torch._foreach_copy_([local(working) for working in self.copies.values()], masters)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of all weights, as the model has them."""
        working = [self.copies.get(name, master) for name, master in self.named.items()]
        return total_norm(working)

    @contextmanager
    def handing_over(self, does: bool) -> Iterator[None]:
        """Whether working copies hand their gradients to their masters, or keep and add them up themselves."""
        self._hands_over = does
        try:
            yield
        finally:
            self._hands_over = True

    def _take_from(self, working: nn.Parameter, master: nn.Parameter) -> None:
        """From now on, and no earlier trainer does: a model may be trained by one trainer after another."""
        earlier = getattr(working, HOOK, None)
        if earlier is not None:
            earlier.remove()
        setattr(working, HOOK, working.register_post_accumulate_grad_hook(partial(self._hand_over, master)))

    def _hand_over(self, master: nn.Parameter, working: Tensor) -> None:
        gradient = working.grad
        assert gradient is not None
        if not self._hands_over:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        working.grad = None
