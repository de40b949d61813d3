"""Origins: whose code a file or a class is, and so whether it may keep state of the program's.

- "program": what is not installed. All of it is followed, and what cannot be read in it is named.
- "library": installed packages. They are followed, and what cannot be read in them is ignored.
- "apart": PyTorch, NumPy, the standard library and the engine, whose functions are not followed.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import weakref
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from types import MemberDescriptorType, ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

import compact
import io_backends

from .._device.kinds import MODULES as DEVICE_MODULES
from .gathered import DEEPSPEED

Origin = Literal["program", "library", "apart"]


def _folder(path: str | None) -> str:
    return os.path.join(path or "", "")


OURS = (
    _folder(os.path.dirname(os.path.dirname(__file__))),
    *(_folder(os.path.dirname(package.__file__ or "")) for package in (io_backends, compact)),
)
_NUMERIC = tuple(_folder(os.path.dirname(package.__file__ or "")) for package in (torch, np))
_INSTALLED = tuple(_folder(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
_STANDARD = tuple(_folder(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_PYTEST = os.path.join("", "_pytest", "")  # pytest rewrites assertions to call it
_COMPILED = tuple(EXTENSION_SUFFIXES)

# Objects of these modules' classes are not the program's state.
_STATELESS = frozenset(
    {
        *("torch._C", "torch._dynamo", "torch._ops", "torch.distributed", "torch.fx", "torch.jit"),
        *DEVICE_MODULES,
        *("torch.utils.hooks", "tba", "io_backends", "compact", "logging", "_thread", "abc", "_abc"),
        *("typing", "re", "datetime", "decimal", "pathlib", "uuid", "importlib", "builtins"),
        DEEPSPEED,
    }
)
# Built-in classes whose objects are state, besides those named "...iterator".
_GO_ON = ("generator", "coroutine", "async_generator", "enumerate", "zip", "map", "filter", "reversed")
# Modules of compiled classes whose objects show everything that they hold.
_SHOWN = ("__main__", "builtins", "collections", "torch", "_abc")


@cache
def of_file(file: str) -> Origin:
    if file.startswith((*OURS, *_NUMERIC, "<frozen")) or _PYTEST in file:
        return "apart"
    if file.startswith(_INSTALLED):
        return "library"
    return "apart" if file.startswith(_STANDARD) else "program"


def is_compiled(module: ModuleType) -> bool:
    return _is_built_in(module) or (getattr(module, "__file__", None) or "").endswith(_COMPILED)


def _is_built_in(module: ModuleType) -> bool:
    return getattr(getattr(module, "__spec__", None), "origin", None) == "built-in"


def of_module(module: ModuleType) -> Origin:
    file = getattr(module, "__file__", None)
    if file is not None:
        return of_file(file)
    return "apart" if _is_built_in(module) else "program"  # created at run time


class Kind(NamedTuple):
    """What we know about a class.

    Attributes:
        origin: whose code it is.
        hidden: it is made from compiled code, whose objects hold what nobody can read.
        stateless: its objects are not the program's state.
        slots: descriptors of its objects' slots.
    """

    origin: Origin
    hidden: bool
    stateless: bool
    slots: tuple[Any, ...]

    @classmethod
    def of(cls, kind: type) -> Kind:
        found = _kinds.get(kind)
        if found is None:
            stateless = _is_stateless(kind)
            hidden = not stateless and _is_hidden(kind)
            found = _kinds[kind] = cls(_origin(_made_from(kind)), hidden, stateless, _slots(kind))
        return found


_kinds: weakref.WeakKeyDictionary[type, Kind] = weakref.WeakKeyDictionary()


def _origin(kind: type) -> Origin:
    module = sys.modules.get(str(kind.__module__))
    return "program" if module is None else of_module(module)


def _is_stateless(kind: type) -> bool:
    if kind.__module__ == "builtins":
        return not (kind.__name__.endswith("iterator") or kind.__name__ in _GO_ON)
    return _is_listed(_made_from(kind))


def _made_from(kind: type) -> type:
    """Give the class of the program's that `fully_shard` has made another from in its own name; else the class."""
    made_from = next((each for each in kind.__mro__ if not _is_listed(each)), kind)
    return made_from if issubclass(made_from, nn.Module) and made_from is not nn.Module else kind


def _is_listed(kind: type) -> bool:
    parts = str(kind.__module__).split(".")
    return any(".".join(parts[:length]) in _STATELESS for length in range(1, len(parts) + 1))


def _is_hidden(kind: type) -> bool:
    if kind.__module__ == "builtins":
        return True
    modules = ((each.__module__, sys.modules.get(str(each.__module__))) for each in kind.__mro__)
    return any(module is not None and name not in _SHOWN and is_compiled(module) for name, module in modules)


def _slots(kind: type) -> tuple[Any, ...]:
    found = []
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            mangled = f"_{each.__name__.lstrip('_')}{name}" if name[:2] == "__" and name[-2:] != "__" else name
            slot = vars(each).get(mangled)
            if type(slot) is MemberDescriptorType:
                found.append(slot)
    return tuple(found)
