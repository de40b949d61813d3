"""Packing: what becomes of a tensor that autograd saves: a weight, one that stays, or a record.

Guarantee: what stays is the tensor that autograd saves, or an alias that shares its version counter: an edit in place
is found as it always is.

Wants the engine's lock held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from compact import Saved

from .._auto.execution import Execution
from .._compress.compressor import Compressor
from .._config import OffloadConfig
from .._device import streams
from .._plan import policy
from .._plan.policy import KEEP, SEND, SHRINK, TOO_SMALL
from .._record.joint import joined
from .._record.known import Known
from .._record.plain import Shell, held_bytes, opened, shown_bytes, why_not_plain
from .._record.record import PENDING, Record
from .._record.sighting import ODD, SMALL, WEIGHT, Chains, Sighting, Sizes, Stays, recognise
from .._record.user_code import Detached
from .._record.view import View, span
from .._stats import Counters
from .._torch.private import (
    DisableTorchFunction,
    current_graph_task_id,
    gives_lengths,
    graph_is_kept,
    in_graph_pool,
    only_inner,
    sequence_nr,
)
from .._torch.weights import mark_weights
from .._torch.whole import Whole
from .._transfer.mover import Mover
from .pending import Pending
from .read_ahead import ReadAhead
from .step import COUNTING, DEPARTS, FOLLOWING, FOLLOWS, FULL, LIGHT, RECORDING, Step
from .write_behind import WriteBehind

_UNKNOWN = Saved.UNKNOWN  # by a name of its own, as the states of a record
EMPTIED = "storage emptied before it was saved"
OFFSETS = "offsets of jagged tensors"
POOL = "memory of CUDA graphs"

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
    """Lets weights and what is not worth moving stay, finds records of what was saved before, and makes all others.

    Attributes:
        numbers: records made so far.
        worth_bytes: saved so far that are worth moving, without what was saved already.
    """

    def __init__(
        self,
        *,
        config: OffloadConfig,
        model: Callable[[], nn.Module | None],
        counters: Counters,
        mover: Mover,
        pending: Pending,
        read_ahead: ReadAhead,
        write_behind: WriteBehind,
        execution: Execution | None,
    ) -> None:
        self.numbers = 0
        self.worth_bytes = 0
        self._chains = Chains()
        self._whole = Whole(config.tier)
        self._remains = read_ahead.remains
        self._died = self._remains.append  # one for all records: each has a reference to it
        self._moves = config.tier in ("nvme", "cpu")  # whether memory fits or not
        self._counters = counters
        self._mover = mover
        self._landing = mover.landing
        self._pending = pending
        self._read_ahead = read_ahead
        self._compressor = pending.compressor
        # What a lossy preset makes must not depend on timing.
        self._joins_alike = self._compressor is None or not self._compressor.lossy
        self._derivations = pending.derivations
        self._derives_all = self._derivations is not None and config.compress is not None
        self._follows = False  # what is packed is given again by others, in a step that follows another
        self._write_behind = write_behind
        self._model = model
        self._execution = execution
        # With a codec what stays has records too, in a planned step as in a watched one: hooks are no cost of moving.
        self._times = execution is not None and self._compressor is None
        self._decisions = policy.decisions(config.tier, compresses=config.compress is not None)
        self._sizes = Sizes.of(int(config.min_tensor_bytes))

    # -- what a step does ------------------------------------------------------------------------------------------

    def count(self, step: Step) -> None:
        """Have a step only count from here on."""
        if step.mode is FOLLOWING:
            self.turn(step)
        step.count()

    def follow(self, step: Step, *, may: bool) -> None:
        """Have a step follow another of its kind, if it `may` and there is one; else write it down for them.

        A further forward of the step goes on with what the first has begun, if that is of its kind.
        """
        execution = self._execution
        assert execution is not None
        kind = execution.kind
        if not (execution.repeats and may):
            self.turn(step, departs=False)
            return
        light = step.mode in LIGHT
        if not (
            light or kind.course is None or self._write_behind.ledger.has_room(sum(e.kept_bytes for e in kind.course))
        ):
            return
        if step.kind is None and step.mode is FULL:
            step.follow(kind, kind.course)
        elif step.kind is not kind:
            self.turn(step)
        if step.mode is FOLLOWING:
            execution.follow()

    def turn(self, step: Step, *, departs: bool = True) -> None:
        """Have the full hooks take over for the rest of a step; if it `departs`, it is another than was planned."""
        before, self._follows = step.mode, False
        step.turn()
        if before is COUNTING:
            self.mark_weights()  # the full hooks are to know them
        elif before is FOLLOWING and self._execution is not None:
            self._execution.depart(departs)

    def mark_weights(self) -> None:
        """Learn the model's storages anew, once a step, as they may have been replaced."""
        if (model := self._model()) is not None:
            mark_weights(model)

    def pass_on(self, step: Step, number: int | None) -> None:
        """Count what finished operators have saved (None: none of them runs)."""
        due, finished = step.due, []
        while due and (number is None or due[0][0] < number):
            finished.append(due.popleft())
        if finished:
            self._write_behind.let_pass(finished)

    def make_way(self, step: Step) -> None:
        """Let go, in forward, of what was read back to compare what a recipe gives (`Pending`)."""
        if step.task == -1:
            self._read_ahead.make_way()

    def leave_to_graphs(self) -> None:
        """Know that saved tensors move within compiled graphs."""
        self._whole.leave_to_graphs()

    def end_step(self, worth_bytes: int, *, moved: bool) -> None:
        """End a step that saved `worth_bytes` worth moving; whether any of them have `moved`."""
        self._whole.end_step(worth_bytes, moves=moved or self._moves)
        self._chains.end_step()

    # -- tensors ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor, step: Step) -> Packed:
        """Pack a tensor of a step, as its mode says."""
        seen = recognise(tensor, self._sizes, self._chains)
        if seen is WEIGHT:  # first, and by no detour: there are as many of them as of all others
            return self._weight(tensor)
        if seen is SMALL:
            return self.keep(tensor, tensor.nbytes, TOO_SMALL)
        packed = self._pack(tensor, seen, step)
        if step.task == -1 and (step.mode is RECORDING or (step.countable and step.mode is FULL)):
            if seen is ODD:
                tensor, seen = self._within(tensor)
            step.note(tensor, seen, _first(packed))
        return packed

    def pass_light(self, tensor: Tensor, step: Step) -> Packed | None:
        """Pack a tensor in a step that counts or follows; None if `pack` is to do it. Few calls: most tensors stay."""
        self._follows = False
        if step.task != -1:  # in backward
            if step.mode is COUNTING:
                if not graph_is_kept():
                    return as_it_is(tensor)
                self.turn(step)  # another graph grows, of which nothing is known
            return None
        number = 0
        if step.course is not None:
            number = sequence_nr()
            next(step.saved)
        if step.due and step.due[0][0] < number:
            self.pass_on(step, number)
            if step.over:  # waiting for room lets go of the lock: another thread has ended it
                return None
        seen = recognise(tensor, self._sizes, self._chains, casts=False)
        if seen is WEIGHT or seen is SMALL:
            return as_it_is(tensor)
        held = tensor
        if seen is ODD:
            held, seen = self._within(tensor)
        kept_bytes = step.kept_bytes(held, seen)
        if kept_bytes < 0:
            if kept_bytes == DEPARTS:
                self.turn(step)
                return None
            self._follows = kept_bytes == FOLLOWS
            return self._pack(tensor, seen, step) if held is tensor else None
        packed = as_it_is(tensor)
        if step.course is None:
            if kept_bytes:
                self._write_behind.count(packed, kept_bytes)
            return packed
        if kept_bytes:
            step.due.append((number, packed, kept_bytes))
            self._write_behind.ledger.await_operator(kept_bytes)
        if self._pending.local.queue:
            self._pending.pass_on(number)
            self.make_way(step)
        return packed

    def _pack(self, tensor: Tensor, seen: Stays | Sighting, step: Step) -> Packed:
        """Pack a tensor that may have a record, and count the work if plans are made from it."""
        if self._times and tensor.is_cpu:
            cost, numbers = self._mover.cost, self.numbers
            begun = cost.begin_work()
            packed = self._full(tensor, seen, None)
            cost.work(begun, self.numbers - numbers)
        else:
            packed = self._full(tensor, seen, None)
        self.make_way(step)
        return packed

    def _within(self, tensor: Tensor) -> tuple[Tensor, Stays | Sighting]:
        """Return the tensor that a step looks at for an odd one, and what it is: of a DTensor, its local tensor."""
        with DisableTorchFunction():
            inner = only_inner(tensor)
        return (tensor, ODD) if inner is None else (inner, recognise(inner, self._sizes, self._chains, casts=False))

    def _full(self, tensor: Tensor, seen: Stays | Sighting, within: Within | None) -> Packed:
        """Pack a tensor by what it is: find the record that has its bytes already, or make one, if it may have one."""
        if seen is WEIGHT:
            return self._weight(tensor)
        if type(seen) is not Sighting:
            return self._odd(tensor, within) if seen is ODD else self.keep(tensor, tensor.nbytes, TOO_SMALL)
        if self._remains or self._landing.unconfirmed or self._mover.ended or self._mover.copies.count:
            self._read_ahead.settle()
        if seen.cast:
            return self._weight(tensor)
        packed = self._plain(tensor, seen, within)
        # Last: it wakes a worker, which would take the interpreter from us at the next call of torch.
        if (queue := self._pending.local.queue) and queue[0][0] < (number := sequence_nr()):
            self._pending.pass_on(number)
        if self._pending.waits:
            self._pending.settle(wait=False)
        return packed

    def _weight(self, tensor: Tensor) -> Packed:
        """Pass a weight as it is."""
        self._counters.weight_bytes += held_bytes(tensor)
        # As it is, but for an operator's own output: one that ran in place on a weight, a buffer or a view of one.
        if tensor.is_leaf or self._chains.lead_to_parameter(tensor):
            return tensor, tensor._version
        return Detached((tensor.detach(), tensor._version))

    def _plain(self, tensor: Tensor, seen: Sighting, within: Within | None) -> Packed:
        """Pack a tensor that may move, unless this run or its own form keeps it."""
        decision, reason = self._decisions[not tensor.is_cpu, current_graph_task_id() != -1 and not graph_is_kept()]
        if decision is KEEP or not seen.nbytes or self._mover.closed:
            return self.keep(tensor, seen.nbytes, reason or ("closed" if seen.nbytes else "empty"))
        view = View.of(tensor)
        begin, end = span(tensor, view)
        if end > seen.storage_bytes:  # whoever emptied it fills it again, with whatever bytes
            return self.keep(tensor, seen.nbytes, EMPTIED)
        nbytes, kind = min(seen.nbytes, end - begin), _UNKNOWN
        if self._compressor is not None:
            kind = self._kind(tensor, within, self._compressor)
        if seen.mark is not None and (record := self._find(tensor, seen, begin, end, kind, within)) is not None:
            self._join(record, tensor, nbytes, apart=within is None)
            return record, view
        place = (begin, end) if nbytes >= seen.storage_bytes else seen.range_to_move(begin, end, self._sizes)
        if place is None:
            return self.keep(tensor, nbytes, TOO_SMALL)
        if tensor.is_quantized or tensor._is_zerotensor():
            return self._odd(tensor, within)
        # Offsets are integers; the lookup is several calls of Python.
        if len(view.size) == 1 and not view.dtype.is_floating_point and gives_lengths(tensor):
            return self.keep(tensor, nbytes, OFFSETS)
        if not tensor.is_cpu and in_graph_pool(tensor):
            self._whole.tell_pool()
            return self.keep(tensor, nbytes, POOL)
        self.worth_bytes += nbytes
        if decision is not SHRINK and self._whole.keeps(sequence_nr(), nbytes):
            return self.keep(tensor, nbytes, policy.WHOLE)
        record = self._make(tensor, seen, place, nbytes, decision, within)
        self._enlist(record, kind, reason, apart=within is None)
        return record, view

    def _kind(self, tensor: Tensor, within: Within | None, compressor: Compressor) -> Saved:
        """Return the class that a codec is chosen by."""
        kind = compressor.kind(tensor) if within is None else within.kind
        if compressor.lossy and kind is _UNKNOWN:
            self._whole.tell_exact(compressor.name)
        return kind

    def _find(
        self, tensor: Tensor, seen: Sighting, begin: int, end: int, kind: Saved, within: Within | None
    ) -> Record | None:
        """Find a record that has the bytes `[begin, end)` of the storage already."""
        known, compressor = seen.mark, self._compressor
        root = _root(tensor) if within is None else within.root
        record: Record | None = known.find(root, begin, end, self._remains)
        if record is not None and (compressor is None or compressor.also(record, kind)):
            return record
        record = joined(reversed(self._pending.local.queue), sequence_nr(), seen.storage, begin, end)
        together = record is not None
        if record is None and self._joins_alike and end - begin == seen.nbytes:
            record = known.find_alike(begin, end, self._remains, pending=self._execution is not None)
            self.numbers += record is not None  # those that follow do not depend on whether it was found in time
        if record is None or not (compressor is None or compressor.also(record, kind)):
            return None
        record.join(tensor, together=together)
        if within is not None:
            record.watch(within.counter)
        return record

    def _join(self, record: Record, tensor: Tensor, nbytes: int, *, apart: bool) -> None:
        """Count one more tensor that looks at a record; `apart`: it is within no wrapper."""
        self._counters.duplicate_bytes += nbytes
        record.add_saver()
        if self._execution is not None and self._execution.joined(record) and record.state is PENDING and apart:
            self._look_for(record)
        if record.stream is not None:
            streams.also_used(tensor, record.stream)

    def _make(
        self,
        tensor: Tensor,
        seen: Sighting,
        place: tuple[int, int],
        nbytes: int,
        decision: policy.Decision,
        within: Within | None,
    ) -> Record:
        """Make a record of a range of the storage, by which others find it."""
        record = Record(
            self.numbers,
            tensor,
            _root(tensor),
            seen.storage,
            *place,
            self._remains,
            died=self._died,
            stream=streams.producer_stream(tensor),
            logical_bytes=nbytes,
            offloaded=decision is SEND,
            stays=decision is SHRINK,
        )
        self.numbers += 1
        self._read_ahead.records[record.number] = record.ref
        self._write_behind.ledger.save(record.nbytes)
        if within is not None:
            record.belong(within.root, within.counter)
        Known.add_to(seen.storage, record)
        return record

    def _enlist(self, record: Record, kind: Saved, reason: str, *, apart: bool) -> None:
        """Have a new record planned, made smaller and counted, and queue it; `apart`: it is within no wrapper."""
        if self._mover.recorder.trace is not None:
            now_s = time.perf_counter()
            self._mover.recorder.note("saved", now_s, now_s, record.nbytes, record.name())
        execution = self._execution
        if self._follows:
            record.follow()
        if execution is not None and execution.saved(record):
            record.go()
        if self._compressor is not None:
            self._compressor.choose(record, kind)
        if apart:
            self._look_for(record)
        if record.offloaded:
            self._counters.offloaded_bytes += record.logical_bytes
        else:
            self._counters.kept_by_reason[reason] += record.logical_bytes
        self._pending.add(sequence_nr(), record)

    def _look_for(self, record: Record) -> None:
        """Find how others may give a record again, if that is of use."""
        derivations, execution, derives_all = self._derivations, self._execution, self._derives_all
        if derivations is None or not (derives_all or (execution is not None and execution.derives)):
            return  # no step by plan looks for what it does not derive
        if execution is not None and execution.tries(record):
            with execution.apart():
                derivations.look_for(record, may=True, notes=derives_all)
        else:
            derivations.look_for(record, may=derives_all or record.follows, notes=derives_all)

    def _odd(self, tensor: Tensor, within: Within | None) -> Packed:
        """Pack a tensor that is not plain: a subclass, sparse, meta, ..."""
        if (type(tensor) is not Tensor or tensor.is_nested) and (packed := self._wrapper(tensor, within)) is not None:
            return packed
        return self.keep(tensor, shown_bytes(tensor), why_not_plain(tensor))

    def _wrapper(self, tensor: Tensor, outer: Within | None) -> Packed | None:
        """Pack a wrapper subclass, perhaps within an `outer` one. None for a subclass that cannot be taken apart."""
        apart = opened(tensor)
        if apart is None:
            return None
        shell, inner = apart
        kind = self._compressor.kind(tensor) if self._compressor is not None else _UNKNOWN
        base = tensor._base
        within = outer or Within(tensor if base is None else base, shell.counter, kind)
        parts = tuple(self._full(each, recognise(each, self._sizes, self._chains), within) for each in inner)
        moved = [type(part[0]) in (Record, Shell) for part in parts]
        if not any(moved):
            return as_it_is(tensor)
        shell.bound = not all(moved)
        return shell, parts

    def keep(self, tensor: Tensor, nbytes: int, reason: str) -> Packed:
        """Let a tensor stay in memory, for `reason`."""
        self._counters.kept_by_reason[reason] += nbytes
        return as_it_is(tensor)


def _root(tensor: Tensor) -> Tensor:
    """Return the tensor whose version counter a saved one shares."""
    base = tensor._base
    return tensor if base is None else base


def _first(packed: Packed) -> Record | Tensor | Shell:
    """Return the record that a tensor is packed in, or what stays. Of a wrapper, that of its only inner tensor."""
    while type(packed[0]) is Shell and len(packed[1]) == 1:
        (packed,) = packed[1]
    return packed[0]


def as_it_is(tensor: Tensor) -> Packed:
    """Pack a tensor that stays."""
    if tensor.is_leaf:
        return tensor, tensor._version
    # Detached: an operator's saved output, held by the node that made it, would be a cycle nobody collects.
    return Detached((tensor.detach(), tensor._version))
