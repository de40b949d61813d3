"""Saver: the pair of saved-tensor hooks, wired to recognition, decision, transfer and residency.

Guarantees:

1. Exact: what `unpack` returns is bit for bit what was saved, or an error that names the tensor.
2. The graph owns the memory: records live in the handles that autograd's nodes hold and die with them. The saver
   itself holds records only weakly; finalisers only append to a deque that the next hook drains. The hooks keep the
   saver alive for as long as a graph has them.
3. One lock guards all state. It is reentrant, because a garbage collection inside it may run foreign finalisers that
   come back here; waiting for data happens outside of it, waiting for room releases it.
4. In a forked child the saver is dead: hooks pass through, finalisers do nothing.

Assumption: one thread does not edit in place what another thread's graph has saved (a data race in PyTorch as well).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, UntypedStorage, nn

from compact import Saved
from io_backends import Store, interrupts

from . import _backward, _policy, _streams
from ._compress.compressor import compressor
from ._config import OffloadConfig
from ._derivations import Derivations, again
from ._endurance import projected_bytes_per_day
from ._errors import edited_in_place
from ._finished import Finished
from ._fork import dies_in_child
from ._held import Held
from ._joint import joined
from ._known import Known
from ._look import Detached, goes_to_code, kept_for_code, look, look_for_code, look_in_child
from ._open import make_mover
from ._plain import shown_bytes, why_not_plain
from ._policy import KEEP, SEND, SHRINK, TOO_SMALL
from ._quiet import quiet
from ._record import DERIVED, IN_MEMORY, PENDING, POISONED, READING, Record, Remains
from ._residency import Residency
from ._rest import Rest
from ._stats import Counters, OffloadStats, TraceEvent
from ._steps import Steps
from ._torch import current_graph_task_id, dispatch_mode_count, function_mode_count, graph_is_kept, sequence_nr
from ._view import View, is_edited, span
from ._weights import MARK, WEIGHT, Chains, is_parameter, mark_weights

# A slice of a storage that is worth moving stays if it is this many times smaller than such a storage has to be.
_SLICES = 16

# What pack gives to autograd: a record and how to look at it, or a tensor that stays, and its version.
Packed = tuple[Record, View] | tuple[Tensor, int]


class Saver:
    """`pack` and `unpack` for `torch.autograd.graph.saved_tensors_hooks`, and what they share."""

    def __init__(
        self, config: OffloadConfig, model: Callable[[], nn.Module | None], open_store: Callable[[bool], Store]
    ) -> None:
        self.lock = threading.RLock()
        self.counters = Counters()
        self.steps = Steps(config.tier, self.counters, model)
        self.dead = False
        self._decisions = _policy.decisions(config.tier, compresses=config.compress is not None)
        self._min_tensor_bytes = int(config.min_tensor_bytes)
        self._min_slice_bytes = self._min_tensor_bytes // _SLICES
        self.model = model  # gives it, or None
        self._marked = False  # the model's weights, in this step
        self._chains = Chains()
        self.mover = make_mover(config, model(), self.lock, self.counters, open_store)
        self.held = Held(config, self.mover, self.counters, model)
        self.compressor = compressor(config, self.counters)
        self.derivations = Derivations(self.unpack) if self.compressor is not None else None
        self.finished = Finished(self.held, self.counters, self.compressor, self.derivations)
        self.rest = Rest.of(config, model, self.held.look_at_room)
        self.residency = Residency(self.mover, self.counters, self.finished.wanted)
        self._remains: deque[Remains] = deque()
        self._numbers = 0
        self._started_s = time.monotonic()
        dies_in_child(self)

    # -- pack ----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Packed:
        """Called by autograd with each tensor it saves."""
        if dispatch_mode_count() or function_mode_count():
            with quiet():
                return self._pack(tensor)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Packed:
        if self.dead:
            return tensor.detach(), tensor._version
        mover = self.mover
        with self.lock:
            on_cpu = tensor.is_cpu
            # Ahead of all that would launch, wait or look around.
            if not on_cpu and _streams.capturing(tensor):
                return self._keep(tensor, tensor.numel() * tensor.itemsize, "CUDA graph capture")
            steps = self.steps
            if (steps.backward_seen or not steps.open) and current_graph_task_id() == -1:
                if steps.backward_seen:
                    self.end_step()
                self.mark_weights()
                steps.begin()
            kind = type(tensor)
            base = tensor._base if kind is Tensor else None
            if kind is nn.Parameter or (base is not None and is_parameter(base)):
                packed = self._pass_weight(tensor)
            else:
                packed = self._pack_activation(tensor, base, on_cpu)
        if mover.ended:
            mover.catch_up()
        if interrupts.pending:
            interrupts.deliver()
        return packed

    def _pass_weight(self, tensor: Tensor) -> Packed:
        try:
            self.counters.weight_bytes += tensor.nbytes
        except RuntimeError:  # a sparse one has no such count
            self.counters.weight_bytes += tensor.numel() * tensor.itemsize
        # As it is, but for an operator's own output: one that ran in place on a weight, a buffer or a view of one.
        if tensor.is_leaf or self._chains.lead_to_parameter(tensor):
            return tensor, tensor._version
        return Detached((tensor.detach(), tensor._version))

    def _pack_activation(self, tensor: Tensor, base: Tensor | None, on_cpu: bool) -> Packed:
        if type(tensor) is not Tensor or not (on_cpu or tensor.is_cuda):
            return self._pack_odd(tensor)
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, functorch wrappers, a zero tensor once: plain by type
            return self._pack_odd(tensor)
        if getattr(storage, MARK, None) is WEIGHT:
            return self._pass_weight(tensor)
        if storage.nbytes() < self._min_tensor_bytes:
            return self._keep(tensor, tensor.nbytes, TOO_SMALL)
        if tensor.is_nested:
            return self._pack_odd(tensor)
        if self._remains or self.mover.unconfirmed or self.mover.ended:
            self.settle()
        if self._chains.lead_to_parameter(tensor):
            return self._pass_weight(tensor)
        packed = self._pack_stored(tensor, base, on_cpu, storage)
        # Last: it wakes a worker, which would take the interpreter from us at the next call of torch.
        if self.finished.pending.queue:
            self.finished.pass_on(sequence_nr())
        if self.compressor is not None and self.finished.waits:
            self.finished.settle(wait=False)
        return packed

    def _pack_stored(self, tensor: Tensor, base: Tensor | None, on_cpu: bool, storage: UntypedStorage) -> Packed:
        compressor, nbytes, storage_bytes = self.compressor, tensor.nbytes, storage.nbytes()
        decision, reason = self._decisions[not on_cpu, current_graph_task_id() != -1 and not graph_is_kept()]
        if decision is KEEP or not nbytes or self.mover.closed:
            return self._keep(tensor, nbytes, reason or ("closed" if nbytes else "empty"))
        view = View.of(tensor)
        begin, end = span(tensor, view)
        nbytes = min(nbytes, end - begin)
        root = base if type(base) is Tensor else tensor
        kind = compressor.kind(tensor) if compressor is not None else Saved.UNKNOWN
        known: Known | None = getattr(storage, MARK, None)
        if known is not None:
            record = known.find(root, begin, end, self._remains)
            if record is not None and (compressor is None or compressor.also(record, kind)):
                return self._pack_known(record, tensor, view, nbytes)
            record = joined(reversed(self.finished.pending.queue), sequence_nr(), storage, begin, end)
            if record is not None and (compressor is None or compressor.also(record, kind)):
                record.join(tensor)
                return self._pack_known(record, tensor, view, nbytes)
        if end - begin < self._min_slice_bytes and nbytes < storage_bytes:
            return self._keep(tensor, nbytes, TOO_SMALL)
        if tensor.is_quantized or tensor._is_zerotensor():
            return self._pack_odd(tensor)
        if decision is not SHRINK and compressor is None and self.steps.whole.keeps(sequence_nr(), nbytes):
            return self._keep(tensor, nbytes, _policy.WHOLE)
        if nbytes < storage_bytes:
            begin, end = _policy.range_to_store(begin, end, storage_bytes)
        record = Record(self._numbers, tensor, root, storage, begin, end, self._remains)
        self.counters.live_records += 1
        self._numbers += 1
        record.stream = _streams.producer_stream(tensor)
        self.residency.records[record.number] = record.ref
        if known is None:
            known = Known()
            setattr(storage, MARK, known)
        known.add(record)
        record.logical_bytes = nbytes
        record.stays = decision is SHRINK
        if compressor is not None:
            compressor.choose(record, kind)
        if self.derivations is not None:
            self.derivations.look_for(record)
        record.offloaded = decision is SEND
        if record.offloaded:
            self.counters.offloaded_bytes += nbytes
        else:
            self.counters.kept_by_reason[reason] += nbytes
        self.finished.add(sequence_nr(), record)
        return record, view

    def _pack_known(self, record: Record, tensor: Tensor, view: View, nbytes: int) -> Packed:
        self.counters.duplicate_bytes += nbytes
        record.saves += 1
        if record.stream is not None:
            _streams.also_used(tensor, record.stream)
        return record, view

    def _pack_odd(self, tensor: Tensor) -> Packed:
        """What is no plain tensor: subclasses, sparse, meta, ..."""
        if isinstance(tensor, nn.Parameter) and type(tensor.data) is Tensor:
            return self._pass_weight(tensor)
        return self._keep(tensor, shown_bytes(tensor), why_not_plain(tensor))

    def _keep(self, tensor: Tensor, nbytes: int, reason: str) -> Packed:
        self.counters.kept_by_reason[reason] += nbytes
        if tensor.is_leaf:
            return tensor, tensor._version
        # Detached: an operator's saved output, held by the node that made it, would be a cycle nobody collects.
        return Detached((tensor.detach(), tensor._version))

    # -- unpack --------------------------------------------------------------------------------------------------

    def unpack(self, packed: Packed) -> Tensor:
        """Called by autograd whenever it wants a saved tensor, any number of times.

        Raises:
            RuntimeError: PyTorch's own, for a tensor that was edited in place.
            TransferError, ClosedError: its bytes could not be brought back; they are gone with the engine, or a fork.
        """
        first: Any
        second: Any
        first, second = packed
        if type(first) is not Record:
            if not self.steps.backward_seen and current_graph_task_id() != -1:
                self.steps.backward_seen = True
            if first._version != second:
                raise edited_in_place(f"{first.type()} {list(first.shape)}", first._version, second)
            if (first.requires_grad or type(packed) is Detached) and goes_to_code(
                current_graph_task_id(), sys._getframe().f_back
            ):
                return kept_for_code(packed, shared=self.derivations is not None)
            return first  # type: ignore[no-any-return]  # the tensor _keep packed; a check would cost as much as the rest
        task = current_graph_task_id()
        to_code = goes_to_code(task, sys._getframe().f_back)
        if dispatch_mode_count() or function_mode_count():
            with quiet():
                return self._unpack(first, second, task, to_code)
        return self._unpack(first, second, task, to_code)

    def _unpack(self, record: Record, view: View, task: int, to_code: bool) -> Tensor:
        if self.dead:
            return look_in_child(record, view)
        if task != _backward.task:
            _backward.begins(task)
        mover, compressor = self.mover, self.compressor
        with self.lock:
            if self.derivations is not None and (peeked := self.derivations.peek(record, view)) is not None:
                return peeked
            if self._remains or mover.unconfirmed or mover.ended:
                self.settle()
            if compressor is not None and self.finished.waits:
                self.finished.settle(wait=True)
            if not record.asks:
                mover.pressure.moved(record.nbytes)
            if task != -1:
                self.steps.backward_seen = True
            if record.state is PENDING:
                self.finished.wanted(record)
            elif record.restored is not None and is_edited(record.restored):
                self.residency.hand_over(record)  # a hook of its node did, or a recomputation: it is read again
            derived = record.state is DERIVED
            again_asked = not derived and task != -1 and not self.residency.ask(record, task)
            if again_asked and not to_code and record.shows():
                self.residency.answered(record)
                return look(record, view)
            tensor = None if derived else self._look(record, view, task, to_code)
        if derived:
            return again(record, view, alone=to_code)
        while tensor is None:
            mover.await_read(record)
            with self.lock:
                tensor = self._look(record, view, task, to_code)
        if mover.ended:
            mover.catch_up()
        if interrupts.pending:
            interrupts.deliver()
        return tensor

    def _look(self, record: Record, view: View, task: int, to_code: bool) -> Tensor | None:
        """The tensor if the record is in memory; else its read is under way and None is returned."""
        mover, residency, alias = self.mover, self.residency, record.alias
        if record.state is READING:
            try:
                mover.arrive(record)
            except RuntimeError:  # TransferError, or no memory on the device
                residency.hand_over(record)
                raise
        elif record.state is POISONED or record.state in IN_MEMORY:
            assert alias is not None
            if record.state is POISONED or record.is_edited():
                raise edited_in_place(record.name(), *record.versions())
            if record.offloaded and not record.asks:
                self.counters.forwarded_bytes += record.logical_bytes
                if mover.trace is not None:
                    now_s = time.perf_counter()
                    mover.trace.append(TraceEvent("forwarded", now_s, now_s, record.nbytes, record.name()))
        window_bytes = mover.read_ahead_bytes(self.held.nbytes)
        if not record.resident_bytes and not record.held_bytes and not record.stays:
            residency.demand(record, window_bytes)
        if record.state is READING:
            residency.advance(task, record, window_bytes)
            return None
        residency.answered(record)
        if to_code:
            tensor, gone = look_for_code(record, view, task)
            if gone:
                residency.hand_over(record)
        else:
            tensor = look(record, view)
        residency.advance(task, record, window_bytes)  # last: waiting for room in it lets go of the lock
        return tensor

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock, for all but the hooks."""
        try:
            with self.lock:
                yield
        finally:
            self.mover.catch_up()

    # -- with the lock -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give back what dead records left, and see whether written ones were edited before their copy was finished."""
        self.mover.land()
        while self._remains:
            remains = self._remains.popleft()
            self.residency.bury(remains)
            self.held.nbytes -= remains.held_bytes
            if remains.write is not None:
                self.mover.discard(remains.write)
        if self.mover.unconfirmed:
            self.mover.confirm()

    def end_step(self) -> None:
        """A micro-batch is over."""
        if not self.steps.open:  # backward went on after its context had been left
            self.steps.backward_seen = False
            return
        self.settle()
        self.residency.end_walks()
        if self.compressor is not None and self.derivations is not None:
            self.compressor.end_step()
            self.derivations.end_step(self._numbers)
        self.held.end_step()
        self._chains.end_step()
        self._marked = False
        self.mover.trim()
        self.steps.end(self.mover.file_bytes())
        self.rest.end_step(self.counters, self.held.room_bytes)

    def enter(self) -> None:
        """The context is entered: between steps, weights may have been replaced."""
        if not self.steps.open:
            self._marked = False

    def mark_weights(self) -> None:
        """Once a step: learn the model's storages anew, as they may have been replaced."""
        if not self._marked and (model := self.model()) is not None:
            mark_weights(model)
        self._marked = True

    def stats(self) -> OffloadStats:
        """A snapshot of the counters."""
        self.settle()
        self.steps.close()
        since_s = time.monotonic() - self._started_s
        return self.counters.snapshot(
            file_bytes=self.mover.file_bytes(),
            last_step=self.steps.last,
            written_today_bytes=self.mover.allowance.written_today_bytes,
            projected_bytes_per_day=projected_bytes_per_day(self.counters.written_bytes, since_s),
        )

    def die(self) -> None:
        """In a forked child."""
        self.dead = True
        self.lock = threading.RLock()  # the old one may be held by a thread that does not exist here
