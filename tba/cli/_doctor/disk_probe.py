"""Disk probe: write and read speed of a directory through the store, with every byte compared.

Every block is random and different, so that a device that compresses or returns another block does not look good. Bytes
are compared between the timed transfers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from io_backends import Buffer, BufferPool, PosixStore, Store, StoreError, StoreStalled
from tba._errors import StorageError

BLOCK_BYTES = 4 << 20
# Blocks in flight at once: enough for every worker, and little memory for any machine that trains.
_BATCH_BLOCKS = 16
# A probe writes at most this share of the free space, and at most what a fast drive moves in about a second.
_FREE_SHARE = 0.02
_MOST_BYTES = 1 << 30
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Findings of a probe.

    Attributes:
        direct: whether transfers bypass the page cache.
        write_bytes_per_s, read_bytes_per_s: None if nothing was measured.
        moved_bytes: bytes written; as many were read.
        error: why it ended early.
    """

    direct: bool = False
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    moved_bytes: int = 0
    error: str | None = None


def probe_bytes(free_bytes: int | None) -> int:
    """Compute the bytes that a probe may write, from the free space (None: unknown)."""
    return _MOST_BYTES if free_bytes is None else min(_MOST_BYTES, int(free_bytes * _FREE_SHARE))


def probe_disk(
    directory: str | os.PathLike[str],
    *,
    threads: int,
    most_bytes: int,
    seconds: float = 1.0,
    timeout_s: float = 60.0,
    make: Callable[..., Store] = PosixStore,
) -> DiskFacts:
    """Measure a directory that exists and can be written. Failures are reported in the facts, not raised.

    Args:
        directory: where the scratch file is made; it is deleted.
        threads: workers of the store.
        most_bytes: maximum to write; if less than a block, nothing is measured.
        seconds: target for each direction; a batch that has begun is finished.
        timeout_s: a disk that moves nothing for this long has stalled.
        make: the store, replaced in tests.
    """
    facts = DiskFacts()
    store = make(directory, threads=threads, timeout_s=timeout_s)
    end = store.close
    try:
        facts = DiskFacts(direct=store.alignment > 1)
        if most_bytes >= BLOCK_BYTES:
            facts = _measured(facts, store, most_bytes // BLOCK_BYTES, seconds)
    except (StoreError, StorageError) as problem:
        facts = replace(facts, error=str(problem))
        if isinstance(problem, StoreStalled):
            end = store.abandon  # closing would wait for the stalled transfers
    end()
    return facts


def _measured(facts: DiskFacts, store: Store, most_blocks: int, seconds: float) -> DiskFacts:
    """Write, read back and compare, batch by batch. Raises StoreError, StorageError for wrong bytes."""
    batch = min(_BATCH_BLOCKS, most_blocks)
    pool = BufferPool(max(store.alignment, _PAGE_BYTES), segment_bytes=batch * BLOCK_BYTES)
    (source_view, source), (target_view, target) = (pool.lease(batch * BLOCK_BYTES) for _ in range(2))
    pattern, found = (torch.frombuffer(view, dtype=torch.int64) for view in (source_view, target_view))
    pattern.random_(generator=torch.Generator().manual_seed(0))
    found.zero_()  # touches its pages before the clock starts
    moved, write_s, read_s = 0, 0.0, 0.0
    while moved + batch <= most_blocks and max(write_s, read_s) < seconds:
        # Number every page by its batch, so that no two pages of the file are equal.
        pattern[:: _PAGE_BYTES // 8] = moved
        begun_s = time.perf_counter()
        tickets = [store.write(_block(source, place)) for place in range(batch)]
        for ticket in tickets:
            ticket.wait()
        written_s = time.perf_counter()
        for read in [store.read(ticket.location, _block(target, place)) for place, ticket in enumerate(tickets)]:
            read.wait()
        read_s += time.perf_counter() - written_s
        write_s += written_s - begun_s
        if not torch.equal(pattern, found):
            raise StorageError(f"of {batch} blocks of {BLOCK_BYTES} bytes, not all came back as they were written")
        for ticket in tickets:
            store.discard(ticket)
        moved += batch
    nbytes = moved * BLOCK_BYTES
    return replace(facts, write_bytes_per_s=nbytes / write_s, read_bytes_per_s=nbytes / read_s, moved_bytes=nbytes)


def _block(whole: Buffer, place: int) -> Buffer:
    return Buffer(whole.address + place * BLOCK_BYTES, BLOCK_BYTES, whole.owner, True)
