"""Steps: where one training step ends and the next begins, and what each has moved.

A micro-batch begins with the first pack made outside backward after a backward has run, and ends where the next begins,
or where the context is left or the numbers are asked for once its backward has run. Around the forward alone, then, the
context is left in the middle of one. Orders of reading and the layout of the file are learned by micro-batch.

A step is one micro-batch or, where gradients are accumulated, several: it ends with the last one before `step()` of an
optimizer that has parameters of the model (of any optimizer, without a model). Until one has been seen to step, each
micro-batch counts as a step; once it has, all before it were one step's. A training without an optimizer of torch
therefore counts micro-batches.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import checkpoint

from .._auto.acted import Acted
from .._memory import heap
from .._memory.ledger import Peaks
from .._stats import Counters, OffloadStats, difference
from .._text import size
from .._torch.foreign import line_to_delete
from .._torch.private import untraced
from .._torch.user_frames import speaks, warn
from .footprint import Footprint
from .step import LIGHT, TURNED, Step

# So often must optimizers have stepped trained parameters of an attached model whose forward nothing has called: before
# the first such step a forward may have run, and attach come after it.
_BYPASSES = 2
_MOST_LOOKS = 64  # at steps of optimizers that train other models: then the context is for something else


class Steps:
    """Boundaries of steps, the last one's statistics, and a word to a user whose tier had nothing to do.

    Attributes:
        current: micro-batch, perhaps still to begin.
        footprint: of the last step, and of the one under way once a micro-batch of it has ended.
        entered: the context has been entered; if it is attached to the model, since then.
        tied: it is attached to the model.
    """

    def __init__(
        self,
        tier: str,
        counters: Counters,
        model: Callable[[], nn.Module | None],
        first: Step,
        footprint: Footprint,
    ) -> None:
        self.current = first
        self.footprint = footprint
        self.entered = self.tied = False
        self.last: OffloadStats | None = None
        self._watches = tier != "keep"  # whether the model is trained outside of the context
        self._bypasses = self._looks = 0  # steps of the model's parameters while it was, and of any
        self._use = _Use.of(model())
        self._tier = tier
        self._counters = counters
        self._model = model
        self._micro_batches = 0  # ended so far
        self._of_step = 0  # those of them that ended since the last step did
        self._at_start = counters.snapshot()
        self._file_bytes = 0
        self._written_bytes = 0  # before the open micro-batch
        self._by_optimizer = False  # whether one has been seen to step
        self._stepped = False  # whether one has since the last step ended
        self.told = tier in ("keep", "auto")  # tiers that may rightly move nothing
        _all.add(self)
        _watch_optimizers()

    @property
    def over(self) -> bool:
        """Whether the open micro-batch's backward has run, or begun."""
        return self.current.begun_s is not None and self.current.task != -1

    def enter(self) -> None:
        """Note that the context is entered."""
        self.entered = self._use.entered = True
        _unentered.pop(self._use, None)

    def tie(self) -> None:
        """Note that it is attached to the model, whose forward enters it from now on."""
        self.entered, self.tied = False, True
        self._watches = self._tier != "keep"

    def give_up(self) -> None:
        """Note that nothing is to be offloaded any more."""
        self._watches = False

    def begin(self) -> None:
        """Begin a micro-batch."""
        self.close()
        self.current.begin()

    def replace(self, step: Step) -> None:
        """Have another step take the place of the current one, of which nothing is to be counted."""
        self.current.end()
        self.current = step

    def end(self, following: Step, file_bytes: int, peaks: Peaks, acted: Acted) -> None:
        """End the open micro-batch; another one takes its place."""
        self.current.end()
        light = self.current.mode in (TURNED, *LIGHT)
        self.footprint.end_micro_batch(peaks, acted, light=light, first=not self._of_step)
        begun_s, self.current = self.current.begun_s, following
        assert begun_s is not None
        self._counters.step_s += time.perf_counter() - begun_s
        self._of_step += 1
        self._micro_batches += 1
        self._counters.micro_batches = self._micro_batches
        self._file_bytes = file_bytes
        self.close()
        before, self._written_bytes = self._written_bytes, self._counters.written_bytes
        heap.heap.end_step(self._written_bytes - before)

    def close(self) -> None:
        """End the step, if no micro-batch is under way and nothing more can belong to it."""
        by_backward = not self._by_optimizer and self._of_step
        if self.current.begun_s is not None or not (self._stepped or by_backward):
            return
        if self._stepped and not self._by_optimizer:
            self._by_optimizer = True
            self._counters.steps, self._at_start = 0, OffloadStats()
        self._stepped = False
        self._of_step = 0
        self._counters.steps += 1
        now = self._counters.snapshot(
            file_bytes=self._file_bytes,
            plain_peak_bytes=self.footprint.plain_bytes,
            step_peak_bytes=self.footprint.held_bytes,
        )
        self.last, self._at_start = difference(now, self._at_start), now
        self.tell_if_idle(self.last, forward_seen=True)

    def tell_of_foreign(self, name: str) -> None:
        """Say that another pair of hooks was innermost, and nothing but weights has reached ours."""
        self.told = True
        warn(
            f"tier={self._tier!r} gets nothing: the saved-tensor hooks of {name} act inside of this context, and "
            f"PyTorch asks the innermost pair alone; {line_to_delete(name)}, or enter tba inside of it"
        )

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped, perhaps ours after a backward of ours. Called without the lock."""
        if self._watches and not self.entered:
            self._look_for_bypass(optimizer)
        ended = self._of_step if self._by_optimizer else self._micro_batches
        if self._stepped or not (self.over or ended):
            return
        model = self._model()
        if model is not None:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not any(id(parameter) in stepped for parameter in model.parameters()):
                return
        self._stepped = True

    def _look_for_bypass(self, optimizer: Optimizer) -> None:
        """Note that the model is trained outside of the context, which may be entered yet; tell of an attached one."""
        model = self._model()
        self._looks += not self.tied
        if model is None or self._looks > _MOST_LOOKS:
            self._watches = False
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        self._bypasses += any(id(parameter) in trained for parameter in model.parameters())
        if not self.tied:
            if self._bypasses:
                self._note_unentered(model)
            return
        if self._bypasses < _BYPASSES:
            return
        name = type(model).__name__
        self._watches = False
        warn(
            f"tier={self._tier!r} gets nothing: an optimizer steps parameters of the attached {name}, but nothing has "
            f"called that {name} since: what took its place, or wraps it, calls its parts or its `forward`. Write "
            "attach(...) for the module that is called, or `with offload_context(model, ...):` around the training"
        )

    def end_program(self) -> None:
        """Note that the model was trained outside of the context, where no optimizer of torch has told."""
        model = self._model()
        if model is None or not self._watches or self.entered or self.tied:
            return
        if any(parameter.grad is not None for parameter in model.parameters()):
            self._note_unentered(model)

    def _note_unentered(self, model: nn.Module) -> None:
        self._watches = False
        if not self._use.entered:  # otherwise this context was for something else
            _unentered[self._use] = (
                f"tier={self._tier!r} gets nothing: the {type(model).__name__} was trained, and the context that "
                "offload_context(...) returned was not entered. Write `with offload_context(model, ...):` around the "
                "training, or attach(model, ...), which needs no `with`"
            )

    def tell_if_idle(self, step: OffloadStats, *, forward_seen: bool) -> None:
        """Say once why a tier that was asked for moved nothing. What backward packs is nothing to judge by."""
        if self.told or (not forward_seen if step.saved_bytes else _inside_checkpoint()):
            return
        self.told = True
        if step.offloaded_bytes or step.errors:
            return
        if not step.saved_bytes:
            why = (
                "autograd saved nothing here (torch.no_grad, no tensor that requires a gradient, or another pair of "
                "saved-tensor hooks inside of this context)"
            )
        else:
            kept = ", ".join(f"{reason}: {nbytes:,} bytes" for reason, nbytes in step.kept_by_reason.items())
            why = f"of {step.saved_bytes:,} bytes saved {step.weight_bytes:,} are weights; kept: {kept or 'nothing'}"
        warn(f"tier={self._tier!r} moved nothing in its first step: {why}")


class Progress:
    """A word to a user whose first micro-batch takes long: how far it has come, each time it took twice as long.

    It is told by whatever hook comes next, so nothing watches beside the training; one that stands still tells nothing.

    Attributes:
        over: a micro-batch has ended, and `look` need not be called any more.
    """

    def __init__(self, tier: str, counters: Counters) -> None:
        self.over = False
        self._tells = tier != "keep" and speaks()
        self._tier = tier
        self._counters = counters
        self._begun_s = 0.0
        self._next_s = _LONG_S

    def look(self) -> None:
        """Look at the clock. Call it for each record, until it is `over`."""
        if self._counters.micro_batches:
            self.over = True
            return
        now_s = time.perf_counter()
        if not self._begun_s:
            self._begun_s = now_s
        if now_s - self._begun_s < self._next_s or not self._tells:
            return
        counters, self._next_s = self._counters, 2 * (now_s - self._begun_s)
        logging.getLogger("tba").warning(
            f"tier {self._tier!r}: the first step takes {now_s - self._begun_s:.0f} s so far: "
            f"{size(counters.saved_bytes)} saved, {size(counters.offloaded_bytes)} to go out of memory, "
            f"{size(counters.written_bytes)} written, {size(counters.read_bytes)} read back"
        )


_LONG_S = 10.0  # most first steps take less, compiling included; who waits longer begins to wonder


def _inside_checkpoint() -> bool:
    """Tell whether a checkpoint calls: the reentrant kind runs its forward under no_grad, and again in backward."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _Use:
    """Whether a context of a model has ever been entered; if not, it outlives the contexts and the model."""

    def __init__(self) -> None:
        self.entered = False

    @staticmethod
    def of(model: nn.Module | None) -> _Use:
        """Return that of a model, or one of its own for none."""
        return _Use() if model is None else _uses.setdefault(model, _Use())


_all: weakref.WeakSet[Steps] = weakref.WeakSet()
_uses: weakref.WeakKeyDictionary[nn.Module, _Use] = weakref.WeakKeyDictionary()
_unentered: dict[_Use, str] = {}  # what to say at the end of the program, of models that were trained


@functools.cache
def _watch_optimizers() -> None:
    """Have torch say when an optimizer steps, once for the process."""
    register_optimizer_step_post_hook(_optimizer_stepped)
    atexit.register(_end_program)
    os.register_at_fork(after_in_child=_unentered.clear)


@untraced
def _optimizer_stepped(optimizer: Optimizer, *_: Any) -> None:
    for steps in list(_all):
        steps.optimizer_stepped(optimizer)


def _end_program() -> None:
    for steps in list(_all):
        steps.end_program()
    for use in [*_unentered]:
        warn(_unentered.pop(use))
