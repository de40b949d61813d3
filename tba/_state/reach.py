"""Reach: the objects that a block's forward may change, found by walking from the block without running its code.

From the block and what it is given, the walk follows attributes, slots, containers, closures, defaults, weak references
and classes. Of the functions that it meets it follows those that the code met so far can call by name, and of a
function's globals those that its code names. PyTorch, NumPy and the standard library keep no state of a program's, so
their functions are not followed, but what they hold is: the closure of a decorator, the attributes of a module.

What holds state that nobody can read (an iterator, an object of compiled code), or code that can reach anything
(`eval`, `globals`), is named in `unseen`: such a block must not run twice. In installed libraries such objects are
passed over: a library that counts how often it is called is not known.

The generators that Python and NumPy share are held where code that was met may draw from them.
"""

from __future__ import annotations

import array
import builtins
import gc
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from functools import _lru_cache_wrapper, cached_property, partial, partialmethod
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    TracebackType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._torch.weights import is_parameter
from .code import names_of
from .gathered import are_hooks, gathers, notes
from .generators import SHARED_GENERATORS, generator
from .holders import (
    MISSING,
    PLAIN,
    Attributes,
    Bytes,
    Calls,
    Cell,
    Class,
    Context,
    Deque,
    Dict,
    Global,
    Holder,
    List,
    Module,
    Parameters,
    Set,
    Slots,
    Tensors,
    cell_contents,
)
from .origins import OURS, Kind, is_compiled, of_file, of_module

_MOST = 50_000  # objects that are walked through

# Built-in functions by which code reaches what it does not name, or the world outside. A block that calls one, in code
# of the program's own, must not run twice.
_ANYWHERE = frozenset({"globals", "eval", "exec", "__import__", "print", "open", "input"})
_ANYTHING = frozenset({"ctypes", "gc", "inspect", "sys", "subprocess", "socket"})

# Code that draws from the generators that Python and NumPy share among all code has one of these names, or one of these
# modules among its globals. (Operators registered with PyTorch are called by `ops`; what they do nobody sees here.)
_DRAWS = frozenset({"random", "mtrand", "ops"})
_GENERATING = ("random", "numpy.random")

# Of a module's hooks, those that its forward calls; a block's own stay outside when its forward runs again.
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
_OTHER_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name) - _HOOKS
# Methods that no statement of a forward calls without naming them, and those that run where a class is called.
_UNCALLED = frozenset(
    f"__{name}__"
    for name in (
        *("repr", "str", "dir", "reduce", "reduce_ex", "getstate", "setstate", "copy", "deepcopy", "sizeof", "format"),
        *("init_subclass", "class_getitem", "subclasshook", "del"),
    )
)
_MAKES = frozenset({"__init__", "__new__", "__post_init__"})
# Those that have no attributes but what they contain.
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, set, deque, tuple, frozenset})
# What holds nothing, or nothing that changes.
_PASSED = frozenset(
    {
        *PLAIN,
        *(float, type, property, staticmethod, classmethod, CodeType, ModuleType, NotImplementedType, GenericAlias),
        *(UnionType, MappingProxyType, FrameType, TracebackType, GetSetDescriptorType, MemberDescriptorType),
        *(WrapperDescriptorType, MethodDescriptorType, ClassMethodDescriptorType, object),
    }
    - {type}
)


def is_ours(value: Any) -> bool:
    """Whether a function is one that the engine puts into modules."""
    return type(value) is FunctionType and value.__code__.co_filename.startswith(OURS)


def _is_weight(value: Any) -> bool:
    return type(value) is Tensor and value._base is not None and is_parameter(value._base)


def _weights(held: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in held.items() if _is_weight(value))


