"""Disk probe: how fast a directory takes and gives back bytes through the store, and whether they are the same bytes.

Every block written differs from every other, random throughout, so that neither a device that compresses nor one that
answers with another block looks good. Comparing takes place between the timed batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from io_backends import Buffer, BufferPool, PosixStore, Store, StoreError, Ticket

from ._errors import StalledError, StorageError

# Blocks in flight at once: enough for every worker, little against the memory of any machine that trains.
_BATCH_BYTES = 64 << 20
# A probe takes this share of the free space at most, and no more than a fast drive moves in about a second.
_FREE_SHARE = 0.02
_MOST_BYTES = 1 << 30
_STAMP_EVERY_BYTES = 4096


class Speed(NamedTuple):
    """What was measured with one size of block; both rates in bytes per second."""

    block_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    moved_bytes: int  # each way


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """What a probe found. `alignment` is that of direct I/O, 1 where there is none; `error` is why it ended early."""

    alignment: int = 1
    speeds: tuple[Speed, ...] = ()
    error: str | None = None

    @property
    def direct(self) -> bool:
        """Whether transfers pass by the page cache."""
        return self.alignment > 1


def probe_bytes(free_bytes: int | None) -> int:
    """How much a probe may write at once where this much is free (None: not known)."""
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
    """Measure a directory that exists and can be written. What goes wrong is told in the facts, not raised.

    Args:
        directory: where the scratch file is made; nothing of it is left.
        block_sizes: bytes of a block, a multiple of 4096; sizes above `most_bytes` are left out.
        threads: workers of the store.
        most_bytes: written at most for each size; the file never grows beyond it by more than the store lays out ahead.
        seconds: aimed at for each size and direction; a batch that has begun ends.
        timeout_s: a block that takes longer has stalled.
        make: the store, replaced in tests.
    """
    store = make(directory, threads=threads)
    alignment, speeds = 1, list[Speed]()
    try:
        alignment = store.alignment
        for block_bytes in block_sizes:
            if block_bytes <= most_bytes:
                speeds.append(_measure(store, block_bytes, most_bytes, seconds, timeout_s))
    except StalledError as error:
        store.abandon()  # closing would wait for what has stalled
        return DiskFacts(alignment=alignment, speeds=tuple(speeds), error=str(error))
    except (StoreError, StorageError) as error:
        store.close()
        return DiskFacts(alignment=alignment, speeds=tuple(speeds), error=str(error))
    store.close()
    return DiskFacts(alignment=alignment, speeds=tuple(speeds))


def _measure(store: Store, block_bytes: int, most_bytes: int, seconds: float, timeout_s: float) -> Speed:
    """Write, read back and compare. Raises StoreError, StalledError, StorageError for wrong bytes."""
    most_blocks = most_bytes // block_bytes
    blocks = min(max(1, _BATCH_BYTES // block_bytes), most_blocks)
    pool = BufferPool(max(store.alignment, 4096), segment_bytes=blocks * block_bytes)
    source_view, source = pool.lease(blocks * block_bytes)
    target_view, target = pool.lease(blocks * block_bytes)
    pattern = torch.frombuffer(source_view, dtype=torch.int64)
    found = torch.frombuffer(target_view, dtype=torch.int64)
    pattern.random_(generator=torch.Generator().manual_seed(0))
    found.zero_()  # its pages are there before the clock runs

    batches: list[list[Ticket]] = []
    written = 0
    write_s = read_s = 0.0
    while written < most_blocks and write_s < seconds:
        # Doubling from one block on, so that a slow disk is not kept busy for long.
        count = min(blocks, most_blocks - written, max(1, written))
        _stamp(pattern, written)
        start_s = time.perf_counter()
        batches.append([store.write(piece) for piece in _pieces(source, block_bytes, count)])
        _wait(batches[-1], timeout_s)
        write_s += time.perf_counter() - start_s
        written += count
    read = 0
    for tickets in batches:
        if read and read_s >= seconds:
            break
        pairs = zip(tickets, _pieces(target, block_bytes, len(tickets)), strict=True)
        start_s = time.perf_counter()
        _wait([store.read(ticket.location, piece) for ticket, piece in pairs], timeout_s)
        read_s += time.perf_counter() - start_s
        _stamp(pattern, read)
        words = len(tickets) * block_bytes // 8
        if not torch.equal(pattern[:words], found[:words]):
            raise StorageError(
                f"of {len(tickets)} blocks of {block_bytes} bytes, not all came back as they were written"
            )
        read += len(tickets)
    for tickets in batches:
        for ticket in tickets:
            store.discard(ticket)
    return Speed(block_bytes, written * block_bytes / write_s, read * block_bytes / read_s, written * block_bytes)


def _stamp(words: Tensor, batch: int) -> None:
    """Number every page by its batch, so that no page of the file is like another."""
    words[:: _STAMP_EVERY_BYTES // 8] = batch


def _pieces(whole: Buffer, block_bytes: int, count: int) -> list[Buffer]:
    return [Buffer(whole.address + place * block_bytes, block_bytes, whole.owner, True) for place in range(count)]


def _wait(tickets: list[Ticket], timeout_s: float) -> None:
    """Wait for every transfer. Raises the first error, or StalledError."""
    for ticket in tickets:
        if not ticket.wait(timeout_s):
            raise StalledError(f"a transfer of {ticket.nbytes} bytes has not ended after {timeout_s:g} s")
