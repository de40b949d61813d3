"""Hooks on threads that autograd has made: no Python frame lies beneath them, as on the thread of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from compact import PRESETS
from support.engine import engine
from tba._audit.observer import Observer
from tba._record.user_code import goes_to_code

_DEEPER = 65  # than the 60 backwards that autograd runs within one another on one thread


class _Within(torch.autograd.Function):
    """Runs backwards within its own backward, so deep that autograd runs one of them on a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None], depth: int) -> Tensor:
        ctx.run, ctx.depth = run, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            ctx.run()
            if ctx.depth:
                leaf = torch.ones(1, requires_grad=True)
                _Within.apply(leaf, ctx.run, ctx.depth - 1).backward()
        return gradients[0], None, None


def _on_a_thread_of_autograds(run: Callable[[], None]) -> None:
    _Within.apply(torch.ones(1, requires_grad=True), run, _DEEPER).backward()


def test_second_derivatives_on_a_thread_of_autograds(scratch: Path) -> None:
    found: list[Tensor] = []

    def run() -> None:
        x = torch.arange(1.0, 65.0, requires_grad=True)
        (first,) = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)
        found.extend(torch.autograd.grad(first.sum(), x))

    _on_a_thread_of_autograds(run)
    with engine(scratch) as offload, offload:
        _on_a_thread_of_autograds(run)
    assert all(torch.equal(each, found[0]) for each in found)


def test_operators_ask_for_wrappers_on_a_thread_of_autograds(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to a program's own code is copied for it; operators need no copy."""
    to_code: list[bool] = []
    asked: list[list[bool]] = []

    def noted(task: int, asker: Any) -> bool:
        to_code.append(goes_to_code(task, asker))
        return to_code[-1]

    def result() -> Tensor:
        x = TwoTensor(torch.ones(64), torch.ones(64)).requires_grad_() * 2
        return (x * x).sum()

    def run() -> None:
        before = len(to_code)
        results.pop().backward()
        asked.append(to_code[before:])

    monkeypatch.setattr("tba._engine.saver.goes_to_code", noted)
    with engine(scratch) as offload, offload:
        results = [result() for _ in range(_DEEPER + 1)]
        _on_a_thread_of_autograds(run)
    assert all(asked)
    assert not any(map(any, asked))


def test_an_audit_on_a_thread_of_autograds() -> None:
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.ones(8, 64)
    observer = Observer(model, PRESETS["exact"], 0)
    with observer.forward():
        results = [model(batch).sum() for _ in range(_DEEPER + 1)]
    _on_a_thread_of_autograds(lambda: results.pop().backward())
    assert not results
