"""Statistics: the engine's mutable counters, and the immutable snapshot a user reads."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from ._text import as_html, as_text, short, size


class TraceEvent(NamedTuple):
    """One event; times are those of `time.perf_counter()`.

    `kind` is "saved" or "freed" for a tensor that its graph now owns, or no longer does; "write" or "read" for a
    transfer; "forwarded" for a tensor that backward needed while it was still in memory; "wait" or "room" when backward
    waited for a tensor, or forward for room; "held" when saved tensors now hold `nbytes` in memory; "plain" when they
    would hold `nbytes` if none was moved, compressed or recomputed.
    """

    kind: str
    start_s: float
    end_s: float
    nbytes: int
    label: str


# An event outside `trace()`: a step has very many, and the garbage collector looks at a plain tuple only once.
_Event = tuple[str, float, float, int, str]
# Limit for a micro-batch outside `trace()`: forwards without a backward never end it.
_MOST_EVENTS = 1 << 17


class Recorder:
    """Events of the current region, if it is recorded: one inside `trace()`, or every 2^n-th micro-batch.

    The first, second, fourth, eighth... are recorded: enough for a picture, and nothing over a long run.

    Attributes:
        trace: events of the current region; None if it is not recorded.
        last: events of the last recorded region.
        number: of the micro-batch that `last` recorded; 0 for a region inside `trace()`.
    """

    def __init__(self) -> None:
        self.trace: list[_Event] | None = []
        self.last: list[_Event] = []
        self.number = 0
        self._own: list[_Event] | None = self.trace
        self._ended = 0

    @property
    def asked(self) -> bool:
        """Whether the current region is inside `trace()`."""
        return self.trace is not None and self.trace is not self._own

    def note(self, kind: str, start_s: float, end_s: float, nbytes: int, label: str) -> None:
        """Record an event, if the region is recorded."""
        trace = self.trace  # read once: another thread may end the region
        if trace is None:
            return
        event = kind, start_s, end_s, nbytes, label
        trace.append(event if trace is self._own else TraceEvent(*event))
        if len(trace) >= _MOST_EVENTS and trace is self._own:
            self.last, self.number = trace, self._ended + 1
            self.trace = self._own = None

    def end_step(self) -> None:
        """End a micro-batch."""
        self._ended += 1
        if self.trace is not self._own:
            return  # a region inside `trace()` continues
        if self.trace:
            self.last, self.number = self.trace, self._ended
        due = self._ended & (self._ended + 1) == 0
        self.trace = self._own = [] if due else None

    def latest(self) -> tuple[list[TraceEvent], int]:
        """Return the events and number of the last recorded region; at first, of the current micro-batch."""
        events, number = (self.last, self.number) if self.last else (self.trace or (), self._ended + 1)
        return [TraceEvent(*event) for event in events], number

    @contextmanager
    def region(self) -> Iterator[list[TraceEvent]]:
        """Collect the events of a region, in the order they ended."""
        events: list[TraceEvent] = []
        before, self.trace = self.trace, cast(list[_Event], events)
        try:
            yield events
        finally:
            self.trace = before
            if before is self._own:  # it now has a gap
                self.trace = self._own = None
            self.last, self.number = [*events], 0


def _line(label: str, *, of: str = "", now: bool = False, default: float = 0) -> Any:
    """A field and its line in the table: a label, indented if it is a part, and the field that it is a share of.

    `now` marks momentary readings; everything else adds up over time, so that a step's share is a difference.
    """
    return field(default=default, metadata={"label": label, "of": of, "now": now})


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an Offloader is at, as far as counters do not tell.

    Attributes:
        tier: as set.
        entered: its context has been entered.
        closed: it was closed.
        hooks: "on", "off", or "count" where they only count.
        since: the step from which on they are off or only count; 0 where that is not known.
        planned: a plan moved or recomputed something of the last step.
        step_ratio: times as long as one that keeps everything, that steps by that plan take; 0 where that is not known.
    """

    tier: str = "auto"
    entered: bool = True
    closed: bool = False
    hooks: str = "on"
    since: int = 0
    planned: bool = False
    step_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Bytes and seconds since the start, and in the last complete step (`last_step`). Prints as a verdict in one line
    (`verdict`) and a table; a notebook shows both too.

    Always `saved_bytes == weight_bytes + duplicate_bytes + kept_bytes + offloaded_bytes`. A view counts the bytes it
    shows, or those of the range it spans if that is less (an expanded tensor). Under tier "auto", tensors that are
    known to stay count as kept, except weights and duplicates.

    Attributes:
        saved_bytes: all bytes that autograd saved.
        weight_bytes: recognised as parameters or buffers, which stay.
        duplicate_bytes: views of a storage that the engine already has.
        kept_bytes: kept in memory; `kept_by_reason` says why.
        offloaded_bytes: handed to a tier (logical bytes), written or still held back in memory.
        encoded_bytes, packed_bytes: bytes before and after codecs; tiers move and budgets count the latter.
        derived_bytes: kept tensors that are stored nowhere, because backward recomputes them from others.
        written_bytes, read_bytes: physically moved, including padding.
        forwarded_bytes: needed while still in memory, so that nothing was read.
        wait_s: seconds that backward waited for data.
        backpressure_s: seconds that forward waited, because writes in flight or memory had reached their limit.
        live_records: storages that graphs still own.
        resident_bytes: restored or prefetched and not yet freed.
        held_bytes: maximum ever held back from writing at once, because backward needs them first (tier "auto":
            because memory has room).
        staging_peak_bytes: maximum ever in flight to a tier.
        written_today_bytes: part of the allowance `max_write_bytes_per_day` that all processes of this user have used;
            0 without an allowance.
        projected_bytes_per_day: bytes written in a day at the rate of this run so far.
        file_bytes: blocks that the tier occupies (for a scratch file, its allocated blocks, not its size).
        peak_bytes: maximum that saved tensors held in memory at once: waiting, being written, read back. Tensors that
            are not worth moving are extra, and so is memory that compiled code or a custom Function has taken over.
        plain_peak_bytes: maximum that saved tensors would have held in memory at once in the last step, if nothing was
            moved, compressed or recomputed; weights and duplicates aside.
        step_peak_bytes: maximum that they did hold at once in the last step. Unlike `peak_bytes`, both include what is
            not worth moving, and this what the largest block makes again that recomputes.
        agreement_s: seconds that agreeing on plans with other ranks has taken, waits for later ranks included.
        unseen_bytes: results in the cache of torch's own selective checkpointing, where no hook sees them; not in
            `saved_bytes`.
        errors: transfers that failed.
        step_s: seconds of the steps, each from its first saved tensor until the next step begins, the context is left
            or statistics are read.
        steps: steps ended. A step ends with `step()` of an optimizer that has parameters of the model (without a model,
            of any optimizer), or with each backward until an optimizer has stepped.
        micro_batches: forwards whose backward has ended; several per step if gradients accumulate.
        kept_by_reason: bytes kept, by reason or by type of tensor.
        situation: what the Offloader is at, for `verdict`.
    """

    steps: int = _line("steps")
    step_s: float = _line("  took", default=0.0)
    micro_batches: int = _line("micro-batches")
    saved_bytes: int = _line("saved by autograd")
    weight_bytes: int = _line("  weights, left alone", of="saved_bytes")
    duplicate_bytes: int = _line("  saved before", of="saved_bytes")
    offloaded_bytes: int = _line("  handed to the tier", of="saved_bytes")
    kept_bytes: int = _line("  kept", of="saved_bytes")
    encoded_bytes: int = _line("given to codecs")
    packed_bytes: int = _line("  encoded", of="encoded_bytes")
    derived_bytes: int = _line("recomputed from others")
    written_bytes: int = _line("written")
    read_bytes: int = _line("read")
    forwarded_bytes: int = _line("unpacked from memory")
    wait_s: float = _line("backward waited", of="step_s", default=0.0)
    backpressure_s: float = _line("forward waited", of="step_s", default=0.0)
    agreement_s: float = _line("ranks agreed", of="step_s", default=0.0)
    unseen_bytes: int = _line("in the cache of selective checkpointing")
    errors: int = _line("failed transfers")
    peak_bytes: int = _line("peak in memory", now=True)
    held_bytes: int = _line("most held back in memory", now=True)
    staging_peak_bytes: int = _line("most in flight to the tier", now=True)
    live_records: int = _line("storages that graphs own now", now=True)
    resident_bytes: int = _line("restored or prefetched now", now=True)
    file_bytes: int = _line("occupied by the tier now", now=True)
    written_today_bytes: int = _line("written today", now=True)
    projected_bytes_per_day: int = _line("written per day at this rate", now=True)
    kept_by_reason: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    plain_peak_bytes: int = 0
    step_peak_bytes: int = 0
    situation: Situation = Situation()
    last_step: OffloadStats | None = None

    @property
    def verdict(self) -> str:
        """One line, such as "saved tensors 244 -> 80 MiB (-67%), step +1%, waited 0%".

        The figures are of the last step: `plain_peak_bytes` and `step_peak_bytes`; times as long as a step that keeps
        everything, by what a plan has measured of waiting, transfers and recomputation (left out without a plan); and
        the share of its time that it waited for the tier.
        """
        return _verdict(self)

    def __str__(self) -> str:
        return f"{self.verdict}\n{as_text(list(_rows(self)), self.notes())}"

    def _repr_html_(self) -> str:
        """Show the verdict and the table in a notebook."""
        return f"<p><b>{html.escape(self.verdict)}</b></p>\n{as_html(list(_rows(self)), self.notes())}"

    def notes(self) -> list[str]:
        """List what the numbers do not show: what failed or waits, why nothing was written, what is unseen."""
        return list(_notes(self))

    def asdict(self) -> dict[str, Any]:
        """Convert to JSON types: the verdict; bytes, counts and seconds by field; `last_step` likewise, or None."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "situation"}
        values["verdict"] = self.verdict
        last = None if self.last_step is None else self.last_step.asdict()
        return values | {"kept_by_reason": dict(self.kept_by_reason), "last_step": last}


