"""Watch: what one step shows of its blocks and of what it saves, and the facts that follow from it.

Times are of computation: what transfers, trials and waiting have taken is left out by who notes them.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from .._plan.facts import OUTSIDE, Block, Facts, Link, Place, Saved, input_place
from .._torch.modes import quiet
from .alike import evened_layers
from .given import Given, Input
from .recompute import Took
from .shared_storages import AtHand, SharedStorages, has_storage
from .timeline import Timeline
from .trial import Trial, Verdict

FIRST_PART = OUTSIDE - 1  # the number of the first part's visit, below which those of others are
_APART_S = 1e-9  # of two times in a row, at least: their order is told by them


@dataclass
class Part:
    """A visit of a part of a block.

    Attributes:
        kind: its class.
        block: the visit of its block.
        begin_s, end_s: when its forward began and ended, by the clock.
        given: to it.
        first, last: the numbers of the places in its block from which on and up to which are its own.
        leaks: what it has saved is saved again outside of it.
    """

    module: weakref.ref[nn.Module]
    kind: str
    block: int
    begin_s: float
    given: Input
    first: int
    last: int = 1 << 62
    end_s: float = math.inf
    leaks: bool = False


@dataclass
class Watch:
    """What has been seen of the step under way.

    Attributes:
        begun_s: when it began, by the clock.
        saved: place, bytes and time of each storage, by record number; the time is when its operator had finished.
        held: bytes that a codec has left of it, by record number; 0 where others give it again.
        derivable: what making it again from others takes, and from which, by record number.
        prompt: numbers of records whose operators had finished when backward began.
        asked: when backward asked for it first, by record number.
        freed: how many backward had asked for when its memory was given back, by record number.
        visits: of blocks: the module, when its forward began, its input.
        parts: of blocks, visited within them.
        ran: parts that have run by a plan, by their index in it.
        replays: of blocks and parts that run again by a plan.
        trials: of blocks and parts, by the number of the visit.
        untried: why a block must not recompute whose trial has found nothing.
        counts: storages saved so far, by block.
        shared: what is saved by a block and again elsewhere: it is none of that block's.
        met: places of shared storages that a planned step has saved outside of the blocks that saved them first.
        input_bytes: saved so far of inputs that go, by where blocks that recompute save them.
        saved_elsewhere: blocks that have saved what others save too, which goes or stays as theirs.
        given: what blocks were given, and what their parts were.
        inside: bytes that each module has saved that may be a block.
        nbytes: saved so far, before any codec.
        aside_s: what trials have taken.
        timeline: where the model is on a device: when that did it all.
        step_s: until backward asked last, by the clock.
        turned: backward has asked for something.
        followed: it did what one before did, from its beginning, and has records only of what is to go.
        departed: it is not the step that was expected.
    """

    begun_s: float
    saved: dict[int, tuple[Place, int, float]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    derivable: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    prompt: set[int] = field(default_factory=set)
    asked: dict[int, float] = field(default_factory=dict)
    freed: dict[int, int] = field(default_factory=dict)
    visits: list[tuple[weakref.ref[nn.Module], float, Input]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    ran: set[int] = field(default_factory=set)
    replays: list[Took] = field(default_factory=list)
    trials: dict[int, Trial] = field(default_factory=dict)
    untried: str = ""
    counts: dict[int, int] = field(default_factory=dict)
    shared: SharedStorages = field(default_factory=SharedStorages)
    met: set[Place] = field(default_factory=set)
    input_bytes: dict[Place, int] = field(default_factory=dict)
    saved_elsewhere: set[int] = field(default_factory=set)
    given: tuple[Given, Given] = field(default_factory=lambda: (Given(), Given()))
    inside: dict[nn.Module, int] = field(default_factory=dict)
    nbytes: int = 0
    aside_s: float = 0.0
    timeline: Timeline | None = None
    step_s: float = 0.0
    turned: bool = False
    followed: bool = False
    departed: bool = False

    def inputs_left(self, inputs: Mapping[Place, int]) -> list[int]:
        """List the blocks of whose inputs, which were to go, less has been saved: these stay."""
        if self.followed:
            return []
        left = (place.number for place, nbytes in inputs.items() if self.input_bytes.get(place, 0) < nbytes)
        return [block for block in left if block not in self.saved_elsewhere]

    def place(self, block: int) -> Place:
        """Give the next storage that `block` saves its place; that of a part is one of its block's."""
        block = self.whole(block)
        number = self.counts.get(block, 0)
        self.counts[block] = number + 1
        return Place(block, number)

    def ready(self, number: int, at_s: float) -> None:
        """Note that the operator which saved the record `number` has finished."""
        if not self.turned and (saved := self.saved.get(number)) is not None:
            self.saved[number] = *saved[:2], at_s
            self.prompt.add(number)

    def stretch(self, block: int) -> int:
        """Number the stretch of forward that is under way, in a block or between two."""
        return 2 * len(self.visits) - (block != OUTSIDE)

    def again(self, block: int, number: int, at_hand: AtHand, root: Tensor | None) -> None:
        """Note that `block` saves the record `number` once more."""
        place = self.saved[number][0] if number in self.saved else Place(OUTSIDE, 0)
        if place.block not in (OUTSIDE, self.whole(block)):
            self.shared.again(number, at_hand.where(self.stretch(block), root))
        for visit, part in enumerate(self.parts):
            if part.block == place.block and part.first <= place.number < part.last and FIRST_PART - visit != block:
                part.leaks = True

    def visit(self, module: nn.Module, at_s: float, given: Iterable[Any]) -> int:
        """Note that a block's forward begins; returns the number of the visit."""
        self.visits.append((weakref.ref(module), at_s, self._input(given)))
        return len(self.visits) - 1

    def visit_part(self, block: int, module: nn.Module, at_s: float, given: Iterable[Any]) -> int | None:
        """Note that the forward of a part of `block` begins; None if it has been visited in there, or is within one."""
        if block < OUTSIDE or any(part.block == block and part.module() is module for part in self.parts):
            return None
        first = self.counts.get(block, 0)
        found = self._input(given, part=True)
        self.parts.append(Part(weakref.ref(module), type(module).__name__, block, at_s, found, first))
        return FIRST_PART - len(self.parts) + 1

    def leave_part(self, visit: int, at_s: float) -> None:
        """Note that it has ended."""
        part = self.parts[FIRST_PART - visit]
        part.end_s, part.last = at_s, self.counts.get(part.block, 0)

    def whole(self, block: int) -> int:
        """Return the block that a part is in, by the numbers of their visits; a block's own number."""
        return self.parts[FIRST_PART - block].block if block <= FIRST_PART else block

    def _input(self, given: Iterable[Any], *, part: bool = False) -> Input:
        with quiet():
            return self.given[part].take(filter(has_storage, given))

    @property
    def replayed_s(self) -> float:
        """Seconds that blocks have run again, by the host's clock."""
        return sum(each.seconds for each in self.replays)

    @property
    def held_bytes(self) -> int:
        """Bytes of the step that would stay, were there room for all."""
        held = self.held
        return self.nbytes - sum(
            nbytes - held[number] for number, (_, nbytes, _) in self.saved.items() if number in held
        )

    def held_by_place(self) -> dict[Place, int]:
        """Give the bytes that codecs have left, by place."""
        return {place: self.held[number] for number, (place, _, _) in self.saved.items() if number in self.held}

    def take_times_of_device(self) -> None:
        """Put the device's times in place of the host's. It waits for the device."""
        if self.timeline is None:
            return
        times = self.timeline.times()
        self.saved = {number: (*saved[:2], times.get(saved[2], saved[2])) for number, saved in self.saved.items()}
        self.asked = {number: times.get(at_s, at_s) for number, at_s in self.asked.items()}
        self.visits = [(module, times.get(at_s, at_s), given) for module, at_s, given in self.visits]
        for part in self.parts:
            part.begin_s, part.end_s = (times.get(at_s, at_s) for at_s in (part.begin_s, part.end_s))
        self.aside_s = self.timeline.aside_s

    def facts(self, link: Link, read_ahead_bytes: int) -> Facts:
        """Conclude the facts of a step that has been watched to its end."""
        asks_s = _ascending(self.asked.values())
        asked = dict(zip(self.asked, asks_s, strict=True))
        turn_s, last_s = asks_s[0], asks_s[-1]
        self.shared.settle({number: place for number, (place, _, _) in self.saved.items()})
        times_s = _ascending(saved_s for _, _, saved_s in self.saved.values())
        places = {number: self.shared.outside.get(place, place) for number, (place, _, _) in self.saved.items()}
        ends_s = [*(ask_s - turn_s for ask_s in asks_s), math.inf]  # the last: after all that was asked for
        saved = tuple(
            Saved(
                places[number],
                self.held.get(number, nbytes),
                min(saved_s, turn_s - _APART_S) if number in self.prompt else turn_s,
                asked.get(number, last_s) - turn_s,
                nbytes,
                ends_s[self.freed.get(number, -1)],
                self.derivable[number][0] if number in self.derivable else None,
                tuple(places[each] for each in self.derivable.get(number, (0.0, ()))[1] if each in places),
            )
            for (number, (_, nbytes, _)), saved_s in zip(self.saved.items(), times_s, strict=True)
        )
        blocks = []
        begins_s = _ascending(begin_s for _, begin_s, _ in self.visits)
        kinds = [type(module()) for module, _, _ in self.visits]
        slowest_s = _slowest(zip(kinds, (end_s - begin_s for begin_s, end_s in pairwise(begins_s)), strict=False))
        for visit, (kind, (_, _, given)) in enumerate(zip(kinds, self.visits, strict=True)):
            verdict = self._verdict(visit)
            replay_s = _at_most(verdict.seconds, slowest_s.get(kind))
            blocks.append(_block(begins_s[visit], replay_s, given, verdict.why_not))
        slowest_parts_s = _slowest((part.kind, part.end_s - part.begin_s) for part in self.parts)
        for number, part in enumerate(self.parts):
            verdict = self._verdict(FIRST_PART - number)
            if part.leaks:
                verdict = Verdict(None, "what it saves is saved again outside of it")
            replay_s = _at_most(verdict.seconds, slowest_parts_s[part.kind])
            block = _block(part.begin_s, replay_s, part.given, verdict.why_not)
            blocks.append(replace(block, within=part.block, kind=part.kind, first=part.first, last=part.last))
        if self.timeline is None:  # a device's own times tell nothing but the device's work
            classes: list[Any] = [*kinds, *(part.kind for part in self.parts)]
            saved, blocks = evened_layers(saved, blocks, classes)
        return Facts(
            saved=saved,
            blocks=tuple(blocks),
            forward_s=turn_s,
            backward_s=last_s - turn_s,
            link=link,
            read_ahead_bytes=read_ahead_bytes,
            watched_s=self.aside_s,
        )

    def _verdict(self, visit: int) -> Verdict:
        trial = self.trials.get(visit)
        return (trial.verdict if trial is not None else None) or Verdict(None, self.untried)


