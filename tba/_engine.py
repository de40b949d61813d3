"""Offloader: the saved-tensor hooks, wired to recognition, decision, transfer and residency.

Guarantees:

1. Exact: what `_unpack` returns is bit for bit what was saved, or an error that names the tensor.
2. The graph owns the memory: records live in the handles that autograd's nodes hold and die with them. The engine
   itself holds records only weakly; finalisers only append to a deque that the next hook drains.
3. One lock guards all state. It is reentrant, because a garbage collection inside it may run foreign finalisers that
   come back here; waiting for data happens outside of it, waiting for room releases it.
4. A tensor is submitted for writing only after its operator's kernel has returned: pack runs before the kernel, which
   may still fill what was saved. The sequence number of autograd's nodes, per thread, tells.
5. In a forked child the engine is dead: hooks pass through, finalisers do nothing.

Assumption: one thread does not edit in place what another thread's graph has saved (a data race in PyTorch as well).
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from io_backends import HostStore, PosixStore, Store, StoreClosed
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import _hooks, _memory, _policy, _streams, _torch
from ._config import OffloadConfig
from ._errors import ClosedError, OffloadWarning, StalledError, TransferError
from ._policy import Decision
from ._record import IN_MEMORY, Record, RecordState, Remains, View, span
from ._residency import Residency
from ._stats import Counters, OffloadStats, TraceEvent, difference
from ._storage_path import storage_directory
from ._transfer import Mover
from ._weights import MARK, WEIGHT, leads_to_parameter, mark_weights

# How much more may be held between two looks at free memory: a look costs some tens of microseconds.
_LOOK_EVERY_BYTES = 32 << 20


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.depth: list[bool] = []  # per entry of the context: whether its hooks could be pushed
        # (sequence number at pack, record): saved by an operator that may still be running
        self.pending: deque[tuple[int, weakref.ref[Record]]] = deque()


class Offloader:
    """Moves what autograd saves out of memory and back. Made by `offload_context` and `attach`.

    A context manager that may be entered again and nested: inside, tensors saved for backward go to the tier. Leaving
    it only stops the hooks; graphs made inside stay valid until `close`.

    Args:
        model: recognises its parameters and buffers as weights; held weakly. May be None.
        config: the settings.
        store: where bytes go, instead of what the settings say (it is closed with the Offloader).
    """

    def __init__(
        self, model: nn.Module | None = None, config: OffloadConfig | None = None, *, store: Store | None = None
    ) -> None:
        self.config = config if config is not None else OffloadConfig()
        self._model = weakref.ref(model) if model is not None else None
        self._tier = self.config.tier
        self._min_tensor_bytes = int(self.config.min_tensor_bytes)
        self._lock = threading.RLock()
        self._counters = Counters()
        self._given_store = store
        if self._tier in ("nvme", "auto") and store is None:
            self._directory = storage_directory(self.config)  # a wrong path is an error now, not in the first step
        self._mover = Mover(self._lock, self._counters, partial(_open_store, weakref.ref(self)), self.config.io_timeout)
        self._residency = Residency(self._mover, self._counters)
        self._remains: deque[Remains] = deque()
        self._per_thread = _PerThread()
        self._numbers = 0
        self._held: deque[weakref.ref[Record]] = deque()  # tier auto: kept so far, oldest first
        self._held_bytes = 0
        self._budget_bytes = 0  # of what is held: see _set_caps
        self._look_at_bytes = 0  # tier auto: once this much is held, see again how much memory is free
        self._backward_seen = False
        self._step_open = False
        self._at_step_start = self._counters.snapshot(file_bytes=0, last_step=None)
        self._last_step: OffloadStats | None = None
        self._told = False
        self._dead = False
        self._untie = _nothing
        self._set_caps()
        _engines.add(self)

    # -- what a user calls ---------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._mover.closed:
            raise ClosedError("this Offloader was closed; offload_context(...) or attach(...) makes a new one")
        if not self._step_open:
            self._mark_weights()
        self._per_thread.depth.append(_hooks.push(self._pack, self._unpack))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        if kind is None and not self._told and not self._dead and not self._counters.saved_bytes:
            self._told = True
            self._tell_if_idle(self.stats())

    def leave(self) -> None:
        """`__exit__` without its first-step check: a forward that `attach` follows may well be an evaluation."""
        thread = self._per_thread
        if thread.depth.pop():
            _hooks.pop()
        if not self._dead:
            with self._lock:
                self._submit_ready(None)
                if not thread.depth:
                    self._end_step()

    def stats(self) -> OffloadStats:
        """A snapshot of what was moved since the start."""
        with self._lock:
            self._settle()
            return self._snapshot(self._last_step)

    def flush(self) -> None:
        """Wait until every queued write of this thread's graphs is done and its memory given back.

        Raises:
            StalledError: no transfer ended for `io_timeout` seconds.
        """
        with self._lock:
            self._submit_ready(None)
            if self._tier != "auto":
                self._send_held(0)
            if not self._mover.staging.wait_until_idle():
                raise StalledError(
                    f"flush: no write has ended for {self.config.io_timeout:g} s; the device under "
                    f"{getattr(self, '_directory', 'the given store')} has stalled"
                )
            self._settle()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Lift the hooks for a region on this thread, e.g. for `torch.func.grad`, which refuses any."""
        with _hooks.lifted(self._pack):
            yield

    @contextmanager
    def trace(self) -> Iterator[list[TraceEvent]]:
        """Collect an event for each write, read, wait and forwarded tensor of the region, in the order they ended."""
        events: list[TraceEvent] = []
        before, self._mover.trace = self._mover.trace, events
        try:
            yield events
        finally:
            self._mover.trace = before

    def close(self) -> None:
        """End threads, give back files and buffers. Idempotent.

        What is still in memory stays usable by its graphs; an unpack of what was stored raises ClosedError.
        """
        with self._lock:
            if self._mover.closed:
                return
            self._mover.closed = True
            self._settle()
            store, untie = self._mover.store or self._given_store, self._untie
            self._untie = _nothing
        untie()
        if store is not None:
            store.close()
        with self._lock:
            self._settle()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mover.closed

    @property
    def entered(self) -> bool:
        """Whether this thread is inside the context."""
        return bool(self._per_thread.depth)

    def tie_to(self, model: nn.Module) -> None:
        """Enter and leave with the model's own forward (`attach`). A second call changes nothing."""
        if self._untie is _nothing:
            weak = weakref.ref(self)  # the model's hooks must not keep a closed Offloader alive, nor this the model
            self._untie = _hooks.tie(model, lambda: _enter(weak), lambda: _leave(weak))

    # -- the hooks -----------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> tuple[Any, Any]:
        if _torch.dispatch_mode_count() or _torch.function_mode_count():
            with _quiet():
                return self._pack_here(tensor)
        return self._pack_here(tensor)

    def _pack_here(self, tensor: Tensor) -> tuple[Any, Any]:
        if self._dead:
            return tensor.detach(), tensor._version
        with self._lock:
            if self._remains or self._mover.unconfirmed:
                self._settle()
            in_backward = _torch.current_graph_task_id() != -1
            if not in_backward:
                if self._backward_seen:
                    self._end_step()
                    self._mark_weights()
                self._step_open = True
            pending = self._per_thread.pending
            if pending:
                self._submit_ready(_torch.sequence_nr())
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or not (tensor.is_cpu or tensor.is_cuda):
                return self._pack_odd(tensor)
            return self._pack_plain(tensor, in_backward)

    def _pack_plain(self, tensor: Tensor, in_backward: bool) -> tuple[Any, Any]:
        counters = self._counters
        nbytes = tensor.nbytes
        base = tensor._base
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # functorch wrappers, zero tensors: plain by type, no storage
            return self._keep(tensor, nbytes, "no storage")
        mark = getattr(storage, MARK, None)
        if mark is WEIGHT or isinstance(base, nn.Parameter) or leads_to_parameter(tensor.grad_fn):
            counters.saved_bytes += nbytes
            counters.weight_bytes += nbytes
            return tensor.detach(), tensor._version
        storage_bytes = storage.nbytes()
        decision, reason = _policy.decide(
            self._tier,
            storage_bytes,
            self._min_tensor_bytes,
            on_device=tensor.is_cuda,
            used_at_once=in_backward and not _torch.graph_is_kept(),
        )
        if decision is Decision.KEEP or not nbytes or self._mover.closed:
            return self._keep(tensor, nbytes, reason or ("closed" if nbytes else "empty"))
        begin, end = span(tensor)
        nbytes = min(nbytes, end - begin)
        root = base if type(base) is Tensor else tensor
        if mark is not None:
            for reference in mark:
                record = reference()
                if record is not None and record.remains is self._remains and record.covers(root, begin, end):
                    counters.saved_bytes += nbytes
                    counters.duplicate_bytes += nbytes
                    record.saves += 1
                    return record, View.of(tensor)
        if tensor.is_quantized or _streams.capturing(tensor):
            return self._keep(tensor, nbytes, "quantized" if tensor.is_quantized else "CUDA graph capture")
        begin, end = _policy.range_to_store(begin, end, storage_bytes)
        record = self._new_record(tensor, root, begin, end)
        others = [reference for reference in mark or () if reference() is not None]
        setattr(storage, MARK, [*others, record.ref])
        record.logical_bytes = nbytes
        counters.saved_bytes += nbytes
        if decision is Decision.SEND:
            record.offloaded = True
            counters.offloaded_bytes += nbytes
        else:
            counters.keep(nbytes, reason)
        self._per_thread.pending.append((_torch.sequence_nr(), record.ref))
        return record, View.of(tensor)

    def _pack_odd(self, tensor: Tensor) -> tuple[Any, Any]:
        """What is no plain strided tensor on a known device: parameters, subclasses, sparse, meta, ..."""
        if isinstance(tensor, nn.Parameter) and type(tensor.data) is Tensor:
            nbytes = tensor.nbytes
            self._counters.saved_bytes += nbytes
            self._counters.weight_bytes += nbytes
            return tensor.detach(), tensor._version
        reason = type(tensor).__name__
        if type(tensor) is Tensor:
            reason = str(tensor.layout) if tensor.layout is not torch.strided else tensor.device.type
        try:
            nbytes = tensor.numel() * tensor.itemsize
        except RuntimeError:  # an opaque tensor may have no count of elements
            nbytes = 0
        return self._keep(tensor, nbytes, reason)

    def _keep(self, tensor: Tensor, nbytes: int, reason: str) -> tuple[Any, Any]:
        self._counters.saved_bytes += nbytes
        self._counters.keep(nbytes, reason)
        # Detached: an operator's saved output, held by the node that made it, would be a cycle nobody collects.
        return tensor.detach(), tensor._version

    def _unpack(self, packed: tuple[Any, Any]) -> Tensor:
        first, second = packed
        if type(first) is not Record:
            if not self._backward_seen and _torch.current_graph_task_id() != -1:
                self._backward_seen = True
            if first._version != second:
                raise _edited_in_place(f"{first.type()} {list(first.shape)}", first._version, second)
            return first  # type: ignore[no-any-return]  # a tensor: what _keep packed
        if _torch.dispatch_mode_count() or _torch.function_mode_count():
            with _quiet():
                return self._unpack_record(first, second)
        return self._unpack_record(first, second)

    def _unpack_record(self, record: Record, view: View) -> Tensor:
        if self._dead:
            return self._unpack_in_child(record, view)
        task = _torch.current_graph_task_id()
        with self._lock:
            self._settle()
            if task != -1:
                self._backward_seen = True
            self._residency.ask(record, task)
            tensor = self._look(record, view, task)
        while tensor is None:
            self._mover.await_read(record)
            with self._lock:
                tensor = self._look(record, view, task)
        return tensor

    def _look(self, record: Record, view: View, task: int) -> Tensor | None:
        """The tensor if the record is in memory; else its read is under way and None is returned."""
        mover, residency = self._mover, self._residency
        if record.state is RecordState.POISONED or (
            record.state in IN_MEMORY and record.alias is not None and record.alias._version != record.version
        ):
            assert record.alias is not None
            raise _edited_in_place(record.name(), record.alias._version, record.version)
        try:
            mover.arrive(record)
        except TransferError:
            residency.hand_over(record)
            raise
        if record.state in IN_MEMORY and not record.asks and record.offloaded:
            self._forwarded(record)
        window_bytes = mover.window_bytes - (self._held_bytes if self._tier != "auto" else 0)
        residency.demand(record, window_bytes)
        residency.advance(task, record, window_bytes)
        if record.state is RecordState.READING:
            return None
        compiled = task != -1 and type(_torch.current_node()).__name__ == "CompiledFunctionBackward"
        if record.state in IN_MEMORY:
            assert record.alias is not None
            storage, begin = record.alias.untyped_storage(), 0
        else:
            assert record.restored is not None
            storage, begin = record.restored, record.begin
        record.asks += 1
        tensor = view.over(storage, begin)
        _streams.use(tensor, record.ready)
        if compiled:  # compiled code may overwrite what it is given
            if record.state in IN_MEMORY or record.saves > 1:  # and others look at this memory too
                tensor = view.over(storage.clone(), begin)
            residency.hand_over(record)
        return tensor

    # -- with the lock -------------------------------------------------------------------------------------------

    def _new_record(self, tensor: Tensor, root: Tensor, begin: int, end: int) -> Record:
        record = Record(self._numbers, tensor, root, begin, end, self._remains)
        record.stream = _streams.producer_stream(tensor)
        self._residency.records[self._numbers] = record.ref
        self._numbers += 1
        self._counters.live_records += 1
        return record

    def _submit_ready(self, sequence_nr: int | None) -> None:
        """Submit what this thread's finished operators saved (None: no operator of this thread runs)."""
        pending = self._per_thread.pending
        while pending and (sequence_nr is None or pending[0][0] < sequence_nr):
            record = pending.popleft()[1]()
            if record is None or record.state is not RecordState.PENDING:
                continue
            record.state = RecordState.HELD
            record.held_bytes = record.nbytes
            self._held_bytes += record.nbytes
            self._held.append(record.ref)
        if self._tier == "auto" and self._held_bytes > self._look_at_bytes:
            self._look_at_memory()
        if self._held_bytes > self._budget_bytes:
            self._send_held(self._budget_bytes)

    def _send_held(self, budget_bytes: int) -> None:
        """Send the oldest held, which backward needs last, until the rest fits the budget."""
        while self._held and self._held_bytes > budget_bytes:
            record = self._held.popleft()()
            if record is None or not record.held_bytes:
                continue
            self._held_bytes -= record.held_bytes
            record.held_bytes = 0
            if not record.offloaded:
                record.offloaded = True
                self._counters.kept_to_offloaded(record.logical_bytes, _policy.FITS)
            if self._mover.closed or not self._mover.send(record):
                record.offloaded = False
                self._counters.kept_to_offloaded(-record.logical_bytes, "write failed")

    def _look_at_memory(self) -> None:
        self._look_at_bytes = self._held_bytes + _LOOK_EVERY_BYTES
        if self.config.memory_budget is not None:
            self._budget_bytes = int(self.config.memory_budget)
            return
        model = self._model() if self._model is not None else None
        coming = sum(p.nbytes for p in model.parameters() if p.requires_grad and p.grad is None) if model else 0
        total, free = _memory.total_bytes(), _memory.free_bytes()
        reserve = _policy.reserve_bytes(total, coming, self._mover.staging_cap_bytes + self._mover.window_bytes)
        self._budget_bytes = _policy.hold_budget_bytes(self._held_bytes, free, reserve)

    def _forwarded(self, record: Record) -> None:
        self._counters.forwarded_bytes += record.logical_bytes
        if self._mover.trace is not None:
            now_s = time.perf_counter()
            self._mover.trace.append(TraceEvent("forwarded", now_s, now_s, record.nbytes, record.name()))

    def _settle(self) -> None:
        """Give back what dead records left, and see whether written ones were edited before their copy was finished."""
        while self._remains:
            remains = self._remains.popleft()
            self._residency.bury(remains)
            self._held_bytes -= remains.held_bytes
            if remains.ticket is not None:
                self._mover.discard(remains.ticket)
        self._mover.confirm()

    def _end_step(self) -> None:
        self._backward_seen = False
        if not self._step_open:
            return
        self._step_open = False
        self._settle()
        self._residency.end_walks()
        self._mover.trim()
        self._counters.steps += 1
        now = self._snapshot(None)
        self._last_step, self._at_step_start = difference(now, self._at_step_start), now
        self._look_at_bytes = 0
        self._held = deque(reference for reference in self._held if reference() is not None)
        if not self._told:
            self._told = True
            self._tell_if_idle(self._last_step)

    def _tell_if_idle(self, step: OffloadStats) -> None:
        if self._tier in ("keep", "auto") or step.offloaded_bytes or step.errors:
            return
        if not step.saved_bytes:
            why = "autograd saved nothing (torch.no_grad, or no tensor that requires a gradient)"
        else:
            kept = ", ".join(f"{reason}: {nbytes:,} bytes" for reason, nbytes in step.kept_by_reason.items())
            why = f"of {step.saved_bytes:,} bytes saved, {step.weight_bytes:,} are weights and kept are {kept or 'none'}"
        warnings.warn(f"tier={self._tier!r} moved nothing in its first step: {why}", OffloadWarning, stacklevel=4)

    def _snapshot(self, last_step: OffloadStats | None) -> OffloadStats:
        store = self._mover.store
        file_bytes = store.allocated_bytes() if store is not None and not self._mover.closed else 0
        return self._counters.snapshot(file_bytes=file_bytes, last_step=last_step)

    def _mark_weights(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None:
            mark_weights(model)

    def _set_caps(self) -> None:
        window_bytes = _policy.default_window_bytes(_memory.total_bytes())
        config = self.config
        self._mover.staging_cap_bytes = int(config.staging_bytes if config.staging_bytes is not None else window_bytes)
        self._mover.window_bytes = int(config.prefetch_bytes if config.prefetch_bytes is not None else window_bytes)
        if self._tier != "auto":
            # What was saved last is wanted first, so it is held back: within the room that read-ahead will have then.
            self._budget_bytes = self._mover.window_bytes

    # -- fork ----------------------------------------------------------------------------------------------------

    def _die(self) -> None:
        self._dead = True
        self._lock = threading.RLock()  # the old one may be held by a thread that does not exist in the child

    def _unpack_in_child(self, record: Record, view: View) -> Tensor:
        if record.state in IN_MEMORY and record.alias is not None:
            return view.over(record.alias.untyped_storage(), 0)
        if record.state is RecordState.RESTORED and record.restored is not None:
            return view.over(record.restored, record.begin)
        raise ClosedError(
            f"{record.name()} was offloaded by the parent process; a forked child has no access to its storage. "
            "Run backward in the process that ran forward"
        )


def _open_store(weak: weakref.ref[Offloader]) -> Store:
    """Called by the mover, which must not keep its engine alive."""
    engine = weak()
    if engine is None:
        raise StoreClosed("the Offloader is gone")
    if engine._given_store is not None:
        store = engine._given_store
    elif engine._tier == "cpu":
        store = HostStore()
    else:
        store = PosixStore(engine._directory, threads=engine.config.io_threads)
    weakref.finalize(engine, store.abandon).atexit = False
    return store


def _edited_in_place(name: str, version: int, expected: int) -> RuntimeError:
    # PyTorch's own words, so that what users know and search for still applies.
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name}] is at version {version}; expected version {expected} instead. Hint: enable anomaly detection to "
        "find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True)."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Dispatch and function modes of the user (FLOP counters, selective checkpointing, default devices) see nothing."""
    with ExitStack() as stack:
        stack.enter_context(_torch.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        yield


def _enter(weak: weakref.ref[Offloader]) -> None:
    engine = weak()
    if engine is not None and not engine.closed:
        engine.__enter__()


def _leave(weak: weakref.ref[Offloader]) -> None:
    engine = weak()
    if engine is not None and engine.entered:
        engine.leave()


def _nothing() -> None:
    """Nothing to untie: not attached to a model."""


_engines: weakref.WeakSet[Offloader] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._die()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
