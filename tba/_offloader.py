"""Offloader: the context that a user enters, and its statistics, plan and report."""

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

from ._compiled.backend import CompileBackend
from ._compiled.served import Served
from ._compress import calls
from ._config import OffloadConfig, describe
from ._engine import backward
from ._engine.saver import Saver
from ._errors import ClosedError, ConfigError
from ._group.node_share import NodeShare
from ._memory.budgets import local_ranks
from ._plan.no_plan import NoPlan
from ._plan.plan import Plan
from ._report.page import Contents, page
from ._stats import OffloadStats, TraceEvent
from ._text import check_page, size
from ._torch import dynamo, private
from ._torch.foreign import Foreign
from ._torch.hook_stack import Pair, bare, clear_dead, hint, lifted, owners
from ._torch.module_hooks import ModelHook, tie
from ._transfer import build

_NOT_ENTERED = "not entered"
_tied: weakref.WeakSet[Offloader] = weakref.WeakSet()


class _PerThread(threading.local):
    def __init__(self) -> None:
        # One for each entry of the context on this thread; None for an entry inside the engine's own code.
        self.pairs: list[Pair | None] = []
        self.forwards: list[Pair | str | None] = []  # for each forward of the model: its entry, or `_NOT_ENTERED`


class Offloader:
    """Offloads what autograd saves, and restores it. Made by `offload_context` and `attach`.

    A context manager that may be entered again and nested: inside, tensors saved for backward go to the tier. Leaving
    it only removes the hooks; graphs made inside stay valid until `close`. Making one is cheap: files and threads start
    when the first tensor is stored.

    Args:
        model: its parameters and buffers are recognised as weights; held weakly. May be None.
        config: the settings.
        store: where bytes go, instead of the settings' store. The Offloader closes it.

    Raises:
        ConfigError: the settings contradict each other; or, on entry, another Offloader of this model with other
            settings is entered.
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
        # A store of the caller's holds what it was made for.
        self._node = NodeShare(local_ranks() if store is None else 1)
        self._take(Saver(self.config, weak_model, self._open_store, self._node))
        # A store of the caller's has one user.
        saver = self._saver
        self._served = Served(self.config, weak_model, saver.lock, saver.counters) if store is None else None
        self._torn: list[weakref.ref[Saver]] = []  # engines before this one, which graphs may still have
        self._per_thread = _PerThread()
        self._untie: Callable[[], None] | None = None

    def _take(self, saver: Saver) -> None:
        """Use an engine from now on."""
        saver.heed_forks()
        self._saved_by, self._foreign = saver.mode(), Foreign(saver.pack)
        self._saver = saver

    def _replace(self) -> None:
        """Replace a torn engine by a new one; graphs keep the torn one, which keeps its store."""
        torn = self._saver
        if self._saved_by is not None:
            self._saved_by.remove()
        if self._store is not None:
            torn.mover.hand_on()
        torn.mover.allowance.close()
        self._torn = [*(each for each in self._torn if each() is not None), weakref.ref(torn)]
        if torn.planner is not None:
            torn.planner.end_forward()
            torn.planner.leave()
        self._take(Saver(self.config, torn.model, self._open_store, self._node, torn.counters))
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
        return f"<Offloader tier={self.config.tier!r} {state}, {steps}, {size(counters.written_bytes)} written>"

    def __enter__(self) -> Self:
        if self.closed:
            raise ClosedError("this Offloader was closed; offload_context(...) or attach(...) makes a new one")
        entries = len(self._per_thread.pairs)
        try:
            self._enter(None)
            if interrupts.pending:
                _ = [*interrupts.again]
            return self
        except BaseException:  # Python will not call `__exit__`
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
        """Enter by a `with` statement, or by the model's forward; None inside a hook."""
        if self._saver.came_back():
            if interrupts.in_midst():
                self._per_thread.pairs.append(None)
                return None
            self._saver.let_go()
        if self._saver.torn:
            clear_dead(forward)  # the interrupt that tore it has ended its forward too
            if not self.entered:
                self._replace()
        if not owners():
            backward.mend()
        dynamo.compile_by(_backend_of)
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
        """Leave a context whose entry or exit an error has interrupted."""
        if self._saved_by is not None:
            private.take_function_mode(self._saved_by, pair.mode_below)
        if pair in self._per_thread.pairs:
            self._per_thread.pairs.remove(pair)
        pair.pop()
        self._foreign.end()

    def _inside_another(self) -> Offloader | None:
        """Return an Offloader of the same model with other settings that is entered on this thread, if any."""
        model = self._saver.model()
        if model is None:
            return None
        others = [each for each in owners() if isinstance(each, Offloader) and each._saver.model() is model]
        return next((other for other in others if other.config != self.config), None)

    def _watch(self, pair: Pair, forward: weakref.ref[nn.Module] | None) -> None:
        """Watch the model's forward begin, as long as the pair is entered."""
        model = self._saver.model()
        if pair.pushed:
            self._foreign.watch(model)
        if model is not None and forward is None and self._saver.watches and len(self._per_thread.pairs) == 1:
            weak, tracer = weakref.ref(self), interrupts.tracer()
            end = partial(_end_forward, weak)
            try:
                pair.unwatch = tie(model, partial(_begin_forward, weak), end, end)
            except RuntimeError as error:  # a ScriptModule refuses hooks with keyword arguments: its hooks stay on
                interrupts.pass_on(error, tracer)

    def _leave(self, *, failed: bool) -> None:
        """Leave what was entered last, without checking for a step: a forward may be an evaluation."""
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
                return  # the next engine prepares the next step
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
        """Remove a pair whose forward a KeyboardInterrupt has ended; it is no longer on the stack."""
        if self._saved_by is not None:
            private.take_function_mode(self._saved_by, pair.mode_below)
        self._per_thread.pairs.remove(pair)
        with suppress(ValueError):  # an interrupt has removed it already
            self._per_thread.forwards.remove(pair)
        self._foreign.end()
        self._saver.leave(failed=True, packed=True, inside=self.entered)
        if pair.armed:
            interrupts.disarm(leaves=False)

    def stats(self) -> OffloadStats:
        """Take a snapshot of what has moved since the start."""
        stats = self._saver.stats(inside=self.entered)
        return stats if self._served is None else self._served.added_to(stats)

    def _compiles(self, module: nn.Module) -> CompileBackend | None:
        """The backend that a module is compiled by which is the whole model, and is called; None for others."""
        if self.closed or self._served is None or not self._served.serves(module):
            return None
        self._saver.leave_to_graphs()
        backend = self._served.backend()
        if backend is not None and backend.moves:
            self._saver.begin_graph()
        return backend

    def flush(self) -> None:
        """Wait until everything that this thread's graphs saved, and whatever else is queued, is written and its memory
        freed. Tier "auto" only writes what does not fit in memory.

        Raises:
            StalledError: no transfer ended for `io_timeout` seconds.
        """
        self._saver.flush(", ".join(str(directory.path) for directory in self._directories) or "the store")

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Remove the hooks for a region on this thread, e.g. for `torch.func.grad`, which refuses any hooks."""
        with lifted(self._saver.pack):
            yield

    def trace(self) -> AbstractContextManager[list[TraceEvent]]:
        """Collect the region's events in the order they end: tensors saved and freed, writes, reads and waits.

        `report` shows them.
        """
        recorder = self._saver.recorder
        return recorder.region()

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained HTML page: bytes by class, memory and transfers over time, plan, settings.

        It shows the last region inside `trace()`, or else the last of the micro-batches 1, 2, 4, 8...

        Raises:
            ConfigError: nothing was saved yet, the path does not end in .html, or the directory does not exist.
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
    def plan(self) -> Plan | NoPlan:
        """The plan of tier "auto" for the next steps, with predicted and measured figures.

        Without one, as for a run that fits in memory, it is a `NoPlan`, which is false and, printed, says why. Where
        the model is compiled whole, that is what becomes of the saved tensors of each graph.
        """
        graphs = self._served.plan if self._served is not None else None
        return self._saver.plan if graphs is None else graphs

    @property
    def tied(self) -> bool:
        """Whether the model's forward enters and leaves (`attach`)."""
        return self._untie is not None

    @interrupts.whole
    def tie_to(self, model: nn.Module) -> None:
        """Enter and leave with the model's own forward (`attach`). Idempotent."""
        clear_dead()
        if self._untie is None:
            weak, forward = weakref.ref(self), weakref.ref(model)  # neither keeps the other alive
            first, last = partial(_enter, weak, forward), partial(_leave, weak)
            self._untie = tie(model, first, last, partial(_end_forward, weak))
            self._saver.tie()
            _tied.add(self)
            dynamo.compile_by(_backend_of)  # a forward's hooks are called once its compiler has been chosen

    @interrupts.whole
    def untie(self) -> None:
        """Enter with the model's forward no more; graphs made so far stay valid. Idempotent."""
        _tied.discard(self)
        untie, self._untie = self._untie, None
        if untie is not None:
            untie()

    def enter_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Enter for a forward that has begun already: torch has looked up the model's hooks before ours were tied."""
        ModelHook(lambda *_: _enter(weakref.ref(self), weakref.ref(model), args, kwargs))()

    @interrupts.whole
    def close(self) -> None:
        """End threads, free files and buffers. Idempotent.

        Graphs can still use what is in memory; unpacking what was stored raises ClosedError.
        """
        if not self._saver.stop():
            return
        backward.look()
        if self._saved_by is not None:
            self._saved_by.remove()
        tied = self.tied
        self.untie()
        if tied:
            while self._per_thread.forwards:  # closed inside the model's own forward, which will not leave us
                if self._per_thread.forwards.pop() is not _NOT_ENTERED:
                    self._leave(failed=True)
        if self._served is not None:
            self._served.close()
        self._saver.close(self._store)
        for torn in filter(None, [each() for each in self._torn]):
            if torn.stop():
                torn.close(None)


