"""Carrier: moves the tensors that compiled graphs give it to the tier and back, by the engine's own mover.

Guarantees:

1. Exact: what `back` gives is bit for bit what `out` got, or a TransferError that names the tensor.
2. Between `out` and `done` the tensor is in memory and its write under way. After `done` nobody looks at that memory:
   what could not be written (a failed or stalled write, no allowance, a closed backend) has been copied.
3. The token owns the bytes. What it stands for dies with its storage: a graph that is dropped without a backward frees
   memory and file. A graph that is kept (`retain_graph`) may ask again and again, and gets memory of its own each time.
4. In a forked child nothing moves; what the parent has stored is gone there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from io_backends import ForkAware, Store, interrupts

from .._config import OffloadConfig
from .._device import streams
from .._errors import OffloadError
from .._plan import policy
from .._record.record import IN_MEMORY, READING, STORED, WRITING, Record, Remains
from .._record.restore import restore, restore_in_child
from .._record.view import View, apart, view_and_span
from .._stats import Counters, OffloadStats, Situation
from .._torch.private import current_graph_task_id, graph_is_kept
from .._transfer import build
from .._transfer.landing import CLOSED
from .._transfer.mover import Mover

SHARED = "memory of an input or output of a compiled graph"


class Moved:
    """A tensor that `out` got: who moves it, where its bytes are, and how it looks at them."""

    __slots__ = ("carrier", "record", "view")

    def __init__(self, carrier: Carrier, record: Record, view: View) -> None:
        self.carrier, self.record, self.view = carrier, record, view

    def be(self, record: Record, view: View) -> None:
        """Be elsewhere from now on."""
        self.record, self.view = record, view


class _Handle(bytearray):
    """The eight bytes of a token, which its storage keeps alive, and what they stand for."""

    __slots__ = ("__weakref__", "moved")

    def __init__(self, number: int, moved: Moved) -> None:
        super().__init__(number.to_bytes(8, "little"))
        self.moved = moved


_numbers = count()
_handles: weakref.WeakValueDictionary[int, _Handle] = weakref.WeakValueDictionary()


def moved_by(token: Tensor) -> Moved:
    """Find what a token stands for. Raises OffloadError for one that is none."""
    found = _handles.get(int(token))
    if found is None:
        raise OffloadError(
            "a compiled graph asked for a tensor by a token that is not of this process, or whose graph is gone; run "
            "backward in the process that ran forward"
        )
    return found.moved


def _token(moved: Moved) -> Tensor:
    """Make a token of its own memory: the compiler may use that again once it has no use for the token."""
    number = next(_numbers)
    handle = _handles[number] = _Handle(number, moved)
    return torch.frombuffer(handle, dtype=torch.int64)


class Carrier(ForkAware):
    """Mover of one backend.

    Args:
        config: the settings.
        store: where bytes go, instead of the settings' store. The carrier closes it.
        engine: the lock and the counters of an engine that counts steps; None: it counts them itself.
    """

    def __init__(
        self,
        config: OffloadConfig,
        store: Store | None = None,
        engine: tuple[threading.RLock, Counters] | None = None,
    ) -> None:
        self.config = config
        self._alone = engine is None
        self.lock, self.counters = engine or (threading.RLock(), Counters())
        self._store = store
        self.directories = build.directories(config) if store is None else ()
        made: Callable[[bool], Store] = partial(build.open_store, config, self.directories)
        self.mover: Mover = build.make_mover(
            config, None, self.lock, self.counters, made if store is None else lambda _: store
        )
        self._dead = False
        self._numbers = count()
        self._remains: deque[Remains] = deque()
        # Each live record, whose end is told by its reference: its bytes, and those that stay beside it.
        self._live: dict[int, tuple[weakref.ref[Record], int, int]] = {}
        self._plain_bytes = self._plain_peak_bytes = self._held_peak_bytes = 0
        self._beside_bytes = self._peak_bytes = 0
        self._plain_now_peak_bytes = self._held_now_peak_bytes = 0  # of the step under way
        self._here: dict[int, int] = {}  # bytes of records that are in memory for good, or are being read
        self.heed_forks()

    # -- forward ---------------------------------------------------------------------------------------------------

    @interrupts.whole
    def out(self, tensor: Tensor, *, moves: bool = True, beside_bytes: int = 0, window_bytes: int = 1 << 62) -> Tensor:
        """Begin to move a tensor; returns its token.

        Args:
            tensor: which is not changed until `done`.
            moves: otherwise it is copied and stays.
            beside_bytes: that its graph saves and keeps, if it is the first of that graph.
            window_bytes: most bytes to be on their way out, with these.
        """
        with self.lock:
            self._settle()
            # Beneath autograd, an alias has a version of its own: kernels that use the memory again are no edits.
            tensor = tensor.detach() if moves and not self._dead else apart(tensor)
            view, begin, end = view_and_span(tensor)
            record = self._record(tensor, begin, end)
            self._count(record, beside_bytes)
            if not moves or self._dead:
                why_not: str | None = SHARED if not moves else CLOSED
                self._here[record.number] = record.nbytes
            else:
                self.mover.wait_for_room(record.nbytes, window_bytes)
                why_not = self.mover.send(record)
            if why_not is not None:
                self.counters.kept_to_offloaded(record.set_offloaded(False), why_not)
            self._note()
            token = _token(Moved(self, record, view))
        self.mover.catch_up()
        return token

    @interrupts.whole
    def done(self, moved: Moved, tensor: Tensor) -> Tensor:
        """End the move of a tensor, whose memory is not its own from now on. Returns the token to save."""
        with self.lock:
            record = moved.record
            if record.state is WRITING and not self._dead and not self.mover.await_write(record):
                self.mover.take_back(record)
            if record.state in IN_MEMORY and not self._is_own(record, tensor):
                self._keep(moved, tensor)
            self.mover.landing.confirm()
            self._note()
            kept = _token(moved)
        self.mover.catch_up()
        return kept

    def _record(self, tensor: Tensor, begin: int, end: int) -> Record:
        storage = tensor.untyped_storage()
        place = policy.range_to_store(begin, end, storage.nbytes())
        record = Record(
            next(self._numbers),
            tensor,
            tensor,
            storage,
            *place,
            self._remains,
            stream=streams.producer_stream(tensor),
            logical_bytes=end - begin,
            offloaded=True,
        )
        record.hold()
        return record

    def _is_own(self, record: Record, tensor: Tensor) -> bool:
        alias = record.alias
        return alias is not None and alias.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()

    def _keep(self, moved: Moved, tensor: Tensor) -> None:
        """Copy a tensor that was not written, and keep the copy."""
        beside_bytes = self._live[moved.record.number][2]
        own = apart(tensor)
        view, begin, end = view_and_span(own)
        record = self._record(own, begin, end)
        self._live[record.number] = record.ref, record.nbytes, beside_bytes
        self._live[moved.record.number] = moved.record.ref, moved.record.nbytes, 0
        self._plain_bytes += record.nbytes
        self._here[record.number] = record.nbytes
        moved.be(record, view)
        self._settle()

    # -- backward --------------------------------------------------------------------------------------------------

    @interrupts.whole
    def ahead(self, moved: Moved) -> None:
        """Begin to bring a tensor back."""
        record = moved.record
        with self.lock:
            self._settle()
            if record.state is STORED and not self._dead:
                tracer = interrupts.tracer()
                try:
                    self._fetch(record, asked=False)
                except RuntimeError as error:  # `back` tries again, and tells
                    interrupts.pass_on(error, tracer)
        self.mover.catch_up()

    @interrupts.whole
    def back(self, moved: Moved) -> Tensor:
        """Give a tensor back, in memory that nobody else has.

        Raises:
            TransferError, ClosedError: its bytes could not be brought back; they are gone with the backend, or a fork.
        """
        record, view = moved.record, moved.view
        if self._dead:
            return apart(restore_in_child(record, view))
        with self.lock:
            self._settle()
            if record.state is WRITING:
                self.mover.await_write(record)
            if record.state in IN_MEMORY:
                self.mover.forward(record)
                once = current_graph_task_id() != -1 and not graph_is_kept()
                return restore(record, view) if once else apart(restore(record, view))
            if record.state is STORED:
                self._fetch(record, asked=True)
        while record.state is READING:
            self.mover.await_read(record)
            if interrupts.kept:
                interrupts.throw()
            with self.lock:
                self.mover.arrive(record)
        with self.lock:
            tensor = restore(record, view, alone=True)
            record.drop()
            self._here.pop(record.number, None)
        self.mover.catch_up()
        return tensor

    def _fetch(self, record: Record, *, asked: bool) -> None:
        self.mover.fetch(record, asked=asked)
        self._here[record.number] = record.nbytes
        self._note()

    # -- counts ----------------------------------------------------------------------------------------------------

    def _count(self, record: Record, beside_bytes: int) -> None:
        self._live[record.number] = record.ref, record.nbytes, beside_bytes
        self._plain_bytes += record.nbytes + beside_bytes
        self._beside_bytes += beside_bytes
        self.counters.offloaded_bytes += record.logical_bytes
        if beside_bytes:
            self.counters.kept_by_reason[policy.FITS] += beside_bytes

    def _note(self) -> None:
        """Note what saved tensors hold in memory, and would hold."""
        held_bytes = self._beside_bytes + sum(self._here.values()) + self.mover.staging.bytes
        self._held_now_peak_bytes = max(self._held_now_peak_bytes, held_bytes)
        self._plain_now_peak_bytes = max(self._plain_now_peak_bytes, self._plain_bytes)
        self._peak_bytes = max(self._peak_bytes, held_bytes)

    def _settle(self) -> None:
        """Give back what dead tokens left; where no token lives any more a step has ended."""
        if self._dead:
            return
        self.mover.land()
        died = bool(self._remains)
        while self._remains:
            remains = self._remains.popleft()
            _, nbytes, beside_bytes = self._live.pop(remains.number)
            self._plain_bytes -= nbytes + beside_bytes
            self._beside_bytes -= beside_bytes
            self._here.pop(remains.number, None)
            if remains.write is not None:
                self.mover.discard(remains.write)
        self.mover.landing.confirm()
        if died and not self._live:
            self.counters.micro_batches += self._alone
            self.counters.steps += self._alone
            self._plain_peak_bytes, self._plain_now_peak_bytes = self._plain_now_peak_bytes, 0
            self._held_peak_bytes, self._held_now_peak_bytes = self._held_now_peak_bytes, 0
            self.mover.take_share()
            self.mover.end_step(self._plain_peak_bytes)

    @interrupts.whole
    def stats(self) -> OffloadStats:
        """Take a snapshot of the counters."""
        with self.lock:
            self._settle()
            self.counters.live_records = len(self._live)
            self.counters.resident_bytes = sum(self._here.values())
            self.counters.peak_bytes = self._peak_bytes
            return self.counters.snapshot(
                file_bytes=self.mover.file_bytes(),
                plain_peak_bytes=self._plain_peak_bytes,
                step_peak_bytes=self._held_peak_bytes,
                situation=Situation(tier=self.config.tier, closed=self.mover.closed),
                written_today_bytes=self.mover.allowance.written_today_bytes,
            )

    @interrupts.whole
    def added_to(self, stats: OffloadStats) -> OffloadStats:
        """Add what there is here to what there is in the engine whose counters these are."""
        with self.lock:
            self._settle()
            here = {
                "live_records": len(self._live),
                "resident_bytes": sum(self._here.values()),
                "peak_bytes": self._peak_bytes,
                "plain_peak_bytes": self._plain_peak_bytes,
                "step_peak_bytes": self._held_peak_bytes,
                "file_bytes": self.mover.file_bytes(),
            }
        return replace(stats, **{name: getattr(stats, name) + number for name, number in here.items()})

    # -- end -------------------------------------------------------------------------------------------------------

    @interrupts.whole
    def close(self) -> None:
        """End threads, free files and buffers. Idempotent."""
        with self.lock:
            if self.mover.closed:
                return
            self._settle()
            self.mover.stop()
        store = self.mover.store or self._store
        if store is not None:
            store.close()
        with self.lock:
            self._settle()
        self.mover.close()

    def forget(self) -> None:
        """In a forked child: nothing moves, stored bytes are gone."""
        self._dead = True
        self.lock = threading.RLock()
