"""Pressure: how often free memory is looked at, and when the allocator is asked to give back what it hoards."""

from __future__ import annotations

import pytest

from tba._memory import free_memory
from tba._memory import pressure as pressure_file
from tba._memory.pressure import LOOK_EVERY_BYTES, Pressure, look_after_bytes

GIB = 1 << 30
MIB = 1 << 20


class Machine:
    """Memory whose free bytes a test sets; a release gives `hoarded` back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.hoarded = 64 * GIB, 0
        self.looks = self.asked = 0
        monkeypatch.setattr(free_memory, "free_bytes", self.look)
        monkeypatch.setattr(pressure_file, "release", self.release)

    def look(self) -> int:
        self.looks += 1
        return self.free

    def release(self) -> None:
        self.asked += 1
        self.free, self.hoarded = self.free + self.hoarded, 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_less_there_is_the_oftener_it_is_looked_at() -> None:
    assert look_after_bytes(17 * GIB, GIB) == GIB
    assert look_after_bytes(2 * GIB, GIB) == 64 * MIB
    for free in (GIB + 512 * MIB, GIB, GIB // 2, 0):
        assert look_after_bytes(free, GIB) == LOOK_EVERY_BYTES


def test_plenty_is_looked_at_rarely(machine: Machine) -> None:
    machine.free = 17 * GIB
    pressure = Pressure(GIB)
    for _ in range(2 * GIB // MIB + 32):
        pressure.moved(MIB)
    assert machine.looks == 3  # after the first 32 MiB, then after each GiB
    assert machine.asked == 0


def test_memory_that_shrinks_sixteen_times_as_fast_as_tensors_move_is_noticed(machine: Machine) -> None:
    machine.free, machine.hoarded = 17 * GIB, 8 * GIB
    pressure = Pressure(GIB)
    lowest = machine.free
    while not machine.asked:
        pressure.moved(MIB)
        machine.free -= 15 * MIB
        lowest = min(lowest, machine.free)
        assert lowest > 0
    assert machine.asked == 1
    assert lowest > GIB - 16 * LOOK_EVERY_BYTES  # seen within one look of where it begins to matter


def test_below_the_reserve_every_look_asks_the_allocator(machine: Machine) -> None:
    machine.free = GIB // 2
    pressure = Pressure(GIB)
    for _ in range(4 * LOOK_EVERY_BYTES // MIB):
        pressure.moved(MIB)
    assert machine.asked == 4


def test_what_is_free_counts_after_the_allocator_has_given_back(machine: Machine) -> None:
    machine.free, machine.hoarded = GIB // 2, 3 * GIB
    assert Pressure(GIB).free_bytes() == 3 * GIB + GIB // 2
