"""RateLimit's arithmetic, on a clock that moves only when somebody sleeps."""

from __future__ import annotations

import pytest

from io_backends import _rate
from io_backends._rate import RateLimit


class Clock:
    """Stands for the module `time`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_rate, "time", clock)
    return clock


def test_bytes_passed_never_exceed_the_rate(clock: Clock) -> None:
    limit = RateLimit(500.0)
    passed = 0
    for nbytes in (100, 1, 1000, 7, 250):
        limit.pace(nbytes)
        passed += nbytes
        assert clock.now_s - 1000.0 == pytest.approx(passed / 500.0)


def test_time_without_traffic_is_not_saved_up(clock: Clock) -> None:
    limit = RateLimit(100.0)
    limit.pace(100)
    clock.now_s += 50.0
    for _ in range(3):
        limit.pace(100)
    assert clock.now_s == pytest.approx(1054.0)


def test_time_spent_elsewhere_counts(clock: Clock) -> None:
    limit = RateLimit(100.0)
    limit.pace(100)
    clock.now_s += 0.75  # the transfer itself
    limit.pace(100)
    assert clock.now_s == pytest.approx(1002.75)


def test_two_threads_share_one_link(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first sleeps: it waits for both."""
    limit = RateLimit(100.0)
    slept: list[float] = []
    monkeypatch.setattr(clock, "sleep", slept.append)
    limit.pace(100)
    limit.pace(300)
    assert slept == pytest.approx([1.0, 4.0])


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(ValueError, match=r"a rate must be positive, got .* bytes per second"):
        RateLimit(rate)
