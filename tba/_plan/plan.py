"""Plan: what becomes of each saved storage and of each block, and what that is predicted to take."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from .._text import as_html, as_text, size
from .bound import lower_bound_s
from .facts import OUTSIDE, Facts, Link, Place, Spill
from .picture import draw
from .simulate import Moment, Timeline, simulate

_End = TypeVar("_End", Link, Spill)
_MORE_BYTES, _MORE_BYTES_PER_S = 1 << 30, 1e9  # whose worth a plan tells


@dataclass(frozen=True)
class Measured:
    """What a planned step has really taken: seconds from the first tensor saved to the last asked for, and most bytes.

    Those are the bytes that saved tensors held in memory: kept, on their way out, read back. What a block has
    recomputed is not counted.

    Attributes:
        plain_s: what the same computation takes that moves and recomputes nothing; 0 where that is not known.
    """

    step_s: float
    peak_bytes: int
    plain_s: float = 0.0


@dataclass(frozen=True)
class Decided:
    """What a plan was last decided from, and how it has stood since.

    Attributes:
        facts, budget_bytes: of then.
        stood: how many times in a row it was found to be as good as any for another pace of the computation.
        steps: that have had another pace since then.
    """

    facts: Facts
    budget_bytes: int
    stood: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Plan:
    """Decisions about one kind of step.

    Attributes:
        facts: what they were made from.
        budget_bytes: that saved tensors may hold.
        moved: indices in `facts.saved` of what goes out and comes back, and those of `facts.inputs`.
        recomputed: indices in `facts.blocks` of those that run again instead of saving; no part beside its block.
        derived: indices in `facts.saved` of what others give again; it does not stay.
        predicted: the step as simulated.
        measured: the last step that was carried out by it.
        decide: made it, and can do so from other facts or for another budget; None where a fixed rule did.
        reason, made_in: why it took the place of another plan, and at the end of which step; "" and 0 if it did not.
        tried: what came of trying another plan in its place, in words; "" if none was.
        decided: what it was decided from, where its facts are others by now; None where they are the same.
        agreed: which ranks recompute alike by it, and which of them binds, in words; "" if this one decided alone.
    """

    facts: Facts
    budget_bytes: int
    moved: frozenset[int]
    recomputed: frozenset[int]
    predicted: Timeline
    measured: Measured | None = None
    decide: Callable[[Facts, int], Plan] | None = field(default=None, compare=False, repr=False)
    reason: str = ""
    made_in: int = 0
    tried: str = ""
    agreed: str = ""
    derived: frozenset[int] = frozenset()
    decided: Decided | None = None

    @cached_property
    def sends(self) -> dict[Place, int]:
        """Bytes of each storage that is to go, by where the step saves it."""
        facts, again, count = self.facts, self.facts.again(self.recomputed), len(self.facts.saved)
        saved = (facts.saved[index] for index in self.moved if index < count)
        return self.inputs | {each.place: each.nbytes for each in saved if each.place not in again}

    @cached_property
    def inputs(self) -> dict[Place, int]:
        """Of them, those that blocks which recompute save of their inputs."""
        moved = map(self.facts.at, self.moved.intersection(self.facts.inputs(self.recomputed)))
        return {each.place: each.nbytes for each in moved}

    @cached_property
    def derives(self) -> frozenset[Place]:
        """Where the step saves what others give again."""
        return frozenset(self.facts.saved[index].place for index in self.derived)

    @cached_property
    def derived_s(self) -> float:
        """Seconds that making it again takes."""
        return sum(self.facts.saved[index].derive_s or 0.0 for index in self.derived)

    @property
    def idle(self) -> bool:
        """Whether it leaves the step as it is."""
        return not (self.sends or self.recomputed or self.derived)

    @property
    def fits(self) -> bool:
        """Whether the predicted step stays within the budget, with room for the tensor just being computed, and cap."""
        return self.missing_bytes <= 0 and self.within_cap

    @property
    def within_cap(self) -> bool:
        """Whether no more moves than may."""
        return self.predicted.moved_bytes <= self.facts.most_moved_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the predicted step exceeds the budget; what is left of it below 0."""
        return max(self.predicted.over_bytes, self.predicted.peak.nbytes - self.budget_bytes)

    @property
    def step_ratio(self) -> float:
        """Times as long as one that keeps everything that the last step by it took; 0 where that is not known."""
        return (
            self.measured.step_s / self.measured.plain_s if self.measured is not None and self.measured.plain_s else 0
        )

    @cached_property
    def bound_s(self) -> float:
        """Seconds that no plan within the budget can do better than, by what was observed."""
        return lower_bound_s(self.facts, self.budget_bytes)

    def under(self, facts: Facts, budget_bytes: int) -> Plan:
        """Return the plan that decides alike from other facts or for another budget: it is simulated anew."""
        predicted = simulate(facts.deriving(self.derived), self.moved, self.recomputed, budget_bytes)
        return replace(self, facts=facts, budget_bytes=budget_bytes, predicted=predicted)

    def decides_as(self, other: Plan) -> bool:
        """Whether another plan decides alike."""
        return (self.moved, self.recomputed, self.derived) == (other.moved, other.recomputed, other.derived)

    @cached_property
    def prices(self) -> dict[str, float]:
        """Seconds of the predicted step that more memory, or a faster link, would save: decided anew with those."""
        if self.decide is None or self.idle or not self.fits:
            return {}
        facts, budget_bytes = self.facts, self.budget_bytes
        others = {"1 GiB more memory": self.decide(facts, budget_bytes + _MORE_BYTES)}
        if (spill := facts.link.spill) is not None:
            more = replace(spill, host_bytes=spill.host_bytes + _MORE_BYTES)
            host = replace(facts, link=replace(facts.link, spill=more))
            others["1 GiB more host memory"] = self.decide(host, budget_bytes)
            disk = replace(facts, link=replace(facts.link, spill=_faster(spill)))
        else:
            disk = replace(facts, link=_faster(facts.link))
        others["1 GB/s more disk"] = self.decide(disk, budget_bytes)
        now_s = self.predicted.step_s
        return {what: max(0.0, now_s - other.predicted.step_s) for what, other in others.items()}

    def binds(self) -> str:
        """Tell where in the step memory is at its peak."""
        return where(self.facts, self.predicted, self.predicted.peak)

    def shortfall(self) -> str:
        """Tell why it does not fit, and what would help; "" if it fits."""
        if self.fits:
            return ""
        facts, peak = self.facts, self.predicted.peak
        need = self.budget_bytes + max(0, self.missing_bytes)
        if facts.cap is not None and self.decide is not None:
            uncapped = self.decide(replace(facts, cap=None), self.budget_bytes)
            if uncapped.fits:
                return (
                    f"memory_budget={size(self.budget_bytes)} cannot be met: of {size(facts.saved_bytes)} that a step "
                    f"saves, {size(uncapped.predicted.moved_bytes)} would have to be written, and {facts.cap.why}. "
                    f"Raise that, set memory_budget to {size(need)} or more, or make batch or sequence smaller"
                )
        text = (
            f"memory_budget={size(self.budget_bytes)} cannot be met: of {size(facts.saved_bytes)} that a step saves, "
            f"the best plan keeps {size(peak.nbytes)} in memory {self.binds()}, beside the tensor being computed "
            f"({size(facts.largest_bytes)}). Set it to {size(need)} or more, make batch or sequence smaller, or use "
            'tier="nvme", which writes everything and has no budget'
        )
        refusals = ", ".join(f"{what}: {why}" for what, why in self._refusals())
        return f"{text}. Not recomputed: {refusals}" if refusals else text

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over the predicted step, by what holds it, with the budget; beneath it what the link carries.

        Args:
            path: the file; its ending chooses the format (.png, .pdf, .svg).

        Raises:
            ConfigError: matplotlib is not installed or does not know the format, or there is no such directory.
            OSError: the file cannot be written.
        """
        peak_bytes = None if self.measured is None else self.measured.peak_bytes
        draw(self.predicted, self.budget_bytes, peak_bytes, path)

    def __str__(self) -> str:
        return as_text(list(self._rows()), self._notes())

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return as_html(list(self._rows()), self._notes(), heads=0)

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        facts, found = self.facts, self.predicted
        total = facts.saved_bytes
        gone = sum(facts.block_bytes(block) for block in self.recomputed)
        inputs = sum(self.inputs.values())
        sent = sum(self.sends.values()) - inputs
        derived = sum(facts.saved[index].nbytes for index in self.derived)
        kept = total - gone - sent - derived

        def share(nbytes: int) -> str:
            return f"{nbytes / total:.0%}" if total else ""

        yield "a step saves", size(total), ""
        if (plain := sum(each.replayed_bytes for each in facts.saved)) != total:
            yield "  before codecs", size(plain), ""
        yield "budget", size(self.budget_bytes), share(self.budget_bytes)
        yield "  kept", size(kept), share(kept)
        if self.derived:
            yield f"  derived, {len(self.derived)} tensors", size(derived), share(derived)
        yield "  moved", size(sent), share(sent)
        if facts.link.spill is not None:
            yield "    to host memory", size(found.moved_bytes - found.spilled_bytes), ""
            yield "    on to disk", size(found.spilled_bytes), ""
        for kind, alike in facts.kinds.items():
            again = self.recomputed.intersection(alike)
            nbytes = sum(map(facts.block_bytes, again))
            yield f"  recomputed, {len(again)} of {len(alike)} {kind or 'blocks'}", size(nbytes), share(nbytes)
        if inputs:
            yield f"  their inputs moved, {len(self.inputs)}", size(inputs), share(inputs)
        yield "peak, predicted", size(found.peak.nbytes), self.binds()
        yield "step, predicted", f"{found.step_s:.3f} s", f"{found.step_s / facts.step_s:.2f}x of one that keeps all"
        yield "  lower bound", f"{self.bound_s:.3f} s", ""
        if self.measured is not None:
            beside = "beside what blocks recompute" if self.recomputed else ""
            yield "peak, measured", size(self.measured.peak_bytes), beside
            yield "step, measured", f"{self.measured.step_s:.3f} s", ""
        for what, seconds in self.prices.items():
            yield f"{what} would save", f"{seconds:.3f} s", ""
        yield "  waiting", f"{found.waited_s:.3f} s", ""
        yield "  recomputing", f"{found.replayed_s:.3f} s", ""
        if self.derived:
            yield "  deriving", f"{self.derived_s:.3f} s", ""
        if facts.watched_s:
            yield (
                "trying blocks took, once",
                f"{facts.watched_s:.3f} s",
                f"{facts.watched_s / facts.step_s:.2f}x of a step",
            )
        for what, reason in self._refusals():
            yield "  never recomputed", what, reason

    def _notes(self) -> list[str]:
        notes = [f"planned anew at step {self.made_in:,}: {self.reason}"] if self.reason else []
        return [*notes, *filter(None, (self.tried, self.agreed))]

    @property
    def runs_again(self) -> str:
        """Tell how many blocks recompute, and parts of them."""
        counts = Counter(self.facts.blocks[number].kind or "blocks" for number in sorted(self.recomputed))
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "0 blocks"

    def _refusals(self) -> list[tuple[str, str]]:
        """Tell what never recomputes, and why."""
        refused = ((block.why_not, block.kind or "blocks") for block in self.facts.blocks if block.replay_s is None)
        return [(f"{count} {kind}", why) for (why, kind), count in sorted(Counter(refused).items())]


def _faster(end: _End) -> _End:
    more = (end.write_bytes_per_s + _MORE_BYTES_PER_S, end.read_bytes_per_s + _MORE_BYTES_PER_S)
    return replace(end, write_bytes_per_s=more[0], read_bytes_per_s=more[1])


def where(facts: Facts, found: Timeline, moment: Moment) -> str:
    """Name the place of a moment in the step: forward, its end, or backward, and the block that is under way."""
    behind_s = moment.at_s - found.turn_s
    if behind_s <= 0:
        if moment.nbytes <= next(each.nbytes for each in found.moments if each.at_s >= found.turn_s):
            return "at the end of forward"
        begun = [number for number in facts.kinds[""] if facts.blocks[number].begin_s <= moment.at_s]
        return f"in forward, block {begun[-1]}" if begun else "in forward"
    last = OUTSIDE
    for each in map(facts.saved.__getitem__, facts.order_wanted):
        if each.wanted_s > behind_s:
            break
        last = each.place.block
    return "in backward" if last == OUTSIDE else f"in backward, block {last}"
