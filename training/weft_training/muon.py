"""Muon, all matrices of one shape at a time: some hundred launches a step on a GPU instead of thousands.

Takes the settings of `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, and moves matrices as that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Of the polynomial that drives singular values towards one, and how often it is applied.
A, B, C = 3.4445, -4.7750, 2.0315
ROUNDS = 5


class Muon(torch.optim.Optimizer):
    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                self._move(parameters, group, 0.2 * max(shape) ** 0.5)

    def _move(self, parameters: list[nn.Parameter], group: dict[str, Any], scale: float) -> None:
        gradients = [parameter.grad for parameter in parameters]
        momenta = [self._momentum(parameter) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        moves = orthogonal(torch.stack(list(ahead))).to(parameters[0].dtype).unbind(0)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, moves, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices whose singular values are about one, of [matrices, rows, columns], on a GPU in bfloat16.

    >>> found = orthogonal(torch.randn(2, 8, 16, generator=torch.manual_seed(0)))
    >>> bool((torch.linalg.svdvals(found.float()) > 0.6).all())
    True
    """
    # Few processors without a GPU multiply in bfloat16.
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x
