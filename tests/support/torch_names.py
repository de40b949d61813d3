"""Run as a program: takes private names of torch away, each in a process of its own, imports tba and trains.

Arguments: how (`gone` or `changed`), and the names. Prints a line of JSON for each: {"name", "refused" (the text of an
ImportError, or null), "warnings", "differs", "error"}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 4


class Block(nn.Module):
    """Has what plans recompute, derivations derive and compression compresses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 256)
        self.drop = nn.Dropout(0.1)
        self.back = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.drop(torch.nn.functional.gelu(self.wide(self.norm(x)))))


class Doubled(torch.autograd.Function):
    """Edits what it has saved, as only custom code may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return gradients[0] * saved.zero_().add_(2)


def train(enter: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        x = torch.randn(32, 64)
        with enter(model):
            loss = Doubled.apply(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def take_away(path: str, how: str) -> Callable[[], None]:
    """Take a name away, or have another function there; returns what puts it back."""
    *parents, name = path.split(".")
    holder: Any = sys.modules[parents[0]]
    for parent in parents[1:]:
        holder = getattr(holder, parent)
    original = getattr(holder, name)
    if how == "gone":
        delattr(holder, name)
        if path in sys.modules:
            sys.modules[path] = None  # type: ignore[assignment]
    else:
        setattr(holder, name, _another)
    return lambda: setattr(holder, name, original)


def _another(*, called: str) -> None:
    """What a later torch may have there: it is called in another way than tba knows."""


def _torch_trains() -> bool:
    x = torch.ones(1, requires_grad=True)
    try:
        Doubled.apply(x).backward()
    except (AttributeError, TypeError):
        return False
    return True


def _tba_trains(expected: list[Tensor]) -> str:
    """Train in each way; the first that differs."""
    import tba
    from tba._torch.private import Feature, has

    ways: dict[str, dict[str, Any]] = {
        "nvme": {"tier": "nvme", "min_tensor_bytes": 1024},
        "exact": {"tier": "nvme", "min_tensor_bytes": 1024, "compress": "exact"},
        "budget": {"tier": "auto", "min_tensor_bytes": 1024, "memory_budget": 1 << 18},
        "lossy": {"tier": "nvme", "min_tensor_bytes": 1024, "compress": "max"},
    }
    for way, settings in ways.items():
        offloads: dict[int, Any] = {}

        def enter(model: nn.Module, settings: dict[str, Any] = settings, offloads: dict[int, Any] = offloads) -> Any:
            if id(model) not in offloads:
                offloads[id(model)] = tba.Offloader(model, tba.OffloadConfig(**settings))
            return offloads[id(model)]

        found = train(enter)
        for offload in offloads.values():
            offload.close()
        lossy = way == "lossy" and has(Feature.LOSSY)
        if not lossy and not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            return way
    return ""


def try_without(path: str, how: str, expected: list[Tensor]) -> dict[str, Any]:
    result: dict[str, Any] = {"name": path, "refused": None, "warnings": [], "differs": "", "error": ""}
    put_back = take_away(path, how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            import tba  # noqa: F401
        except ImportError as error:
            result["refused"] = str(error)
        except BaseException:
            result["error"] = traceback.format_exc()
        result["warnings"] = [str(each.message) for each in told]
        if not _torch_trains():  # up to 2.13 it asks for one of the names itself
            put_back()
        if result["refused"] is None and not result["error"]:
            try:
                result["differs"] = _tba_trains(expected)
            except BaseException:
                result["error"] = traceback.format_exc()
    return result


def main() -> None:
    import contextlib

    how, *paths = sys.argv[1:]
    torch.set_num_threads(1)
    expected = train(lambda model: contextlib.nullcontext())
    for path in paths:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(try_without(path, how, expected)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
