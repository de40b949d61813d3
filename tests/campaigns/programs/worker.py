"""Worker: runs the random programs it is asked for by seed, in a process of its own.

`python -m tests.campaigns.programs.worker DIRECTORY` serves the command `programs`.

An interrupted program is not compared. A SIGINT is raised at a random line that it runs in the engine's files; then the
same engine has to run another program to the same bits as plain PyTorch, with no record and no hook left.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import io_backends
import tba
from benchmarks._processes.serve import Tell, serve
from io_backends import PosixStore, interrupts
from io_backends.testing import FaultyStore
from tba import OffloadConfig, Offloader

from .check import WAYS, Engine, Plan, ShortCollections, compare, losing, through_idle_hooks
from .machine import NAMES, Instruction, Machine, Model

_ENGINE = tuple(os.path.join(os.path.dirname(package.__file__ or ""), "") for package in (tba, io_backends))
_MOST_LINES = 3000


def program_of(seed: int) -> tuple[str, list[Instruction], random.Random]:
    """Draw the case of a seed: its way, its instructions, and the random numbers that follow."""
    numbers = random.Random(seed)
    way = numbers.choice([*WAYS, "losing", "interrupted", "interrupted", "interrupted"])
    length = numbers.randint(4, 40)
    byte = [numbers.randrange(256) for _ in range(3 * length)]
    return way, [(numbers.choice(NAMES), *three) for three in zip(*[iter(byte)] * 3, strict=True)], numbers


def run_case(seed: int, directory: Path) -> tuple[str, str, str]:
    """Run the case of a seed; return its way, its verdict (ok, wrong, broken, struck) and the details."""
    way, program, numbers = program_of(seed)

    @contextmanager
    def make(plan: Plan | None, *, model: Model, threads: int = 1, **settings: Any) -> Iterator[Offloader]:
        store: Any = PosixStore(directory, threads=threads)
        config = OffloadConfig(**({"tier": "nvme", "min_tensor_bytes": 0} | settings))
        offload = Offloader(model, config, store=FaultyStore(store, plan) if plan is not None else store)
        try:
            yield offload
        finally:
            offload.close()

    if way == "interrupted":
        plan, chosen = numbers.choice(list(WAYS.values()))
        struck, detail = _interrupted(program, numbers, lambda model: make(plan, model=model, **chosen), plan, chosen)
        return way, "broken" if detail else "struck" if struck else "ok", detail
    plan, chosen = (losing, {"prefetch_bytes": 0}) if way == "losing" else WAYS[way]
    detail = compare(program, make, plan, **chosen)
    return way, "wrong" if detail else "ok", detail


def _interrupted(
    program: list[Instruction], numbers: random.Random, make: Any, plan: Plan | None, chosen: dict[str, Any]
) -> tuple[bool, str]:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with make(model) as offload:
            done, struck = _strike(program, Machine(model, Engine(offload)), numbers.randrange(_MOST_LINES))
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                return struck, "hooks are left on the stack"
            # A backward that failed leaves its queue and our handler until the next has ended, as PyTorch does.
            with offload:
                torch.ones(1, requires_grad=True).sin().backward()
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return struck, "the handler is left in place"
            offload.flush()
            gc.collect()
            left = offload.stats().live_records
            if left and not any(through_idle_hooks(program[:count])[1] for count in (done, done + 1)):
                return struck, f"{left} records are left"
            again = _random_program(numbers)

            @contextmanager
            def same(_: Plan | None, *, model: Model, **__: Any) -> Iterator[Offloader]:
                yield offload

            detail = compare(again, same, plan, records_before=left, **chosen)
            return struck, detail and f"after an interrupt: {detail}"


def _random_program(numbers: random.Random) -> list[Instruction]:
    byte = numbers.randrange
    return [(numbers.choice(NAMES), byte(256), byte(256), byte(256)) for _ in range(numbers.randint(4, 20))]


def _strike(program: list[Instruction], machine: Machine, line: int) -> tuple[int, bool]:
    """Run a program with a SIGINT at the `line`-th line it runs in the engine's files.

    Returns the number of instructions that ended, and whether the signal reached the program.
    """
    left, done = line, 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return local if left > 0 else None

    def tracer(frame: FrameType, event: str, _: Any) -> Any:
        return local if left > 0 and frame.f_code.co_filename.startswith(_ENGINE) else None

    struck = False
    try:
        sys.settrace(tracer)
        machine.step(("context", 0, 0, 0))
        for instruction in program:
            machine.step(instruction)
            done += 1
        while interrupts.pending:
            time.sleep(0.001)
    except KeyboardInterrupt:
        struck = True
    finally:
        sys.settrace(None)
    if machine.inside and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        machine.inside = False  # struck as it left
    elif not machine.inside and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        machine.inside = True  # struck as it had entered
    machine.finish()
    return done, struck


class Worker:
    """Runs the cases it is asked for, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._collections = directory, ShortCollections()
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored

    def answer(self, seed: int, tell: Tell) -> tuple[str, str, str]:
        """Run the case of a seed; return its way, verdict and details."""
        self._collections.before_a_program()
        return run_case(seed, self._directory)


if __name__ == "__main__":
    serve(Worker(Path(sys.argv[1])).answer)
