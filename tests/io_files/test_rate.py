"""RateLimit's arithmetic, on a clock that moves only when somebody sleeps."""

from __future__ import annotations

import pytest

from io_backends._file import rate
from io_backends._file.rate import BURST_S, RateLimit


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
    monkeypatch.setattr(rate, "time", clock)
    return clock


def test_bytes_passed_never_exceed_the_rate_by_more_than_a_burst(clock: Clock) -> None:
    limit = RateLimit(500.0)
    passed = 0
    for nbytes in (100, 1, 1000, 7, 250):
        limit.pace(nbytes)
        passed += nbytes
        assert clock.now_s - 1000.0 == pytest.approx(passed / 500.0 - BURST_S)


def test_time_without_traffic_is_saved_up_to_a_burst_only(clock: Clock) -> None:
    limit = RateLimit(100.0)
    limit.pace(100)
    clock.now_s += 50.0
    for _ in range(3):
        limit.pace(100)
    assert clock.now_s == pytest.approx(1000 + 1 - BURST_S + 50 + 3 - BURST_S)


def test_time_spent_elsewhere_counts(clock: Clock) -> None:
    limit = RateLimit(100.0)
    limit.pace(100)
    clock.now_s += 0.75  # the transfer itself
    limit.pace(100)
    assert clock.now_s == pytest.approx(1000 + 1 - BURST_S + 0.75 + 1 - BURST_S)


def test_late_sleepers_reach_the_rate_all_the_same(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sleep ends half a millisecond late and each transfer takes as long; without a burst that would add up."""
    limit = RateLimit(1e9)

    def oversleep(seconds: float) -> None:
        clock.now_s += seconds + (0.0005 if seconds else 0.0)

    monkeypatch.setattr(clock, "sleep", oversleep)
    for _ in range(1000):
        limit.pace(1_000_000)
        clock.now_s += 0.0005
    assert clock.now_s - 1000.0 == pytest.approx(1.0, abs=BURST_S + 0.002)


def test_two_threads_share_one_link(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first sleeps: it waits for both."""
    limit = RateLimit(100.0)
    slept: list[float] = []
    monkeypatch.setattr(clock, "sleep", slept.append)
    limit.pace(100)
    limit.pace(300)
    assert slept == pytest.approx([1.0 - BURST_S, 4.0 - BURST_S])


@pytest.mark.parametrize(
    ("rate", "piece_bytes"),
    [(1.0, 4096), (50_000.0, 4096), (100_000.0, 8192), (1e12, 16 << 20), (float("inf"), 16 << 20)],
)
def test_pieces_are_whole_blocks_and_take_no_longer_than_a_tenth_of_a_second(rate: float, piece_bytes: int) -> None:
    assert RateLimit(rate).piece_bytes == piece_bytes


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(ValueError, match=r"a rate must be positive, got .* bytes per second"):
        RateLimit(rate)