class Reach:
    """What a walk has found.

    Attributes:
        holders: of all that may change.
        weights: parameters.
        unseen: why some of it cannot be seen; "" if all can.
    """

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.weights: list[nn.Parameter] = []
        self._unseen: dict[str, str] = {}  # why, by the name that leads there; "" where no name does
        self._called: set[str] = {"forward"}
        self._uncalled: dict[str, list[tuple[Any, bool]]] = {}
        self._seen: dict[int, Any] = {}
        self._globals: set[tuple[int, str]] = set()
        self._classes: set[int] = set()
        self._modules: set[tuple[int, int]] = set()
        self._stack: list[tuple[Any, str, bool]] = []
        self._later: list[tuple[Any, str, bool]] = []  # what libraries lead to
        self._gathers = False  # hooks within the block exchange its weights
        self._draws = False  # code that was met may draw from the shared generators

    @property
    def unseen(self) -> str:
        return next((why for name, why in self._unseen.items() if not name or name in self._called), "")

    def walk(self, roots: Iterable[Any], *, block: nn.Module | None = None, but: Iterable[Any] = ()) -> Reach:
        """Walk from `roots`, and from a `block` without its own hooks, but not from `but`; returns itself."""
        self._seen.update((id(each), each) for each in but)
        if block is not None:
            self._gathers = gathers(block)
            self._seen[id(block)] = block
            self._object(block, block=True)
        for root in roots:
            self._meet(root, "", False)
        self._go_on()
        if self._draws:
            self._stack.extend((each, "", False) for each in SHARED_GENERATORS)
            self._go_on()
        self._seen.clear()
        self._stack.clear()
        self._later.clear()
        return self

    def _go_on(self) -> None:
        while self._stack or self._later:
            value, name, library = (self._stack or self._later).pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value, name, library)
            if len(self._seen) > _MOST:
                self._unseen[""] = f"it reaches more than {_MOST:,} objects"
                break

    def _meet(self, value: Any, name: str, library: bool) -> None:
        if type(value) not in _PASSED:
            (self._later if library else self._stack).append((value, name, library))

    def _hold(self, holder: Holder) -> None:
        self.holders.append(holder)

    def _visit(self, value: Any, name: str, library: bool) -> None:
        kind = type(value)
        meet = self._meet
        if isinstance(value, Tensor):
            self._tensor(value, name)
        elif isinstance(value, (dict, list, set, deque, tuple, frozenset)):
            self._container(value, name, library)
        elif kind is FunctionType:
            self._function(value)
        elif kind is MethodType:
            meet(value.__self__, "", library)
            meet(value.__func__, "", library)
        elif kind in (BuiltinFunctionType, MethodWrapperType):
            meet(value.__self__, name, library)
        elif isinstance(value, partial):
            for each in (value.func, value.args, value.keywords, vars(value)):
                meet(each, "", library)
        elif kind is CellType:
            self._hold(Cell(value, name))
            meet(cell_contents(value), "", library)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, weakref.ref):
            meet(value(), name, library)
        elif kind is ContextVar:
            context = Context(value, value.name)
            self._hold(context)
            meet(context.read()[0], "", library)
        elif kind is _lru_cache_wrapper:
            meet(value.__wrapped__, "", library)
            if not library:
                self._cache(value, name)
        elif isinstance(value, (bytearray, array.array, memoryview, np.ndarray)):
            self._numbers(value, name, library)
        elif isinstance(value, threading.local):
            held = vars(value)  # this thread's
            self._hold(Attributes(held, kind.__name__))
            for key, each in held.items():
                meet(each, key, library)
            self._class(kind)
        elif (state := generator(value, name)) is not None:
            self._hold(state)
        elif not Kind.of(kind).stateless:
            self._object(value, name, library=library)
        elif isinstance(value, nn.Module) and kind.__module__.startswith("torch.distributed"):
            for part in value._modules.values():  # the program's own, in a wrapper
                meet(part, name, library)

    def _container(self, value: Any, name: str, library: bool) -> None:
        """Walk on to what a container has; from one of a class of its own, to its attributes too."""
        kind = type(value)
        if isinstance(value, dict):
            self._dict(value, name or kind.__name__, library)
        elif isinstance(value, (tuple, frozenset)):
            for each in value:
                self._meet(each, name, library)
        else:
            make = List if isinstance(value, list) else Set if isinstance(value, set) else Deque
            holder = make(value, name or kind.__name__)
            self._hold(holder)
            for each in holder.read():
                self._meet(each, "", library)
        if kind not in _CONTAINERS:
            self._object(value, name, library=library)

    def _dict(self, value: dict[Any, Any], name: str, library: bool) -> None:
        self._hold(Dict(value, name))
        for key in dict.keys(value):
            self._meet(key, "", library)
        for key, each in dict.items(value):
            if isinstance(each, Tensor) and id(each) not in self._seen:
                self._seen[id(each)] = each
                self._tensor(each, key if type(key) is str else "")
            self._meet(each, "", library)
        if type(value) is defaultdict:
            self._meet(value.default_factory, "", library)

    def _cache(self, function: Any, name: str) -> None:
        """Walk on from a function that remembers its results. How many those are shows in nothing but `cache_info`."""
        self._unseen.setdefault("cache_info", "its code asks what a cache knows of its calls")
        self._hold(Calls(function, name or "a cache"))
        for each in gc.get_referents(function):
            for result in each.values() if type(each) is dict else (each,):
                self._meet(result, "", False)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, nn.Parameter):
            self.weights.append(tensor)
        elif not _is_weight(tensor):
            self._hold(Tensors(tensor, name or "a tensor"))
        if getattr(tensor, "__dict__", None) and not hasattr(tensor, "ds_id"):  # else what it has is ZeRO-3's
            self._meet(vars(tensor), name, False)

    def _numbers(self, value: Any, name: str, library: bool) -> None:
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            self._cannot_see(value, name, library)
        elif not isinstance(value, np.ndarray) or value.flags.c_contiguous:
            self._hold(Bytes(value, name or type(value).__name__))
        else:
            base = value if value.base is None else value.base
            self._meet(base, name, library) if base is not value else self._cannot_see(value, name, library)

    def _object(self, value: Any, name: str = "", *, library: bool = False, block: bool = False) -> None:
        """Walk on from an object: its attributes, slots and class."""
        kind = type(value)
        if Kind.of(kind).hidden:
            self._cannot_see(value, name, library)
        within = library or Kind.of(kind).origin == "library"
        held = object.__getattribute__(value, "__dict__") if kind.__dictoffset__ else None
        if isinstance(value, nn.Module):
            self._module_object(value, within, block=block)
        elif type(held) is dict:
            self._hold(Attributes(held, kind.__name__))
            for key, each in held.items():
                self._meet(each, key if type(key) is str else "", within)
        if slots := Kind.of(kind).slots:
            holder = Slots((value, slots), kind.__name__)
            self._hold(holder)
            for each, slot in zip(holder.read(), slots, strict=True):
                self._meet(each, slot.__name__, within)
        self._class(kind)

    def _module_object(self, module: nn.Module, library: bool, *, block: bool) -> None:
        held, name = vars(module), type(module).__name__
        parameters: Any = held.get("_parameters")
        plain = type(parameters) is dict or (self._gathers and isinstance(parameters, dict))  # ZeRO-3 has its own
        # A forward that the engine has put there, and weights that hooks gather anew, are not the program's.
        gathered = (*_weights(held), *(dict.keys(parameters) if plain and self._gathers else ()))
        apart = frozenset(("forward", *_OTHER_HOOKS, *(_HOOKS if block else ()), *gathered, *notes(held)))
        self._hold(Module(weakref.ref(module), name, apart))
        if plain and id(parameters) not in self._seen:
            self._seen[id(parameters)] = parameters
            self._hold(Parameters(parameters, name, frozenset((*gathered, *_weights(parameters)))))
            for each in dict.values(parameters):
                self._meet(each, "", library)
        for key, each in held.items():
            if key not in apart or (key == "forward" and not is_ours(each)):
                self._meet(each, key, library)

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if id(each) in self._classes or Kind.of(each).origin == "apart":
                continue
            self._classes.add(id(each))
            library = Kind.of(each).origin == "library"
            if not library:
                self._hold(Class(each, each.__name__))
            runs = issubclass(each, torch.autograd.Function)  # its methods are called by the one that is named
            for name, value in vars(each).items():
                functions = _functions(value)
                under = each.__name__ if name in _MAKES else name
                special = name[:2] == "__" and name not in _UNCALLED and name not in _MAKES
                for function in functions:
                    if runs or special or under in self._called:
                        self._meet(function, name, library)
                    else:
                        self._uncalled.setdefault(under, []).append((function, library))
                if not functions and name[:2] != "__":
                    self._meet(value, name, library)

    def _function(self, function: FunctionType) -> None:
        code, origin = function.__code__, of_file(function.__code__.co_filename)
        if code.co_filename.startswith(OURS) or are_hooks(function.__module__):
            return
        library = origin != "program"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._meet(cell, name, library)
        for each in (function.__defaults__, function.__kwdefaults__, vars(function)):
            if each:
                self._meet(each, "", library)
        if origin == "apart":
            return
        named, names = names_of(code)
        self._draws |= not names.isdisjoint(_DRAWS)
        for name in names - self._called:
            self._called.add(name)
            for waiting, inside in self._uncalled.pop(name, ()):
                self._meet(waiting, name, inside)
        for name in named:
            self._global(function.__globals__, name, names, library)

    def _global(self, space: dict[str, Any], name: str, names: frozenset[str], library: bool) -> None:
        value = space.get(name, MISSING)
        if value is MISSING and (value := vars(builtins).get(name, MISSING)) is not MISSING:
            if name in _ANYWHERE and not library:
                self._unseen[""] = f"its code calls {name}()"
            space = vars(builtins)  # where a program may have put more
        if value is MISSING and name in sys.modules:  # imported within the function
            value = sys.modules[name]
        if type(value) is ModuleType:
            self._module(value, names, library)
        elif (id(space), name) not in self._globals:
            self._globals.add((id(space), name))
            if not library:
                self._hold(Global((space, name), name))
            if value is not MISSING:
                self._meet(value, name, library)

    def _module(self, module: ModuleType, names: frozenset[str], library: bool) -> None:
        """Walk on from a Python module by the names that some code has."""
        if (id(module), id(names)) in self._modules:
            return
        self._modules.add((id(module), id(names)))
        origin = of_module(module)
        self._draws |= module.__name__.startswith(_GENERATING)
        if not library and module.__name__ in _ANYTHING:
            self._unseen[""] = f"its code uses the module {module.__name__}"
        elif origin != "apart" and is_compiled(module):
            if not library:
                self._unseen[""] = f"its code calls {module.__name__}, which is compiled"
        else:
            inside = library or origin == "library"
            for name in names & vars(module).keys():
                value = vars(module)[name]
                if origin != "apart":
                    self._global(vars(module), name, names, inside)
                elif not library and not isinstance(value, (ModuleType, FunctionType, BuiltinFunctionType, type)):
                    self._global(vars(module), name, names, False)  # a program may have put it there

    def _cannot_see(self, value: Any, name: str, library: bool) -> None:
        if not library:
            self._unseen.setdefault(name, f"it holds a {type(value).__name__}, whose state nobody can compare")


def _functions(value: Any) -> tuple[Any, ...]:
    """Give the functions that an attribute of a class calls when it is asked for or called."""
    if type(value) is FunctionType:
        return (value,)
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return tuple(filter(None, (value.fget, value.fset, value.fdel)))
    if isinstance(value, (partialmethod, cached_property)):
        return (value.func,)
    return ()
