"""Measuring arms that train: rounds in turns, in several sets of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._report.progress import progress
from .._report.results import mib
from .._report.steps import Measured
from .arms import Spec, in_turns, running
from .device import CPU, Device

WARM_UP_ROUNDS = 2


def measure(
    specs: Sequence[Spec],
    *,
    rounds: int,
    title: str,
    warm_up: int = WARM_UP_ROUNDS,
    starts: int = 1,
    apart: bool = False,
) -> dict[str, Measured]:
    """Run all arms in turns, in `starts` sets of processes: at least `rounds` timed rounds in total.

    Each set begins with `warm_up` rounds: their memory counts, their time does not. With `apart`, the arms of a set run
    one after the other, each alone from its first round to its last.
    """
    each = warm_up + -(-rounds // starts)
    found: dict[str, Measured] = {}
    together = [[spec] for spec in specs] if apart else [specs]
    with progress(title, starts * each * len(specs)) as bar:
        for start, some in ((start, some) for start in range(starts) for some in together):
            with running(some) as arms:
                for arm in arms:
                    name = arm.spec.name
                    found.setdefault(name, Measured(name=name, allocator=arm.allocator, about=arm.about))
                for arm, number, answer in in_turns(arms, range(start * each, (start + 1) * each)):
                    found[arm.spec.name].take(number, answer, timed=number >= start * each + warm_up)
                    bar.advance(f"{arm.spec.name}: {answer['wall_s']:.2f} s, {mib(answer['peak_bytes'])} MiB over idle")
                for arm in arms:
                    arm.close()
    return found


def count_saved_bytes(options: Mapping[str, Any], threads: int, device: Device = CPU) -> int:
    """Count the bytes that a plain step of a `FamilyArm` saves, in storages of at least the minimum size."""
    found = device.spec("keep", {**options, "tier": "keep"}, threads=threads)
    moved = measure([found], rounds=1, title=f"bytes {options['family']}", warm_up=1)["keep"].moved
    return int(moved["saved_bytes"] - moved["weight_bytes"] - moved["duplicate_bytes"])
