"""Record: one range of one storage at one version, and where its bytes are.

The graph owns records: handles in autograd's nodes hold them, nothing else does for longer than a transfer needs.
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
    """Place where a record's bytes are."""

    PENDING = enum.auto()  # in memory (`alias`); its operator's kernel may still be running, so not yet submitted
    RESIDENT = enum.auto()  # in memory (`alias`): held back from writing, kept by decision, or its write failed
    WRITING = enum.auto()  # in memory (`alias`) while a write is queued or running
    STORED = enum.auto()  # in the tier only
    READING = enum.auto()  # in the tier, on the way back
    RESTORED = enum.auto()  # in the tier and in memory (`restored`)
    DERIVED = enum.auto()  # nowhere: made again from others (`derivations`)
    POISONED = enum.auto()  # edited in place before the copy was finished: nobody may have it


# By a name of its own: read off the class, a member costs as much as asking a tensor something.
PENDING, RESIDENT, WRITING, STORED, READING, RESTORED, DERIVED, POISONED = RecordState
# A tuple: members are compared by identity there, while a set would call the enum's slow hash.
IN_MEMORY = (RESIDENT, WRITING, PENDING)


class Remains(weakref.ref["Record"]):
    """A weak reference to a record, which outlives it and knows what is to be given back then.

    Its callback is `deque.append`: no Python code runs at a record's end, so nothing can interrupt it half way.
    """

    __slots__ = ("number", "write")
    number: int
    write: Ticket | None


