"""Worker: searches random programs for one that is not exact, a batch at a time, in a process of its own.

`python -m tests.campaigns.programs.worker DIRECTORY DEVICE` serves the command `programs`. A batch is what hypothesis
draws from its seed, so a seed shows the same programs again. Of those that fail the smallest is reported.

An interrupted program is not compared. A SIGINT is raised at one of the places in the engine that it passes; then the
same engine has to run another program to the same bits as plain PyTorch, with no record and no hook left.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

import io_backends
import tba
from benchmarks._processes.serve import Tell, serve
from support.signals import interrupted_at, places
from tba import Offloader
from tba._torch import private

from ..device import open_device, shuffle
from .check import LOSING, ShortCollections, compare, losing, maker, through_idle_hooks, ways_of
from .machine import PROGRAMS, Instruction, Machine, Model

BATCH = 50  # programs of a seed
_RAISES = ("signals.py", "opcodes.py", "interrupts.py")  # files of what raises an interrupt
_ENGINE = tuple(os.path.join(os.path.dirname(package.__file__ or ""), "") for package in (tba, io_backends))


class Case(NamedTuple):
    """A program and its way; where it is interrupted, the number of the place among those it passes (-1: nowhere)."""

    way: str
    program: list[Instruction]
    place: int = -1
    after: tuple[Instruction, ...] = ()  # what the same engine runs then


def cases_of(device: torch.device) -> st.SearchStrategy[Case]:
    """Return what draws a case of a device."""
    ways = [*ways_of(device)]
    interrupted = st.builds(Case, st.sampled_from(ways), PROGRAMS, st.integers(0, 1 << 16), PROGRAMS.map(tuple))
    alone = st.builds(Case, st.sampled_from([*ways, LOSING]), PROGRAMS, st.just(-1), st.just(()))
    return st.integers(0, 12).flatmap(lambda number: alone if number < 10 else interrupted)


def run_case(case: Case, directory: Path, device: torch.device) -> tuple[str, str]:
    """Run a case; return its verdict (ok, wrong, broken, struck) and the details."""
    plan, chosen = (losing, {"prefetch_bytes": 0}) if case.way == LOSING else ways_of(device)[case.way]
    make = maker(device, directory)
    if case.place < 0:
        detail = compare(case.program, make, plan, device=device, **chosen)
        return "wrong" if detail else "ok", detail
    with make(plan, model=(model := Model(device)), **chosen) as offload:
        machine = Machine(model, offload)
        found = places(lambda: machine.run(case.program), _ENGINE)
        machine.finish()
    if not found:
        return "ok", ""
    with make(plan, model=(model := Model(device)), **chosen) as offload:
        machine, struck_in = Machine(model, offload), list[str]()
        struck = interrupted_at(found[case.place % len(found)], lambda: _noting(machine, case.program, struck_in))
        machine.inside = offload.entered  # it may have been struck as it entered or left
        machine.finish()
        detail, left = _after(case, machine.done, struck_in, offload, device)
        detail = detail or compare(
            case.after, lambda *_, **__: nullcontext(offload), plan, device=device, records_before=left, **chosen
        )
    return "broken" if detail else "struck" if struck else "ok", detail


def _noting(machine: Machine, program: list[Instruction], struck_in: list[str]) -> None:
    """Run a program, and note the function that an interrupt strikes."""
    try:
        machine.run(program)
    except KeyboardInterrupt as error:
        frames = traceback.extract_tb(error.__traceback__)
        struck_in += [frame.name for frame in frames if not frame.filename.endswith(_RAISES)][-1:]
        raise


def _after(case: Case, done: int, struck_in: list[str], offload: Offloader, device: torch.device) -> tuple[str, int]:
    """Say what an interrupt has left behind that must not be, or ""; and how many records PyTorch itself keeps."""
    left = 0
    while private.top_hooks(True) is not None:
        private.pop_hooks()
        left += 1
    # As a `with` statement over the program's own hooks begins to end, PyTorch leaves them on, too; its `checkpoint`
    # also does while it throws an error into the generator that holds the statement.
    if left and struck_in not in (["__exit__"], ["_pop"], ["checkpoint"]):
        return f"{left} pairs of hooks are left on the stack, struck in {struck_in}", 0
    # A backward that failed leaves its queue and our handler until the next has ended, as PyTorch does.
    with offload:
        torch.ones(1, device=device, requires_grad=True).sin().backward()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return "the handler is left in place", 0
    offload.flush()
    gc.collect()
    left = offload.stats().live_records
    if left and not any(through_idle_hooks(case.program[:count], device)[1] for count in (done - 1, done)):
        return f"{left} records are left", left
    return "", left


def search(seed: int, directory: Path, device: torch.device, collections: ShortCollections) -> dict[str, Any]:
    """Run the batch of a seed; return how many cases there were by way and verdict, and the smallest that failed."""
    counts, failed = Counter[tuple[str, str]](), dict[str, str]()

    @hypothesis.seed(seed)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases_of(device))
    def batch(case: Case) -> None:
        collections.before_a_program()
        verdict, detail = run_case(case, directory, device)
        if not failed:  # once one has failed, smaller ones are tried
            counts[case.way if case.place < 0 else "interrupted", verdict] += 1
        if verdict in ("wrong", "broken"):
            failed.setdefault("first", f"{detail}: {case}")  # the smallest may be another's, or fail only at times
            failed.update(verdict=verdict, detail=f"{detail}: {case}")
        assert verdict not in ("wrong", "broken"), detail

    try:
        batch()
    except Exception as error:
        failed.setdefault("verdict", "wrong")
        failed.setdefault("detail", repr(error))
    return {"counts": [[*which, count] for which, count in counts.items()], "failed": failed}


class Worker:
    """Searches the batches it is asked for, in `directory` and on `device`."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory, self._device, self._collections = directory, device, ShortCollections()
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored

    def answer(self, seed: int, tell: Tell) -> dict[str, Any]:
        """Search the batch of a seed."""
        shuffle(self._device, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return search(seed, self._directory, self._device, self._collections)


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1]), open_device(sys.argv[2])).answer)
