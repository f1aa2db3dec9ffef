"""Muon for hidden matrices, AdamW for the rest (embeddings, norms), in one optimizer and one process.

The momentum of a matrix is orthogonalised by five Newton-Schulz iterations (coefficients of Jordan et al., 2024);
matrices of one shape go through them as a batch. In float32: on a CPU bfloat16 products are many times slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """`lr` is AdamW's; a matrix moves by `lr * matrix_lr_scale` times an orthogonal matrix of its shape."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        matrix_lr_scale: float = 7.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
    ):
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            is_table = "embed" in name or "lm_head" in name
            (matrices if parameter.ndim == 2 and not is_table else others).append(parameter)
        shared = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(
            [
                {"params": matrices, "matrices": True, "scale": matrix_lr_scale, "momentum": momentum, **shared},
                {"params": others, "matrices": False, "betas": betas, **shared},
            ],
            {},
        )

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["matrices"]:
                self._step_matrices(parameters, group["lr"] * group["scale"], group["momentum"], group["weight_decay"])
            else:
                self._step_others(parameters, group["lr"], group["betas"], group["weight_decay"])

    def _step_matrices(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - momentum)
            nesterov = parameter.grad.lerp(state["momentum"], momentum)
            by_shape[parameter.shape].append((parameter, nesterov))
        for shape, pairs in by_shape.items():
            directions = orthogonalize(torch.stack([direction for _, direction in pairs]))
            size = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for (parameter, _), direction in zip(pairs, directions, strict=True):
                parameter.mul_(1 - lr * weight_decay).add_(direction, alpha=-size)

    def _step_others(
        self, parameters: list[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            gradient = parameter.grad
            assert gradient is not None
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - betas[0])
            state["exp_avg_sq"].lerp_(gradient.square(), 1 - betas[1])
            mean = state["exp_avg"] / (1 - betas[0] ** state["step"])
            spread = (state["exp_avg_sq"] / (1 - betas[1] ** state["step"])).sqrt().add_(1e-8)
            parameter.mul_(1 - lr * weight_decay).sub_(lr * mean / spread)


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """Each matrix's singular values moved to about 1 (between 0.7 and 1.2), its singular vectors kept."""
    wide = matrices_NRC.shape[-2] <= matrices_NRC.shape[-1]
    x = matrices_NRC if wide else matrices_NRC.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
