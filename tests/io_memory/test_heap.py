"""HeapPool: leases from the heap, aligned as asked for, each of which goes back with its last view."""

from __future__ import annotations

import mmap
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from io_backends import HeapPool, PosixStore, StoreClosed

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.mark.parametrize("alignment", [1, 512, PAGE])
@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 3 * MIB + 5])
def test_a_lease_owns_the_blocks_around_it(alignment: int, nbytes: int) -> None:
    pool = HeapPool(alignment)
    skews = {0, alignment // 2, alignment - 1}
    leases = [(skew, *pool.lease(nbytes, skew)) for skew in skews for _ in range(3)]
    blocks: list[int] = []
    for number, (skew, view, buffer) in enumerate(leases):
        assert (buffer.address % alignment, buffer.nbytes, len(view)) == (skew, nbytes, nbytes)
        assert buffer.padded
        blocks += range(buffer.address // alignment, -(-(buffer.address + max(1, nbytes)) // alignment))
        view[:] = bytes([number]) * nbytes
    assert len(blocks) == len(set(blocks))
    assert all(bytes(view) == bytes([number]) * nbytes for number, (_, view, _) in enumerate(leases))


def test_memory_goes_back_to_the_heap_with_the_last_view() -> None:
    pool = HeapPool(PAGE)
    tracemalloc.start()
    try:
        view, buffer = pool.lease(8 * MIB)
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        part = view[: 2 * MIB]
        assert tracemalloc.get_traced_memory()[0] >= 8 * MIB
        assert pool.mapped_bytes == pool.leased_bytes == 8 * MIB
        del view, buffer
        tensor.fill_(3)
        del tensor
        assert bytes(part[:3]) == b"\3\3\3"  # a slice has the memory too, though the lease has ended
        assert pool.leased_bytes == 0
        del part
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()


def test_a_direct_read_goes_into_a_lease(tmp_path: Path) -> None:
    source = np.frombuffer(np.random.default_rng(0).bytes(3 * MIB + 100), np.uint8)
    with closing(PosixStore(tmp_path)) as store:
        pool = HeapPool(max(PAGE, store.alignment))
        for begin in (0, 64, 1000):
            ticket = store.write(source[begin:])
            ticket.wait()
            assert ticket.location is not None
            view, buffer = pool.lease(source.nbytes - begin, ticket.location.skew)
            store.read(ticket.location, buffer).wait()
            assert np.array_equal(np.frombuffer(view, np.uint8), source[begin:])


def test_a_closed_pool_leases_nothing() -> None:
    pool = HeapPool(PAGE)
    view, _ = pool.lease(PAGE)
    pool.close()
    view[:] = bytes(PAGE)
    with pytest.raises(StoreClosed):
        pool.lease(PAGE)