@dataclass(slots=True)
class Counters:
    """Mutable counters, guarded by the engine's lock."""

    weight_bytes: int = 0
    duplicate_bytes: int = 0
    offloaded_bytes: int = 0
    encoded_bytes: int = 0
    packed_bytes: int = 0
    derived_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    forwarded_bytes: int = 0
    wait_s: float = 0.0
    backpressure_s: float = 0.0
    agreement_s: float = 0.0
    unseen_bytes: int = 0
    errors: int = 0
    step_s: float = 0.0
    steps: int = 0
    micro_batches: int = 0
    live_records: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0
    staging_peak_bytes: int = 0
    # Adding to a collections.Counter takes twice as long.
    kept_by_reason: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def kept_bytes(self) -> int:
        """Bytes left in memory."""
        return sum(self.kept_by_reason.values())

    @property
    def saved_bytes(self) -> int:
        """All bytes that autograd saved."""
        return self.weight_bytes + self.duplicate_bytes + self.kept_bytes + self.offloaded_bytes

    def kept_to_offloaded(self, nbytes: int, reason: str) -> None:
        """Count a kept tensor as offloaded after all (negative: as kept again, because its write failed)."""
        self.kept_by_reason[reason] -= nbytes
        self.offloaded_bytes += nbytes

    def snapshot(self, **others: Any) -> OffloadStats:
        """Take a snapshot of the counters, with readings of other parts (such as `file_bytes`)."""
        values = {name: getattr(self, name) for name in (*_COUNTED, "saved_bytes", "kept_bytes")}
        kept = MappingProxyType({reason: nbytes for reason, nbytes in self.kept_by_reason.items() if nbytes})
        return OffloadStats(**values, **others, kept_by_reason=kept)


