"""Record: one range of one storage at one version, and where its bytes are.

The graph owns records: handles in autograd's nodes hold them, nothing else does for longer than a transfer needs.
When the last handle goes, the record goes, and its weak reference, `Remains`, is appended to a deque.

Identity is the storage *object* (a mark on it lists its records weakly), the tensor whose version counter is shared
(`root`: the base of a view where the two still share memory, else the tensor), and the version. A detached alias with a
root of its own may have been edited through `.data` without a trace, so it counts as another tensor.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from compact import Codec, Packed
from io_backends import Ticket

from ._recipe import Recipe
from ._view import View, empty, is_over


class RecordState(enum.Enum):
    """Where the bytes are."""

    PENDING = enum.auto()  # in memory (`alias`); its operator's kernel may still be running, so not yet submitted
    HELD = enum.auto()  # in memory (`alias`) and meant to stay: kept by decision, taken back, or its write failed
    WRITING = enum.auto()  # in memory (`alias`) while a write is queued or running
    STORED = enum.auto()  # in the tier only
    READING = enum.auto()  # in the tier, on the way back
    RESTORED = enum.auto()  # in the tier and in memory (`restored`)
    DERIVED = enum.auto()  # nowhere: made again from others (`_derivations`)
    POISONED = enum.auto()  # edited in place before the copy was finished: nobody may have it


# By a name of its own: read off the class, a member costs as much as asking a tensor something.
PENDING, HELD, WRITING, STORED, READING, RESTORED, DERIVED, POISONED = RecordState
# A tuple: members are compared by identity there, while a set would call the enum's slow hash.
IN_MEMORY = (HELD, WRITING, PENDING)


class Encoded(NamedTuple):
    """How a record's bytes are packed: by which codec, and all of `Packed` but the bytes.

    `sizes` are those of its buffers, which lie one behind another; `begin` and `end` are the range of the original.
    """

    codec: Codec
    packed: Packed
    sizes: tuple[int, ...]
    begin: int
    end: int


class Remains(weakref.ref["Record"]):
    """A weak reference to a record, which outlives it and knows what is to be given back then.

    Its callback is `deque.append`: no Python code runs at a record's end, so nothing can interrupt it half way.
    """

    __slots__ = ("held_bytes", "number", "resident_bytes", "write")
    number: int
    write: Ticket | None
    resident_bytes: int
    held_bytes: int


class Record:
    """One range `[begin, end)` of a storage. The engine's lock guards every field.

    Attributes:
        number: position in the engine's pack sequence.
        alias: detached tensor over the whole storage while the bytes are in memory; afterwards, until the copy is
            confirmed, a tensor without bytes that still shares the version counter.
        version: of that alias; another value later means it was edited in place.
        saved_version: of the tensor at pack, which is what a later save is recognised by.
        counter: without bytes, with the version counter of the tensor, for as long as the record lives; None if nobody
            needs it.
        leaf: whether no operator of the graph made it: a program may edit it through `.data` at any time.
        address, storage_bytes: of the storage at pack; another value later means it was resized or replaced.
        codec, encoded, decoded: what may make the bytes smaller, how it has, and them unpacked (on which stream) while
            further saved tensors of this record are still to be asked for (`_compress`). Once encoded, all fields
            about memory are those of the packed bytes.
        restored: flat over the bytes that are back in memory, of the first saver's dtype or of bytes.
        joined: version counters of tensors without a common base that compiled code saved with it (`_joint`), and
            their versions at pack: an edit through any of them is an edit.
        lent: the node that saved all of it has its memory, and nobody else looks at it.
        given: of a restored record with several views, the last that an operator was given: the next wants the same.
        recipe: how to make the bytes again; None where they are kept.
        stays: compressed in place, never moved; or compressed to nothing, so that there is nothing to move.
        wanted: prefetch or backward asked for it while it was being written: it stays in memory.
        saves: how many saved tensors are views of it.
        asks: how often one of them was asked for; from `saves` on, a backward that frees its graph needs it no more.
        logical_bytes: what it counts for in `offloaded_bytes` (if `offloaded`) or `kept_bytes`.
        resident_bytes, held_bytes: what it counts for in the engine's two budgets now.
    """

    __slots__ = (
        "__weakref__",
        "address",
        "alias",
        "asks",
        "begin",
        "codec",
        "counter",
        "decoded",
        "device",
        "encoded",
        "end",
        "given",
        "joined",
        "label",
        "leaf",
        "lent",
        "logical_bytes",
        "nbytes",
        "offloaded",
        "read",
        "ready",
        "recipe",
        "ref",
        "remains",
        "restored",
        "root",
        "saved_version",
        "saves",
        "state",
        "stays",
        "storage_bytes",
        "stream",
        "version",
        "view",
        "wanted",
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
    ) -> None:
        if root is not tensor and not is_over(root, storage):
            root = tensor
        self.begin = begin
        self.end = end
        self.nbytes = end - begin
        self.label = (tensor.dtype, tensor.shape)
        self.device = tensor.device
        self.version = self.saved_version = root._version
        self.leaf = root.is_leaf
        self.root = weakref.ref(root)
        self.alias: Tensor | None = root.detach()
        self.address = storage.data_ptr()
        self.storage_bytes = storage.nbytes()
        self.state: RecordState = PENDING
        self.read: Ticket | None = None
        self.view: memoryview | Tensor | None = None  # the lease, or device memory, being read into
        self.restored: Tensor | None = None
        self.given: tuple[View, Tensor] | None = None
        self.ready: object = None  # device: what the consumer's stream waits for before it uses `restored`
        self.stream: object = None  # device: the producer's stream
        self.codec: Codec | None = None
        self.counter: Tensor | None = None
        self.encoded: Encoded | None = None
        self.decoded: tuple[Tensor, object] | None = None
        self.recipe: Recipe | None = None
        self.joined: list[tuple[Tensor, int]] = []
        self.lent = False
        self.stays = False
        self.wanted = False
        self.asks = 0
        self.saves = 1
        self.logical_bytes = 0
        self.offloaded = False
        self.remains = remains
        ref = Remains(self, remains.append)
        ref.number = number
        ref.write = None
        ref.resident_bytes = ref.held_bytes = 0
        self.ref = ref  # last: a record that could not be made leaves nothing to be given back

    @property
    def number(self) -> int:
        return self.ref.number

    @property
    def write(self) -> Ticket | None:
        return self.ref.write

    @write.setter
    def write(self, ticket: Ticket | None) -> None:
        self.ref.write = ticket

    @property
    def resident_bytes(self) -> int:
        return self.ref.resident_bytes

    @resident_bytes.setter
    def resident_bytes(self, nbytes: int) -> None:
        self.ref.resident_bytes = nbytes

    @property
    def held_bytes(self) -> int:
        return self.ref.held_bytes

    @held_bytes.setter
    def held_bytes(self, nbytes: int) -> None:
        self.ref.held_bytes = nbytes

    def name(self) -> str:
        """For messages and timelines, e.g. `float32[8, 256, 1024] #17`."""
        dtype, shape = self.label
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} #{self.number}"

    def may_be_joined(self, root: Tensor) -> bool:
        """Whether a save of `root`, at the version this was saved at, finds its bytes here."""
        if self.state is POISONED or self.root() is not root:
            return False
        return all(counter._version == version for counter, version in self.joined)

    def shows(self) -> bool:
        """Whether its bytes can be looked at where they are, now, as they were saved."""
        if self.state is RESTORED:
            return self.encoded is None
        alias = self.alias
        return self.state is HELD and self.encoded is None and alias is not None and not self.is_edited()

    def versions(self) -> tuple[int, int]:
        """The version found and the one expected: of a tensor that was edited in this memory, if any was."""
        assert self.alias is not None
        found, expected = self.alias._version, self.version
        if self.joined and found == expected and self.encoded is None:
            for counter, version in self.joined:
                if counter._version != version:
                    return counter._version, version
        return found, expected

    def is_edited(self) -> bool:
        """Whether the memory its alias shows was edited since pack, through any of the tensors that were saved."""
        found, expected = self.versions()
        return found != expected

    def join(self, tensor: Tensor) -> None:
        """One more tensor shows some of these bytes, which has a version counter of its own."""
        self.joined.append((_counter_of(tensor), tensor._version))

    def become(self, payload: Tensor, encoded: Encoded) -> None:
        """From now on the bytes are `payload`, uint8 [nbytes] with a storage of its own."""
        storage = payload.untyped_storage()
        self.alias, self.version, self.encoded = payload, payload._version, encoded
        self.begin, self.end, self.nbytes = 0, payload.numel(), payload.numel()
        self.address, self.storage_bytes = storage.data_ptr(), storage.nbytes()
        self.stays = self.stays or not self.nbytes

    def keep_counter(self, root: Tensor) -> None:
        """From now on `counter` tells of edits, wherever the bytes are."""
        self.counter = _counter_of(root)

    def drop_alias(self) -> None:
        """Let the memory go, keep the version counter: `.data` swaps the storage of our own alias only."""
        alias = self.alias
        assert alias is not None
        alias.data = empty(alias.dtype, alias.device)


def _counter_of(tensor: Tensor) -> Tensor:
    """A tensor without bytes that shares a version counter."""
    counter = tensor.detach()
    counter.data = empty(tensor.dtype, tensor.device)
    return counter
