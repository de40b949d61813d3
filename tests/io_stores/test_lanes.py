"""Lanes: which store gets a write, on a clock of the test's own."""

from __future__ import annotations

import pytest

from io_backends._stores.lanes import REST_S, Ended, Lane, choose


class Disks:
    """Stores that move bytes at a given speed, one write after the other, on a clock that the test moves."""

    def __init__(self, *bytes_per_s: float) -> None:
        self.rates = list(bytes_per_s)
        self.lanes = [Lane() for _ in bytes_per_s]
        self.now_s = 100.0
        self.taken = [0] * len(self.rates)
        self._free_at_s = [0.0] * len(self.rates)
        self._under_way: list[tuple[float, int, int]] = []

    def write(self, nbytes: int) -> int:
        index = choose(self.lanes, nbytes, self.now_s)
        self.lanes[index].begin(nbytes, self.now_s)
        self._free_at_s[index] = max(self._free_at_s[index], self.now_s) + nbytes / self.rates[index]
        self._under_way.append((self._free_at_s[index], index, nbytes))
        self.taken[index] += nbytes
        return index

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for end in sorted(end for end in self._under_way if end[0] <= self.now_s):
            self._under_way.remove(end)
            self.lanes[end[1]].ended.append(Ended(end[0], end[2], moved=True, failed=False))


def failed(lane: Lane, at_s: float, nbytes: int = 0) -> None:
    lane.ended.append(Ended(at_s, nbytes, moved=False, failed=True))


def test_a_faster_disk_gets_as_much_more_as_it_is_faster() -> None:
    disks = Disks(3e9, 1e9)
    for _ in range(2000):
        disks.write(4_000_000)
        disks.pass_time(0.001)  # as much as both together can take
    assert disks.taken[0] / disks.taken[1] == pytest.approx(3.0, rel=0.15)
    speeds = [lane.bytes_per_s for lane in disks.lanes]
    assert speeds == pytest.approx(disks.rates, rel=0.05)


def test_a_disk_that_becomes_slow_gets_less() -> None:
    disks = Disks(1e9, 1e9)
    for turn in range(2000):
        if turn == 1000:
            disks.rates[0] = 1e8
            disks.taken = [0, 0]
        disks.write(4_000_000)
        disks.pass_time(0.004)
    assert disks.taken[0] < 0.15 * disks.taken[1]


def test_a_disk_that_hangs_gets_no_more_than_it_would_have_under_way() -> None:
    disks = Disks(1e9, 1e9)
    for _ in range(20):
        disks.write(1_000_000)
        disks.pass_time(0.002)
    disks.rates[0] = 1e-9
    disks.taken = [0, 0]
    for _ in range(1000):
        disks.write(1_000_000)
        disks.pass_time(0.002)
    assert disks.taken[0] <= 2_000_000


def test_each_disk_is_tried_at_first() -> None:
    disks = Disks(1e9, 1e9, 1e9)
    assert {disks.write(1_000_000) for _ in range(3)} == {0, 1, 2}


def test_a_failed_disk_rests_and_is_tried_again() -> None:
    lanes = [Lane(), Lane()]
    for now_s in (100.0, 100.0 + REST_S, 1000.0):
        failed(lanes[0], now_s)
        assert choose(lanes, 1, now_s) == 1
        assert choose(lanes, 1, now_s + REST_S - 0.01) == 1
        assert choose(lanes, 1, now_s + REST_S) == 0
    failed(lanes[0], 2000.0)
    lanes[0].begin(5, 2000.0)
    lanes[0].ended.append(Ended(2001.0, 5, moved=True, failed=False))  # begun before, and it went well
    assert choose(lanes, 1, 2001.0) == 0


def test_where_all_rest_one_is_tried_rather_than_none() -> None:
    lanes = [Lane(), Lane()]
    failed(lanes[0], 11.0)
    failed(lanes[1], 10.0)
    assert choose(lanes, 1, 12.0) == 1
    failed(lanes[1], 12.0)
    assert choose(lanes, 1, 12.0) == 0


def test_what_was_taken_back_or_failed_is_under_way_no_more() -> None:
    lane = Lane()
    for _ in range(3):
        lane.begin(10, 1.0)
    lane.ended.append(Ended(2.0, 10, moved=False, failed=False))
    failed(lane, 2.0, 10)
    lane.ended.append(Ended(2.0, 10, moved=True, failed=False))
    assert lane.bytes_per_s is None
    lane.catch_up()
    assert lane.in_flight_bytes == 0
    assert lane.bytes_per_s == pytest.approx(10.0)


def test_time_in_which_nothing_was_under_way_does_not_make_a_disk_slow() -> None:
    lane = Lane()
    for turn in range(5):
        now_s = 1000.0 * turn
        lane.begin(500, now_s)
        lane.ended.append(Ended(now_s + 0.5, 500, moved=True, failed=False))
        lane.catch_up()
    assert lane.bytes_per_s == pytest.approx(1000.0)


@pytest.mark.parametrize("together", [1, 4, 64])
def test_what_ends_together_does_not_make_a_disk_fast(together: int) -> None:
    lane, nbytes, rate = Lane(), 1_000_000, 1e9
    for turn in range(40):
        begun_s = 100.0 + turn
        for _ in range(together):
            lane.begin(nbytes, begun_s)
        for _ in range(together):
            lane.ended.append(Ended(begun_s + together * nbytes / rate, nbytes, moved=True, failed=False))
        lane.catch_up()
        assert lane.bytes_per_s == pytest.approx(rate, rel=1e-6)
