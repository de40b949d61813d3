"""A record's life: random walks through its transitions against a model, and that nothing else may change a record."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tba
from compact import Exact, Packed
from io_backends import Buffer, Ticket
from support.samples import examples
from tba._derive.recipe import Recipe
from tba._record.encoded import Encoded
from tba._record.record import IN_MEMORY, Record, RecordState, Remains

N = 16
STEADY = settings(derandomize=True, database=None, deadline=None, max_examples=examples(150), stateful_step_count=30)

# What the docstring of `Record` promises: from which states a transition may start, and where it leads.
TRANSITIONS: dict[str, tuple[set[str], str]] = {
    "hold": ({"PENDING"}, "RESIDENT"),
    "derive": ({"PENDING"}, "DERIVED"),
    "send": ({"PENDING", "RESIDENT"}, "WRITING"),
    "stay": ({"WRITING"}, "RESIDENT"),
    "take_back": ({"WRITING"}, "RESIDENT"),
    "store": ({"WRITING"}, "STORED"),
    "read_into": ({"STORED"}, "READING"),
    "read_failed": ({"READING"}, "STORED"),
    "restore": ({"READING", "STORED"}, "RESTORED"),
    "poison": ({"RESIDENT", "WRITING", "STORED", "READING", "RESTORED"}, "POISONED"),
}


def ticket() -> Ticket:
    return Ticket(Buffer(0, 0, None), None, lambda _: None)


class Lives(RuleBasedStateMachine):
    """One record, and a model of it: the state by name, whether the store has a copy, and whether it was edited."""

    @initialize(base=st.booleans())
    def pack(self, base: bool) -> None:
        self.source = torch.arange(float(N))
        self.tensor = self.source[2:] if base else self.source
        self.remains: deque[Remains] = deque()
        self.record = Record(7, self.tensor, self.source, self.source.untyped_storage(), 0, 4 * N, self.remains)
        self.state = "PENDING"
        self.copied = self.edited = self.confirmed = False

    def _go(self, transition: str, *arguments: object, **named: object) -> object:
        return_value = getattr(self.record, transition)(*arguments, **named)
        self.state = TRANSITIONS[transition][1]
        return return_value

    def _may(self, transition: str) -> bool:
        return self.state in TRANSITIONS[transition][0]

    @rule()
    def hold(self) -> None:
        if self._may("hold"):
            self._go("hold")

    @rule()
    def derive(self) -> None:
        if self._may("derive"):
            self._go("derive", Recipe.__new__(Recipe))

    @precondition(lambda self: not self.copied)
    @rule()
    def send(self) -> None:
        if self._may("send"):
            sent = ticket()
            self._go("send", sent)
            assert self.record.ref.write is sent
            self.copied = True

    @rule()
    def stay(self) -> None:
        if self._may("stay"):
            self._go("stay")

    @rule()
    def take_back(self) -> None:
        if self._may("take_back"):
            sent = self.record.write
            assert self._go("take_back") is sent
            assert self.record.write is self.record.ref.write is None
            self.copied = False

    @rule(confirmed=st.booleans())
    def store(self, confirmed: bool) -> None:
        if self._may("store"):
            self._go("store", confirmed=confirmed)
            self.confirmed = confirmed

    @precondition(lambda self: self.state in ("STORED", "READING", "RESTORED") and not self.confirmed)
    @rule()
    def look_again(self) -> None:
        """At a later hook: was it edited while it was being written?"""
        assert self.record.is_edited() == self.edited
        if self.edited:
            self._go("poison")
        else:
            self.record.confirm()
            self.confirmed = True

    @rule()
    def read_into(self) -> None:
        if self._may("read_into"):
            self._go("read_into", ticket(), memoryview(bytearray(4 * N)), None)

    @rule()
    def read_failed(self) -> None:
        if self._may("read_failed"):
            self._go("read_failed")

    @rule()
    def restore(self) -> None:
        if self._may("restore"):
            self._go("restore", torch.arange(float(N)), None)

    @rule()
    def drop(self) -> None:
        self.record.drop()
        if self.state == "RESTORED":
            self.state = "STORED"
        elif self.state == "RESIDENT" and self.copied:
            self.state = "POISONED" if self.edited else "STORED"
            self.confirmed = True

    @precondition(lambda self: self.state in IN_MEMORY_NAMES)
    @rule()
    def edit(self) -> None:
        with torch.no_grad():
            self.source.add_(1)
        self.edited = True

    @precondition(lambda self: self.state == "PENDING" and not self.edited)
    @rule()
    def encode(self) -> None:
        encoded = Encoded(Exact(), Packed.__new__(Packed), (4,), 0, 4 * N)
        self.record.become(torch.zeros(4, dtype=torch.uint8), encoded)
        self.source = self.record.alias if self.record.alias is not None else self.source

    @rule(transition=st.sampled_from(sorted(TRANSITIONS)))
    def refuse(self, transition: str) -> None:
        """What the table does not allow is refused, and nothing has changed."""
        if self._may(transition):
            return
        arguments = {
            "derive": (None,),
            "send": (ticket(),),
            "read_into": (ticket(), None, None),
            "restore": (torch.ones(1), None),
        }
        before = {name: getattr(self.record, name) for name in _slots()}
        with pytest.raises(AssertionError):
            getattr(self.record, transition)(
                *arguments.get(transition, ()), **({"confirmed": True} if transition == "store" else {})
            )
        assert all(getattr(self.record, name) is value for name, value in before.items())

    @invariant()
    def agrees(self) -> None:
        record = self.record
        assert record.state is RecordState[self.state]
        assert (record.write is not None) == self.copied
        assert (record.read is not None) == (self.state == "READING")
        assert (record.restored is not None) == (self.state == "RESTORED")
        assert (record.recipe is not None) == (self.state == "DERIVED")
        in_memory = self.state in IN_MEMORY_NAMES
        if in_memory:
            assert record.alias is not None
            assert record.alias.untyped_storage().nbytes() > 0
            assert record.is_edited() == self.edited
        elif record.alias is not None:
            assert record.alias.untyped_storage().nbytes() == 0  # only its version counter is left
        assert not self.remains  # it lives

    def teardown(self) -> None:
        if not hasattr(self, "record"):
            return
        write = self.record.write
        del self.record
        (remains,) = self.remains
        assert (remains.number, remains.write) == (7, write)


IN_MEMORY_NAMES = {state.name for state in IN_MEMORY}
LivesTest = Lives.TestCase
LivesTest.settings = STEADY


def _slots() -> list[str]:
    return [name for kind in Record.__mro__ for name in getattr(kind, "__slots__", ()) if not name.startswith("__")]


def test_edits_through_tensors_that_joined_count_until_the_bytes_are_our_own() -> None:
    source = torch.ones(N)
    alias = torch.empty(0).set_(source.untyped_storage(), 0, (N,), (1,))  # a version counter of its own
    record = Record(0, source, source, source.untyped_storage(), 0, 4 * N, deque())
    record.join(alias, together=True)
    assert not record.is_edited()
    alias.add_(1)
    assert record.is_edited()
    assert not record.may_be_joined(source)
    record.become(torch.zeros(4, dtype=torch.uint8), Encoded(Exact(), Packed.__new__(Packed), (4,), 0, 4 * N))
    assert not record.is_edited()  # nobody else has this memory
    assert not record.may_be_joined(source)  # it shows what was before the edit


# -- ownership -----------------------------------------------------------------------------------------------------

PACKAGE = Path(tba.__file__).parent
OWNERS = {"record.py", "source.py", "_record.py", "_source.py"}


def assigned(path: Path) -> Iterator[tuple[str, str, int]]:
    """Attributes that a file assigns to or deletes, of anything but `self`: of what, their names and lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = ast.unparse(node.value)
            if owner != "self":
                yield owner, node.attr, node.lineno


def test_nothing_but_a_record_changes_a_record() -> None:
    fields = set(_slots()) - {"ref", "nbytes"}
    found = [
        f"{path.name}:{line} {owner}.{name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name not in OWNERS
        for owner, name, line in assigned(path)
        if name in fields or owner == "record"
    ]
    assert found == []
