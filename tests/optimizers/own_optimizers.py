"""Optimizers and schedules of a user, right and wrong."""

from __future__ import annotations

import os
from typing import Any

import torch


class Adagrad(torch.optim.Optimizer):
    """Elementwise, with one state of the parameter's shape and a step count per parameter."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, eps: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"], state["count"] = torch.zeros_like(parameter), 0
                state["count"] += 1
                state["sum"] += parameter.grad.square()
                update = parameter.grad / (state["sum"] / state["count"]).sqrt().add(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


class CountsInGroup(Adagrad):
    """The rate depends on a count in the parameter group, which ZeRO 3 would increase several times."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        for group in self.param_groups:
            group["k"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / group["k"])


class Normalized(torch.optim.Optimizer):
    """The update depends on the norm of the whole parameter, and one state has another shape."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["norms"] = torch.zeros(3)
                state["norms"] = torch.cat([state["norms"][1:], parameter.grad.norm().cpu().view(1)])
                parameter.sub_(parameter.grad / (state["norms"].mean() + 1), alpha=group["lr"])


class EagerState(Adagrad):
    """Creates its states in the constructor."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"sum": torch.zeros_like(parameter), "count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] += 1
                self.state[parameter]["sum"] += parameter.grad.square()
        super().step()


class HiddenCount(Adagrad):
    """A count outside of the states, which a checkpoint does not have."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] /= self.count
        super().step()


class NeedsClosure(Adagrad):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Explodes(Adagrad):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.fill_(float("nan"))


class RefusesToBuild(Adagrad):
    def __init__(self, params: Any, lr: float) -> None:
        raise RuntimeError("no such preconditioner")


class ListState(Adagrad):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state.setdefault("history", []).append(1)


class FailsOnRankOne(Adagrad):
    """Raises in the third step of training on rank 1 only."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        large = any(p.numel() > 10_000 for group in self.param_groups for p in group["params"])
        counts = [state["count"] for state in self.state.values()]
        if large and os.environ.get("RANK") == "1" and max(counts) == 3:
            raise ArithmeticError("the preconditioner is singular")


def not_an_optimizer(params: Any, lr: float) -> dict[str, float]:
    return {"lr": lr}


def inverse_sqrt(step: int, samples: int, warmup: int = 2) -> float:
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def by_samples(step: int, samples: int) -> float:
    return 1.0 / (1.0 + samples / 8)


def nan_later(step: int, samples: int) -> float:
    return float("nan") if step >= 10 else 1.0


def wrong_signature(step: int) -> float:
    return 1.0


def impure(step: int, samples: int) -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32


def raises(step: int, samples: int) -> float:
    return 1 / (step - step)
