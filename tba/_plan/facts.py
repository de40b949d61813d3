"""Facts: what one step saves, when, what its blocks take, and what a link carries. What a plan is made from."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

OUTSIDE = -1  # the block of what no block saves
INPUTS = -2  # and, in its place, that of the inputs of blocks that recompute


class Place(NamedTuple):
    """Where in a step a storage is saved: the block's index in order of forward, or OUTSIDE, and its number in there.

    The input of a block that recomputes is the one with the block's index in INPUTS.

    It stays while other blocks recompute, as positions in the whole step would not.
    """

    block: int
    number: int


def input_place(block: int) -> Place:
    """Return where a block that recomputes saves its input."""
    return Place(INPUTS, block)


@dataclass(frozen=True, slots=True)
class Saved:
    """One storage that the step saves.

    Attributes:
        place: where.
        nbytes: of it that are saved, as a codec has left them; 0 where others give it again.
        saved_s: seconds from the begin of forward until its operator has finished, and it may move.
        wanted_s: seconds from the begin of backward until it is asked for first.
        plain_bytes: that it has without a codec, if there is one.
        freed_s: seconds from the begin of backward until its memory is given back, by then; None: as soon as another
            is asked for.
        derive_s: seconds that making it again from others takes, and comparing; None where it cannot be.
        sources: where those are saved.
    """

    place: Place
    nbytes: int
    saved_s: float
    wanted_s: float
    plain_bytes: int | None = None
    freed_s: float | None = None
    derive_s: float | None = None
    sources: tuple[Place, ...] = ()

    def outlasts(self, wanted_s: float) -> bool:
        """Whether its memory is still taken where backward, which has used it, asks for another."""
        return self.freed_s is not None and self.freed_s > wanted_s

    def scaled(self, ratio: float) -> Saved:
        """Return the storage of a step that takes `ratio` times as long."""
        freed_s, derive_s = (None if each is None else each * ratio for each in (self.freed_s, self.derive_s))
        saved_s, wanted_s = self.saved_s * ratio, self.wanted_s * ratio
        return replace(self, saved_s=saved_s, wanted_s=wanted_s, freed_s=freed_s, derive_s=derive_s)

    @property
    def replayed_bytes(self) -> int:
        """Bytes that it has where its block runs again: no codec sees it then."""
        return self.nbytes if self.plain_bytes is None else self.plain_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """One of the model's alike blocks, or a part of one, which may recompute instead of saving.

    Attributes:
        begin_s: seconds from the begin of forward until its forward begins.
        replay_s: seconds that running its forward again takes; None where it must not be.
        input_bytes: what it saves when it recomputes: its input, which may move.
        why_not: why it must not recompute.
        within: of a part, the index of its block; else OUTSIDE. A block recomputes whole, or some of its parts do.
        kind: of a part, its class.
        first, last: of a part, the numbers of its block's places from which on and up to which are its own.
        stays_bytes: of the input, those that may not move.
        small_bytes: of the input, those of small tensors, which have no record.
    """

    begin_s: float
    replay_s: float | None
    input_bytes: int
    why_not: str = ""
    within: int = OUTSIDE
    kind: str = ""
    first: int = 0
    last: int = 0
    stays_bytes: int = 0
    small_bytes: int = 0

    @property
    def moving_bytes(self) -> int:
        """Of the input, those that may move."""
        return self.input_bytes - self.stays_bytes

    def scaled(self, ratio: float, replay_ratio: float) -> Block:
        """Return a block that takes `ratio` times as long, and its second run `replay_ratio` times."""
        replay_s = None if self.replay_s is None else self.replay_s * replay_ratio
        return replace(self, begin_s=self.begin_s * ratio, replay_s=replay_s)


@dataclass(frozen=True, slots=True)
class Spill:
    """Host memory that a device's link leads to, and the disk that the oldest of it goes to where it is full.

    Attributes:
        host_bytes: that stay in host memory.
        queued_bytes: most bytes beyond them that wait in host memory for the disk.
        write_bytes_per_s, read_bytes_per_s: of the disk, while it is busy.
    """

    host_bytes: int
    queued_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float

    def slowed(self, times: float) -> Spill:
        """Return a disk that is so many times slower."""
        rates = self.write_bytes_per_s / times, self.read_bytes_per_s / times
        return replace(self, write_bytes_per_s=rates[0], read_bytes_per_s=rates[1])


@dataclass(frozen=True, slots=True)
class Link:
    """What carries bytes out and back.

    Attributes:
        write_bytes_per_s, read_bytes_per_s: while it is busy.
        step_s_per_byte: seconds that each byte, out and back, costs a step that never waits: transfers take cores,
            caches and memory bandwidth from the computation.
        in_flight_bytes: most bytes on their way out at once.
        spill: what is at its other end, if that is host memory with a disk beneath it.
        step_s_per_record: seconds that hooks take for each storage that goes out and comes back.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    step_s_per_byte: float = 0.0
    in_flight_bytes: int = 40 << 20
    spill: Spill | None = None
    step_s_per_record: float = 0.0

    def slowed(self, times: float) -> Link:
        """Return a link that is so many times slower, and its disk too."""
        rates = self.write_bytes_per_s / times, self.read_bytes_per_s / times
        spill = None if self.spill is None else self.spill.slowed(times)
        return replace(self, write_bytes_per_s=rates[0], read_bytes_per_s=rates[1], spill=spill)

    def change(self, before: Link) -> tuple[str, float]:
        """Return which has changed most, the "link" or the "disk" beneath it, and how many times as fast it is."""
        ends: list[tuple[str, Link | Spill, Link | Spill]] = [("link", self, before)]
        if self.spill is not None and before.spill is not None:
            ends.append(("disk", self.spill, before.spill))
        ratios = [
            (name, ratio)
            for name, new, old in ends
            for ratio in (new.write_bytes_per_s / old.write_bytes_per_s, new.read_bytes_per_s / old.read_bytes_per_s)
        ]
        return max(ratios, key=lambda each: max(each[1], 1 / each[1]))

    def times(self, other: Link) -> float:
        """How many times faster or slower it is than another, out or back, or its disk than the other's."""
        _, ratio = self.change(other)
        return max(ratio, 1 / ratio)