def _backend_of(module: nn.Module) -> CompileBackend | None:
    """The backend of the innermost Offloader at work whose whole model a compiled module is, as it is called."""
    if not torch.is_grad_enabled() or private.current_graph_task_id() != -1:
        return None
    entered = [owner for owner in reversed(owners()) if isinstance(owner, Offloader)]
    found = (offloader._compiles(module) for offloader in (*entered, *_tied))
    return next((backend for backend in found if backend is not None), None)


def _enter(
    weak: weakref.ref[Offloader], forward: weakref.ref[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    offloader = weak()
    if offloader is not None and not offloader.closed:
        enters = torch.is_grad_enabled()  # otherwise nothing can be saved: evaluation or generation
        offloader._per_thread.forwards.append(offloader._enter(forward) if enters else _NOT_ENTERED)
        if enters:
            _begin_forward(weak, args, kwargs)


def _leave(weak: weakref.ref[Offloader]) -> None:
    offloader = weak()
    if offloader is not None and offloader._per_thread.forwards:  # otherwise a hook before ours has raised
        if offloader._per_thread.forwards.pop() is _NOT_ENTERED:
            return
        error = sys.exc_info()[1]  # the forward's: its hooks run while it is raised
        offloader._leave(failed=error is not None)
        hint(error)
        if interrupts.kept and error is None:  # otherwise torch would drop ours: the next exit raises it
            interrupts.throw()


def _begin_forward(weak: weakref.ref[Offloader], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remove or push the hooks as the model's forward begins, depending on its arguments."""
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
    """Make the error for a model to which `other` is attached, or for which it is entered, with other settings."""
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
