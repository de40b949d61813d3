"""BufferPool: leases that never overlap, come back when their view dies, and live in memory that a fork shares."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch

from io_backends import Buffer, BufferPool, StoreClosed, _extents
from io_backends._memory import huge_pages, pool
from support.interrupts import interrupted_everywhere
from support.stores import in_child

BLOCK = 512
SEGMENT = 1 << 20


def blocks_of(buffer: Buffer, alignment: int = BLOCK) -> range:
    """The numbers of the whole blocks that a lease owns."""
    return range(buffer.address // alignment, -(-(buffer.address + buffer.nbytes) // alignment))


def test_memory_is_recycled_when_the_view_dies() -> None:
    pool = BufferPool(BLOCK, SEGMENT)
    view, buffer = pool.lease(10_000, 64)
    address = buffer.address
    assert pool.lease(10_000, 64)[1].address != address  # held: another place
    del buffer
    assert pool.leased_bytes == 10_240  # the view alone holds it
    del view
    assert pool.leased_bytes == 0
    assert pool.lease(10_000, 64)[1].address == address


def test_the_end_of_a_lease_only_appends() -> None:
    """A view may die on any thread at any bytecode, also on one that is inside the pool: no lock is taken."""
    pool = BufferPool(BLOCK, SEGMENT)
    view, buffer = pool.lease(BLOCK)
    dropped = threading.Event()
    held = [view]
    del view, buffer

    def drop() -> None:
        held.clear()
        dropped.set()

    with pool._lock:  # as if this thread were in the middle of `lease`
        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        assert dropped.wait(60)
        segment = pool._segments[0]
        assert segment.extents.used_bytes == BLOCK  # nothing is given back yet ...
    thread.join()
    assert pool.leased_bytes == 0  # ... only when the pool is used next


def test_a_large_segment_serves_no_small_lease_and_goes_after_a_step_without_one() -> None:
    pool = BufferPool(BLOCK, 1 << 16)
    large = pool.lease(1 << 18)
    (own,) = pool._segments
    for _ in range(3):
        small = pool.lease(1000)
        assert pool._segments[0] is own
        assert not own.address <= small[1].address < own.address + own.memory.nbytes
        large = None  # type: ignore[assignment]
        again = pool.lease(1 << 18)
        assert again[1].address == own.address, "the next large one has the same memory"
        del again
        pool.trim()
    small = pool.lease(1000)
    pool.trim()
    assert [segment.memory.nbytes for segment in pool._segments] == [1 << 16]
    assert large is None
    assert small[1].nbytes == 1000


def test_a_small_lease_shares_a_large_segment_where_the_budget_is_full() -> None:
    pool = BufferPool(4096, 1 << 16, budget_bytes=1 << 18)
    large = pool.lease(1 << 18)
    del large
    kept = pool.lease(200 << 10)
    assert pool.lease(40 << 10)[1].nbytes == 40 << 10
    assert kept[1].nbytes == 200 << 10


def test_a_lease_beyond_the_idle_cap_goes_back_to_the_system_at_once() -> None:
    pool = BufferPool(BLOCK, SEGMENT, idle_bytes=4 << 20)
    view, buffer = pool.lease((4 << 20) + 1, 65)
    assert buffer.address % BLOCK == 65
    assert pool._segments == []
    assert pool.leased_bytes == pool.mapped_bytes == (4 << 20) + BLOCK
    mapping = weakref.ref(view.obj)
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    del view, buffer
    assert mapping() is not None
    del storage
    assert mapping() is None, "the pool was not asked, and held nothing"
    assert pool.leased_bytes == pool.mapped_bytes == 0
    other = pool.lease(4 << 20)
    assert pool._segments != [], "as much as may be idle is used again"
    pool.close()
    assert other[1].nbytes == 4 << 20


def test_trim_gives_back_segments_that_a_whole_step_did_not_use() -> None:
    pool = BufferPool(BLOCK, 1 << 16)
    first = pool.lease(1 << 16)
    second = pool.lease(1 << 16)
    assert len(pool._segments) == 2
    segments = list(pool._segments)
    del second
    pool.trim()
    assert len(pool._segments) == 2  # the second was used since the last trim
    pool.trim()
    assert pool._segments == segments[:1]
    pool.trim()
    assert pool._segments == segments[:1]  # leased, though nobody asked for more
    del first
    second = pool.lease(1 << 16)
    del second
    pool.trim()
    assert pool._segments == segments[:1]  # not leased, but it was
    pool.trim()
    assert pool._segments == []
    assert pool.lease(10)[1].nbytes == 10


def test_a_lease_that_is_retained_goes_on_until_the_device_is_done_with_it() -> None:
    """A copy under way knows nothing of references: memory given to somebody else meanwhile would be torn."""
    pool = BufferPool(BLOCK, SEGMENT)
    done: list[bool] = []
    asked: list[int] = []

    def ready() -> bool:
        asked.append(1)
        assert not pool._lock.locked()
        return bool(done)

    view, buffer = pool.lease(5000)
    address = buffer.address
    pool.retain(view, ready)
    assert asked == []
    del view, buffer
    other = pool.lease(5000)
    assert other[1].address != address
    pool.trim()
    assert asked == [1, 1]
    assert pool.leased_bytes == 2 * 5120
    done.append(True)
    assert pool.lease(5000)[1].address == address
    pool.lease(5000)
    assert asked == [1, 1, 1]  # and never again
    assert pool.leased_bytes == 5120


def test_of_copies_on_one_queue_only_the_first_is_asked_for() -> None:
    """Asked for all at each lease, a thousand copies under way would cost a million questions."""
    pool = BufferPool(BLOCK, SEGMENT)
    asked = [0, 0]
    over = [0, 0]

    def ready(queue: int, number: int) -> bool:
        asked[queue] += 1
        return number < over[queue]

    for queue in (0, 1):
        for number in range(100):
            pool.retain(pool.lease(1000)[0], partial(ready, queue, number), queue)
    pool.trim()
    assert pool.leased_bytes == 200 * 1024
    asked[:], over[:] = [0, 0], [3, 100]
    pool.trim()
    assert asked == [4, 100]
    assert pool.leased_bytes == 97 * 1024


def test_what_is_retained_outlives_close() -> None:
    pool = BufferPool(BLOCK, SEGMENT)
    view, _ = pool.lease(5000)
    watched = weakref.ref(view)
    pool.retain(view, lambda: False)
    del view, _
    pool.close()
    assert watched() is not None
    del pool
    assert watched() is None


def test_close_gives_back_all_but_what_is_on_lease() -> None:
    pool = BufferPool(BLOCK, SEGMENT)
    view, _ = pool.lease(1000)
    pool.close()
    pool.close()
    pool.trim()
    assert (pool.mapped_bytes, pool.leased_bytes) == (0, 0)
    view[:] = bytes(1000)
    with pytest.raises(StoreClosed, match="make a new one"):
        pool.lease(1)


@pytest.mark.parametrize("operation", ["lease", "trim", "an end", "retained"])
def test_an_interrupt_at_any_bytecode_costs_nothing_that_trim_does_not_find(operation: str) -> None:
    """Every block that no lease holds can be leased again, and no other."""

    class Begun:
        def __init__(self) -> None:
            self.pool = BufferPool(BLOCK, SEGMENT)
            self.pool._lock = threading.RLock()  # type: ignore[assignment]  # no interrupt falls between block and lock
            self.held = [self.pool.lease(100_000) for _ in range(3)]
            if operation != "lease":
                del self.held[1]
            self.copied = False
            self.retained = [self.pool.lease(50_000)[0]]
            self.pool.retain(self.retained[0], lambda: self.copied)

    def operate(begun: Begun) -> None:
        if operation == "trim":
            begun.pool.trim()
        elif operation == "an end":
            assert begun.pool.leased_bytes > 200_000
        elif operation == "retained":
            begun.copied = True
            begun.retained.clear()
            begun.pool.trim()
        else:
            begun.held.append(begun.pool.lease(300_000))

    for place, begun in interrupted_everywhere(Begun, operate, pool, _extents, huge_pages):
        begun.copied = True
        begun.retained.clear()
        begun.pool.trim()
        begun.pool.trim()
        held = sum(len(blocks_of(buffer)) for _, buffer in begun.held) * BLOCK
        assert begun.pool.leased_bytes == held, f"interrupted at bytecode {place}"
        (segment,) = begun.pool._segments
        assert segment.extents.used_bytes == held
        begun.held += [begun.pool.lease(length) for _, length in segment.extents.free_ranges(0, SEGMENT)]
        assert begun.pool._segments == [segment]
        taken = sorted(block for _, buffer in begun.held for block in blocks_of(buffer))
        assert len(set(taken)) == len(taken) == SEGMENT // BLOCK


def test_settings_and_requests_that_make_no_sense_are_refused() -> None:
    for alignment in (0, -512, 3, 4 << 20):
        with pytest.raises(ValueError, match=f"must divide a huge page of 2097152 bytes, got {alignment}"):
            BufferPool(alignment)
    for skew in (-1, BLOCK):
        with pytest.raises(ValueError, match=f"within the alignment of 512 bytes, got {skew}"):
            BufferPool(BLOCK).lease(1, skew)


def test_a_lease_outlives_its_pool() -> None:
    pool = BufferPool(BLOCK, SEGMENT)
    view, _ = pool.lease(1000, 5)
    del pool, _
    gc.collect()
    array = np.frombuffer(view, np.uint8)
    array[:] = 7
    assert int(array.sum()) == 7000


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_copy_of_its_own() -> None:
    """What the child does to a lease it inherited never reaches the parent's tensors."""
    pool = BufferPool(BLOCK, SEGMENT)
    view, _ = pool.lease(BLOCK)
    array = np.frombuffer(view, np.uint8)
    array[:] = 1

    def child() -> str:
        array[1] = 9
        return str(array[0])

    assert in_child(child) == "1"
    assert array[1] == 1
