"""Record: one range of one storage at one version, and where its bytes are.

The graph owns records: handles in autograd's nodes hold them, and nothing else holds them longer than a transfer needs.
When the last handle goes, the record goes, and its weak reference, `Remains`, is appended to a deque.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from compact import Codec, Spec
from io_backends import Ticket

from .._errors import edited_in_place
from .encoded import Encoded
from .source import Source
from .view import View


class RecordState(enum.Enum):
    """Where a record's bytes are."""

    PENDING = enum.auto()  # in memory (`alias`); its operator's kernel may still be running, so not yet submitted
    RESIDENT = enum.auto()  # in memory (`alias`): held back, kept by decision, or its write failed
    WRITING = enum.auto()  # in memory (`alias`) while a write is queued or running
    STORED = enum.auto()  # only in the tier
    READING = enum.auto()  # in the tier, being read back
    RESTORED = enum.auto()  # in the tier and in memory (`restored`)
    DERIVED = enum.auto()  # nowhere: recomputed from others (`derivations`)
    POISONED = enum.auto()  # edited in place before the copy was finished: unusable


# Module names, because reading a member off the enum class costs as much as a tensor's attribute.
PENDING, RESIDENT, WRITING, STORED, READING, RESTORED, DERIVED, POISONED = RecordState
# A tuple compares members by identity; a set would call the enum's slow hash.
IN_MEMORY = (RESIDENT, WRITING, PENDING)


class Remains(weakref.ref["Record"]):
    """A weak reference that outlives a record and knows what to give back then.

    Its callback is `deque.append`: no Python code runs at a record's end, so nothing can interrupt it halfway.
    """

    __slots__ = ("nbytes", "number", "write")
    nbytes: int
    number: int
    write: Ticket | None


class Recipe(Protocol):
    """How to recompute a record's bytes."""

    @property
    def sources(self) -> Sequence[Any]:
        """The packed objects that it asks for, each as often as it does."""

    @property
    def depth(self) -> int:
        """The most operators on a path to what is kept."""

    def compute(self, *, checked: bool = True) -> Tensor:
        """Recompute the tensor; `checked`: as what it was. Raises what its sources raise, and EditedError."""


