"""Optimizers for a config's `optimizer`: Adam in a basis in which late gradients do little harm."""

from __future__ import annotations

from typing import Any

import torch


class BasisRotation(torch.optim.Optimizer):
    """Adam in the eigenbases U, V of gradients' covariances (arXiv 2602.03515, Algorithms 1, 2).

        m <- b1 m + (1 - b1) G; L <- b2 L + (1 - b2) G G'; R <- b2 R + (1 - b2) G' G
        v <- b2 v + (1 - b2) (U' G V)^2
        W <- (1 - lr decay) W - lr sqrt(1 - b2^t) / (1 - b1^t) U [U' m V / (sqrt(v) + eps)] V'

    U and V are eigenvectors of L and R at the first step; a step of orthogonal iteration moves them
    every `frequency` steps. Raise `ValueError` for `params` that are not matrices (m, n).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        frequency: int = 10,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "frequency": frequency})
        if any(p.dim() != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("only matrices can be rotated: use ndim: 2, and adamw for the rest")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all matrices that have a gradient."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step_matrix(p, p.grad, group)

    def _step_matrix(self, p: Any, g: Any, group: Any) -> None:
        b1, b2 = group["betas"]
        state = self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0))
            state.update(exp_avg=torch.zeros_like(g), exp_avg_sq=torch.zeros_like(g))
            state.update(left=torch.zeros_like(g @ g.T), right=torch.zeros_like(g.T @ g))
        state["step"] += 1
        t = int(state["step"])
        state["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
        for axis, side, covariance in ((0, "left", g @ g.T), (1, "right", g.T @ g)):
            state[side].mul_(b2).add_(covariance, alpha=1 - b2)
            basis = state.get(f"{side}_basis")
            if basis is None:
                state[f"{side}_basis"] = torch.linalg.eigh(state[side])[1].flip(1)
            elif t % group["frequency"] == 0:
                order = (basis * (state[side] @ basis)).sum(0).argsort(descending=True)
                # the second moments stay with their eigenvectors
                state["exp_avg_sq"] = state["exp_avg_sq"].index_select(axis, order)
                basis = torch.linalg.qr(state[side] @ basis[:, order])[0]
                # as a checkpoint gives it back: the layout decides the last bits of products
                state[f"{side}_basis"] = basis.contiguous()
        U = state["left_basis"]
        V = state["right_basis"]
        state["exp_avg_sq"].mul_(b2).add_((U.T @ g @ V).square(), alpha=1 - b2)
        rotated = (U.T @ state["exp_avg"] @ V) / (state["exp_avg_sq"].sqrt() + group["eps"])
        rate = group["lr"] * (1 - b2**t) ** 0.5 / (1 - b1**t)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(U @ rotated @ V.T, alpha=-rate)
