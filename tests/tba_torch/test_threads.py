"""Hooks on a thread where no Python frame lies beneath them, as on those that autograd makes for CUDA devices."""

from __future__ import annotations

import _thread
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.testing._internal.two_tensor import TwoTensor

from compact import PRESETS
from support.engine import engine
from tba._audit.observer import Observer
from tba._record.user_code import goes_to_code
from tba._torch.private import pop_hooks, push_hooks


def _without_frames(*calls: Callable[[], Any]) -> None:
    """Make calls of functions written in C on a thread of their own, by C alone."""
    ended, results = _thread.allocate_lock(), list[Any]()
    ended.acquire()
    _thread.start_new_thread(results.extend, (map(operator.call, [*calls, ended.release]),))
    assert ended.acquire(timeout=60)


def _backward(root: Tensor, *, create_graph: bool = False) -> Callable[[], Any]:
    run = Variable._execution_engine.run_backward
    return partial(run, (root,), (torch.ones_like(root),), create_graph, create_graph, (), True, accumulate_grad=True)


@pytest.mark.filterwarnings("ignore:Using backward")  # `create_graph`: a leaf and its gradient refer to each other
def test_second_derivatives(scratch: Path) -> None:
    x = torch.arange(1.0, 65.0, requires_grad=True)
    with engine(scratch) as offload:
        saver = offload._saver
        first = _backward((x * x * x).sum(), create_graph=True)
        _without_frames(partial(push_hooks, saver.pack, saver.unpack), first, pop_hooks)
        assert x.grad is not None
        assert offload.stats().saved_bytes > 0
        (second,) = torch.autograd.grad(x.grad.sum(), x)
        x.grad = None
    assert torch.equal(second, 6 * x.detach())


def test_operators_ask_for_wrappers(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to a program's own code is copied for it; operators need no copy."""
    to_code: list[bool] = []

    def noted(task: int, asker: Any) -> bool:
        to_code.append(goes_to_code(task, asker))
        return to_code[-1]

    monkeypatch.setattr("tba._engine.saver.goes_to_code", noted)
    with engine(scratch) as offload:
        with offload:
            x = TwoTensor(torch.ones(64), torch.ones(64)).requires_grad_() * 2
            result = (x * x).sum()
        _without_frames(_backward(result))
    assert to_code
    assert not any(to_code)


def test_an_audit() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    observer = Observer(model, PRESETS["exact"], 0)
    with observer.forward():
        result = model(torch.ones(8, 64)).sum()
    _without_frames(_backward(result))
    assert all(parameter.grad is not None for parameter in model.parameters())
