"""Trial: one case of the fault campaign, run in this process, and the verdict on it.

The verdict, the first of these that holds:

    wrong   gradients or loss differ from plain PyTorch's; an error that is not one of tba's, or does not name tensor
            and cause; an error under a fault that has to be survived; an exception that reached no caller
    leaked  records, extents, bytes under way, descriptors, threads or files are left when all graphs are dead
    raised  some step raised `OffloadError`, and every step that completed was exact
    exact   every step completed
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from io_backends.testing import FaultyStore
from support.exactness import CPU
from tba import OffloadConfig, Offloader, OffloadError, OffloadWarning

from ..device import shuffle
from .cases import KINDS, Case
from .sabotage import Sabotage
from .site import Seen, Site, backward, forward, make_model, plain_steps, seen_of, size_of

# How often a step that raised is tried again; the last time with the fault over.
_TRIES = 3
# Threads and files may take a moment to go on a busy machine.
_GRACE_S = 5.0
# Every error of a transfer says which tensor (`float32[2, 16, 32] #7 (4096 bytes)`) and, behind "back", why.
_NAMES_TENSOR = re.compile(r"\w+\[[\d, ]*\] #\d+ \(\d+ bytes\) .*back\b.*\S", re.DOTALL)
_NAMES_STORE = re.compile(r"flush: no write has ended for .* s; .* has stalled")  # flush waits for many tensors


class Wrong(Exception):
    """A verdict "wrong"; the message is its detail."""


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a case; `struck` counts the calls that a fault struck, `raised` the steps that raised."""

    seed: int
    kind: str
    verdict: str = "exact"
    struck: int = 0
    raised: int = 0
    detail: str = ""
    case: dict[str, Any] = field(default_factory=dict)


def run_trial(case: Case, directory: Path, disk: Path | None = None, *, device: torch.device = CPU) -> Outcome:
    """Run a case in `directory`, empty and on a disk; `disk` is the mount point of one that runs full."""
    shuffle(device, case.seed)
    outcome = Outcome(seed=case.seed, kind=case.kind, case=case.describe())
    if case.kind == "disk full" and disk is None:
        outcome.verdict, outcome.detail = "skipped", "there is no small file system here"
        return outcome
    before = _holdings()
    with _listening() as noises:
        trial = _Trial(case, directory, disk, device, outcome)
        try:
            trial.train()
        except Wrong as wrong:
            outcome.verdict, outcome.detail = "wrong", str(wrong)
        except Exception:
            outcome.verdict, outcome.detail = "wrong", f"an error that is none of tba's:\n{traceback.format_exc()}"
        left = trial.end()
        left += _await_none(lambda: sorted(f"{what} is left" for what in _holdings() - before))
    outcome.struck = trial.sabotage.struck
    if outcome.verdict != "wrong" and noises:
        outcome.verdict, outcome.detail = "wrong", "reached no caller: " + "; ".join(noises)
    elif outcome.verdict != "wrong" and left:
        outcome.verdict, outcome.detail = "leaked", "; ".join(left)
    return outcome


