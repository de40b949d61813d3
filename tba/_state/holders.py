"""Holders: objects whose contents a forward may change, each read, compared and restored without running its code.

A holder reads its object as a tuple. Readings are compared element by element: objects by identity, plain values by
type and value. So an attribute set to an equal number has not changed; one set to an equal tensor has.
"""

from __future__ import annotations

import operator
from array import array
from collections import OrderedDict, deque
from contextvars import ContextVar
from types import CellType
from typing import Any

import torch
from torch import Tensor

from .._torch.private import keeping_version

# Values without identity: equal ones are the same.
PLAIN = (
    *(bool, int, complex, str, bytes, type(None), type(...), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Larger tensors are not copied: only their version and address are compared.
COPIED_BYTES = 64 << 10

Reading = tuple[Any, ...]
MISSING: Any = object()


class Value:
    """Contents compared by `==` as a whole; `raw` is what they are restored from."""

    __slots__ = ("raw", "value")

    def __init__(self, value: Any, raw: Any = None) -> None:
        self.value = value
        self.raw = raw


def same(one: Any, other: Any) -> bool:
    """Whether two objects read at different times show no change."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return bool(one.hex() == other.hex())  # distinguishes the two zeros, and equates NaNs
    if kind is tuple:
        return len(one) == len(other) and all(map(same, one, other))
    return (kind in PLAIN and bool(one == other)) or (kind is Value and bool(one.value == other.value))


def equal(one: Reading, other: Reading) -> bool:
    """`same` for all elements of two readings."""
    if len(one) != len(other):
        return False
    return all(map(operator.is_, one, other)) or all(map(same, one, other))


class Holder:
    """Base of all holders.

    Attributes:
        of: the object.
        name: for messages.
        undoes: whether it can restore everything that it reads.
    """

    __slots__ = ("name", "of")
    undoes: bool = True

    def __init__(self, of: Any, name: str) -> None:
        self.of = of
        self.name = name

    def read(self) -> Reading:
        """What it holds now."""
        raise AssertionError("each holder reads in its own way")

    def write(self, reading: Reading) -> None:
        """Restore a reading. Called only if it differs from the present."""

    def difference(self, one: Reading, other: Reading) -> str:
        """Name what differs between two readings."""
        return self.name


class Dict(Holder):
    """A dictionary, or a subclass's, whose own methods are not called."""

    __slots__ = ()

    def read(self) -> Reading:
        kind = _kind(self.of)
        return (*kind.keys(self.of), *kind.values(self.of))

    def write(self, reading: Reading) -> None:
        half = len(reading) // 2
        kind = _kind(self.of)
        kind.clear(self.of)
        for key, value in zip(reading[:half], reading[half:], strict=True):
            kind.__setitem__(self.of, key, value)


def _kind(held: dict[Any, Any]) -> Any:
    return OrderedDict if isinstance(held, OrderedDict) else dict  # OrderedDict keeps its own order


class Attributes(Dict):
    __slots__ = ()

    def difference(self, one: Reading, other: Reading) -> str:
        half, others = len(one) // 2, len(other) // 2
        before = dict(zip(one[:half], one[half:], strict=True))
        after = dict(zip(other[:others], other[others:], strict=True))
        names = (key for key in {**before, **after} if not same(before.get(key, MISSING), after.get(key, MISSING)))
        return f"{self.name}.{next(names, '')}".rstrip(".")


class _Part(Dict):
    """A dictionary, except for the keys named in `apart`."""

    __slots__ = ("_apart",)

    def __init__(self, of: Any, name: str, apart: frozenset[str]) -> None:
        super().__init__(of, name)
        self._apart = apart

    def _held(self) -> dict[str, Any]:
        held: dict[str, Any] = self.of
        return held

    def read(self) -> Reading:
        held = self._held()
        names = [name for name in held if name not in self._apart]
        return (*names, *map(held.__getitem__, names))

    def write(self, reading: Reading) -> None:
        held, half = self._held(), len(reading) // 2
        before = dict(zip(reading[:half], reading[half:], strict=True))
        kept = {name: value for name, value in held.items() if name in self._apart}
        kind = _kind(held)
        kind.clear(held)
        kind.update(held, before | kept)


class Module(_Part):
    """The attributes of a module, except those named in `apart`; `of` is a weak reference to it."""

    __slots__ = ()

    def _held(self) -> dict[str, Any]:
        module = self.of()
        return vars(module) if module is not None else {}

    difference = Attributes.difference


class Parameters(_Part):
    """The parameters of a module, except those named in `apart`."""

    __slots__ = ()


class List(Holder):
    __slots__ = ()

    def read(self) -> Reading:
        return tuple(list.__iter__(self.of))

    def write(self, reading: Reading) -> None:
        list.__setitem__(self.of, slice(None), reading)


class Deque(Holder):
    __slots__ = ()

    def read(self) -> Reading:
        return tuple(deque.__iter__(self.of))

    def write(self, reading: Reading) -> None:
        deque.clear(self.of)
        deque.extend(self.of, reading)


class Set(Holder):
    """A set. If unchanged, it gives its elements in the same order."""

    __slots__ = ()

    def read(self) -> Reading:
        return tuple(set.__iter__(self.of))

    def write(self, reading: Reading) -> None:
        set.clear(self.of)
        set.update(self.of, reading)


class Slots(Holder):
    """The slots of an object: `of` is the object with its slots' descriptors."""

    __slots__ = ()

    def read(self) -> Reading:
        owner, slots = self.of
        return tuple(_slot(owner, each) for each in slots)

    def write(self, reading: Reading) -> None:
        owner, slots = self.of
        for each, value in zip(slots, reading, strict=True):
            if value is not MISSING:
                each.__set__(owner, value)
            elif _slot(owner, each) is not MISSING:
                each.__delete__(owner)


def _slot(owner: Any, slot: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return MISSING


class Cell(Holder):
    """A variable that functions share in their closures."""

    __slots__ = ()

    def read(self) -> Reading:
        return (cell_contents(self.of),)

    def write(self, reading: Reading) -> None:
        if reading[0] is not MISSING:
            self.of.cell_contents = reading[0]
        else:
            del self.of.cell_contents


def cell_contents(cell: CellType) -> Any:
    """The contents of a cell; MISSING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


class Global(Holder):
    """One name in the dictionary of a Python module: `of` is both."""

    __slots__ = ()

    def read(self) -> Reading:
        names, name = self.of
        return (names.get(name, MISSING),)

    def write(self, reading: Reading) -> None:
        names, name = self.of
        if reading[0] is MISSING:
            names.pop(name, None)
        else:
            names[name] = reading[0]


class Class(Holder):
    __slots__ = ()

    def read(self) -> Reading:
        held = vars(self.of)
        return (*held.keys(), *held.values())

    def write(self, reading: Reading) -> None:
        half = len(reading) // 2
        before, now = dict(zip(reading[:half], reading[half:], strict=True)), dict(vars(self.of))
        for name in [*before, *(name for name in now if name not in before)]:
            if name not in before:
                type.__delattr__(self.of, name)
            elif now.get(name, MISSING) is not before[name]:
                type.__setattr__(self.of, name, before[name])

    difference = Attributes.difference


class Bytes(Holder):
    """Numbers in their own memory: a bytearray, an array, a NumPy array."""

    __slots__ = ()

    def read(self) -> Reading:
        return (Value(bytes(memoryview(self.of).cast("B"))),)

    def write(self, reading: Reading) -> None:
        view, held = memoryview(self.of).cast("B"), reading[0].value
        if len(view) == len(held):
            view[:] = held
            return
        view.release()  # else it could not be resized
        del self.of[:]
        self.of.frombytes(held) if isinstance(self.of, array) else self.of.extend(held)


class Tensors(Holder):
    """A tensor that is no parameter: its version, its address and, if it is small, its contents.

    An in-place edit can be undone only for a small tensor.
    """

    __slots__ = ("undoes",)

    def __init__(self, of: Tensor, name: str) -> None:
        super().__init__(of, name)
        plain = type(of) is Tensor and of.layout is torch.strided and not (of.is_inference() or of.is_nested)
        self.undoes = plain and of.nbytes <= COPIED_BYTES and of.device.type != "meta"

    def read(self) -> Reading:
        tensor: Tensor = self.of
        seen = version(tensor), address(tensor), tuple(tensor.shape)
        return (*seen, Value(Contents(tensor.detach()))) if self.undoes else seen

    def write(self, reading: Reading) -> None:
        if self.undoes:
            reading[-1].value.fill(self.of)


class Contents:
    """What a small tensor held, and where. On a device contents are copied but not compared, as that would wait."""

    __slots__ = ("alias", "copy")

    def __init__(self, alias: Tensor) -> None:
        self.alias = alias
        self.copy = alias.clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents):
            return False
        return not self.copy.is_cpu or equal_bits(self.copy, other.copy)

    __hash__ = None  # type: ignore[assignment]

    def fill(self, tensor: Tensor) -> None:
        """Give a tensor its old memory and contents back."""
        with torch.no_grad(), keeping_version(tensor):
            if tensor.data_ptr() != self.alias.data_ptr() or tensor.shape != self.alias.shape:
                tensor.data = self.alias
            tensor.copy_(self.copy)


def equal_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    one, other = (each.detach().resolve_conj().resolve_neg().contiguous().view(-1) for each in (one, other))
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def version(tensor: Tensor) -> int:
    """The version of a tensor; -1 for one without."""
    return -1 if tensor.is_inference() else tensor._version


def address(tensor: Tensor) -> int:
    """The address of a tensor's memory; -1 for one without."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return -1


class Generator(Holder):
    """A random number generator: `of` gets its state, sets it, and converts it into something comparable."""

    __slots__ = ()

    def read(self) -> Reading:
        state = self.of[0]()
        return (Value(self.of[2](state), state),)

    def write(self, reading: Reading) -> None:
        self.of[1](reading[0].raw)


class Context(Holder):
    __slots__ = ()

    def read(self) -> Reading:
        variable: ContextVar[Any] = self.of
        try:
            return (variable.get(),)
        except LookupError:
            return (MISSING,)

    def write(self, reading: Reading) -> None:
        if reading[0] is not MISSING:
            self.of.set(reading[0])


class Calls(Holder):
    """A function with cached results (`functools.lru_cache`); they are valid whenever they were made."""

    __slots__ = ()

    def read(self) -> Reading:
        found = self.of.cache_info()
        return found.misses, found.currsize
