"""Disk probe: write and read speed of a directory through the store, with every byte compared.

Every block differs from every other and is random throughout, so that neither a device that compresses nor one that
returns another block looks good. Bytes are compared between the timed transfers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from io_backends import Buffer, BufferPool, PosixStore, Store, StoreError, StoreStalled, Ticket
from tba._errors import StorageError

# Blocks in flight at once: enough for every worker, little against the memory of any machine that trains.
_BATCH_BYTES = 64 << 20
# A probe writes this share of the free space at most, and no more than a fast drive moves in about a second.
_FREE_SHARE = 0.02
_MOST_BYTES = 1 << 30
_STAMP_EVERY_BYTES = 4096


@dataclass(frozen=True)
class Speed:
    """Rates measured with one size of block, in bytes per second."""

    block_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    moved_bytes: int  # each way


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Findings of a probe. `alignment` is that of direct I/O, 1 where there is none; `error` is why it ended early."""

    alignment: int = 1
    speeds: tuple[Speed, ...] = ()
    error: str | None = None

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self.alignment > 1


def probe_bytes(free_bytes: int | None) -> int:
    """Bytes that a probe may write for each size of block where this much is free (None: not known)."""
    return _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, int(free_bytes * _FREE_SHARE))


def probe_disk(
    directory: str | os.PathLike[str],
    block_sizes: Sequence[int],
    *,
    threads: int,
    most_bytes: int,
    seconds: float = 1.0,
    timeout_s: float = 60.0,
    make: Callable[..., Store] = PosixStore,
) -> DiskFacts:
    """Measure a directory that exists and can be written. Failures are reported in the facts, not raised.

    Args:
        directory: where the scratch file is made; it does not stay.
        block_sizes: bytes of a block, a multiple of 4096; sizes above `most_bytes` are left out.
        threads: workers of the store.
        most_bytes: written at most for each size.
        seconds: aimed at for each size and direction; a batch that has begun ends.
        timeout_s: a disk that moves nothing for so long has stalled.
        make: the store, replaced in tests.
    """
    store = make(directory, threads=threads, timeout_s=timeout_s)
    alignment, speeds, error, end = 1, list[Speed](), None, store.close
    try:
        alignment = store.alignment
        for block_bytes in block_sizes:
            if block_bytes <= most_bytes:
                speeds.append(_measure(store, block_bytes, most_bytes, seconds))
    except (StoreError, StorageError) as problem:
        error = str(problem)
        if isinstance(problem, StoreStalled):
            end = store.abandon  # closing would wait for what has stalled
    end()
    return DiskFacts(alignment=alignment, speeds=tuple(speeds), error=error)


def _measure(store: Store, block_bytes: int, most_bytes: int, seconds: float) -> Speed:
    """Write, read back and compare, batch by batch. Raises StoreError, StorageError for wrong bytes."""
    most_blocks = most_bytes // block_bytes
    batch_blocks = min(max(1, _BATCH_BYTES // block_bytes), most_blocks)
    pool = BufferPool(max(store.alignment, 4096), segment_bytes=batch_blocks * block_bytes)
    (source_view, source), (target_view, target) = (pool.lease(batch_blocks * block_bytes) for _ in range(2))
    pattern, found = (torch.frombuffer(view, dtype=torch.int64) for view in (source_view, target_view))
    pattern.random_(generator=torch.Generator().manual_seed(0))
    found.zero_()  # its pages are there before the clock runs
    moved, write_s, read_s = 0, 0.0, 0.0
    while moved < most_blocks and max(write_s, read_s) < seconds:
        # Doubling from one block on, so that a slow disk is not kept busy for long.
        blocks = min(batch_blocks, most_blocks - moved, max(1, moved))
        # Number every page by its batch, so that no two pages of the file are equal.
        pattern[:: _STAMP_EVERY_BYTES // 8] = moved
        begun_s = time.perf_counter()
        tickets = [store.write(piece) for piece in _pieces(source, block_bytes, blocks)]
        _wait(tickets)
        written_s = time.perf_counter()
        pieces = zip(tickets, _pieces(target, block_bytes, blocks), strict=True)
        _wait([store.read(ticket.location, piece) for ticket, piece in pieces])
        read_s += time.perf_counter() - written_s
        write_s += written_s - begun_s
        words = blocks * block_bytes // 8
        if not torch.equal(pattern[:words], found[:words]):
            raise StorageError(f"of {blocks} blocks of {block_bytes} bytes, not all came back as they were written")
        for ticket in tickets:
            store.discard(ticket)
        moved += blocks
    return Speed(block_bytes, moved * block_bytes / write_s, moved * block_bytes / read_s, moved * block_bytes)


def _pieces(whole: Buffer, block_bytes: int, count: int) -> Iterator[Buffer]:
    return (Buffer(whole.address + place * block_bytes, block_bytes, whole.owner, True) for place in range(count))


def _wait(tickets: list[Ticket]) -> None:
    """Wait for every transfer. Raises the first error."""
    for ticket in tickets:
        ticket.wait()