@dataclass
class Places:
    """Where a planned step is to save what.

    Attributes:
        nbytes: of what is saved there, before any codec, by place.
        shared: storages that a block saves, and something outside of it.
        recomputed: blocks that run again.
        inputs: most bytes of an input that is to go, by where the block that recomputes saves it.
    """

    nbytes: dict[Place, int] = field(default_factory=dict)
    shared: SharedStorages = field(default_factory=SharedStorages)
    recomputed: frozenset[int] = frozenset()
    inputs: dict[Place, int] = field(default_factory=dict)

    def find(self, seen: Watch, block: int, at_hand: AtHand, root: Tensor | None, nbytes: int) -> Place | None:
        """Find the place of what `block` saves now; None if nothing of as many bytes is to be saved there."""
        first = self.shared.first(at_hand.where(seen.stretch(block), root)) if self.shared.outside else None
        if first is not None and self._is_missing(seen, first, nbytes):
            seen.saved_elsewhere.add(block)
            return self._meet(seen, first)
        inside = seen.place(block)
        place = self.shared.outside.get(inside, inside)
        runs_again = block in self.recomputed  # it saves its input first, whatever it saved first before
        if self.nbytes.get(place) == nbytes and not (runs_again and place == inside):
            seen.saved_elsewhere.add(block)
            return place
        if runs_again:
            return self._input(seen, input_place(block), nbytes)
        first = next((each for each in self.shared.outside if self._is_missing(seen, each, nbytes)), None)
        if first is None:
            return None
        seen.counts[block] -= 1
        return self._meet(seen, first)

    def _input(self, seen: Watch, place: Place, nbytes: int) -> Place | None:
        """Return where the input of a block is saved, unless it does not go or there has been all of it."""
        found_bytes = seen.input_bytes.get(place, 0) + nbytes
        if found_bytes > self.inputs.get(place, 0):
            return None
        seen.input_bytes[place] = found_bytes
        return place

    def _is_missing(self, seen: Watch, first: Place, nbytes: int) -> bool:
        """Whether what was saved first at `first` is still to be saved, as its block recomputes."""
        place = self.shared.outside[first]
        return first.block in self.recomputed and place not in seen.met and self.nbytes.get(place) == nbytes

    def _meet(self, seen: Watch, first: Place) -> Place:
        place = self.shared.outside[first]
        seen.met.add(place)
        return place


def _block(begin_s: float, replay_s: float | None, given: Input, why_not: str) -> Block:
    stays_bytes, small_bytes = given.stays_bytes, given.small_bytes
    return Block(begin_s, replay_s, given.nbytes, why_not, stays_bytes=stays_bytes, small_bytes=small_bytes)


def _slowest(runs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Return how long the slowest run of each kind took in forward.

    A single run tells little: what transfers took is taken off where they end, which may be all of a run's time.
    """
    found: dict[Any, float] = {}
    for kind, took_s in runs:
        found[kind] = max(took_s, found.get(kind, 0.0))
    return found


def _at_most(trial_s: float | None, forward_s: float | None) -> float | None:
    """Return what running again takes: as the trial did, which transfers of backward may slow down, or forward did."""
    return trial_s if trial_s is None or forward_s is None else min(trial_s, forward_s)


def _ascending(times_s: Iterable[float]) -> list[float]:
    """Raise each time above those before it: what was taken off for transfers is an estimate, the order is not."""
    return list(itertools.accumulate(times_s, lambda last_s, next_s: max(last_s + _APART_S, next_s)))
