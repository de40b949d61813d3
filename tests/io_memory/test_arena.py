"""HostArena: pinned segments of exact sizes within a budget, unpinned and unmapped when nobody holds them any more."""

from __future__ import annotations

import mmap
import os
import random
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from io_backends import Buffer, StoreClosed, StoreFull
from io_backends._memory.arena import HostArena
from support.stores import in_child

PAGE = mmap.PAGESIZE
SEGMENT = 16 * PAGE


class Device:
    """Pins memory as cudaHostRegister does: every range once, whole pages, mapped as long as it is pinned."""

    def __init__(self, fail: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.fail = fail

    def register(self, address: int, nbytes: int) -> None:
        self.calls.append((address, nbytes))
        if self.fail:
            self.fail -= 1
            raise RuntimeError("cudaHostRegister: out of memory")
        assert address % PAGE == 0 == nbytes % PAGE
        assert not any(a < address + nbytes and address < a + n for a, n in self.pinned.items())
        assert mapped(address, nbytes)
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        assert mapped(address, self.pinned.pop(address))

    def arena(self, budget_bytes: int = 1 << 24, **options: int) -> HostArena:
        options.setdefault("segment_bytes", SEGMENT)
        return HostArena(budget_bytes, register=self.register, unregister=self.unregister, **options)


def mapped(address: int, nbytes: int) -> bool:
    """Whether the system has this range mapped, readable and writable, for this process."""
    while nbytes > 0:
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            if first <= address < last and line.split()[1].startswith("rw"):
                nbytes, address = nbytes - (last - address), last
                break
        else:
            return False
    return True


def test_segments_are_pinned_whole_and_leases_lie_in_them() -> None:
    device = Device()
    arena = device.arena()
    kept = [arena.lease(5 * PAGE + 1, 64) for _ in range(4)]
    assert device.calls == [(address, SEGMENT) for address in device.pinned]
    assert arena.pinned_bytes == arena.mapped_bytes == sum(device.pinned.values()) == 2 * SEGMENT
    for _, buffer in kept:
        assert buffer.address % PAGE == 64
        assert any(a <= buffer.address and buffer.address + buffer.nbytes <= a + n for a, n in device.pinned.items())


@pytest.mark.parametrize("pages", [17, 33, 65, 100])
def test_a_large_lease_gets_its_exact_pages_and_no_power_of_two(pages: int) -> None:
    device = Device()
    arena = device.arena()
    _view, _ = arena.lease(pages * PAGE - 5)
    assert arena.mapped_bytes == arena.pinned_bytes == pages * PAGE


def test_close_unpins_and_unmaps_what_nobody_holds() -> None:
    device = Device()
    arena = device.arena()
    address = arena.lease(100)[1].address
    assert mapped(address, 100)
    assert len(device.pinned) == 1
    arena.close()
    arena.close()
    assert device.pinned == {}
    assert not mapped(address, 100)
    assert (arena.mapped_bytes, arena.pinned_bytes, arena.leased_bytes) == (0, 0, 0)
    with pytest.raises(StoreClosed, match="closed"):
        arena.lease(1)


def test_a_lease_outlives_close_and_its_segment_goes_with_it() -> None:
    device = Device()
    arena = device.arena()
    view, buffer = arena.lease(1000, 8)
    address = buffer.address
    arena.close()
    assert len(device.pinned) == 1
    np.frombuffer(view, np.uint8)[:] = 7
    assert bytes(view) == b"\x07" * 1000
    del view
    assert len(device.pinned) == 1  # the buffer's owner is the view
    del buffer
    assert device.pinned == {}
    assert not mapped(address, 1000)


def test_an_arena_that_is_dropped_leaves_nothing() -> None:
    device = Device()
    arena = device.arena()
    arena.lease(1000)
    assert len(device.pinned) == 1
    del arena
    assert device.pinned == {}


def test_steps_that_need_more_and_less_pin_nothing_anew() -> None:
    device = Device()
    arena = device.arena()
    for segments in (20, 10) * 20:
        leases = [arena.lease(SEGMENT) for _ in range(segments)]
        del leases
        arena.trim()
    assert len(device.calls) == len(device.pinned) == 20


def test_trim_unpins_what_no_step_has_used_for_long() -> None:
    device = Device()
    arena = device.arena()
    kept, _ = arena.lease(SEGMENT)
    arena.lease(SEGMENT)
    for _ in range(HostArena._kept_trims):
        arena.trim()
    assert len(device.pinned) == 2
    arena.trim()
    assert len(device.pinned) == 1
    assert arena.pinned_bytes == SEGMENT
    del kept


def test_failed_pinning_leaves_pageable_memory_warns_once_and_is_tried_again() -> None:
    device = Device(fail=2)
    arena = device.arena()
    with pytest.warns(RuntimeWarning, match=f"pinning {SEGMENT} bytes .*cudaHostRegister: out of memory.*ulimit -l"):
        first = arena.lease(SEGMENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = arena.lease(SEGMENT)  # fails too, and says nothing
        third = arena.lease(SEGMENT)  # succeeds again
    assert len(device.calls) == 3
    assert arena.mapped_bytes == 3 * SEGMENT
    assert arena.pinned_bytes == SEGMENT
    for lease in (first, second, third):
        np.frombuffer(lease[0], np.uint8)[:] = 3
    del lease, first, second
    arena.close()
    assert len(device.pinned) == 1
    del third
    assert device.pinned == {}


def test_a_device_that_is_gone_at_the_end_harms_nobody() -> None:
    def unregister(address: int) -> None:
        calls.append(address)
        raise RuntimeError("driver shutting down")

    calls: list[int] = []
    arena = HostArena(1 << 20, segment_bytes=SEGMENT, register=lambda *_: None, unregister=unregister)
    _, buffer = arena.lease(10)
    address = buffer.address
    del _, buffer
    arena.close()
    assert len(calls) == 1
    assert not mapped(address, 10)


def test_the_budget_is_never_exceeded_and_idle_segments_make_way() -> None:
    device = Device()
    arena = device.arena(4 * SEGMENT)
    kept = [arena.lease(SEGMENT) for _ in range(4)]
    with pytest.raises(StoreFull, match=f"a lease of {PAGE} bytes .* budget is {4 * SEGMENT} bytes.*{4 * SEGMENT}"):
        arena.lease(1)
    del kept[1], kept[2]  # not neighbours: no room for two segments in one piece, except anew
    whole, _ = arena.lease(2 * SEGMENT)
    assert arena.mapped_bytes == 4 * SEGMENT == sum(device.pinned.values())
    kept.clear()
    del whole, _
    assert arena.lease(4 * SEGMENT)[1].nbytes == 4 * SEGMENT
    assert list(device.pinned.values()) == [4 * SEGMENT]


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        Device().arena(100)


def test_many_threads() -> None:
    """Each fills its leases with its own number and finds it there again; in the end all is free and unpinned."""
    device = Device()
    arena = device.arena(1 << 22)
    wrong: list[int] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        held: list[tuple[memoryview, Buffer]] = []
        for _ in range(150):
            try:
                view, buffer = arena.lease(choose.choice([1, 700, PAGE, 5 * PAGE + 3]), choose.randrange(PAGE))
                np.frombuffer(view, np.uint8)[:] = number
                held.append((view, buffer))
                del view, buffer
            except StoreFull:
                held.clear()
            if len(held) > 8:
                view, _ = held.pop(choose.randrange(len(held)))
                if not np.all(np.frombuffer(view, np.uint8) == number):
                    wrong.append(number)
                del view, _

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.leased_bytes == 0
    assert arena.mapped_bytes <= 1 << 22
    arena.close()
    assert device.pinned == {}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_never_calls_the_device_nor_copies_what_is_pinned() -> None:
    device = Device()
    arena = device.arena()
    view, _ = arena.lease(PAGE)
    pid = os.getpid()

    np.frombuffer(view, np.uint8)[:] = 7

    def child() -> str:
        nonlocal view, _
        assert os.getpid() != pid
        assert not np.any(np.frombuffer(view, np.uint8)), "the fork has copied what is pinned"
        del view, _
        arena.close()
        return str(len(device.pinned))

    assert in_child(child) == "1"
    assert np.all(np.frombuffer(view, np.uint8) == 7)
    del view, _
    arena.close()
    assert device.pinned == {}
