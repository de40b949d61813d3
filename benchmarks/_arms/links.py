"""The links arm: bandwidth between a device, pinned host memory and a file, both ways; everything is compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from io_backends import KvikioStore, PosixStore, Store, StoreError

from .._processes.serve import Tell
from .._report.results import CannotMeasure
from .._workload.accelerator import module_of, open_device
from .._workload.tools import sums

COPY, FILE, KVIKIO = "pinned host memory", "a file, through pinned host memory", "a file, by kvikio"


def measure_links(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Measure the links of a device.

    Options: `device`, `directory` for the file, `pieces` of `piece_bytes`, and `rounds`, after one that is not counted.

    Returns:
        For each link, bytes per second `out` of the device and `back` to it, one for each round; for kvikio also its
        `mode`, or why there is none.
    """
    pieces = _Pieces(options)
    found: dict[str, Any] = {COPY: _rounds(options["rounds"], pieces, pieces.copy_out, pieces.copy_back)}
    tell(COPY)
    store: Store = PosixStore(options["directory"])
    found[FILE] = _through(store, options["rounds"], pieces, pieces.file_out, pieces.file_back)
    tell(FILE)
    found[KVIKIO] = _kvikio(options, pieces)
    return found


class _Pieces:
    """Pieces of a device's memory, as much pinned host memory, and the ways between them.

    A way to a file leaves its tickets in `tickets`, which the way back takes.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.device = open_device(options["device"])
        self._card = module_of(self.device.type)
        self._stream = self._card.Stream()
        self._directory = Path(options["directory"])
        count, nbytes = options["pieces"], options["piece_bytes"]
        generator = torch.Generator().manual_seed(0)
        self._host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        for piece in self._host:
            piece.random_(generator=generator)
        self.on_device = [piece.to(self.device) for piece in self._host]
        self.nbytes = count * nbytes
        self.tickets: list[Any] = []
        self._sums = self._sum()

    def forget(self) -> None:
        """Overwrite what a way back has to bring."""
        for piece in self.on_device:
            piece.zero_()
        self._card.synchronize()

    def check(self) -> None:
        """Compare what a way back brought with what was there at first. Raises CannotMeasure."""
        if self._sum() != self._sums:
            raise CannotMeasure("other bytes came back than had gone out")

    def copy_out(self, store: Store | None) -> float:
        """Copy all pieces to host memory; return the device's seconds."""
        return self._copy(self._host, self.on_device)

    def copy_back(self, store: Store | None) -> float:
        """Copy all pieces from host memory; return the device's seconds."""
        return self._copy(self.on_device, self._host)

    def file_out(self, store: Store) -> float:
        """Copy each piece to host memory and write it from there, as the engine does; return seconds."""
        begun_s = time.perf_counter()
        for host, piece in zip(self._host, self.on_device, strict=True):
            copied = self._queue(host, piece)
            self.tickets.append(store.write(host, before=copied.synchronize))
        return self._ended(begun_s)

    def file_back(self, store: Store) -> float:
        """Read each piece into host memory and copy it from there; return seconds."""
        begun_s = time.perf_counter()
        reads = [store.read(ticket.location, host) for ticket, host in zip(self.tickets, self._host, strict=True)]
        for read, host, piece in zip(reads, self._host, self.on_device, strict=True):
            read.wait()
            self._queue(piece, host)
        self._stream.synchronize()
        return time.perf_counter() - begun_s

    def device_out(self, store: Store) -> float:
        """Write each piece from the device's memory; return seconds."""
        begun_s = time.perf_counter()
        self.tickets += [store.write(piece) for piece in self.on_device]
        return self._ended(begun_s)

    def device_back(self, store: Store) -> float:
        """Read each piece into the device's memory; return seconds."""
        begun_s = time.perf_counter()
        pairs = zip(self.tickets, self.on_device, strict=True)
        for read in [store.read(ticket.location, piece) for ticket, piece in pairs]:
            read.wait()
        return time.perf_counter() - begun_s

    def _ended(self, begun_s: float) -> float:
        for ticket in self.tickets:
            ticket.wait()
        return time.perf_counter() - begun_s

    def _queue(self, target: Tensor, source: Tensor) -> Any:
        """Queue a copy; return the event behind it."""
        with self._card.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> float:
        begun, ended = self._card.Event(enable_timing=True), self._card.Event(enable_timing=True)
        begun.record(self._stream)
        for target, source in zip(targets, sources, strict=True):
            self._queue(target, source)
        ended.record(self._stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def _sum(self) -> list[list[int]]:
        return [sums(piece).tolist() for piece in self.on_device]


_Way = Callable[[Any], float]


def _rounds(rounds: int, pieces: _Pieces, out: _Way, back: _Way, store: Store | None = None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"out": [], "back": []}
    for _ in range(1 + rounds):
        found["out"].append(pieces.nbytes / out(store))
        pieces.forget()
        found["back"].append(pieces.nbytes / back(store))
        pieces.check()
        for ticket in pieces.tickets:
            assert store is not None
            store.discard(ticket)
        pieces.tickets.clear()
    return {way: rates[1:] for way, rates in found.items()}


def _through(store: Store, rounds: int, pieces: _Pieces, out: _Way, back: _Way) -> dict[str, list[float]]:
    try:
        return _rounds(rounds, pieces, out, back, store)
    finally:
        store.close()


def _kvikio(options: Mapping[str, Any], pieces: _Pieces) -> dict[str, Any]:
    if pieces.device.type != "cuda":
        return {"mode": "needs CUDA"}
    try:
        store = KvikioStore(options["directory"])
    except ImportError:
        return {"mode": "not installed"}
    try:
        mode = store.mode
    except StoreError as error:
        store.close()
        return {"mode": f"does not work: {error}"}
    return {"mode": mode, **_through(store, options["rounds"], pieces, pieces.device_out, pieces.device_back)}