@dataclass(frozen=True, slots=True)
class Cap:
    """Most bytes that a step may write.

    Attributes:
        nbytes: so many.
        why: the setting that leaves no more, with its figures, for messages.
    """

    nbytes: int
    why: str


class _BlockBytes(NamedTuple):
    """Bytes of a block: that it saves, that of these are held at the end of forward, and that a second run saves."""

    saved: int = 0
    held: int = 0
    replayed: int = 0


_NONE = _BlockBytes()


@dataclass(frozen=True)
class Facts:
    """All that is known of a step.

    Attributes:
        saved: in order of forward.
        blocks: in order of forward, and then their parts.
        forward_s, backward_s: seconds of computation, without waiting and without transfers.
        link: that carries what moves.
        read_ahead_bytes: most bytes read before they are asked for.
        cap: on what moves; None for none.
        watched_s: seconds that finding out took once, beside the step: second runs of blocks, and comparing.
    """

    saved: tuple[Saved, ...]
    blocks: tuple[Block, ...]
    forward_s: float
    backward_s: float
    link: Link
    read_ahead_bytes: int
    cap: Cap | None = None
    watched_s: float = 0.0
    by_block: dict[int, list[int]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        by_block: dict[int, list[int]] = {}
        for index, each in enumerate(self.saved):
            by_block.setdefault(each.place.block, []).append(index)
        for number, part in enumerate(self.blocks):
            if part.within != OUTSIDE:
                inside = by_block.get(part.within, ())
                by_block[number] = [each for each in inside if part.first <= self.saved[each].place.number < part.last]
        object.__setattr__(self, "by_block", by_block)

    @cached_property
    def kinds(self) -> dict[str, list[int]]:
        """Indices of what is alike: blocks under "", parts under their class."""
        kinds: dict[str, list[int]] = {"": []}
        for number, block in enumerate(self.blocks):
            kinds.setdefault(block.kind, []).append(number)
        return kinds

    def again(self, recomputed: Iterable[int]) -> dict[Place, int]:
        """Tell by which of these blocks and parts a storage is made again, by its place."""
        return {self.saved[index].place: block for block in recomputed for index in self.by_block.get(block, ())}

    def inputs(self, recomputed: Iterable[int]) -> list[int]:
        """List what stands in `moved` for the inputs of these blocks; of parts, inputs stay."""
        count = len(self.saved)
        whole = (number for number in sorted(recomputed) if self.blocks[number].within == OUTSIDE)
        return [count + number for number in whole if self.blocks[number].moving_bytes and number in self.by_block]

    def keeping_inputs(self, of: Collection[int]) -> Facts:
        """Return the facts of a step in which the inputs of these blocks may not move."""
        blocks = [
            replace(block, stays_bytes=block.input_bytes) if number in of else block
            for number, block in enumerate(self.blocks)
        ]
        return replace(self, blocks=tuple(blocks))

    def input(self, number: int) -> Saved:
        """Return the input of a block that recomputes, as a storage: it is wanted ahead of all that the block saves."""
        block = self.blocks[number]
        asks_s = [self.saved[index].wanted_s for index in self.by_block[number]]
        # Its memory is given back as soon as backward, which has had all of the block, asks for something else.
        wanted_s, freed_s = math.nextafter(min(asks_s), -math.inf), math.nextafter(max(asks_s), math.inf)
        return Saved(input_place(number), block.moving_bytes, block.begin_s, wanted_s, freed_s=freed_s)

    def at(self, index: int) -> Saved:
        """Return what stands in `moved` at an index: a storage, or the input of a block that recomputes."""
        count = len(self.saved)
        return self.saved[index] if index < count else self.input(index - count)

    def saving_inputs(self, moved: Collection[int], recomputed: Collection[int]) -> tuple[Facts, set[int]]:
        """Return the facts of a step in which inputs that move are storages, and what moves by its indices."""
        count = len(self.saved)
        inputs = set(self.inputs(recomputed)).intersection(moved)
        if not inputs:
            return self, {index for index in moved if index < count}
        items = [(index, self.at(index)) for index in (*range(count), *sorted(inputs))]
        items.sort(key=lambda item: item[1].saved_s)
        blocks = [
            replace(block, input_bytes=block.stays_bytes) if count + number in inputs else block
            for number, block in enumerate(self.blocks)
        ]
        indices = {index for index, (before, _) in enumerate(items) if before in moved}
        return replace(self, saved=tuple(each for _, each in items), blocks=tuple(blocks)), indices

    @cached_property
    def order_wanted(self) -> list[int]:
        """Indices of what is saved, in the order in which backward asks."""
        return sorted(range(len(self.saved)), key=lambda index: (self.saved[index].wanted_s, -index))

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that the step saves where nothing is recomputed."""
        return sum(each.nbytes for each in self.saved)

    @cached_property
    def held_bytes(self) -> int:
        """Bytes that it holds at the end of forward, where nothing goes either."""
        return sum(self.saved[index].nbytes for index in self.movable)

    @property
    def most_moved_bytes(self) -> int:
        """Bytes that may move: all that is saved, unless a cap is below that."""
        return self.saved_bytes if self.cap is None else min(self.cap.nbytes, self.saved_bytes)

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward that move and recompute nothing."""
        return self.forward_s + self.backward_s

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest saved storage, before any codec: there it is when it is computed."""
        return max((each.replayed_bytes for each in self.saved), default=0)

    def scaled(self, ratio: float, replay_ratio: float | None = None) -> Facts:
        """Return the facts of a step whose computation takes `ratio` times as long.

        Second runs of blocks take `replay_ratio` times as long; None: so many times as well.
        """
        replay_ratio = ratio if replay_ratio is None else replay_ratio
        return replace(
            self,
            saved=tuple(each.scaled(ratio) for each in self.saved),
            blocks=tuple(block.scaled(ratio, replay_ratio) for block in self.blocks),
            forward_s=self.forward_s * ratio,
            backward_s=self.backward_s * ratio,
        )

    def holding(self, nbytes: Mapping[Place, int]) -> Facts:
        """Return the facts of a step of which codecs leave these bytes, in the places that are given."""
        if all(nbytes.get(each.place, each.nbytes) == each.nbytes for each in self.saved):
            return self
        saved = (replace(each, nbytes=nbytes.get(each.place, each.nbytes)) for each in self.saved)
        return replace(self, saved=tuple(saved))

    @cached_property
    def derivable(self) -> list[int]:
        """Indices of what others may give again, the cheapest a byte first."""
        costs = {index: each.derive_s for index, each in enumerate(self.saved) if each.derive_s is not None}
        may = [index for index in costs if self.saved[index].nbytes and not self.is_late(index)]
        return sorted(may, key=lambda index: (costs[index] / self.saved[index].nbytes, index))

    def deriving(self, derived: Collection[int]) -> Facts:
        """Return the facts of a step in which others give these storages again, and no more can be decided on that.

        They have no bytes, and backward makes each where it asks for it, and so needs what it is made from by then.
        """
        if not derived:
            return self
        hooks_s = self.link.step_s_per_record
        costs = [(each.derive_s or 0.0) + hooks_s if index in derived else 0.0 for index, each in enumerate(self.saved)]
        order = self.order_wanted
        late_s = dict(zip(order, accumulate((costs[index] for index in order), initial=0.0), strict=False))
        asks_s, lates_s = zip(*((self.saved[index].wanted_s, late_s[index]) for index in order), strict=True)
        wanted = {each.place: each.wanted_s + late_s[index] for index, each in enumerate(self.saved)}
        needed = dict(wanted)
        for index in derived:
            for place in self.saved[index].sources:
                needed[place] = min(needed.get(place, math.inf), wanted[self.saved[index].place])
        saved = []
        for index, each in enumerate(self.saved):
            freed_s = each.freed_s
            if freed_s is not None:
                freed_s += sum(costs) if freed_s > asks_s[-1] else lates_s[bisect_left(asks_s, freed_s)]
            if needed[each.place] < wanted[each.place]:  # it stays until it is asked for itself
                freed_s = max(freed_s or 0.0, math.nextafter(wanted[each.place], math.inf))
            each = replace(each, wanted_s=needed[each.place], freed_s=freed_s, derive_s=None)
            saved.append(replace(each, nbytes=0, plain_bytes=each.replayed_bytes) if index in derived else each)
        return replace(self, saved=tuple(saved), backward_s=self.backward_s + sum(costs))

    @cached_property
    def movable(self) -> list[int]:
        """Indices of what has bytes to move."""
        return [index for index, each in enumerate(self.saved) if each.nbytes and not self.is_late(index)]

    def is_late(self, index: int) -> bool:
        """Whether a storage's operator has finished only where backward asks for it: until then it is not held."""
        return self.saved[index].saved_s >= self.forward_s

    def at_best(self) -> Facts:
        """Return the facts of a step whose operators finish at once, and let go of what they have used at once."""
        last_s = self.forward_s * (1 - 1e-9)  # still before the end of forward after `scaled` rounds
        saved = (replace(each, saved_s=min(each.saved_s, last_s), freed_s=None) for each in self.saved)
        return replace(self, saved=tuple(saved))

    def block_bytes(self, block: int) -> int:
        """Bytes that a block saves."""
        return self._bytes_by_block.get(block, _NONE).saved

    def held_block_bytes(self, block: int) -> int:
        """Bytes that a block saves and the step still holds at the end of forward."""
        return self._bytes_by_block.get(block, _NONE).held

    def replayed_bytes(self, block: int) -> int:
        """Bytes that a block saves where it runs again, which no codec sees."""
        return self._bytes_by_block.get(block, _NONE).replayed

    def replay_bytes(self, recomputed: Iterable[int]) -> int:
        """Bytes that come back at once where blocks recompute: those of the largest."""
        return max(map(self.replayed_bytes, recomputed), default=0)

    @cached_property
    def _bytes_by_block(self) -> dict[int, _BlockBytes]:
        return {
            block: _BlockBytes(
                saved=sum(self.saved[index].nbytes for index in inside),
                held=sum(self.saved[index].nbytes for index in inside if not self.is_late(index)),
                replayed=sum(self.saved[index].replayed_bytes for index in inside),
            )
            for block, inside in self.by_block.items()
        }
