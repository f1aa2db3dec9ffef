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
from offbook.train.optim.exchange import Exchange, plan_exchanges
from offbook.train.optim.newton_schulz import OURS, Method, orthogonalize
from offbook.train.optim.units import Block, as_units, holds_whole_units, local

WORKSPACE = {"cuda": 3 * 2**30, "cpu": 2**27}  # bytes of a batch, all that is computed on the way included
IN_FLIGHT = 3  # exchanges


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
        """`units` says how the matrices are cut, by name; what it leaves out is AdamW's. `scale`: of the matrices'
        learning rate by that of the rest."""
        self.method = method
        self.fallbacks = 0  # units that took a second attempt, since the start
        self.blocks: dict[Tensor, Block] = {}
        self._planned: tuple[tuple[int, ...], list[list[Tensor]], list[Exchange]] | None = None
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            if block := units.get(name):
                self.blocks[parameter] = block
            (matrices if block else others).append(parameter)
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
            if group["matrices"]:
                self._step_matrices(parameters, group)
            else:
                self._step_others(parameters, group["lr"], group["betas"], group["weight_decay"])

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:  # checkpoints may have another optimizer's state of it
                self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
        if not parameters:
            return
        whole, exchanges = self._plan(parameters)
        if cut := list(set(parameters).difference(*whole)):  # momenta of the others move with their batches
            momenta = [local(self.state[parameter]["momentum"]) for parameter in cut]
            torch._foreach_lerp_(momenta, [_gradient(parameter) for parameter in cut], 1 - group["momentum"])
        lr = group["lr"] * group["scale"]
        step = _Step(self, lr, group["momentum"], 1 - lr * group["weight_decay"])
        here = [batch for same_shape in whole for batch in step.batches(same_shape)]
        apart = [(exchange, units) for exchange in exchanges for units in exchange.rounds(_batch_size(exchange.block))]
        in_flight: deque[Iterator[None]] = deque()
        for travelling, batch in zip_longest(apart, here):
            if travelling is not None:
                in_flight.append(step.exchanged(*travelling))
                next(in_flight[-1])
            if len(in_flight) == IN_FLIGHT:
                _resume(in_flight)
            if batch is not None:
                step.local(batch)
        while in_flight:
            _resume(in_flight)

    def _plan(self, parameters: list[Tensor]) -> tuple[list[list[Tensor]], list[Exchange]]:
        """Parameters whose units are whole on every rank, by the units' shape, and the others."""
        key = tuple(map(id, parameters))
        if self._planned is None or self._planned[0] != key:
            by_shape: dict[Block, list[Tensor]] = defaultdict(list)
            apart = []
            for parameter in parameters:
                if holds_whole_units(parameter, self.blocks[parameter]):
                    by_shape[self.blocks[parameter]].append(parameter)
                else:
                    apart.append(parameter)
            self._planned = key, list(by_shape.values()), plan_exchanges(apart, self.blocks)
        return self._planned[1:]

    def _step_others(
        self, parameters: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            gradient = _gradient(parameter)
            mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
            state["step"] += 1
            mean.lerp_(gradient, 1 - betas[0])
            square.lerp_(gradient.square(), 1 - betas[1])
            step = mean / (1 - betas[0] ** state["step"])
            spread = (square / (1 - betas[1] ** state["step"])).sqrt().add_(1e-8)
            local(parameter).mul_(1 - lr * weight_decay).sub_(lr * step / spread)


Part = tuple[Tensor, int, int]  # a parameter's units from one number to another


class _Step:
    """What one step does to batches of units."""

    def __init__(self, optimizer: Muon, lr: float, momentum: float, keep: float):
        self.optimizer = optimizer
        self.lr = lr
        self.momentum = momentum
        self.keep = keep  # what decay leaves of a weight

    def batches(self, parameters: list[Tensor]) -> Iterator[list[Part]]:
        """All of their units, as many at a time as there is room for."""
        block = self.optimizer.blocks[parameters[0]]
        room = size = _batch_size(block, parameters[0].device)
        batch: list[Part] = []
        for parameter in parameters:
            count, start = local(parameter).numel() // (block[0] * block[1]), 0
            while start < count:
                stop = min(count, start + room)
                batch.append((parameter, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield batch
                    batch, room = [], size
        if batch:
            yield batch

    def local(self, batch: list[Part]) -> None:
        block, first = self.optimizer.blocks[batch[0][0]], local(batch[0][0])
        units_NRC = first.new_empty(sum(stop - start for _, start, stop in batch), *block)
        norms, place = [], 0
        for parameter, start, stop in batch:
            gradient, average = (
                as_units(tensor, block)[start:stop] for tensor in (_gradient(parameter), self._momentum(parameter))
            )
            advance = compile_once(_advance) if average.is_cuda else _advance
            norms.append(advance(average, gradient, self.momentum, units_NRC[place : place + stop - start]))
            place += stop - start
        directions, place = self.directions(units_NRC, torch.cat(norms)), 0
        for parameter, start, stop in batch:
            self.move(as_units(local(parameter), block)[start:stop], directions[place : place + stop - start], block)
            place += stop - start

    def exchanged(self, exchange: Exchange, units: list[int]) -> Iterator[None]:
        """Stops where others go on while tensors travel."""
        block = exchange.block
        pieces = [
            torch.lerp(_gradient(parameter)[rows, columns], self._momentum(parameter)[rows, columns], self.momentum)
            for parameter, rows, columns in exchange.held(units)
        ]
        arriving = exchange.to_owners(units, pieces)
        yield
        units_NRC = arriving()
        leaving = exchange.to_holders(units, self.directions(units_NRC) if len(units_NRC) else units_NRC)
        yield
        for (parameter, rows, columns), direction in zip(exchange.held(units), leaving(), strict=True):
            self.move(local(parameter)[rows, columns], direction, block)

    def directions(self, units_NRC: Tensor, norm_N: Tensor | None = None) -> Tensor:
        directions, fallbacks = orthogonalize(units_NRC, self.optimizer.method, norm_N=norm_N)
        self.optimizer.fallbacks += fallbacks
        return directions

    def move(self, weights: Tensor, directions: Tensor, block: Block) -> None:
        """Units, or a piece of one."""
        if weights.ndim == 2:
            weights, directions = weights[None], directions[None]
        size = -self.lr * self.optimizer.method.size(*block)
        (compile_once(_move) if weights.is_cuda else _move)(weights, self.keep, size, directions)

    def _momentum(self, parameter: Tensor) -> Tensor:
        return local(self.optimizer.state[parameter]["momentum"])


def _advance(average: Tensor, gradient: Tensor, momentum: float, out: Tensor) -> Tensor:
    """Move the average towards the gradient, write what Nesterov moves by to `out`, and return its norms."""
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
    """The one that travels longest: to its next stop, or to its end."""
    oldest = in_flight.popleft()
    if next(oldest, StopIteration) is not StopIteration:
        in_flight.append(oldest)


def _batch_size(block: Block, device: torch.device | None = None) -> int:
    """Units whose gradients, copies in half precision and Gram matrices fit."""
    kind = device.type if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    short, long = sorted(block)
    entry = 2 if kind == "cuda" else 4
    return max(1, WORKSPACE[kind] // ((4 + 3 * entry) * short * long + 6 * entry * short * short))