class Record(Source):
    """One range of one storage, and what becomes of it. The engine's lock guards every field.

    Only methods of this class change a record, and each transition asserts the states it may start from:

        PENDING   hold -> RESIDENT, send -> WRITING, derive -> DERIVED
        RESIDENT  send -> WRITING, drop -> STORED (if a copy is in the store)
        WRITING   store -> STORED (perhaps still in host memory: `staged`), stay -> RESIDENT (a copy is in the store),
                  take_back -> RESIDENT (none is)
        STORED    read_into -> READING, restore -> RESTORED
        READING   restore -> RESTORED, read_failed -> STORED
        RESTORED  drop -> STORED
        any but PENDING and DERIVED: poison -> POISONED

    Attributes:
        number: position in the engine's pack sequence.
        stream: the producer's, on a device; None on a CPU.
        codec, encoded, decoded: what may shrink the bytes; how it did; and the bytes unpacked (on which stream) while
            backward still has to ask for other saved tensors of this record (`compressor`). Once encoded, all fields
            about memory describe the packed bytes.
        write, read: the transfer that writes the bytes to the store; the one that reads them back.
        staged: for device bytes being written: their copy in host memory, until the write has succeeded. Reads use it,
            and the device's own memory is free.
        view: the lease or device memory that is being read into.
        restored: flat over the restored bytes, of the first saver's dtype or of bytes.
        ready: on a device, what the consumer's stream waits for before it uses `restored`.
        lent: the node that saved all of it has its memory, and nobody else uses it.
        last_view: of a restored record with several views, the last one given out: the next request often wants it too.
        recipe: how to recompute the bytes; None if they are kept.
        stays: compressed in place and never moved; or compressed to nothing.
        examined: a device is comparing or encoding its current bytes, and the result is not known yet.
        goes: a plan moves it, however much room there is.
        follows: a plan has others give it again.
        wanted: read-ahead or backward asked for it before it was written: it stays in memory.
        saves: how many saved tensors are views of it.
        asks: how many requests for them came; at `saves`, a backward that frees its graph is done with it.
        logical_bytes: what it counts for in `offloaded_bytes` (if `offloaded`) or `kept_bytes`.
    """

    __slots__ = (
        *("__weakref__", "asks", "codec", "decoded", "encoded", "examined", "follows", "goes", "last_view", "lent"),
        *("logical_bytes", "number", "offloaded", "read", "ready", "recipe", "ref", "remains", "restored", "saves"),
        *("staged", "state", "stays", "stream", "view", "wanted", "write"),
    )

    def __init__(
        self,
        number: int,
        tensor: Tensor,
        root: Tensor,
        storage: torch.UntypedStorage,
        begin: int,
        end: int,
        remains: deque[Remains],
        *,
        died: Callable[[Remains], None] | None = None,
        stream: object = None,
        logical_bytes: int = 0,
        offloaded: bool = False,
        stays: bool = False,
    ) -> None:
        super().__init__(tensor, root, storage, begin, end)
        self.number = number
        self.stream = stream
        self.logical_bytes = logical_bytes
        self.offloaded = offloaded
        self.stays = stays
        self.examined = self.goes = self.follows = False
        self.state: RecordState = PENDING
        self.write: Ticket | None = None
        self.read: Ticket | None = None
        self.view: memoryview | Tensor | None = None
        self.staged: Tensor | None = None
        self.restored: Tensor | None = None
        self.last_view: tuple[View, Tensor] | None = None
        self.ready: object = None
        self.codec: Codec | None = None
        self.encoded: Encoded | None = None
        self.decoded: tuple[Tensor, object] | None = None
        self.recipe: Recipe | None = None
        self.lent = False
        self.wanted = False
        self.asks = 0
        self.saves = 1
        self.remains = remains
        ref = Remains(self, died or remains.append)
        ref.number = number
        ref.nbytes = self.nbytes
        ref.write = None
        self.ref = ref  # last: a record that could not be made leaves nothing to give back

    # -- transitions -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Stay in memory: the operator has finished."""
        assert self.state is PENDING
        self.state = RESIDENT

    def derive(self, recipe: Recipe) -> None:
        """Drop the bytes: `recipe` recomputes them."""
        assert self.state is PENDING
        self.recipe, self.alias = recipe, None
        self.state = DERIVED

    def send(self, ticket: Ticket) -> None:
        """Go to the store by the queued write `ticket`."""
        assert self.state in (PENDING, RESIDENT)
        assert self.write is None
        self.write = self.ref.write = ticket
        self.state = WRITING

    def pass_on(self, ticket: Ticket) -> None:
        """Continue with `ticket`: the copy out of the device is over, and its write begins."""
        assert self.state is WRITING
        self.write = self.ref.write = ticket

    def stay(self) -> None:
        """Stay in memory, because the record is wanted, although its write has ended."""
        assert self.state is WRITING
        self.state = RESIDENT

    def take_back(self) -> Ticket | None:
        """Become an alias, as in plain PyTorch. Returns the worthless write, for the caller to discard."""
        assert self.state is WRITING
        ticket, self.write, self.ref.write = self.write, None, None
        self.state = RESIDENT
        return ticket

    def store(self, *, confirmed: bool, staged: Tensor | None = None) -> None:
        """Drop the memory: the write has ended, or the bytes are `staged`. Unless `confirmed`, keep the counter."""
        assert self.state is WRITING
        self.staged = staged
        self._drop_alias()
        self.state = STORED
        if confirmed:
            self.alias = None

    def written(self) -> None:
        """Drop what was staged: the write has succeeded."""
        self.staged = None

    def unwritten(self) -> Ticket | None:
        """Stay staged for good: the write failed or was cancelled. Returns it, for the caller to discard."""
        assert self.staged is not None
        ticket, self.write, self.ref.write = self.write, None, None
        return ticket

    def confirm(self) -> None:
        """Note that nobody edited the source during the write."""
        assert self.state not in IN_MEMORY
        self.alias = None

    def read_into(self, ticket: Ticket, view: memoryview | Tensor, ready: object) -> None:
        """Come back by the read `ticket`, into `view`."""
        assert self.state is STORED
        self.read, self.view, self.ready = ticket, view, ready
        self.state = READING

    def read_failed(self) -> None:
        """Be only in the store again; a later unpack may retry."""
        assert self.state is READING
        self.read = self.view = self.ready = None
        self.state = STORED

    def restore(self, restored: Tensor, ready: object) -> None:
        """Be back in memory, flat over `restored`, once `ready` has happened (None: it has, or `read_into` said)."""
        assert self.state in (READING, STORED)
        self.read = self.view = None
        self.restored, self.ready = restored, ready or self.ready
        self.state = RESTORED

    def drop(self) -> None:
        """Drop bytes from memory that are in the store too; else do nothing.

        Poisons a record whose source was edited since the write began: nobody can tell any more whether before or after
        the copy.
        """
        if self.state is RESTORED:
            self.restored = self.last_view = self.ready = None
            self.state = STORED
        elif self.state is RESIDENT and self.write is not None:
            if self.alias is not None and self.is_edited():
                self.poison()
                return
            self._drop_alias()
            self.alias = None
            self.wanted = False
            self.state = STORED

    def poison(self) -> None:
        """Make the bytes unusable: they were edited before the copy was finished."""
        assert self.state not in (PENDING, DERIVED)
        self.state = POISONED
        if self.alias is not None and self.alias.untyped_storage().nbytes():
            self._drop_alias()
        self.staged = None
        self.restored = self.last_view = self.ready = None

    # -- what changes beside the state -----------------------------------------------------------------------------

    def want(self, wanted: bool = True) -> None:
        """Stay in memory when the current write has ended, or unwritten while waiting for room; or no longer."""
        self.wanted = wanted

    def go(self) -> None:
        """Move by plan once the operator has finished."""
        self.goes = True

    def follow(self) -> None:
        """Be given again by others, by plan, if they do once the operator has finished."""
        self.follows = True

    def add_saver(self) -> None:
        """Count one more saved tensor, or recipe, that will ask for it."""
        self.saves += 1

    def answer(self) -> bool:
        """Count a request for one of its tensors; return whether it was the last one expected."""
        self.asks += 1
        return self.asks >= self.saves

    def set_offloaded(self, offloaded: bool) -> int:
        """Count as offloaded or kept from now on; return the change in offloaded bytes."""
        change = self.logical_bytes * (offloaded - self.offloaded)
        self.offloaded = offloaded
        return change

    def use_codec(self, codec: Codec | None) -> None:
        self.codec = codec

    def plan(self, recipe: Recipe | None) -> None:
        """Set how to recompute the bytes; None to keep them."""
        self.recipe = recipe

    def become(self, payload: Tensor, encoded: Encoded) -> None:
        """Replace the bytes by `payload`, uint8 [nbytes] with its own storage."""
        storage = payload.untyped_storage()
        self.alias, self.version, self.encoded = payload, payload._version, encoded
        self.own = True
        self.begin, self.end, self.nbytes = 0, payload.numel(), payload.numel()
        self.address, self.storage_bytes = storage.data_ptr(), storage.nbytes()
        self.stays = self.stays or not self.nbytes

    def examine(self, examined: bool) -> None:
        """Note that a device has begun to compare or encode the bytes, or has ended."""
        self.examined = examined

    def keep_decoded(self, whole: Tensor | None, stream: object = None) -> None:
        """Keep the bytes unpacked on `stream` for the next request; None to drop them."""
        self.decoded = None if whole is None else (whole, stream)

    def keep_view(self, view: View | None, tensor: Tensor | None = None) -> None:
        self.last_view = None if view is None or tensor is None else (view, tensor)

    def lend(self) -> None:
        """Note that the node that saved all of it has its memory."""
        self.lent = True

    # -- questions -------------------------------------------------------------------------------------------------

    def name(self) -> str:
        """For messages and timelines, e.g. `float32[8, 256, 1024] #17`."""
        dtype, shape = self.label
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} #{self.number}"

    @property
    def plain_bytes(self) -> int:
        return self.nbytes if self.encoded is None else self.encoded.end - self.encoded.begin

    def may_be_joined(self, root: Tensor) -> bool:
        """Whether a save of `root`, at the version of this record's save, finds its bytes here."""
        same = self.root() is root and all(counter._version == version for counter, version in self.joined)
        return same and self.state is not POISONED

    def was_saved_together(self) -> bool:
        """Whether one call of compiled code saved several tensors over it, and nobody else saved any."""
        return 0 < self.together == len(self.joined) == self.saves - 1

    def shows(self) -> bool:
        """Whether its bytes are in memory now, as they were saved."""
        if self.state is RESTORED:
            return self.encoded is None
        alias = self.alias
        return self.state is RESIDENT and self.encoded is None and alias is not None and not self.is_edited()

    def is_where_it_was(self) -> bool:
        """Whether its bytes are only in the memory that was saved, and not about to be elsewhere."""
        if self.examined:
            return False
        if self.state is not PENDING and (self.state is not RESIDENT or self.write is not None):
            return False
        alias = self.alias
        return alias is not None and self.encoded is None and not self.was_moved() and not self.is_edited()

    def is_whole(self) -> bool:
        """Whether its alias is one dense tensor over exactly its bytes."""
        alias = self.alias
        assert alias is not None
        spec = Spec.of(alias)
        return (
            alias.storage_offset() * alias.itemsize == self.begin
            and spec.numel == spec.stored_numel
            and spec.stored_bytes == self.nbytes
            and not alias.is_conj()
            and not alias.is_neg()
        )

    def check(self) -> None:
        """Raise PyTorch's own RuntimeError if its bytes in memory were edited in place."""
        if self.state is POISONED or (self.state in IN_MEMORY and self.is_edited()):
            raise edited_in_place(self.name(), *self.versions())