class Recipe(Protocol):
    """Way to make a record's bytes again."""

    @property
    def sources(self) -> Sequence[Any]:
        """The packed objects that it asks for, each as often as it does."""

    @property
    def depth(self) -> int:
        """The most operators on a path to what is really kept."""

    def compute(self) -> Tensor:
        """Make the tensor again. Raises what its sources raise."""


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
        codec, encoded, decoded: what may make the bytes smaller, how it has, and them unpacked (on which stream) while
            further saved tensors of this record are still to be asked for (`compressor`). Once encoded, all fields
            about memory are those of the packed bytes.
        write, read: the transfer that took, or is to take, the bytes to the store; the one that brings them back.
        staged: of a device's bytes that are being written: where they are in host memory, until the write has ended
            well. They come back from there, and the device's own memory is free.
        view: the lease, or device memory, that is being read into.
        restored: flat over the bytes that are back in memory, of the first saver's dtype or of bytes.
        ready: on a device, what the consumer's stream waits for before it uses `restored`.
        lent: the node that saved all of it has its memory, and nobody else looks at it.
        last_view: of a restored record with several views, the last that an operator was given: the next wants it too.
        recipe: how to make the bytes again; None where they are kept.
        stays: compressed in place, never moved; or compressed to nothing, so that there is nothing to move.
        examined: a device compares or encodes its bytes as they are now, and has not said what came of it.
        goes: it is to be moved by plan, however much room there is.
        wanted: read-ahead or backward asked for it while it was being written, or was to be: it stays in memory.
        saves: how many saved tensors are views of it.
        asks: how often one of them was asked for; from `saves` on, a backward that frees its graph needs it no more.
        logical_bytes: what it counts for in `offloaded_bytes` (if `offloaded`) or `kept_bytes`.
    """

    __slots__ = (
        *("__weakref__", "asks", "codec", "decoded", "encoded", "examined", "goes", "last_view", "lent"),
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
        self.examined = self.goes = False
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
        ref.write = None
        self.ref = ref  # last: a record that could not be made leaves nothing to be given back

    # -- transitions -----------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Stay in memory: the operator has finished."""
        assert self.state is PENDING
        self.state = RESIDENT

    def derive(self, recipe: Recipe) -> None:
        """Let the bytes go: `recipe` makes them again."""
        assert self.state is PENDING
        self.recipe, self.alias = recipe, None
        self.state = DERIVED

    def send(self, ticket: Ticket) -> None:
        """Go to the store by the write `ticket`, which has been queued."""
        assert self.state in (PENDING, RESIDENT)
        assert self.write is None
        self.write = self.ref.write = ticket
        self.state = WRITING

    def pass_on(self, ticket: Ticket) -> None:
        """Go on by `ticket`: the copy out of the device is over, and its write begins."""
        assert self.state is WRITING
        self.write = self.ref.write = ticket

    def stay(self) -> None:
        """Stay in memory after all, now that the write has ended: the record is wanted."""
        assert self.state is WRITING
        self.state = RESIDENT

    def take_back(self) -> Ticket | None:
        """Become what plain PyTorch has, an alias; the write is worthless, and the caller's to discard."""
        assert self.state is WRITING
        ticket, self.write, self.ref.write = self.write, None, None
        self.state = RESIDENT
        return ticket

    def store(self, *, confirmed: bool, staged: Tensor | None = None) -> None:
        """Let the memory go: the write has ended, or the bytes are `staged`. Unless `confirmed`, keep the counter."""
        assert self.state is WRITING
        self.staged = staged
        self._drop_alias()
        self._forget_root()
        self.state = STORED
        if confirmed:
            self.alias = None

    def written(self) -> None:
        """Let what was staged go: the write has ended well."""
        self.staged = None

    def unwritten(self) -> Ticket | None:
        """Be staged for good: the write has failed, or was cancelled. Returns it, the caller's to discard."""
        assert self.staged is not None
        ticket, self.write, self.ref.write = self.write, None, None
        return ticket

    def confirm(self) -> None:
        """Note that nobody edited the source while it was being written."""
        assert self.state not in IN_MEMORY
        self.alias = None

    def read_into(self, ticket: Ticket, view: memoryview | Tensor, ready: object) -> None:
        """Come back by the read `ticket`, into `view`."""
        assert self.state is STORED
        self.read, self.view, self.ready = ticket, view, ready
        self.state = READING

    def read_failed(self) -> None:
        """Be in the store only, as before: a later unpack may try again."""
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
        """Let go of bytes that are in the store too; where they are not, nothing changes.

        A source that was edited, during the write or after it, is poisoned: nobody can tell which any more.
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
        """Give the bytes to nobody any more: they were edited before the copy was finished."""
        assert self.state not in (PENDING, DERIVED)
        self.state = POISONED
        if self.alias is not None and self.alias.untyped_storage().nbytes():
            self._drop_alias()
        self.staged = None
        self.restored = self.last_view = self.ready = None

    # -- what changes beside the state -----------------------------------------------------------------------------

    def want(self, wanted: bool = True) -> None:
        """Stay in memory when the write under way has ended, or unwritten where it waits for room; or no more."""
        self.wanted = wanted

    def go(self) -> None:
        """Be moved by plan, once the operator has finished."""
        self.goes = True

    def add_saver(self) -> None:
        """Count one more saved tensor, or one more recipe, that will ask for it."""
        self.saves += 1

    def answer(self) -> bool:
        """Count that one of its tensors was asked for; whether no other is to be expected."""
        self.asks += 1
        return self.asks >= self.saves

    def set_offloaded(self, offloaded: bool) -> int:
        """Count from now on as handed to the tier, or as kept: the bytes by which what is handed over changes."""
        change = self.logical_bytes * (offloaded - self.offloaded)
        self.offloaded = offloaded
        return change

    def use_codec(self, codec: Codec | None) -> None:
        """Settle which codec may make it smaller; None for none."""
        self.codec = codec

    def plan(self, recipe: Recipe | None) -> None:
        """Settle how the bytes may be made again; None where they are kept."""
        self.recipe = recipe

    def become(self, payload: Tensor, encoded: Encoded) -> None:
        """Replace the bytes by `payload`, uint8 [nbytes] with a storage of its own."""
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
        """Keep the unpacked bytes, made on `stream`, for the next that asks; None to let them go."""
        self.decoded = None if whole is None else (whole, stream)

    def keep_view(self, view: View | None, tensor: Tensor | None = None) -> None:
        """Keep the tensor made for `view` for the next that asks; None to let it go."""
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
        """Bytes of it before any codec."""
        return self.nbytes if self.encoded is None else self.encoded.end - self.encoded.begin

    def may_be_joined(self, root: Tensor) -> bool:
        """Whether a save of `root`, at the version this was saved at, finds its bytes here."""
        return self.state is not POISONED and self.is_of(root)

    def was_saved_together(self) -> bool:
        """Whether one call of compiled code saved several tensors that look at it, and nobody else saved any."""
        return 0 < self.together == len(self.joined) == self.saves - 1

    def shows(self) -> bool:
        """Whether its bytes can be looked at where they are, now, as they were saved."""
        if self.state is RESTORED:
            return self.encoded is None
        alias = self.alias
        return self.state is RESIDENT and self.encoded is None and alias is not None and not self.is_edited()

    def is_where_it_was(self) -> bool:
        """Whether its bytes are in the memory that was saved, and nowhere else, nor about to be elsewhere."""
        if self.examined:
            return False
        if self.state is not PENDING and (self.state is not RESIDENT or self.write is not None):
            return False
        alias = self.alias
        return alias is not None and self.encoded is None and not self.was_moved() and not self.is_edited()

    def is_whole(self) -> bool:
        """Whether its alias is one dense tensor over exactly its bytes, so that no other view shows more."""
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
        """Raise PyTorch's own RuntimeError if what is in memory was edited in place."""
        if self.state is POISONED or (self.state in IN_MEMORY and self.is_edited()):
            raise edited_in_place(self.name(), *self.versions())
