"""Derivations: records whose bytes are not kept, because tensors that are kept anyway give them again (`search`).

Guarantees:

1. An exact tensor is never another in backward than it was: nothing but a comparison detects edits without a trace
   (`.data`, NumPy, a tensor that no node saved edited under `no_grad`). In the first steps at each place the bytes go
   only after the tensor was recomputed and compared with the original. Later ones of the same signature count as right
   until they are used: a hash of the original is taken (on a device, sums), and what backward makes must have the same,
   or it raises `EditedError` (`check`). From sources that a lossy codec packed, with `verify="full"`, and where finding
   an operator's scalars would wait for a device, the bytes go only after a comparison in each step. From lossy sources
   it must be as close as those are, else bit-equal.
2. An exact tensor (by the preset's class of its savers) is derived only from exact ones.
3. Sources stay as they were: they are records of activations, or private copies of anything else (weights, small
   tensors). An edit without a trace to an activation after it was saved is found by the digest; from lossy sources
   there is none.
4. The choice of sources does not depend on timing: a comparison in full reads back a source that was written, and
   waits until a device has said whether a lossy codec packed it (`awaits`). Exception: a source that is edited in place
   while being written serves if the write has ended before.
5. No derivation uses a tensor that is known to have been edited between being saved and being used.
6. `settle` collects the comparisons that a device has ended. If more than `most_waiting` are in flight (`crowded`),
   forward waits, after its hook has let go of the lock.

If running the operator again and comparing costs the step more than moving the tensor, and only time depends on it, the
tensor is moved (`worth`).

All but `again` must be called with the engine's lock held.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from io_backends import interrupts

from .._device import streams
from .._errors import OffloadError
from .._memory import shortage
from .._plan import clock
from .._record.record import DERIVED, IN_MEMORY, PENDING, RESTORED, Record
from .._record.restore import restore
from .._record.user_code import Detached
from .._record.view import View, apart, counted, is_edited, span
from .._torch.private import current_graph_task_id
from .check import Check, digest
from .operators import bits_differ
from .outcomes import Outcomes
from .recipe import Hold, Recipe
from .search import recipe, remember
from .trust import Trust
from .worth import Worth

# The largest relative error of a recipe that starts from 8 bits (whose own error is below 0.01), and from fewer (4
# bits: about 0.1). The error of a wrong recipe is about as large as the tensor.
_NEAR = 0.03
_NEAR_OF_FEW_BITS = 0.25
_LEAST_GAIN = 16  # a derived tensor has at least this many times the bytes of the private copies made for it
_MOST_PLACES = 1 << 16  # recipes to remember
# Times what making a tensor again takes alone, on a warm cache: so much a step takes longer by it, beside its hooks. A
# GPT 2, a residual network 1.6. The smaller, as trials of blocks, which plans compare it with, are too fast as well.
_AROUND = 1.6


class _Comparison(NamedTuple):
    """A comparison, in flight on a device, of a result with the tensor it is to replace.

    The record alone has the recipe: once its graph is dropped, nothing keeps the recipe's sources.
    """

    record: weakref.ref[Record]
    trust: Trust | None  # None if the outcome depends on values
    place: int  # in the step
    stamps: tuple[Any, ...]  # of the device: before the recipe, after it, after the comparison; () if nobody asks
    differs: Tensor  # on the host, or being copied there
    there: Any  # event

    def seconds(self) -> tuple[float, float]:
        """What the device took for the recipe, and for the comparison, once that is over; 0 if nobody asks."""
        if not self.stamps:
            return 0.0, 0.0
        begun, ran, compared = self.stamps
        return begun.elapsed_time(ran) * 1e-3, ran.elapsed_time(compared) * 1e-3


class Derivations:
    """Finds records that can be recomputed, and remembers which recipes failed.

    Args:
        in_full: every recipe is run and compared before a tensor goes.
        most_waiting: comparisons in flight on a device, which forward does not wait for.

    Attributes:
        waiting: comparisons that a device has not finished, oldest first.
    """

    def __init__(self, unpack: Callable[[Any], Tensor], worth: Worth, *, in_full: bool, most_waiting: int) -> None:
        self.waiting: deque[_Comparison] = deque()
        self._unpack = unpack
        self._worth = worth
        self._in_full, self._most_waiting = in_full, most_waiting
        self._outcomes = Outcomes()
        self._trust: dict[int, Trust] = {}  # by place in the step
        self._first_number = 0  # of the step's records
        self._comparing = 0  # the thread that is comparing, or 0
        self._made: tuple[weakref.ref[Record], Tensor] | None = None  # the last result: the next often starts from it
        self._depths: dict[int, int] = {}  # of all recipes of this step, by the record's number

    def look_for(self, record: Record, *, may: bool, notes: bool) -> None:
        """In pack: find how a new record could be recomputed, if it `may` be; `notes` it as a source for later ones."""
        root = record.root()
        if root is None:
            return
        record.keep_counter(root)
        if root._version == 0 and not root.is_leaf:
            if may and self._worth.pays(record.number - self._first_number, record.nbytes):
                record.plan(recipe(root, self._unpack, self._about))
                if record.recipe is not None:
                    self._depths[record.number] = record.recipe.depth
            if not notes:
                return
            view = View.of(root)
            begin, end = span(root, view)
            if record.begin <= begin and end <= record.end:  # a record may have only a part of a large tensor
                reference = record.ref
                remember(root, self._unpack, lambda: None if (found := reference()) is None else (found, view))

    def awaits(self, record: Record) -> bool:
        """Whether a source of a record's recipe may still be packed by a lossy codec: a device has not said yet."""
        found = record.recipe
        return isinstance(found, Recipe) and any(map(_undecided, found.sources))

    def replaces(self, record: Record) -> bool | None:
        """Drop a finished, pending record's bytes if its recipe gives them. None if `settle` will tell."""
        found, alias = record.recipe, record.alias
        if not isinstance(found, Recipe) or alias is None:
            return False
        off = max(map(_off, found.sources), default=0.0)
        place = record.number - self._first_number
        trust = self._trust_in(place, (found.signature, off))
        too_far = off and (record.codec is None or record.codec.properties.exact)
        if too_far or trust.lost or record.is_edited() or record.was_moved() or not record.is_whole():
            record.plan(None)
            return False
        checks = not off
        known = None if off and found.amplifies else trust
        least = record.nbytes // _LEAST_GAIN
        settled: Recipe | None = None
        self._comparing = threading.get_ident()
        tracer = interrupts.tracer()
        try:
            with streams.on(record.stream):
                if checks and trust.enough and not self._compares(found, record.stream):
                    settled = found.as_before(_holding(least, guarded=True), _at_hand, trust.scalars)
                    if settled is not None:
                        return self._end(record, self._checked(record, alias, settled, trust, place), trust)
                begun_s, stamps = clock.current.now_s(), self._stamp((), record)
                settled, made = found.settled(_holding(least, guarded=checks))
                made_s, stamps = clock.current.now_s(), self._stamp(stamps, record)
                differs = made.stride() != alias.stride() or _differs(made, alias, off)
                if isinstance(differs, Tensor):
                    stamps, flag = self._stamp(stamps, record), streams.fetch(differs)
                    record.plan(self._knowing(record, alias, settled, trust) if checks else settled)
                    record.examine(True)  # last: there may be no memory for what comes before
                    self.waiting.append(_Comparison(record.ref, known, place, stamps, *flag))
                    return None
        except OffloadError:  # an operand could not be read back, which says nothing about the recipe
            known, differs = None, True
        except shortage.ENDS as error:  # an operand was edited or is too large to copy, or its operator ran in place
            interrupts.pass_on(error, tracer)
            if shortage.lacks_memory(error):
                known = None
            elif not isinstance(error, RuntimeError):
                raise
            differs = True
        finally:
            self._comparing = 0
        if differs or settled is None:
            return self._end(record, None, known)
        self._made = record.ref, made
        compare_s = clock.current.now_s() - made_s
        trust.gain(settled.found, made_s - begun_s, compare_s)
        if checks:
            settled = self._checked(record, alias, settled, trust, place)
        else:
            self._worth.note(place, record.nbytes, trust.run_s, compare_s)
        return self._end(record, settled, known)

    def cost(self, record: Record) -> tuple[float, list[int]] | None:
        """Return the seconds that making a finished, pending record again takes, and the numbers of its sources.

        None if that is not possible, or not told. The record stays as it is; sources that have gone are brought back.
        """
        found, alias = record.recipe, record.alias
        record.plan(None)
        if not isinstance(found, Recipe) or alias is None or (record.stream is not None and found.searches):
            return None
        records = [packed[0] for packed in found.sources if isinstance(packed[0], Record)]
        if record.is_edited() or record.was_moved() or not record.is_whole():
            return None
        tracer = interrupts.tracer()
        self._comparing = threading.get_ident()
        try:
            with streams.on(record.stream):
                if any(source.state not in IN_MEMORY for source in records):
                    found.settled(_holding(record.nbytes // _LEAST_GAIN, guarded=True))
                begun_s = _reached_s(record.stream)
                _, made = found.settled(_holding(record.nbytes // _LEAST_GAIN, guarded=True))
                made_s = _reached_s(record.stream) - begun_s
                if made.stride() != alias.stride() or bool(bits_differ(made, alias)):
                    return None
                begun_s = _reached_s(record.stream)
                digest(made)
                derive_s = made_s + 2 * (_reached_s(record.stream) - begun_s)
                # A device's seconds have the launches in them, which a step hides behind its kernels.
                return derive_s * (_AROUND if record.stream is None else 1), [source.number for source in records]
        except OffloadError:  # a source could not be read back
            return None
        except shortage.ENDS as error:  # as in `replaces`
            interrupts.pass_on(error, tracer)
            if not isinstance(error, RuntimeError):
                raise
            return None
        finally:
            self._comparing = 0

    def _trust_in(self, place: int, signature: Hashable) -> Trust:
        """Return what is known of recipes of this signature at this place."""
        trust = self._trust.get(place)
        if trust is None or trust.signature != signature:
            trust = self._trust[place] = Trust(signature)
            if len(self._trust) > _MOST_PLACES:  # forwards without a backward end no step, so places keep growing
                del self._trust[next(iter(self._trust))]
        return trust

    def _compares(self, found: Recipe, stream: Any) -> bool:
        """Whether each step compares the result in full: it is to, or a device would be waited for otherwise."""
        return self._in_full or (found.searches and stream is not None)

    def _knowing(self, record: Record, alias: Tensor, settled: Recipe, trust: Trust) -> Recipe:
        """Return a recipe that knows the bits of the record's tensor."""
        return replace(settled, check=Check(record.number, digest(alias), trust, record.stream, self._outcomes))

    def _checked(self, record: Record, alias: Tensor, settled: Recipe, trust: Trust, place: int) -> Recipe:
        """Return a recipe that knows the bits of the record's tensor; note what making that again takes."""
        begun_s = clock.current.now_s()
        settled = self._knowing(record, alias, settled, trust)
        # A device reads as many bytes for sums as for a comparison; how long that takes the host does not see.
        check_s = clock.current.now_s() - begun_s if record.stream is None else trust.compare_s
        if record.stream is None or self._worth.leaves:
            self._worth.note(place, record.nbytes, trust.run_s, 2 * check_s, runs=1 + self._in_full)
        return settled

    def settle(self, *, wait: bool) -> list[tuple[Record, bool]]:
        """Finish the comparisons that a device has completed, or all: (pending record, whether its bytes went)."""
        settled: list[tuple[Record, bool]] = []
        while self.waiting and (wait or self.waiting[0].there.query()):
            entry = self.waiting.popleft()
            record = entry.record()
            if record is None:
                continue
            record.examine(False)
            if record.state is not PENDING or record.alias is None or not isinstance(record.recipe, Recipe):
                continue
            entry.there.synchronize()
            differs = bool(entry.differs) or record.is_edited() or record.was_moved()
            if not differs:
                self._gain(entry, record, record.recipe)
            settled.append((record, self._end(record, None if differs else record.recipe, entry.trust)))
        return settled

    def _gain(self, entry: _Comparison, record: Record, found: Recipe) -> None:
        """Note a recipe that has given the right tensor on a device, and what that took."""
        run_s, compare_s = entry.seconds()
        if entry.trust is not None:
            entry.trust.gain(found.found, run_s, compare_s)
        if entry.stamps:
            each_step = found.check is None or self._compares(found, record.stream)
            compares = each_step + 2 * (found.check is not None)
            self._worth.note(entry.place, record.nbytes, run_s, compares * compare_s, runs=1 + each_step)

    def _stamp(self, stamps: tuple[Any, ...], record: Record) -> tuple[Any, ...]:
        """Add one, if a device computes and what it takes is to be noted."""
        return stamps if record.stream is None or not self._worth.leaves else (*stamps, streams.stamp(record.stream))

    def _end(self, record: Record, found: Recipe | None, trust: Trust | None) -> bool:
        """Drop the record's bytes if a recipe was `found` that gives them. Return whether they went."""
        alias = record.alias
        assert alias is not None
        if found is None:
            record.plan(None)
            if trust is not None:
                trust.lose()
            return False
        for packed in found.sources:
            if isinstance(packed[0], Record):
                packed[0].add_saver()  # the recipe will ask for it too
        if record.stream is not None:
            streams.goes_early(alias, record.stream)
        record.derive(found)
        return True

    def peek(self, record: Record, view: View) -> Tensor | None:
        """In unpack: a tensor that a comparison on this thread asks for, with nothing counted or moved.

        None if no comparison is running, or if the bytes are not in memory and must be read as usual.
        """
        if not self.compares_here:
            self._made = None
            return None
        if record.state is DERIVED:
            assert record.recipe is not None
            if self._made is not None and self._made[0] is record.ref:
                made = self._made[1]
            else:  # a device would tell of a wrong one in the end; what is made from it is compared in any case
                made = record.recipe.compute(checked=record.stream is None)
            return view.over(_own(made), 0)
        if record.state not in IN_MEMORY and record.state is not RESTORED:
            return None
        decoded = record.decoded
        tensor = restore(record, view)
        record.keep_decoded(*decoded or (None,))
        return tensor

    @property
    def crowded(self) -> bool:
        """Whether more comparisons are in flight than should be."""
        return len(self.waiting) > self._most_waiting

    @property
    def compares_here(self) -> bool:
        """Whether a comparison is running on this thread, which asks for tensors with the lock held."""
        return self._comparing == threading.get_ident()

    def end_step(self, next_number: int) -> None:
        """End a step: places of the next one count from `next_number`."""
        self._first_number = next_number
        self._made = None
        self._depths.clear()

    def _about(self, packed: tuple[Any, Any], upstream: bool) -> int | None:
        first, second = packed
        if isinstance(first, Record):
            if upstream and (first.counter is None or first.counter._version != first.saved_version):
                return None
            # Also for a failed recipe: when a device reports that depends on timing.
            return self._depths.get(first.number, 0) if first.recipe is None else first.recipe.depth
        if type(first) not in (Tensor, nn.Parameter) or first.is_nested or first.layout is not torch.strided:
            return None
        return None if upstream and first._version != second else 0


def again(record: Record, view: View, *, alone: bool) -> Tensor:
    """Recompute a saved tensor of a derived record; `alone`: in its own memory. Raises what its sources raise."""
    stream, decoded = streams.current(record.device), record.decoded
    # On a device whether it is right is told to the backward that has made it; another one makes its own.
    here = None if stream is None else (stream, current_graph_task_id())
    if decoded is not None and decoded[1] == here and not is_edited(decoded[0]):
        whole = decoded[0].clone() if alone else decoded[0]
    else:
        assert record.recipe is not None
        whole = counted(_own(record.recipe.compute()))
        record.keep_decoded(None if alone else whole, here)
    if record.answer():
        record.keep_decoded(None)
    return view.over(whole.untyped_storage(), 0) if alone else view.on_plain(whole)


def _own(made: Tensor) -> torch.UntypedStorage:
    """The bytes as a storage of their own, copied if the tensor is a view of an operand."""
    if made._base is not None or made.storage_offset() or made.untyped_storage().nbytes() != made.nbytes:
        made = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=made.device).copy_(made)
    return made.untyped_storage()


def _reached_s(stream: Any) -> float:
    """The time, in seconds, at which a device has done all that was queued on a stream (None: on a CPU, now)."""
    if stream is not None:
        stream.synchronize()
    return clock.current.now_s()


def _undecided(packed: tuple[Any, Any]) -> bool:
    """Whether a device has yet to say what becomes of a packed object, or of its sources."""
    record = packed[0]
    if not isinstance(record, Record):
        return False
    if record.state is DERIVED:
        return record.recipe is not None and any(map(_undecided, record.recipe.sources))
    return record.examined and record.codec is not None and not record.codec.properties.exact


def _off(packed: tuple[Any, Any]) -> float:
    """The largest relative error of recipes that start from a packed object; 0 for exact ones."""
    record = packed[0]
    if not isinstance(record, Record):
        return 0.0
    if record.state is DERIVED:
        return 0.0 if record.recipe is None else max(map(_off, record.recipe.sources), default=0.0)
    codec = record.encoded.codec if record.encoded is not None else None
    if record.state is PENDING:  # its codec may be waiting for the device
        codec = record.codec
    if codec is None or codec.properties.exact:
        return 0.0
    return _NEAR if codec.properties.kept_bits >= 8 else _NEAR_OF_FEW_BITS


def _differs(made: Tensor, wanted: Tensor, off: float) -> Tensor | bool:
    """Whether `made` cannot replace `wanted`; as a tensor if a device computes that."""
    if not off:
        return bits_differ(made, wanted)
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        return True
    scale = torch.linalg.vector_norm(wanted, dtype=torch.float32)
    # Not `>`, which is false for NaN.
    far = ~((torch.linalg.vector_norm(made - wanted, dtype=torch.float32) <= off * scale) & scale.isfinite())
    return bool(far) if far.is_cpu else far


def _holding(most_bytes: int, *, guarded: bool) -> Hold:
    """Return a `Hold` that keeps a recipe's sources unchanged, by private copies of those edited through `.data`.

    Programs edit leaves that way: weights, trained or not, tensors detached from them, a model's buffers, inputs. Where
    a check has the recipe `guarded`, activations that stay without a record need not be copied.
    """
    left_bytes = most_bytes

    def hold(packed: Any, operand: Callable[[], Tensor]) -> tuple[Any, Tensor | None]:
        nonlocal left_bytes
        if isinstance(packed[0], Record) and not packed[0].leaf:
            return packed, None
        if guarded and type(packed) is Detached and packed[0].nbytes > left_bytes:  # asking for it takes long
            return packed, None
        tensor = operand()
        nbytes = span(tensor, View.of(tensor))[1]
        left_bytes -= nbytes
        if left_bytes < 0:
            raise RuntimeError(f"a copy of {tensor.dtype} {list(tensor.shape)} costs too much: keep what it gives")
        held = apart(tensor)
        return (held, held._version), held

    return hold


def _at_hand(packed: tuple[Any, Any]) -> Tensor | None:
    """The tensor of a packed object if it is in memory as it was saved."""
    record, view = packed
    if not isinstance(record, Record):
        return record if record._version == view else None
    as_saved = record.state in IN_MEMORY and record.encoded is None and not record.is_edited()
    return restore(record, view) if as_saved else None
