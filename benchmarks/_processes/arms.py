"""Arms as processes: each under its own allocator, taking turns so that they share the machine's noise.

Timing on a small machine drifts by tens of percent within minutes. So all arms are alive at once, one works at a time
(A B A B ...), every other round runs in reverse, and results are ratios within a round. `ask` runs one without turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from .._report.results import CannotMeasure
from .child import Child
from .serve import Tell

_WORKER = "benchmarks._processes.worker"
# A turn takes a few seconds; the timeout only ends one that hangs.
_TURN_TIMEOUT_S = 600.0
# The longest arm without turns times every codec, which takes minutes.
_ASK_TIMEOUT_S = 3600.0
# OpenMP's threads spin for some milliseconds after their work; the next arm should not run at the same time.
SETTLE_S = 0.02
# Variables that choose or tune an allocator; removed for the arm that runs "as Python comes".
_ALLOCATOR_PREFIXES = ("LD_PRELOAD", "MALLOC_", "_RJEM_MALLOC_CONF", "JE_MALLOC_CONF", "MIMALLOC_", "GLIBC_TUNABLES")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One arm: its name, the role and options of its process, its allocator and its threads.

    `role` names a module of `_arms` and what to call in it, such as "train:TrainArm".
    `allocator` is "as-is" (as Python comes) or a name that `tba run --allocator` takes.
    """

    name: str
    role: str
    options: Mapping[str, Any]
    allocator: str = "as-is"
    threads: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without variables that choose or tune an allocator."""
    return {name: value for name, value in environ.items() if not name.startswith(_ALLOCATOR_PREFIXES)}


def arm_environment(spec: Spec, environ: Mapping[str, str]) -> tuple[dict[str, str], str, str]:
    """Return the environment of an arm's process, the name of its allocator, and why that one.

    Raises:
        CannotMeasure: this machine does not have the allocator.
    """
    environment, allocator, reason = plain_environment(environ), "as Python comes", "nothing is preloaded or tuned"
    if spec.allocator != "as-is":
        from tba import ConfigError
        from tba.cli import allocator_environment

        try:
            chosen = allocator_environment(spec.allocator, environ=environment)
        except ConfigError as error:
            raise CannotMeasure(f"the arm {spec.name!r} cannot start: {error}") from error
        environment |= chosen.environment
        allocator, reason = chosen.name, chosen.reason
    environment |= {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    return environment | dict(spec.environment), allocator, reason


def available(allocator: str) -> bool:
    """Whether this machine has the allocator."""
    try:
        arm_environment(Spec(name=allocator, role="", options={}, allocator=allocator), os.environ)
    except CannotMeasure:
        return False
    return True


class Arm:
    """The process of one arm, started on construction.

    Attributes:
        about: the arm's description of itself, once it is built; for a role without turns, its answer.
        final: its final figures, once it is closed.
        allocator, allocator_reason: the allocator it runs under, and why that one.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.about: dict[str, Any] = {}
        self.final: dict[str, Any] = {}
        environment, self.allocator, self.allocator_reason = arm_environment(spec, os.environ)
        self.child = Child(f"the arm {spec.name!r}", _WORKER, environment=environment)

    def begin(self) -> None:
        """Start building the arm in its process."""
        self.child.send({"role": self.spec.role, "options": dict(self.spec.options)})

    def ready(self, *, timeout_s: float = _TURN_TIMEOUT_S, tell: Tell = lambda note: None) -> None:
        """Wait until the arm is built; `tell` gets its notes as they arrive."""
        self.about = self.child.receive(timeout_s=timeout_s, tell=tell)

    def turn(self, index: int) -> dict[str, Any]:
        """Run one turn."""
        answer: dict[str, Any] = self.child.ask({"turn": index}, timeout_s=_TURN_TIMEOUT_S)
        return answer

    def close(self) -> None:
        """Close the arm, which then has its final figures."""
        self.final = self.child.ask({"close": True}, timeout_s=_TURN_TIMEOUT_S)


@contextmanager
def running(specs: Sequence[Spec]) -> Iterator[list[Arm]]:
    """Start the processes of all arms together and wait until they are ready; kill them at the end."""
    with ExitStack() as stack:
        arms = []
        for spec in specs:
            arm = Arm(spec)
            stack.callback(arm.child.close)
            arm.begin()
            arms.append(arm)
        for arm in arms:
            arm.ready()
        yield arms


def in_turns(arms: Sequence[Arm], rounds: Sequence[int]) -> Iterator[tuple[Arm, int, dict[str, Any]]]:
    """Take one turn of every arm per round, in reverse order every other round; yield (arm, round, answer)."""
    for number in rounds:
        for arm in arms if number % 2 == 0 else reversed(arms):
            answer = arm.turn(number)
            time.sleep(SETTLE_S)
            yield arm, number, answer


def ask(spec: Spec, *, tell: Tell = lambda note: None) -> Arm:
    """Run an arm without turns; return it closed, with its answer in `about`.

    Raises:
        CannotMeasure: this machine does not have the allocator.
        ChildError: the process ended, or gave no answer in an hour.
    """
    arm = Arm(spec)
    with closing(arm.child):
        arm.begin()
        arm.ready(timeout_s=_ASK_TIMEOUT_S, tell=tell)
    return arm
