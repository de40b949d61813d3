"""Trainee: a program that trains while signals strike it, and tells whether each step was as plain PyTorch's.

Its handlers do what those of programs do: raise (as PyTorch's own does where a DataLoader's worker was killed, as a
time limit does, as Ctrl-C does), leave, evaluate and save, train another model under the same context. Weights stay as
they are, so each step's gradients are known beforehand.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tba import Offloader, OffloadWarning
from tba._torch import private

KINDS = ("raises", "interrupts", "exits", "saves", "trains")
_RAISES: dict[str, type[BaseException]] = {"interrupts": KeyboardInterrupt, "exits": SystemExit}
NUMBERS = tuple(
    int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGUSR2", "SIGHUP", "SIGRTMIN")
)
SIGNALS = 10  # of one program
_BATCHES = 3
_SILENT_S = 30.0  # a handler that has not run for so long does not run any more


class Struck(RuntimeError):
    """Raised by a handler: what swallows it takes it for an error of PyTorch's."""


@dataclass(frozen=True)
class Case:
    """What a seed draws.

    Attributes:
        kind: what the handler does.
        number: the signal's.
        attached: the model's own forward enters, instead of a `with` statement.
        inside: backward runs inside of the `with` statement.
        flushes: `flush` is called between forward and backward.
    """

    kind: str
    number: int
    attached: bool
    inside: bool
    flushes: bool

    @staticmethod
    def draw(numbers: random.Random) -> Case:
        kind, number = numbers.choice(KINDS), numbers.choice(NUMBERS)
        return Case(kind, number, numbers.random() < 0.4, numbers.random() < 0.5, numbers.random() < 0.3)


class Block(nn.Module):
    """What a plan may recompute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Trainee:
    """A model, a second one, and the gradients of both in plain PyTorch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block(32) for _ in range(4)])
        self.probe = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.batches = [torch.randn(24, 32) for _ in range(_BATCHES)]
        self.probe_batch = torch.randn(8, 16)
        self.expected = [self._plain(batch) for batch in self.batches]
        self.probe_expected = self.train_probe()

    def _plain(self, batch: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        self.model(batch).square().mean().backward()
        return self.gradients()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def train_probe(self) -> list[Tensor]:
        loss = self.probe(self.probe_batch).square().sum()
        return list(torch.autograd.grad(loss, list(self.probe.parameters())))


class Run:
    """One program: steps under `offload` until so many signals have been handled.

    Attributes:
        sent, raised, caught: signals, errors of the handler, those that the program got.
        wrong: what was not as in plain PyTorch.
    """

    def __init__(self, trainee: Trainee, case: Case, offload: Offloader, numbers: random.Random) -> None:
        self._trainee, self._case, self._offload, self._numbers = trainee, case, offload, numbers
        self.sent = self.handled = self.steps = 0
        self.raised: list[BaseException] = []
        self.caught: list[BaseException] = []
        self.wrong: list[str] = []
        self._inside = False  # the step can be done again
        self._over = threading.Event()

    def go(self) -> None:
        """Run it. `wrong` tells what came of it."""
        case = self._case
        before = signal.signal(case.number, self._handle)
        shooter = threading.Thread(target=self._shoot, args=([self._numbers.uniform(0, 4e-3) for _ in range(64)],))
        shooter.start()
        try:
            while self.handled < SIGNALS and not self._over.is_set():
                self._step()
        finally:
            self._over.set()
            shooter.join()
            time.sleep(0.01)  # the last signal may still have to strike
        for _ in range(_BATCHES):  # the next forward clears away what an attached one has left that was interrupted
            self._step()
        left = signal.signal(case.number, before)
        if left != self._handle:
            self.wrong.append(f"the handler of {case.number} is {left!r} after all")
        if self.raised != self.caught:
            self.wrong.append(f"handlers raised {len(self.raised)} errors, the program got {len(self.caught)}")
        if private.top_hooks(True) is not None:
            self.wrong.append("hooks are left on the stack")
        self._trainee.model.zero_grad()
        gc.collect()
        self._offload.flush()
        gc.collect()
        stats = self._offload.stats()
        if stats.live_records or stats.resident_bytes:
            self.wrong.append(f"{stats.live_records} records, {stats.resident_bytes} bytes are left")

    def _step(self) -> None:
        trainee, case, offload = self._trainee, self._case, self._offload
        number = self.steps % _BATCHES
        self.steps += 1
        trainee.model.zero_grad()
        try:
            self._inside = True
            with nullcontext() if case.attached else offload:
                loss = trainee.model(trainee.batches[number]).square().mean()
                if case.inside:
                    self._backward(loss)
            if not case.inside:
                self._backward(loss)
            self._inside = False
        except (Struck, KeyboardInterrupt, SystemExit) as error:
            self._inside = False
            self.caught.append(error.with_traceback(None))  # its frames have the step's graph
            return
        found = trainee.gradients()
        if not _equal(found, trainee.expected[number]):
            self.wrong.append(f"step {self.steps} has other gradients")

    def _backward(self, loss: Tensor) -> None:
        if self._case.flushes:
            self._offload.flush()
        loss.backward()

    def _handle(self, number: int, frame: Any) -> None:
        kind = self._case.kind
        try:
            if kind == "saves":
                torch.save(self._trainee.model.state_dict(), io.BytesIO())
                with torch.no_grad():
                    self._trainee.model(self._trainee.batches[0])
                self._offload.stats()
            elif kind == "trains":
                if self._inside and not torch.is_grad_enabled():
                    self.wrong.append("the handler was called where autograd records nothing")
                if not _equal(self._trainee.train_probe(), self._trainee.probe_expected):
                    self.wrong.append("what the handler trained has other gradients")
            elif self._inside:
                self.raised.append(_RAISES.get(kind, Struck)(len(self.raised)))
                raise self.raised[-1]
        finally:
            self.handled += 1

    def _shoot(self, waits_s: list[float]) -> None:
        """One signal at a time, as another in the midst of the handler would be the program's own affair."""
        while not self._over.is_set() and self.handled < SIGNALS:
            time.sleep(waits_s[self.sent % len(waits_s)])
            handled, deadline_s = self.handled, time.monotonic() + _SILENT_S
            self.sent += 1
            os.kill(os.getpid(), self._case.number)
            while self.handled == handled or len(self.caught) < len(self.raised):
                time.sleep(1e-4)
                if self._over.is_set() and self.handled > handled:
                    return
                if time.monotonic() > deadline_s:
                    faulthandler.dump_traceback(file=sys.stderr)
                    what = "is not called" if self.handled == handled else "has raised, which the program never gets"
                    self.wrong.append(f"the handler {what}")
                    self._over.set()
                    return


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@contextmanager
def quietly() -> Iterator[None]:
    """Without words on what a tier has had to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        yield


Make = Callable[[nn.Module], Any]  # (model) -> context manager of an Offloader


def run_case(trainee: Trainee, case: Case, make: Make, numbers: random.Random) -> Run:
    """Run a case on an Offloader of its own."""
    with quietly(), make(trainee.model) as offload:
        if case.attached:
            offload.tie_to(trainee.model)
        run = Run(trainee, case, offload, numbers)
        run.go()
    return run
