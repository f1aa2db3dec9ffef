"""Muon for the units of matrices (units.py), AdamW for the rest, in one optimizer, on whole or sharded parameters.

An update of a unit of R rows and C columns is lr * 0.2 * sqrt(max(R, C)) times an orthogonal matrix, whose entries are
max(R, C) ** -0.5 on average: every entry moves by about 0.2 lr, as under AdamW, so that learning rate and decay are
AdamW's (Moonlight, 2502.16982, section 2.2). Decay is decoupled and the same for all: a weight shrinks by lr * decay.

Units of one shape go through the iterations in batches of bounded memory. Where ranks hold whole units each takes its
own. A matrix whose units are cut travels to an owner and back while others are being computed. Every rank makes the
same plan: the costliest matrix first, each to the rank with the least work; a round has one for each owner. On GPUs
gradients travel in bfloat16 and directions in float16.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbook.train.host import compile_once
from offbook.train.optim.newton_schulz import OURS, Method, orthogonalize
from offbook.train.optim.units import Block, as_units, holds_whole_units, local, row_group, rows_of_ranks

WORKSPACE = {"cuda": 3 * 2**30, "cpu": 2**27}  # bytes of a batch with all its intermediate tensors
IN_FLIGHT = 3  # rounds
MOMENTUM = 0.95
BETAS = (0.9, 0.95)  # of AdamW
Part = tuple[Tensor, slice]  # a parameter and some of its units
Round = tuple[Any, list[Tensor | None]]  # a group of ranks, and what each of them owns


class Muon(torch.optim.Optimizer):
    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        units: Mapping[str, Block],
        lr: float,
        method: Method = OURS,
        scale: float = 1.0,
        weight_decay: float = 0.0,
    ):
        """`units`: the shape of the units of each matrix, by name; other parameters are AdamW's. `scale`: of the
        matrices' learning rate by that of the rest."""
        self.method = method
        self.scale = scale
        self.blocks: dict[Tensor, Block] = {}
        self._planned: tuple[list[Tensor], list[list[Tensor]], list[Round]] | None = None
        groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for name, parameter in named_parameters:
            if name in units:
                self.blocks[parameter] = units[name]
            groups[name not in units].append(parameter)
        super().__init__([{"params": group} for group in groups], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        matrices, others = self.param_groups
        parameters = [parameter for parameter in matrices["params"] if parameter.grad is not None]
        if parameters:
            self._step_matrices(parameters, matrices)
        for parameter in others["params"]:
            if parameter.grad is not None:
                self._step_other(parameter, others["lr"], others["weight_decay"])

    def _step_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:  # checkpoints may have another optimizer's state of it
                self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
        whole, rounds = self._plan(parameters)
        here = [batch for same_shape in whole for batch in self._batches(same_shape)]
        in_flight: deque[Iterator[None]] = deque()
        for travelling, batch in zip_longest(rounds, here):
            if travelling is not None:
                in_flight.append(self._step_owned(travelling, group))
                next(in_flight[-1])
            if len(in_flight) == IN_FLIGHT:
                _resume(in_flight)
            if batch is not None:
                self._step_here(batch, group)
        while in_flight:
            _resume(in_flight)

    def _plan(self, parameters: list[Tensor]) -> tuple[list[list[Tensor]], list[Round]]:
        """Parameters whose units are whole on every rank, by the units' shape, and rounds of the others."""
        if self._planned is None or list(map(id, self._planned[0])) != list(map(id, parameters)):
            by_shape: dict[Block, list[Tensor]] = defaultdict(list)
            cut: list[Tensor] = []
            for parameter in parameters:
                if holds_whole_units(parameter, self.blocks[parameter]):
                    by_shape[self.blocks[parameter]].append(parameter)
                else:
                    cut.append(parameter)
            load: dict[Any, list[int]] = {}
            owned: dict[Any, list[list[Tensor]]] = {}
            for parameter in sorted(cut, key=self._cost, reverse=True):  # stable: the same on all ranks
                ranks = row_group(parameter)
                busy = load.setdefault(ranks, [0] * dist.get_world_size(ranks))
                owner = busy.index(min(busy))
                busy[owner] += self._cost(parameter)
                owned.setdefault(ranks, [[] for _ in busy])[owner].append(parameter)
            rounds = [(ranks, [*one]) for ranks, queues in owned.items() for one in zip_longest(*queues)]
            self._planned = parameters, list(by_shape.values()), rounds
        return self._planned[1:]

    def _cost(self, parameter: Tensor) -> int:
        return parameter.numel() * min(self.blocks[parameter])

    def _batches(self, parameters: list[Tensor]) -> Iterator[list[Part]]:
        """All of their units, as many at a time as there is room for."""
        block = self.blocks[parameters[0]]
        size = _batch_size(block, parameters[0].device)
        batch: list[Part] = []
        room = size
        for parameter in parameters:
            count = local(parameter).numel() // (block[0] * block[1])
            start = 0
            while start < count:
                stop = min(count, start + room)
                batch.append((parameter, slice(start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield batch
                    batch = []
                    room = size
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
            norms.append(advance(average, as_units(_gradient(parameter), block)[part], out))
        directions = orthogonalize(units_NRC, self.method, norm_N=torch.cat(norms))
        for (parameter, part), direction in zip(batch, directions.split(sizes), strict=True):
            self._move(as_units(local(parameter), block)[part], direction, block, group)

    def _step_owned(self, owned: Round, group: dict[str, Any]) -> Iterator[None]:
        """Yields where others go on while tensors travel."""
        ranks, by_owner = owned
        pieces: dict[Tensor, Tensor] = {}
        for parameter in by_owner:
            if parameter is not None:
                average, gradient = local(self.state[parameter]["momentum"]), _gradient(parameter)
                average.lerp_(gradient, 1 - MOMENTUM)
                pieces[parameter] = torch.lerp(gradient, average, MOMENTUM)
        mine = by_owner[dist.get_rank(ranks)]
        to_owners = [0 if parameter is None else local(parameter).numel() for parameter in by_owner]
        to_here = [0] * len(by_owner) if mine is None else [rows * mine.shape[1] for rows in rows_of_ranks(mine)]
        arriving = _travel([*pieces.values()], torch.bfloat16, to_owners, to_here, ranks)
        yield
        matrix = arriving().to(next(iter(pieces.values())).dtype)
        if mine is not None:
            for part in as_units(matrix.view(mine.shape), self.blocks[mine]).split(_batch_size(self.blocks[mine])):
                part.copy_(orthogonalize(part, self.method))
        leaving = _travel([matrix], torch.float16, to_here, to_owners, ranks)
        yield
        for parameter, direction in zip(by_owner, leaving().split(to_owners), strict=True):
            if parameter is not None:
                weights = local(parameter)[None]
                self._move(weights, direction.view_as(weights), self.blocks[parameter], group)

    def _move(self, weights: Tensor, directions: Tensor, block: Block, group: dict[str, Any]) -> None:
        lr = group["lr"] * self.scale
        size = -lr * self.method.size(*block)
        (compile_once(_move) if weights.is_cuda else _move)(weights, 1 - lr * group["weight_decay"], size, directions)

    def _step_other(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        """AdamW."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        gradient = _gradient(parameter)
        mean, square = local(state["exp_avg"]), local(state["exp_avg_sq"])
        state["step"] += 1
        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient.square(), 1 - BETAS[1])
        step = mean / (1 - BETAS[0] ** state["step"])
        spread = (square / (1 - BETAS[1] ** state["step"])).sqrt().add_(1e-8)
        local(parameter).mul_(1 - lr * weight_decay).sub_(lr * step / spread)


def _advance(average: Tensor, gradient: Tensor, out: Tensor) -> Tensor:
    """Move the average towards the gradient, write Nesterov's update to `out`, and return its norms."""
    average.lerp_(gradient, 1 - MOMENTUM)
    out.copy_(torch.lerp(gradient, average, MOMENTUM))
    return torch.linalg.matrix_norm(out, dtype=torch.float32)


def _move(weights: Tensor, keep: float, size: float, directions: Tensor) -> None:
    if keep != 1:
        weights.mul_(keep)
    weights.addcmul_(directions.to(weights.dtype), weights.new_full((len(weights), 1, 1), size))


def _travel(
    pieces: list[Tensor], wire: torch.dtype, sent: list[int], received: list[int], ranks: Any
) -> Callable[[], Tensor]:
    """Start an all-to-all of entries. The result waits for those that come here."""
    wire = wire if pieces[0].is_cuda else pieces[0].dtype
    flat = torch.cat([piece.flatten().to(wire) for piece in pieces])
    got = flat.new_empty(sum(received))
    work = dist.all_to_all_single(got, flat, received, sent, ranks, async_op=True)

    def arrived() -> Tensor:
        work.wait()
        return got

    return arrived


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