class _Trial:
    """A model in training over a sabotaged store."""

    def __init__(self, case: Case, directory: Path, disk: Path | None, device: torch.device, outcome: Outcome) -> None:
        self.case, self.device, self.outcome = case, device, outcome
        saved_bytes, transfers = size_of(case.model, device, directory)
        self.sabotage = Sabotage(case, transfers * (case.steps * case.forwards + case.dropped))
        self._site = Site(case, disk if disk is not None and case.kind == "disk full" else directory, device)
        config = OffloadConfig(
            tier="nvme",
            min_tensor_bytes=0,
            io_timeout=case.io_timeout_s,
            prefetch_bytes=int(case.window * saved_bytes),
            staging_bytes=int(case.staging * saved_bytes),
        )
        self.model, self.optimizer = make_model(case.model, device)
        store = FaultyStore(self._site.make_store(self.sabotage.syscalls), self.sabotage.plan)
        self.offload = Offloader(self.model, config, store=store)

    def train(self) -> None:
        """Train all steps. Raises Wrong."""
        case = self.case
        expected = plain_steps(case.model, self.device, case.steps, case.forwards, case.retained)
        self._maybe_remove("before")
        if case.dropped:
            with self.offload:
                losses = forward(self.model, case.model, case.forwards, -1)
            del losses
        for step, (seen, weights) in enumerate(expected):
            for attempt in range(_TRIES):
                if attempt == _TRIES - 1:
                    self.sabotage.stop()
                self.optimizer.zero_grad()
                try:
                    found = self._step(step)
                except OffloadError as error:
                    self._judge(error)
                    continue
                if found != seen:
                    raise Wrong(f"step {step}, attempt {attempt}: loss and gradients {found}, plain {seen}")
                self.optimizer.step()
                break
            else:
                self.model.load_state_dict(weights)
        if self.outcome.raised:
            self.outcome.verdict = "raised"

    def end(self) -> list[str]:
        """Once all graphs are gone, list what they have left; then close the offloader."""
        self.sabotage.stop()
        left = []
        try:
            self.offload.flush()
        except OffloadError as error:
            left.append(f"bytes under way that never land: {error}")
        left += _await_none(self._left)
        if self.case.kind == "disk full" and self.offload.stats().errors:
            self.sabotage.count()
        self.offload.close()
        return left + self._site.clear()

    def _step(self, step: int) -> Seen:
        case, offload = self.case, self.offload
        with offload:
            losses = forward(self.model, case.model, case.forwards, step)
            if case.flush:
                offload.flush()
            self._maybe_remove("after")
            if case.inside:
                backward(losses, retained=case.retained)
        if not case.inside:
            backward(losses, retained=case.retained)
        return seen_of(self.model, losses)

    def _judge(self, error: OffloadError) -> None:
        """Accept an error that names tensor and cause, unless the fault has to be survived. Raises Wrong."""
        self.outcome.raised += 1
        self.outcome.detail = f"{type(error).__name__}: {error}"
        if not (_NAMES_TENSOR.search(str(error)) or _NAMES_STORE.search(str(error))):
            raise Wrong(f"an error that does not name tensor and cause: {error!r}")
        if KINDS[self.case.kind].survived:
            raise Wrong(f"an error under a fault that has to be survived: {error!r}")

    def _maybe_remove(self, when: str) -> None:
        """Remove the directories, before the first write or while a graph lives, if the case says so."""
        if self.case.kind == "directory gone" and self.case.call == when and self._site.remove():
            self.sabotage.count()

    def _left(self) -> list[str]:
        stats = self.offload.stats()
        found = {
            "live records": stats.live_records,
            "resident bytes": stats.resident_bytes,
            "bytes in the store": self._site.used_bytes(),
        }
        return [f"{count} {what} are left" for what, count in found.items() if count]


# -- the process around it -------------------------------------------------------------------------------------------


def _holdings() -> Counter[str]:
    """List tba's threads by identity, and every descriptor by number and target."""
    held = Counter(f"thread {t.name} ({t.ident})" for t in threading.enumerate() if t.name.startswith("tba-"))
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            held[f"descriptor {entry} of {os.readlink(f'/proc/self/fd/{entry}')}"] += 1
    return held


def _await_none(look: Callable[[], list[str]]) -> list[str]:
    """Wait until `look` finds nothing, for a while at most; return what it finds then."""
    until_s = time.monotonic() + _GRACE_S
    while (found := look()) and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.005)
    return found


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect errors that reach no caller, of threads and finalisers, and warnings that are no part of a promise."""
    noises: list[str] = []
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda args: noises.append(f"{args.exc_value!r} in a thread")
    sys.unraisablehook = lambda args: noises.append(f"{args.exc_value!r} in {args.object!r}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield noises
        noises += [str(w.message) for w in caught if not issubclass(w.category, OffloadWarning)]
    finally:
        threading.excepthook, sys.unraisablehook = hooks
