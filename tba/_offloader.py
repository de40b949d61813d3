"""Offloader: the context that a user enters, and what it tells."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils import checkpoint

from io_backends import Store, interrupts

from ._compress import calls
from ._config import OffloadConfig, describe
from ._engine import backward
from ._engine.saver import Saver
from ._errors import ClosedError, ConfigError
from ._plan.plan import Plan
from ._report.page import Contents, page
from ._stats import OffloadStats, TraceEvent
from ._text import check_page, size
from ._torch import private
from ._torch.foreign import Foreign
from ._torch.hook_stack import Pair, bare, clear_dead, hint, lifted, owners
from ._torch.module_hooks import tie
from ._transfer import build

_NOT_ENTERED = "not entered"


class _PerThread(threading.local):
    def __init__(self) -> None:
        # One for each entry of the context on this thread; None for one in the midst of the engine's own code.
        self.pairs: list[Pair | None] = []
        self.forwards: list[Pair | str | None] = []  # of the model: the entry it has made, or `_NOT_ENTERED`


class Offloader:
    """Moves what autograd saves out of memory and back. Made by `offload_context` and `attach`.

    A context manager that may be entered again and nested: inside, tensors saved for backward go to the tier. Leaving
    it only stops the hooks; graphs made inside stay valid until `close`. Making one is cheap: no file and no thread
    before something is first stored.

    Args:
        model: recognises its parameters and buffers as weights; held weakly. May be None.
        config: the settings.
        store: where bytes go, instead of what the settings say (it is closed with the Offloader).

    Raises:
        ConfigError: settings that do not go together. When it is entered: inside of another one of this model with
            other settings.
        StorageError: the storage path cannot be used.
    """

    def __init__(
        self, model: nn.Module | None = None, config: OffloadConfig | None = None, *, store: Store | None = None
    ) -> None:
        self.config = config if config is not None else OffloadConfig()
        self._store = store
        self._directories = build.directories(self.config) if store is None else ()
        weak_model: Callable[[], nn.Module | None] = weakref.ref(model) if model is not None else _no_model
        made = partial(build.open_store, self.config, self._directories)
        self._open_store: Callable[[bool], Store] = made if store is None else lambda _: store
        self._take(Saver(self.config, weak_model, self._open_store))
        self._torn: list[weakref.ref[Saver]] = []  # engines before this one, which graphs may still have
        self._per_thread = _PerThread()
        self._untie: Callable[[], None] | None = None

    def _take(self, saver: Saver) -> None:
        """Have an engine do the work."""
        saver.heed_forks()
        self._saved_by, self._foreign = saver.mode(), Foreign(saver.pack)
        self._saver = saver

    def _replace(self) -> None:
        """Make another engine in place of one that is torn; graphs keep that, and it keeps its store."""
        torn = self._saver
        if self._saved_by is not None:
            self._saved_by.remove()
        if self._store is not None:
            torn.mover.hand_on()
        torn.mover.allowance.close()
        self._torn = [*(each for each in self._torn if each() is not None), weakref.ref(torn)]
        if torn.planner is not None:
            torn.planner.end_forward()
        self._take(Saver(self.config, torn.model, self._open_store, torn.counters))
        if self.tied:
            self._saver.tie()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._saver.closed

    @property
    def entered(self) -> bool:
        """Whether this thread is inside the context."""
        return bool(self._per_thread.pairs)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "entered" if self.entered else "not entered"
        counters = self._saver.counters
        steps = f"{counters.steps:,} step{'s' * (counters.steps != 1)}"
        return f"<Offloader tier={self.config.tier!r} {state}, {steps}, {size(counters.offloaded_bytes)} offloaded>"

    def __enter__(self) -> Self:
        if self.closed:
            raise ClosedError("this Offloader was closed; offload_context(...) or attach(...) makes a new one")
        entries = len(self._per_thread.pairs)
        try:
            self._enter(None)
            if interrupts.pending:
                _ = [*interrupts.again]
            return self
        except BaseException:  # nobody calls `__exit__` then
            if len(self._per_thread.pairs) > entries:
                self._leave(failed=True)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(failed=kind is not None)
        hint(error)
        if kind is None and not self.entered:
            self._saver.tell_if_idle()
        if interrupts.kept:
            interrupts.throw()
        if interrupts.pending:
            _ = [*interrupts.again]

    def _enter(self, forward: weakref.ref[nn.Module] | None) -> Pair | None:
        """Enter by a `with` statement, or by the model's forward; None where that comes in the midst of a hook."""
        if self._saver.came_back():
            if interrupts.in_midst():
                self._per_thread.pairs.append(None)
                return None
            self._saver.let_go()
        if self._saver.torn:
            clear_dead(forward)  # what has torn it has ended its forward too
            if not self.entered:
                self._replace()
        if not owners():
            backward.mend()
        saver = self._saver
        pair = Pair(saver.pack, saver.unpack, forward, self._forget, owner=self)
        try:
            pair.armed = interrupts.arm()
            if self._inside_another():
                clear_dead(forward)  # its forward may have ended in an interrupt
                if (other := self._inside_another()) is not None:
                    raise conflict(saver.model(), self.config, other)
            pair.enter(push=saver.enter())
            self._per_thread.pairs.append(pair)
            if self._saved_by is not None:
                calls.forget()
                pair.mode_below = private.top_function_mode()
                self._saved_by.__enter__()
            self._watch(pair, forward)
        except BaseException as error:
            entered = pair in self._per_thread.pairs
            self._undo(pair)
            if pair.armed:
                interrupts.disarm(leaves=False)
            saver.left_by(error)
            if entered and not saver.torn:
                saver.leave(failed=True, packed=False, inside=self.entered)
            raise
        return pair

    def _undo(self, pair: Pair) -> None:
        """Leave for good what an error has broken off in the midst of being entered or left."""
        if self._saved_by is not None:
            private.take_function_mode(self._saved_by, pair.mode_below)
        if pair in self._per_thread.pairs:
            self._per_thread.pairs.remove(pair)
        pair.pop()
        self._foreign.end()

    def _inside_another(self) -> Offloader | None:
        """Return an Offloader of the same model with other settings that is entered on this thread, if there is one."""
        model = self._saver.model()
        if model is None:
            return None
        others = [each for each in owners() if isinstance(each, Offloader) and each._saver.model() is model]
        return next((other for other in others if other.config != self.config), None)

    def _watch(self, pair: Pair, forward: weakref.ref[nn.Module] | None) -> None:
        """Look on as the model's forward begins, for as long as the pair is on."""
        model = self._saver.model()
        if pair.pushed:
            self._foreign.watch(model)
        if model is not None and forward is None and self._saver.watches and len(self._per_thread.pairs) == 1:
            weak, tracer = weakref.ref(self), interrupts.tracer()
            end = partial(_end_forward, weak)
            try:
                pair.unwatch = tie(model, partial(_begin_forward, weak), end, end)
            except RuntimeError as error:  # a ScriptModule takes no hook that sees keyword arguments: it never rests
                interrupts.pass_on(error, tracer)

    def _leave(self, *, failed: bool) -> None:
        """Leave what was entered last. There is no check of the first step: a forward may well be an evaluation."""
        pair = self._per_thread.pairs[-1]
        if pair is None:
            self._per_thread.pairs.pop()
            return
        packed, saver = pair.pushed, self._saver
        try:
            self._per_thread.pairs.pop()
            if self._saved_by is not None:
                self._saved_by.__exit__(None, None, None)
            pair.pop()
            if saver.torn:
                return  # what it had to do for the next step is the next engine's
            saver.leave(failed=failed, packed=packed, inside=self.entered)
            if (foreign := self._foreign.end()) is not None:
                saver.tell_of_foreign(foreign)
            self._foreign.suspect(packed and saver.nothing_came)
        except BaseException as error:
            self._undo(pair)
            saver.left_by(error)
            raise
        finally:
            backward.look()
            if packed and not failed and saver.expects:
                backward.expect()
            if pair.armed:
                interrupts.disarm(leaves=False)

    def _forget(self, pair: Pair) -> None:
        """Forget a pair whose forward has ended in a KeyboardInterrupt; it is off the stack."""
        if self._saved_by is not None:
            private.take_function_mode(self._saved_by, pair.mode_below)
        self._per_thread.pairs.remove(pair)
        with suppress(ValueError):  # an interrupt between its two ends has taken it
            self._per_thread.forwards.remove(pair)
        self._foreign.end()
        self._saver.leave(failed=True, packed=True, inside=self.entered)
        if pair.armed:
            interrupts.disarm(leaves=False)

    def stats(self) -> OffloadStats:
        """Take a snapshot of what was moved since the start."""
        return self._saver.stats(inside=self.entered)

    def flush(self) -> None:
        """Wait until all that this thread's graphs saved, and whatever else is queued, is written and its memory given
        back. Tier "auto" writes only what memory has no room for.

        Raises:
            StalledError: no transfer ended for `io_timeout` seconds.
        """
        self._saver.flush(", ".join(str(directory.path) for directory in self._directories) or "the store")

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Lift the hooks for a region on this thread, e.g. for `torch.func.grad`, which refuses any."""
        with lifted(self._saver.pack):
            yield

    def trace(self) -> AbstractContextManager[list[TraceEvent]]:
        """Collect an event for each tensor saved or freed, write, read and wait of the region, in the order they ended.

        `report` shows it.
        """
        recorder = self._saver.recorder
        return recorder.region()

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML page that needs nothing else: bytes by class, memory and transfers over time, plan, settings.

        The courses are those of the last region inside `trace()`, or of the last of the micro-batches 1, 2, 4, 8...

        Raises:
            ConfigError: nothing was saved yet, a path that does not end in .html, or no such directory.
            OSError: the file cannot be written.
        """
        check_page(path)
        stats = self.stats()
        if not stats.saved_bytes:
            raise ConfigError(
                "report: nothing has been saved inside this context yet; run a step in it, then ask again"
            )
        recorder, model = self._saver.recorder, self._saver.model()
        with self._saver.locked():
            events, number = recorder.latest()
        name = type(model).__name__ if model is not None else "saved tensors"
        contents = Contents(
            title=f"{name}, tier {self.config.tier!r}",
            about=f"PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
            stats=stats,
            settings=describe(self.config),
            events=events,
            number=number,
            plan=self.plan,
        )
        Path(path).write_text(page(contents), encoding="utf-8")

    @property
    def plan(self) -> Plan | None:
        """What tier "auto" has decided for the steps to come, with predicted and measured figures; None until then.

        A run that fits is not planned.
        """
        planner = self._saver.planner
        return planner.plan if planner is not None else None

    @property
    def tied(self) -> bool:
        """Whether the model's forward enters and leaves (`attach`)."""
        return self._untie is not None

    @interrupts.whole
    def tie_to(self, model: nn.Module) -> None:
        """Enter and leave with the model's own forward (`attach`). A second call changes nothing."""
        clear_dead()
        if self._untie is None:
            weak, forward = weakref.ref(self), weakref.ref(model)  # none keeps another alive
            first, last = partial(_enter, weak, forward), partial(_leave, weak)
            self._untie = tie(model, first, last, partial(_end_forward, weak))
            self._saver.tie()

    @interrupts.whole
    def close(self) -> None:
        """End threads, give back files and buffers. Idempotent.

        What is still in memory stays usable by its graphs; an unpack of what was stored raises ClosedError.
        """
        if not self._saver.stop():
            return
        backward.look()
        if self._saved_by is not None:
            self._saved_by.remove()
        untie, self._untie = self._untie, None
        if untie is not None:
            untie()
            while self._per_thread.forwards:  # closed by the model's own forward, which ends without us now
                if self._per_thread.forwards.pop() is not _NOT_ENTERED:
                    self._leave(failed=True)
        self._saver.close(self._store)
        for torn in filter(None, [each() for each in self._torn]):
            if torn.stop():
                torn.close(None)


