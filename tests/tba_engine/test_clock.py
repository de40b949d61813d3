"""Plans are made from the clock that is put in place, and from nothing that a machine's speed or load can change."""

from __future__ import annotations

import random
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.clock import Erratic, put
from support.planned import SLOW, Training, assert_equal, follow, saved_bytes, train
from tba import Offloader
from tba._plan import clock
from tba._plan.clock import Carried

STEPS = 12
_perf_counter = time.perf_counter


class _Noisy:
    """The machine's clock, beside others that take nine tenths of it now and then."""

    def __init__(self, seed: int) -> None:
        self._numbers = random.Random(seed)
        self._last_s = self._shown_s = _perf_counter()

    def __call__(self) -> float:
        now_s = _perf_counter()
        self._shown_s += (now_s - self._last_s) * self._numbers.choice((1, 10))
        self._last_s = now_s
        return self._shown_s


def _plans(make: Callable[..., Offloader], share: float, rates: dict[str, str]) -> list[Any]:
    """What each step's plan is made from, and decides."""
    training = Training()
    offload = make(training.model, memory_budget=int(share * saved_bytes()), nvme_budget="1GiB", **rates)
    plans = follow(offload, training, 7)
    return [plan and (plan.facts, plan.sends, plan.recomputed, plan.predicted) for plan in plans]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.4, 0.7])
@pytest.mark.parametrize("rates", [{}, SLOW], ids=["fast", "slow"])
def test_plans_are_the_same_however_the_machines_clock_runs(
    auto: Callable[..., Offloader], share: float, rates: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in range(3):
        monkeypatch.setattr(clock, "current", type(clock.current)())
        if seed:
            monkeypatch.setattr(time, "perf_counter", _Noisy(seed))
        found.append(_plans(auto, share, rates))
    assert found[0][-1]
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_plain_ones_by_a_clock_that_tells_nothing_true(auto: Callable[..., Offloader], seed: int) -> None:
    put(Erratic(seed))
    training = Training()
    offload = auto(training.model, memory_budget=int(0.5 * saved_bytes()))
    plans = follow(offload, training, STEPS)
    assert_equal(training.state(), train(None, Training(), STEPS))
    assert len({plan.facts.step_s for plan in plans if plan}) > 2  # it was planned anew again and again


def test_programs_go_by_the_machines_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.__file__ is not None
    current = runpy.run_path(str(Path(clock.__file__)))["current"]
    assert type(current).__name__ == "Clock"
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    ticket: Any = SimpleNamespace(started_s=1.0, ended_s=3.0, cpu_s=0.5)
    assert (current.now_s(), current.waited_s(2.0)) == (7.0, 2.0)
    assert tuple(current.carried(ticket)) == Carried(1.0, 3.0, 0.5)
