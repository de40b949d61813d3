"""Alike: layers of one class that save the same take equally long; what differs in one step's times is noise.

A plan that took each layer at its own time, measured once, would choose those that happened to be fast, and promise a
step that is faster than it can be. Layers of one class that really differ (attention over a window in every other one)
keep their own times where these are far apart.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import replace

from .._plan.facts import OUTSIDE, Block, Saved

_FAR = 2.0  # times the median, or a part of it: beyond, a time is a layer's own


def evened(times_s: Iterable[tuple[Hashable, float | None]]) -> list[float | None]:
    """Put the median of its kind in place of each time (kind, seconds), unless the two are far apart."""
    times_s = list(times_s)
    by_kind: dict[Hashable, list[float]] = defaultdict(list)
    for kind, time_s in times_s:
        if time_s is not None:
            by_kind[kind].append(time_s)
    medians_s = {kind: statistics.median(found) for kind, found in by_kind.items()}
    return [
        medians_s[kind] if time_s is not None and medians_s[kind] / _FAR <= time_s <= medians_s[kind] * _FAR else time_s
        for kind, time_s in times_s
    ]


def evened_layers(
    saved: tuple[Saved, ...], blocks: list[Block], kinds: Iterable[Hashable]
) -> tuple[tuple[Saved, ...], list[Block]]:
    """Even out what it takes to run blocks of a step again, and to make again what they save.

    Args:
        saved: all storages of the step.
        blocks: its blocks, whole ones first, then parts (`Block.within`).
        kinds: the class of each block.
    """
    sizes: dict[int, dict[int, int]] = defaultdict(dict)  # of what a block saves, by number
    for each in saved:
        sizes[each.place.block][each.place.number] = each.plain_bytes or each.nbytes
    alike: list[Hashable] = []
    for number, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
        whole = block.within == OUTSIDE
        own = sizes[number if whole else block.within]
        alike.append((kind, tuple(own[at] for at in sorted(own) if whole or block.first <= at < block.last)))
    replays_s = evened(zip(alike, (block.replay_s for block in blocks), strict=True))
    derives_s = evened(
        ((alike[each.place.block], each.place.number) if each.place.block != OUTSIDE else each.place, each.derive_s)
        for each in saved
    )
    return (
        tuple(replace(each, derive_s=time_s) for each, time_s in zip(saved, derives_s, strict=True)),
        [replace(block, replay_s=time_s) for block, time_s in zip(blocks, replays_s, strict=True)],
    )