_COUNTED = tuple(f.name for f in fields(Counters) if f.name != "kept_by_reason")
_SUMS = tuple(f.name for f in fields(OffloadStats) if f.name in _COUNTED and not f.metadata["now"])


def difference(now: OffloadStats, before: OffloadStats) -> OffloadStats:
    """Subtract sums to get one step's share; momentary readings stay as they are now."""
    values = {f.name: getattr(now, f.name) for f in fields(now) if f.name not in ("last_step", "kept_by_reason")}
    for name in (*_SUMS, "saved_bytes", "kept_bytes"):
        values[name] -= getattr(before, name)
    reasons = dict.fromkeys([*now.kept_by_reason, *before.kept_by_reason])
    kept = {reason: now.kept_by_reason.get(reason, 0) - before.kept_by_reason.get(reason, 0) for reason in reasons}
    return OffloadStats(**values, kept_by_reason=MappingProxyType({r: n for r, n in kept.items() if n}))


_MUCH_WAITING = 0.1  # share of a step, above which a note says so

# -- for people ------------------------------------------------------------------------------------------------------


def _verdict(stats: OffloadStats) -> str:
    """Tell in one line what became of a step's saved tensors, and what that cost."""
    now, last = stats.situation, stats.last_step or stats
    plain_bytes, held_bytes = stats.plain_peak_bytes, stats.step_peak_bytes
    moved = last.written_bytes or last.encoded_bytes or last.derived_bytes or now.planned
    if not stats.saved_bytes:
        said = "nothing saved yet" if now.entered else "nothing saved yet: the context was not entered"
    elif not stats.micro_batches:
        so_far_bytes = stats.saved_bytes - stats.weight_bytes - stats.duplicate_bytes
        said = f"saved tensors {short(so_far_bytes)} so far: the first step is not over"
    elif not plain_bytes:
        said = "no saved tensors but weights"
    elif moved:
        said = _change(plain_bytes, held_bytes)
        if now.step_ratio:
            said += f", step {now.step_ratio - 1:+.0%}"
        if last.step_s:
            said += f", waited {(last.wait_s + last.backpressure_s) / last.step_s:.0%}"
    else:
        said = f"saved tensors {short(plain_bytes)}, all {_why_in_memory(now, last)}"
    if stats.errors:
        said += f"; {stats.errors:,} transfers failed"
    if last.unseen_bytes:
        said += f"; {short(last.unseen_bytes)} more in the cache of selective checkpointing"
    return f"{said}; closed" if now.closed else said


