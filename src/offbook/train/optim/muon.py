"""Muon for the units of matrices (units.py), AdamW for the rest, in one optimizer, on whole or sharded parameters.

An update of a unit of R rows and C columns is lr * 0.2 * sqrt(max(R, C)) times an orthogonal matrix, whose entries are
max(R, C) ** -0.5 on average: every entry moves by about 0.2 lr, as under AdamW, so that learning rate and decay are
AdamW's (Moonlight, 2502.16982, section 2.2). Decay is decoupled and the same for all: a weight shrinks by lr * decay.

Units of one shape go through the iterations in batches of bounded memory. Where ranks hold whole units each takes its
own; else units travel to an owner and back (exchange.py), while others are being computed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from offbook.train.host import compile_once
from offbook.train.optim.exchange import Exchange, holds_whole_units, plan_exchanges
from offbook.train.optim.newton_schulz import OURS, Method, orthogonalize
from offbook.train.optim.units import Block, as_units, local

WORKSPACE = {"cuda": 3 * 2**30, "cpu": 2**27}  # bytes of a batch with all its intermediate tensors
IN_FLIGHT = 3  # exchanges
Part = tuple[Tensor, slice]  # a parameter and some of its units


class Muon(torch.optim.Optimizer):
    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        units: Mapping[str, Block],
        lr: float,
        method: Method = OURS,
        scale: float = 1.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ):
        """`units`: the shape of the units of each matrix, by name; other parameters are AdamW's. `scale`: of the
        matrices' learning rate by that of the rest."""
        self.method = method
        self.blocks: dict[Tensor, Block] = {}
        self._planned: tuple[list[Tensor], list[list[Tensor]], list[Exchange]] | None = None
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            if name in units:
                self.blocks[parameter] = units[name]
            (matrices if name in units else others).append(parameter)
        shared = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(
            [
                {"params": matrices, "matrices": True, "scale": scale, "momentum": momentum, **shared},
                {"params": others, "matrices": False, "betas": betas, **shared},
            ],
            {},
        )

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["matrices"] and parameters:
                self._step_matrices(parameters, group)
            elif not group["matrices"]:
                self._step_others(parameters, group["lr"], group["betas"], group["weight_decay"])

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:  # checkpoints may have another optimizer's state of it
                self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
        whole, exchanges = self._plan(parameters)
        cut = list(set(parameters).difference(*whole))  # momenta of the others move with their batches
        if cut:
            momenta = [local(self.state[parameter]["momentum"]) for parameter in cut]
            torch._foreach_lerp_(momenta, [_gradient(parameter) for parameter in cut], 1 - group["momentum"])
        here = [batch for same_shape in whole for batch in self._batches(same_shape)]
        rounds = [one for exchange in exchanges for one in exchange.rounds(_batch_size(exchange.block))]
        in_flight: deque[Iterator[None]] = deque()
        for travelling, batch in zip_longest(rounds, here):
            if travelling is not None:
                in_flight.append(self._step_exchanged(travelling, group))
                next(in_flight[-1])
            if len(in_flight) == IN_FLIGHT:
                _resume(in_flight)
            if batch is not None:
                self._step_here(batch, group)
        while in_flight:
            _resume(in_flight)

    def _plan(self, parameters: list[Tensor]) -> tuple[list[list[Tensor]], list[Exchange]]:
        """Parameters whose units are whole on every rank, by the units' shape, and exchanges of the others."""
        if self._planned is None or list(map(id, self._planned[0])) != list(map(id, parameters)):
            by_shape: dict[Block, list[Tensor]] = defaultdict(list)
            cut = []
            for parameter in parameters:
                if holds_whole_units(parameter, self.blocks[parameter]):
                    by_shape[self.blocks[parameter]].append(parameter)
                else:
                    cut.append(parameter)
            self._planned = parameters, list(by_shape.values()), plan_exchanges(cut, self.blocks)
        return self._planned[1:]

    def _batches(self, parameters: list[Tensor]) -> Iterator[list[Part]]:
        """All of their units, as many at a time as there is room for."""
        block = self.blocks[parameters[0]]
        size = room = _batch_size(block, parameters[0].device)
        batch: list[Part] = []
        for parameter in parameters:
            count, start = local(parameter).numel() // (block[0] * block[1]), 0
            while start < count:
                stop = min(count, start + room)
                batch.append((parameter, slice(start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield batch
                    batch, room = [], size
        if batch:
            yield batch

    def _step_here(self, batch: list[Part], group: dict[str, Any]) -> None:
        block = self.blocks[batch[0][0]]
        sizes = [part.stop - part.start for _, part in batch]
        units_NRC = local(batch[0][0]).new_empty(sum(sizes), *block)
        advance = compile_once(_advance) if units_NRC.is_cuda else _advance
        norms = []
        for (parameter, part), out in zip(batch, units_NRC.split(sizes), strict=True):
            average = as_units(local(self.state[parameter]["momentum"]), block)[part]
            norms.append(advance(average, as_units(_gradient(parameter), block)[part], group["momentum"], out))
        directions = orthogonalize(units_NRC, self.method, norm_N=torch.cat(norms))
        for (parameter, part), direction in zip(batch, directions.split(sizes), strict=True):
            self._move(as_units(local(parameter), block)[part], direction, block, group)

    def _step_exchanged(self, exchange: Exchange, group: dict[str, Any]) -> Iterator[None]:
        """Yields where others go on while tensors travel."""
        pieces = []
        for unit in exchange.units:
            average = local(self.state[unit.parameter]["momentum"])[unit.own]
            pieces.append(torch.lerp(_gradient(unit.parameter)[unit.own], average, group["momentum"]))
        arriving = exchange.to_owners(pieces)
        yield
        units_NRC = arriving()
        leaving = exchange.to_holders(orthogonalize(units_NRC, self.method) if len(units_NRC) else units_NRC)
        yield
        for unit, direction in zip(exchange.units, leaving(), strict=True):
            if len(direction):
                self._move(local(unit.parameter)[unit.own][None], direction[None], exchange.block, group)

    def _move(self, weights: Tensor, directions: Tensor, block: Block, group: dict[str, Any]) -> None:
        lr = group["lr"] * group["scale"]
        size = -lr * self.method.size(*block)
        (compile_once(_move) if weights.is_cuda else _move)(weights, 1 - lr * group["weight_decay"], size, directions)

    def _step_others(
        self, parameters: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            gradient = _gradient(parameter)
            mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
            state["step"] += 1
            mean.lerp_(gradient, 1 - betas[0])
            square.lerp_(gradient.square(), 1 - betas[1])
            step = mean / (1 - betas[0] ** state["step"])
            spread = (square / (1 - betas[1] ** state["step"])).sqrt().add_(1e-8)
            local(parameter).mul_(1 - lr * weight_decay).sub_(lr * step / spread)


def _advance(average: Tensor, gradient: Tensor, momentum: float, out: Tensor) -> Tensor:
    """Move the average towards the gradient, write Nesterov's update to `out`, and return its norms."""
    average.lerp_(gradient, 1 - momentum)
    out.copy_(torch.lerp(gradient, average, momentum))
    return torch.linalg.matrix_norm(out, dtype=torch.float32)


def _move(weights: Tensor, keep: float, size: float, directions: Tensor) -> None:
    if keep != 1:
        weights.mul_(keep)
    weights.addcmul_(directions.to(weights.dtype), weights.new_full((len(weights), 1, 1), size))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _resume(in_flight: deque[Iterator[None]]) -> None:
    """The oldest exchange: to its next stop, or to its end."""
    oldest = in_flight.popleft()
    if next(oldest, StopIteration) is not StopIteration:
        in_flight.append(oldest)


def _batch_size(block: Block, device: torch.device | None = None) -> int:
    """Units whose gradients, copies in half precision and Gram matrices fit."""
    kind = device.type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    short, long = sorted(block)
    entry = 2 if kind == "cuda" else 4
    return max(1, WORKSPACE[kind] // ((4 + 3 * entry) * short * long + 6 * entry * short * short))
