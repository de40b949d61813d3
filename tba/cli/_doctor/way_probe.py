"""Way probe: how fast a device's bytes reach a directory through a store, and come back, with every byte compared.

They go as the engine has them go: the store takes device memory, or they are copied to pinned memory and written from
there.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from io_backends import KvikioStore, PosixStore, Store, Ticket
from tba._device import streams
from tba._errors import StorageError
from tba._memory.host_pools import HostMemory
from tba._transfer.measured import Speed

BLOCK_BYTES = 16 << 20  # as large as a layer's tensors
_BLOCKS = 8  # in flight at once
_ROUNDS = 3  # the first one makes and pins what the others use


def probe_bytes() -> int:
    """Bytes that are written, both ways together."""
    return 2 * _ROUNDS * _BLOCKS * BLOCK_BYTES


def probe_ways(directory: str | os.PathLike[str], device: torch.device, threads: int) -> tuple[Speed, Speed]:
    """Measure both ways: through pinned memory, and through kvikio. Raises StoreError, StorageError, RuntimeError."""
    with closing(PosixStore(directory, threads=threads)) as store:
        pinned = _measured(store, device)
    with closing(KvikioStore(directory, threads=threads)) as store:
        return pinned, _measured(store, device)


def _measured(store: Store, device: torch.device) -> Speed:
    host = HostMemory(2 * _BLOCKS * BLOCK_BYTES)
    source = torch.randint(256, (_BLOCKS * BLOCK_BYTES,), dtype=torch.uint8).to(device)
    best = Speed(0.0, 0.0)
    for _ in range(_ROUNDS):
        source += 1  # other bytes than before
        _finish(device)
        begun_s = time.perf_counter()
        tickets = _write(store, source, host)
        written_s = time.perf_counter()
        found = _read(store, tickets, device, host)
        read_s = time.perf_counter()
        if not torch.equal(torch.cat(found), source):
            raise StorageError(f"not all of {source.nbytes} bytes came back as they were written")
        for ticket in tickets:
            store.discard(ticket)
        best = Speed(
            max(best.write, source.nbytes / (written_s - begun_s)), max(best.read, source.nbytes / (read_s - written_s))
        )
    host.close()
    return best


def _finish(device: torch.device) -> None:
    stream = streams.current(device)
    if stream is not None:
        stream.synchronize()


def _direct(store: Store, device: torch.device) -> bool:
    return device.type != "cpu" and store.takes_device_memory and store.threshold_bytes <= BLOCK_BYTES


def _write(store: Store, source: Tensor, host: HostMemory) -> list[Ticket]:
    producer, pool = streams.current(source.device), host.of(source.device, max(store.alignment, mmap.PAGESIZE))
    places, tickets = range(0, source.nbytes, BLOCK_BYTES), []
    if _direct(store, source.device):
        leaving = [streams.lend(source, place, BLOCK_BYTES, producer) for place in places]
    else:
        leaving = [streams.out(source, place, BLOCK_BYTES, producer, pool) for place in places]  # type: ignore[misc]
    for buffer, departure in leaving:
        if departure is not None:
            departure()
        tickets.append(store.write(buffer))
    for ticket in tickets:
        ticket.wait()
    return tickets


def _read(store: Store, tickets: Sequence[Ticket], device: torch.device, host: HostMemory) -> list[Tensor]:
    pool, reads, found = host.of(device), [], []
    for ticket in tickets:
        if _direct(store, device):
            target, _, buffer, before = streams.borrow(BLOCK_BYTES, device)
            reads.append((store.read(ticket.location, buffer, before=before), target))
        else:
            view, buffer = pool.lease(BLOCK_BYTES, ticket.location.skew)
            reads.append((store.read(ticket.location, buffer), streams.host_bytes(view)))
    for read, memory in reads:
        read.wait()
        whole, ready = streams.into(memory, device, None if device.type == "cpu" else pool)
        streams.use(whole, ready)
        found.append(whole)
    _finish(device)
    return found