def _change(before_bytes: int, after_bytes: int) -> str:
    """Tell two counts of bytes, the unit once if it is the same, and the change in per cent."""
    before, after = short(before_bytes), short(after_bytes)
    if before.split()[1] == after.split()[1]:
        before = before.split()[0]
    return f"saved tensors {before} -> {after} ({round(100 * (after_bytes / before_bytes - 1)):d}%)"


def _why_in_memory(now: Situation, last: OffloadStats) -> str:
    if last.offloaded_bytes:
        return "held back in memory: nothing was written"
    reason = max(last.kept_by_reason, key=lambda each: last.kept_by_reason[each], default="")
    hooks = {"off": "hooks off", "count": "hooks only count"}.get(now.hooks, "")
    why = "they fit" if reason == "fits in memory" or (hooks and not reason) else reason
    if hooks and now.since:
        hooks += f" since step {now.since:,}"
    said = "; ".join(part for part in (why, hooks) if part)
    return f"in memory: {said}" if said else "in memory"


def _rows(stats: OffloadStats) -> Iterator[tuple[str, ...]]:
    """Rows of the table: the total and the last step. Lines that are 0 in both are omitted."""
    columns = [stats] if stats.last_step is None else [stats, stats.last_step]
    yield ("", *(cell for title in ("total", "last step")[: len(columns)] for cell in (title, "")))
    for line in fields(stats):
        if not line.metadata:
            continue
        name, whole, now = line.name, line.metadata["of"], line.metadata["now"]
        amounts = [(getattr(c, name), getattr(c, whole, 0)) for c in (columns[:1] if now else columns)]
        yield from _row(line.metadata["label"], amounts, name, len(columns))
        if name == "kept_bytes":
            for reason in sorted({reason for c in columns for reason in c.kept_by_reason}):
                by_reason = [(c.kept_by_reason.get(reason, 0), c.saved_bytes) for c in columns]
                yield from _row(f"    {reason}", by_reason, name, len(columns))


def _row(label: str, amounts: Sequence[tuple[float, float]], name: str, columns: int) -> Iterator[tuple[str, ...]]:
    if any(amount for amount, _ in amounts):
        cells = [cell for amount, whole in amounts for cell in (_amount(amount, name), _share(amount, whole))]
        yield (label, *cells, *[""] * (2 * columns - len(cells)))


def _amount(amount: float, name: str) -> str:
    if "bytes" in name:
        return size(amount) if amount else "0"
    return f"{amount:,.2f} s" if name.endswith("_s") else f"{amount:,}"


def _share(amount: float, whole: float) -> str:
    if not (amount and whole):
        return ""
    return f"{amount / whole:.0%}" if abs(amount) >= 0.005 * whole else "<1%"


def _notes(stats: OffloadStats) -> Iterator[str]:
    if stats.errors:
        yield f"{stats.errors:,} transfers failed: a tensor whose write fails stays in memory; see the warnings above."
    last = stats.last_step or stats
    if (waited_s := last.wait_s + last.backpressure_s) > _MUCH_WAITING * last.step_s > 0:
        yield (
            f"a step waits {waited_s / last.step_s:.0%} of its time for the tier: `tba doctor` measures the disks; a "
            "larger memory_budget, compress='exact' or another storage path reduces the waiting."
        )
    if stats.unseen_bytes:
        yield (
            f"{size(stats.unseen_bytes)} of results were in the cache of torch's selective checkpointing, where no "
            "hook sees them; tba.integrations.checkpoint stores them like any other saved tensor."
        )
    if stats.offloaded_bytes and stats.held_bytes and not stats.staging_peak_bytes:
        yield (
            "nothing was written: everything was held back for backward, which needs it first "
            f"({size(stats.held_bytes)} at most). A larger step, a smaller TBA_PREFETCH_BYTES or flush() writes."
        )
