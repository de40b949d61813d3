"""Packing: what becomes of a tensor that autograd saves: a weight, one that stays, or a record.

Wants the engine's lock held.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn

from compact import Saved
from io_backends import interrupts

from .._config import OffloadConfig
from .._device import streams
from .._device.kinds import is_streamed
from .._plan import policy
from .._plan.policy import KEEP, SEND, SHRINK, TOO_SMALL
from .._record.joint import joined
from .._record.known import Known
from .._record.plain import Shell, held_bytes, opened, shown_bytes, why_not_plain
from .._record.record import Record, Remains
from .._record.user_code import Detached
from .._record.view import View, span
from .._stats import Counters
from .._torch.private import current_graph_task_id, graph_is_kept, sequence_nr
from .._torch.weights import MARK, WEIGHT, Chains, is_parameter
from .._torch.whole import Whole
from .._transfer.mover import Mover
from .auto.planner import Planner
from .pending import Pending
from .read_ahead import ReadAhead

# A slice of a storage that is worth moving stays if it is this many times smaller than such a storage has to be.
_SLICES = 16
EMPTIED = "storage emptied before it was saved"

# What pack gives to autograd: a record and how to look at it; a tensor that stays, and its version; or a wrapper
# subclass without its inner tensors, and those packed (mypy knows no recursive alias within a tuple).
Packed = tuple[Record, View] | tuple[Tensor, int] | tuple[Shell, tuple[Any, ...]]


class Within(NamedTuple):
    """What is known of the wrapper subclass that an inner tensor belongs to: its base if it is a view, else itself.

    Its version counter, and the class of what was saved, if that is the inner tensor's too.
    """

    root: Tensor
    counter: Tensor
    kind: Saved


class Packing:
    """Recognises weights, duplicates and tensors that are not worth moving, and makes records of all others.

    Attributes:
        chains: what is known of nodes that lead from a weight to a cast or view of it.
        whole: compiled graphs that are worth no moving.
        remains: where records append themselves when they die.
        numbers: records made so far.
        step_bytes: saved in this step that is worth moving, without what was saved already.
    """

    def __init__(
        self,
        config: OffloadConfig,
        counters: Counters,
        mover: Mover,
        pending: Pending,
        read_ahead: ReadAhead,
        settle: Callable[[], None],
        planner: Planner | None,
    ) -> None:
        self.chains = Chains()
        self.whole = Whole(config.tier)
        self.remains: deque[Remains] = deque()
        self._died = self.remains.append  # one for all records: each has a reference to it
        self.numbers = 0
        self.step_bytes = 0
        self._counters = counters
        self._mover = mover
        self._landing = mover.landing
        self._pending = pending
        self._read_ahead = read_ahead
        self._compressor = pending.compressor
        # What a lossy preset makes must not depend on timing.
        self._joins_alike = self._compressor is None or not self._compressor.lossy
        self._derivations = pending.derivations
        self._settle = settle
        self._planner = planner
        self._decisions = policy.decisions(config.tier, compresses=config.compress is not None)
        self._min_slice_bytes, self._min_tensor_bytes = sizes(config)

    def end_step(self, *, moves: bool) -> None:
        """Forget the step that has ended; `moves`: whether any of what it saved moves."""
        self.whole.end_step(self.step_bytes, moves=moves)
        self.chains.end_step()
        self.step_bytes = 0

    def weight(self, tensor: Tensor) -> Packed:
        """Pass a weight as it is."""
        self._counters.weight_bytes += held_bytes(tensor)
        # As it is, but for an operator's own output: one that ran in place on a weight, a buffer or a view of one.
        if tensor.is_leaf or self.chains.lead_to_parameter(tensor):
            return tensor, tensor._version
        return Detached((tensor.detach(), tensor._version))

    def activation(self, tensor: Tensor, base: Tensor | None, on_cpu: bool, within: Within | None = None) -> Packed:
        """Pack a tensor that is no parameter, though it may be a cast or view of one; `base` is that of a view."""
        if type(tensor) is not Tensor or not (on_cpu or is_streamed(tensor)):
            return self._odd(tensor, within)
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError) as error:  # sparse, functorch wrappers, a zero tensor once
            interrupts.pass_on_from_call(error)
            return self._odd(tensor, within)  # plain by type
        if getattr(storage, MARK, None) is WEIGHT:
            return self.weight(tensor)
        if storage.nbytes() < self._min_tensor_bytes:
            return self.keep(tensor, tensor.nbytes, TOO_SMALL)
        if tensor.is_nested:
            return self._odd(tensor, within)
        if self.remains or self._landing.unconfirmed or self._mover.ended or self._mover.copies.count:
            self._settle()
        if self.chains.lead_to_parameter(tensor):
            return self.weight(tensor)
        packed = self._stored(tensor, base, on_cpu, storage, within)
        # Last: it wakes a worker, which would take the interpreter from us at the next call of torch.
        if self._pending.local.queue:
            self._pending.pass_on(sequence_nr())
        if self._compressor is not None and self._pending.waits:
            self._pending.settle(wait=False)
        return packed

    def _stored(
        self, tensor: Tensor, base: Tensor | None, on_cpu: bool, storage: UntypedStorage, within: Within | None
    ) -> Packed:
        compressor, nbytes, storage_bytes = self._compressor, tensor.nbytes, storage.nbytes()
        decision, reason = self._decisions[not on_cpu, current_graph_task_id() != -1 and not graph_is_kept()]
        if decision is KEEP or not nbytes or self._mover.closed:
            return self.keep(tensor, nbytes, reason or ("closed" if nbytes else "empty"))
        view = View.of(tensor)
        begin, end = span(tensor, view)
        if end > storage_bytes:  # whoever emptied it fills it again, with whatever bytes
            return self.keep(tensor, nbytes, EMPTIED)
        nbytes = min(nbytes, end - begin)
        root = base if type(base) is Tensor else tensor
        kind = Saved.UNKNOWN if compressor is None else compressor.kind(tensor) if within is None else within.kind
        if compressor is not None and compressor.lossy and kind is Saved.UNKNOWN:
            self.whole.tell_exact(compressor.name)
        known: Known | None = getattr(storage, MARK, None)
        if known is not None:
            record = known.find(root if within is None else within.root, begin, end, self.remains)
            if record is not None and (compressor is None or compressor.also(record, kind)):
                return self._known(record, tensor, view, nbytes)
            record = joined(reversed(self._pending.local.queue), sequence_nr(), storage, begin, end)
            together = record is not None
            if record is None and self._joins_alike and end - begin == tensor.nbytes:
                record = known.find_alike(begin, end, self.remains, pending=self._planner is not None)
                self.numbers += record is not None  # those that follow do not depend on whether it was found in time
            if record is not None and (compressor is None or compressor.also(record, kind)):
                record.join(tensor, together=together)
                if within is not None:
                    record.watch(within.counter)
                return self._known(record, tensor, view, nbytes)
        if end - begin < self._min_slice_bytes and nbytes < storage_bytes:
            return self.keep(tensor, nbytes, TOO_SMALL)
        if tensor.is_quantized or tensor._is_zerotensor():
            return self._odd(tensor, within)
        self.step_bytes += nbytes
        if decision is not SHRINK and self.whole.keeps(sequence_nr(), nbytes):
            return self.keep(tensor, nbytes, policy.WHOLE)
        if nbytes < storage_bytes:
            begin, end = policy.range_to_store(begin, end, storage_bytes)
        record = Record(
            self.numbers,
            tensor,
            root,
            storage,
            begin,
            end,
            self.remains,
            died=self._died,
            stream=streams.producer_stream(tensor),
            logical_bytes=nbytes,
            offloaded=decision is SEND,
            stays=decision is SHRINK,
        )
        self.numbers += 1
        if self._mover.recorder.trace is not None:
            now_s = time.perf_counter()
            self._mover.recorder.note("saved", now_s, now_s, record.nbytes, record.name())
        self._read_ahead.records[record.number] = record.ref
        if known is None:
            known = Known()
            setattr(storage, MARK, known)
        if within is not None:
            record.belong(within.root, within.counter)
        known.add(record)
        if self._planner is not None and self._planner.saved(record):
            record.go()
        if compressor is not None:
            compressor.choose(record, kind)
        if self._derivations is not None and within is None:
            self._derivations.look_for(record)
        if record.offloaded:
            self._counters.offloaded_bytes += nbytes
        else:
            self._counters.kept_by_reason[reason] += nbytes
        self._pending.add(sequence_nr(), record)
        return record, view

    def _known(self, record: Record, tensor: Tensor, view: View, nbytes: int) -> Packed:
        self._counters.duplicate_bytes += nbytes
        record.add_saver()
        if self._planner is not None:
            self._planner.joined(record)
        if record.stream is not None:
            streams.also_used(tensor, record.stream)
        return record, view

    def _odd(self, tensor: Tensor, within: Within | None) -> Packed:
        """Pack a tensor that is not plain: a subclass, sparse, meta, ..."""
        if isinstance(tensor, nn.Parameter) and type(tensor.data) is Tensor:
            return self.weight(tensor)
        if type(tensor) is not Tensor and (packed := self._wrapper(tensor, within)) is not None:
            return packed
        return self.keep(tensor, shown_bytes(tensor), why_not_plain(tensor))

    def _wrapper(self, tensor: Tensor, outer: Within | None) -> Packed | None:
        """Pack a wrapper subclass, perhaps within an `outer` one. None for a subclass that cannot be taken apart."""
        base = tensor._base
        if is_parameter(tensor) or (base is not None and is_parameter(base)) or self.chains.lead_to_parameter(tensor):
            return self.weight(tensor)
        apart = opened(tensor)
        if apart is None:
            return None
        shell, inner = apart
        compressor = self._compressor
        kind = compressor.kind(tensor) if compressor is not None else Saved.UNKNOWN
        within = outer or Within(tensor if base is None else base, shell.counter, kind)
        parts = tuple(self.activation(each, each._base, each.is_cpu, within) for each in inner)
        moved = [type(part[0]) in (Record, Shell) for part in parts]
        if not any(moved):
            return as_it_is(tensor)
        shell.bound = not all(moved)
        return shell, parts

    def keep(self, tensor: Tensor, nbytes: int, reason: str) -> Packed:
        """Let a tensor stay in memory, for `reason`."""
        self._counters.kept_by_reason[reason] += nbytes
        return as_it_is(tensor)


def sizes(config: OffloadConfig) -> tuple[int, int]:
    """Return the bytes of the smallest slice that may have a record, and of the smallest storage."""
    return int(config.min_tensor_bytes) // _SLICES, int(config.min_tensor_bytes)


def as_it_is(tensor: Tensor) -> Packed:
    """Pack a tensor that stays."""
    if tensor.is_leaf:
        return tensor, tensor._version
    # Detached: an operator's saved output, held by the node that made it, would be a cycle nobody collects.
    return Detached((tensor.detach(), tensor._version))
