"""Attaching: under `tba run` with settings, the models of a program that does not know tba are attached.

A global forward pre-hook stays on for good, because a program may make its next model at any time. The module that it
sees first with gradients enabled, and with parameters to train, is the outermost one: modules inside it are known from
then on. What backward runs again (checkpointing) is in no forward, so backward is left out.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Proxy
from torch.nn.parameter import is_lazy

from io_backends import interrupts

from ._config import REPORT, describe
from ._context import attach_until_asked, is_offloaded
from ._offloader import Offloader
from ._torch import private
from ._torch.hook_stack import clear_dead, owners

_MOST_TOLD = 8  # some programs make a model in each step


class _Attached(NamedTuple):
    model: weakref.ref[nn.Module]
    name: str
    offload: Offloader
    number: int  # of the model in this process, from 1
    rank: int  # of this process as it attached: at the end the group of processes may be gone


class _Attaching:
    """Attaches to each outermost module that trains, and tells of it: when it attaches and at the end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Attached or left alone, with all inside. Plain references: torch.compile must find no Python code to compile.
        self._known: set[weakref.ref[nn.Module]] = set()
        self._attached: list[_Attached] = []
        self._count = 0
        self._told = 0

    @private.not_compiled
    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Look at a module as its forward begins: the global forward pre-hook."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        tracer = interrupts.tracer()
        try:
            if weakref.ref(module) not in self._known:
                self._consider(module, args)
        except Exception as error:  # whatever it is, the program's forward goes on
            interrupts.pass_on(error, tracer)
            self._leave_alone(module, str(error))

    @private.untraced
    @interrupts.whole
    def _consider(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        traced = tracing or private.compiles()
        traced = traced or any(isinstance(each, Proxy) for each in (*args, *_keywords().values()))
        if traced or private.current_graph_task_id() != -1 or not _trains(module):
            return
        with self._lock:
            clear_dead()  # a forward that an interrupt has ended
            entered = [owner for owner in owners() if isinstance(owner, Offloader)]
            if any(owner is each.offload for owner in entered for each in self._attached):
                return  # a part of that model's forward which is no module of it
            if entered or any(is_offloaded(part) for part in module.modules() if weakref.ref(part) not in self._known):
                self._leave_alone(module, "the program offloads it by itself")
            else:
                self._attach(module, args)

    def _attach(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._end(died=True)
        parts = set(model.modules())
        for each in self._attached:  # a part that was called by itself before would take its tensors from this one
            if each.model() in parts:
                each.offload.untie()
        offload = attach_until_asked(model)
        self._count += 1
        attached = _Attached(weakref.ref(model), _name(model), offload, self._count, _rank())
        try:
            offload.enter_forward(model, args, _keywords())
        except BaseException:
            offload.close()
            raise
        self._attached.append(attached)
        self._know(model)
        self._tell(f"attached to {attached.name} ({_parameters(model)}), {_settings(offload)}")

    def _know(self, model: nn.Module) -> None:
        self._known.update(weakref.ref(part, self._known.discard) for part in model.modules())

    def _leave_alone(self, module: nn.Module, why: str) -> None:
        with suppress(Exception):  # the program's own: a module that cannot be hashed, say
            self._know(module)
        self._tell(f"not attached to {_name(module)}: {' '.join(why.split())}")

    def forked(self) -> None:
        """Begin anew in a forked child: what its parent attached has ended there."""
        vars(self).update(vars(_Attaching()))

    def finish(self) -> None:
        """Tell what was moved, at the program's end. A child of `multiprocessing` ends without a word."""
        self._end(died=False)

    def _end(self, *, died: bool) -> None:
        """Tell of models that have died, or of all, and write their reports."""
        for each in [each for each in self._attached if not died or each.model() is None]:
            self._attached.remove(each)
            tracer = interrupts.tracer()
            try:
                stats = each.offload.stats()
                if each.number <= _MOST_TOLD:
                    _say(f"{each.name}: {stats.verdict}", each.rank)
                if (report := os.environ.get(REPORT)) and stats.saved_bytes:
                    each.offload.report(_page(Path(report), each.number, each.rank))
            except Exception as error:
                interrupts.pass_on(error, tracer)
                _say(f"{each.name}: {' '.join(str(error).split())}", each.rank)

    def _tell(self, text: str) -> None:
        """Say a line on a model, unless there are very many."""
        self._told += 1
        if self._told <= _MOST_TOLD:
            _say(text + " (no line on further models)" * (self._told == _MOST_TOLD))


_attaching = _Attaching()
os.register_at_fork(after_in_child=_attaching.forked)


def start() -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Attach from now on. Returns what to call for a forward that has begun already."""
    nn.modules.module.register_module_forward_pre_hook(_attaching.begin)
    atexit.register(_attaching.finish)
    return _attaching.begin


def _say(text: str, rank: int | None = None) -> None:
    if sys.stderr is not None and (_rank() if rank is None else rank) == 0:
        with suppress(OSError, ValueError):  # it is closed
            print(f"tba: {text}", file=sys.stderr, flush=True)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _keywords() -> dict[str, Any]:
    """Find the keyword arguments of the forward that begins: global hooks do not get them."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != nn.modules.module.__file__:
        frame = frame.f_back
    found = frame.f_locals.get("kwargs")
    return found if isinstance(found, dict) else {}


def _name(model: nn.Module) -> str:
    """Name a model by its class, and what a wrapper (DDP, DeepSpeed, torch.compile) holds."""
    inside = vars(model).get("_modules", {})  # not by getattr, which may run code of the program
    inner = inside.get("module") or inside.get("_orig_mod")
    return f"{type(model).__name__}({_name(inner)})" if isinstance(inner, nn.Module) else type(model).__name__


def _parameters(model: nn.Module) -> str:
    """Count the parameters; DeepSpeed keeps the number of those that it has sharded."""
    parameters = list(model.parameters())
    if any(map(is_lazy, parameters)):
        return "lazy parameters"
    count = sum(getattr(each, "ds_numel", each.numel()) for each in parameters)
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name} parameters"
    return f"{count} parameters"


def _settings(offload: Offloader) -> str:
    """List the settings that the environment gives, as they are written there."""
    given = [each for each in describe(offload.config) if each.origin != "default"]
    return ", ".join(f"{each.name}={os.environ.get(each.origin, each.value)}" for each in given) or "tier=auto"


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    told = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""
    return int(told) if told.isdecimal() else 0


def _page(path: Path, number: int, rank: int) -> Path:
    """Give each model and rank a page of its own: out.html, out-2.html, out-rank1.html."""
    which = f"-{number}" * (number > 1) + f"-rank{rank}" * (rank > 0)
    return path.with_name(f"{path.stem}{which}{path.suffix}")
