"""Arms as processes: each in its own, under its own allocator, taking turns so that they share the machine's noise.

Timing on a small machine drifts by tens of percent within minutes. So all arms are alive at once, one works at a time
(A B A B ...), every other round runs in reverse, and results are ratios within a round.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

_ROOT = Path(__file__).resolve().parent.parent
# A turn is a few seconds; this only ends what would otherwise hang.
TURN_TIMEOUT_S = 600.0
# OpenMP's threads spin for some milliseconds after their work; the next arm should not run beside them.
_SETTLE_S = 0.02
# What would choose or tune an allocator: taken away for the arm that runs "as Python comes".
_ALLOCATOR_PREFIXES = ("LD_PRELOAD", "MALLOC_", "_RJEM_MALLOC_CONF", "JE_MALLOC_CONF", "MIMALLOC_", "GLIBC_TUNABLES")


class ArmError(RuntimeError):
    """An arm's process ended, or answered nothing, in the middle of a measurement."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One arm: what it is called, what its process does, under which allocator and with how many threads.

    `allocator` is "as-is" (as Python comes) or a name that `tba run --allocator` takes.
    """

    name: str
    role: str
    options: Mapping[str, Any]
    allocator: str = "as-is"
    threads: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without anything that chooses or tunes an allocator."""
    return {name: value for name, value in environ.items() if not name.startswith(_ALLOCATOR_PREFIXES)}


def arm_environment(spec: Spec, environ: Mapping[str, str]) -> tuple[dict[str, str], str, str]:
    """The process environment of an arm, the name of the allocator it gets, and why that one.

    Raises:
        ArmError: the allocator is not on this machine.
    """
    environment, allocator, reason = plain_environment(environ), "as Python comes", "nothing is preloaded or tuned"
    if spec.allocator != "as-is":
        from tba import ConfigError
        from tba.cli import allocator_environment

        try:
            chosen = allocator_environment(spec.allocator, environ=environment)
        except ConfigError as error:
            raise ArmError(f"the arm {spec.name!r} cannot start: {error}") from error
        environment |= chosen.environment
        allocator, reason = chosen.name, chosen.reason
    environment |= {"OMP_NUM_THREADS": str(spec.threads), "MKL_NUM_THREADS": str(spec.threads)}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), environ.get("PYTHONPATH", "")]))}
    return environment | dict(spec.environment), allocator, reason


def available(allocator: str) -> bool:
    """Whether an arm can run under this allocator here."""
    from tba import ConfigError
    from tba.cli import allocator_environment

    try:
        allocator_environment(allocator, environ=plain_environment(os.environ))
    except ConfigError:
        return False
    return True


class ArmProcess:
    """One arm's process: started on construction, ready after `ready()`, then `turn()` as often as needed."""

    def __init__(self, spec: Spec, *, timeout_s: float = TURN_TIMEOUT_S) -> None:
        self.spec = spec
        self._timeout_s = timeout_s
        environment, self.allocator, self.allocator_reason = arm_environment(spec, os.environ)
        self.about: dict[str, Any] = {}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            bufsize=0,
        )
        self._answers = b""
        self._send({"role": spec.role, "options": dict(spec.options)})

    def ready(self) -> None:
        """Wait until the arm is built; `about` is what it says of itself."""
        self.about = self._receive("ready")

    def turn(self, index: int) -> dict[str, Any]:
        """Let the arm work once."""
        self._send({"turn": index})
        return self._receive("turn")

    def close(self) -> dict[str, Any]:
        """Ask for the arm's last words and let it end by itself."""
        self._send({"close": True})
        answer = self._receive("closed")
        self._process.wait(self._timeout_s)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._failed("ended") from None

    def _receive(self, kind: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        until_s = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._answers:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    self._process.send_signal(signal.SIGUSR1)  # it writes its stacks to its standard error
                    raise self._failed(f"gave no answer within {self._timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise self._failed("ended")
                self._answers += piece
        line, _, self._answers = self._answers.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)[kind]
        return answer

    def _failed(self, how: str) -> ArmError:
        try:
            status = f"exit status {self._process.wait(2.0)}"
        except subprocess.TimeoutExpired:
            status = "still running"
        return failed(self.spec, f"{how} ({status})", self._errors)


def failed(spec: Spec, how: str, errors: IO[bytes]) -> ArmError:
    """The error that an arm ended in, with the end of what it wrote to its standard error."""
    errors.seek(0)
    tail = errors.read().decode(errors="replace").strip()[-4000:]
    return ArmError(f"the arm {spec.name!r} {how}; its standard error:\n{tail or '(empty)'}")


@contextmanager
def running(specs: Sequence[Spec], *, timeout_s: float = TURN_TIMEOUT_S) -> Iterator[list[ArmProcess]]:
    """All arms' processes, started together and ready; killed on the way out if they have not ended."""
    with ExitStack() as stack:
        arms = [stack.enter_context(ArmProcess(spec, timeout_s=timeout_s)) for spec in specs]
        for arm in arms:
            arm.ready()
        yield arms


def in_turns(arms: Sequence[ArmProcess], rounds: Sequence[int]) -> Iterator[tuple[ArmProcess, int, dict[str, Any]]]:
    """One turn of every arm per round, in reverse order every other round: (arm, round, answer) as they come."""
    for number in rounds:
        for arm in arms if number % 2 == 0 else reversed(arms):
            answer = arm.turn(number)
            time.sleep(_SETTLE_S)
            yield arm, number, answer