def _enter(
    weak: weakref.ref[Offloader], forward: weakref.ref[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    offloader = weak()
    if offloader is not None and not offloader.closed:
        enters = torch.is_grad_enabled()  # else nothing can be saved: an evaluation, a model that generates
        offloader._per_thread.forwards.append(offloader._enter(forward) if enters else _NOT_ENTERED)
        if enters:
            _begin_forward(weak, args, kwargs)


def _leave(weak: weakref.ref[Offloader]) -> None:
    offloader = weak()
    if offloader is not None and offloader._per_thread.forwards:  # else a hook ahead of ours has raised
        if offloader._per_thread.forwards.pop() is _NOT_ENTERED:
            return
        error = sys.exc_info()[1]  # of the forward: its closing hooks run while it is raised
        offloader._leave(failed=error is not None)
        hint(error)
        if interrupts.kept and error is None:  # else torch would leave ours out: whoever leaves next raises it
            interrupts.throw()


def _begin_forward(weak: weakref.ref[Offloader], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take the hooks off, or push them, as the model's forward begins: it depends on what that is given."""
    offloader = weak()
    if (
        offloader is None
        or not offloader.entered
        or not torch.is_grad_enabled()
        or private.current_graph_task_id() != -1
    ):
        return
    pair, saver = offloader._per_thread.pairs[-1], offloader._saver
    if pair is None or saver.torn:
        return
    if pair.pushed:
        saver.end_packing(step_over=True)
    if saver.begin_forward(args, kwargs):
        pair.lift()
    elif not pair.pushed:
        pair.push_late()


def _end_forward(weak: weakref.ref[Offloader]) -> None:
    offloader = weak()
    if offloader is not None:
        planner = offloader._saver.planner
        if planner is not None:
            planner.end_forward()


def conflict(model: object, asked: OffloadConfig, other: Offloader) -> ConfigError:
    """Make the error for a model that `other` is attached to, or entered for, with settings that are not `asked`."""
    there = other.config
    names = [name for name in OffloadConfig.model_fields if getattr(asked, name) != getattr(there, name)]
    differ = ", ".join(f"{name}={getattr(asked, name)!r} instead of {getattr(there, name)!r}" for name in names)
    line = ", ".join(f"{name}={getattr(there, name)!r}" for name in names)
    state, end = ("attached", "close() that one first") if other.tied else ("entered", "leave that one first")
    return ConfigError(
        f"two offloaders with different settings on one {type(model).__name__}: it is {state} already, by {other!r}, "
        f"and only the inner one would get its tensors. Asked for now: {differ}. Write {line} here too, or {end}"
    )


def _no_model() -> None:
    """Return None, the model of an Offloader without one."""


interrupts.run_apart(bare, beside=checkpoint.__file__)
