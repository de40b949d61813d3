"""Measuring arms that train: rounds in turns, in several sets of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._report.progress import progress
from .._report.steps import Measured
from .arms import Arm, Spec, in_turns, running
from .device import CPU, Device

WARM_UP_ROUNDS = 2


def run_rounds(
    specs: Sequence[Spec],
    *,
    rounds: int,
    title: str,
    warm_up: int = WARM_UP_ROUNDS,
    starts: int = 1,
    apart: bool = False,
) -> Iterator[tuple[Arm, int, dict[str, Any], bool]]:
    """Run all arms in turns, in `starts` sets of processes: at least `rounds` timed rounds in total.

    Each set begins with `warm_up` rounds, which are not timed. With `apart`, the arms of a set run one after the other,
    each alone from its first round to its last. Yields (arm, number of the round, answer, whether it is timed); the
    arms are closed at the end.
    """
    each = warm_up + -(-rounds // starts)
    together = [[spec] for spec in specs] if apart else [specs]
    with progress(title, starts * each * len(specs)) as bar:
        for start, some in ((start, some) for start in range(starts) for some in together):
            with running(some) as arms:
                for arm, number, answer in in_turns(arms, range(start * each, (start + 1) * each)):
                    yield arm, number, answer, number >= start * each + warm_up
                    bar.advance(arm.spec.name + (f": {answer['wall_s']:.2f} s" if "wall_s" in answer else ""))
                for arm in arms:
                    arm.close()


def measure(specs: Sequence[Spec], **turns: Any) -> dict[str, Measured]:
    """Run arms that train, as `run_rounds` does. The memory of all rounds counts, the time of timed ones."""
    found: dict[str, Measured] = {}
    for arm, number, answer, timed in run_rounds(specs, **turns):
        name = arm.spec.name
        one = found.setdefault(name, Measured(name=name, allocator=arm.allocator, about=arm.about))
        one.take(number, answer, timed=timed)
    return found


def measure_together(specs: Sequence[Spec], **turns: Any) -> dict[str, Measured]:
    """Run arms that train a family in turns in one process, as `run_rounds` does; their peaks mean nothing."""
    options = {"arms": {spec.name: dict(spec.options) for spec in specs}}
    one = replace(specs[0], name="all arms", role="several:SeveralArms", options=options)
    found: dict[str, Measured] = {}
    for arm, number, answers, timed in run_rounds([one], **turns):
        for spec in specs:
            about = arm.about[spec.name]
            each = found.setdefault(spec.name, Measured(name=spec.name, allocator=arm.allocator, about=about))
            each.take(number, answers[spec.name], timed=timed)
    return found


def count_saved_bytes(options: Mapping[str, Any], threads: int, device: Device = CPU) -> int:
    """Count the bytes that a plain step of a `FamilyArm` saves, in storages of at least the minimum size."""
    found = device.spec("keep", {**options, "tier": "keep"}, threads=threads)
    moved = measure([found], rounds=1, title=f"bytes {options['family']}", warm_up=1)["keep"].moved
    return int(moved["saved_bytes"] - moved["weight_bytes"] - moved["duplicate_bytes"])
