"""Source: a record's range of a storage, and whether it was edited since pack.

A source is identified by the storage *object* (a mark on it lists its records weakly), by the tensor whose version
counter it shares (`root`: the base of a view if the two still share memory, else the tensor), and by the version. A
detached alias counts as another tensor, because it may have been edited through `.data` without a trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .view import as_it_lies, empty, is_over

# Aliases that may share a record, which moves once for all of them. Nobody can tell which of them share a counter, so
# each check of a record reads all counters: without a limit, n aliases would take n * n reads.
_MOST_JOINED = 256


def _gone() -> None:
    """Replaces a reference to a dead root."""


class Source:
    """A range `[begin, end)` of a storage at one version.

    A large step has very many sources, and Python's garbage collector keeps visiting objects that may hold others. So a
    source has few of those: no empty lists, and tuples of plain values only.

    Attributes:
        alias: detached tensor over the whole storage while the bytes are in memory; afterwards, until the copy is
            confirmed, a tensor without bytes that still shares the version counter.
        version: of the alias at pack; a different value later means an in-place edit.
        saved_version: of the tensor at pack; a later save recognizes it by this.
        counter: tensor without bytes that shares the version counter for as long as the record lives; None if not
            needed.
        joined: version counters of other tensors over these bytes (saved aliases, wrapper subclasses), with their
            versions at pack: an edit through any of them counts.
        aliases: those that joined one by one, by identity: saving one again adds nothing.
        together: how many of them one call of compiled code saved with the first tensor (`joint`).
        leaf: no operator of the graph made it, so a program may edit it through `.data` at any time.
        own: the alias now shows the engine's own memory, which nobody else can edit.
        address, storage_bytes: of the storage at pack; a different value later means that it was resized or replaced.
    """

    __slots__ = (
        *("address", "alias", "aliases", "begin", "counter", "device", "end", "joined", "label", "leaf"),
        *("nbytes", "own", "root", "saved_version", "storage_bytes", "together", "version"),
    )

    def __init__(self, tensor: Tensor, root: Tensor, storage: torch.UntypedStorage, begin: int, end: int) -> None:
        if root is not tensor and not is_over(root, storage):
            root = tensor
        self.begin = begin
        self.end = end
        self.nbytes = end - begin
        self.label = (tensor.dtype, tuple(tensor.shape))
        self.device = tensor.device
        self.version = self.saved_version = root._version
        self.leaf = root.is_leaf
        self.root: Callable[[], Tensor | None] = weakref.ref(root)
        self.alias: Tensor | None = root.detach()
        self.address = storage.data_ptr()
        self.storage_bytes = storage.nbytes()
        self.counter: Tensor | None = None
        self.joined: list[tuple[Tensor, int]] | tuple[()] = ()
        self.aliases: dict[int, weakref.ref[Tensor]] = {}
        self.together = 0
        self.own = False

    def join(self, tensor: Tensor, *, together: bool) -> None:
        """Add a tensor that shows some of these bytes and may have its own version counter.

        `together`: the call that saved the first tensor saves it too.
        """
        known = self.aliases.get(id(tensor))
        if not together and known is not None and known() is tensor:
            return  # its counter has not moved, or nothing could have joined now
        self.watch(_counter_of(tensor))
        if together:
            self.together += 1
        else:
            self.aliases[id(tensor)] = weakref.ref(tensor)

    @property
    def is_full(self) -> bool:
        """Whether no more tensors may join."""
        return len(self.joined) >= _MOST_JOINED

    def watch(self, counter: Tensor) -> None:
        """From now on count what bumps the version of `counter` as an edit."""
        if isinstance(self.joined, tuple):
            self.joined = []
        self.joined.append((counter, counter._version))

    def belong(self, root: Tensor, counter: Tensor) -> None:
        """Become known by the wrapper subclass whose inner tensor this is: by its `root` and its version counter."""
        self.root = weakref.ref(root)
        self.saved_version = root._version
        self.watch(counter)

    def keep_counter(self, root: Tensor) -> None:
        """Keep the version counter, so that `counter` shows edits even after the bytes have left memory."""
        self.counter = _counter_of(root)

    def versions(self) -> tuple[int, int]:
        """The version found and the one expected; those of an edited tensor if there is one."""
        assert self.alias is not None
        found, expected = self.alias._version, self.version
        if self.joined and found == expected and not self.own:
            for counter, version in self.joined:
                if counter._version != version:
                    return counter._version, version
        return found, expected

    def is_edited(self) -> bool:
        """Whether the alias's memory was edited since pack, through any of the saved tensors."""
        found, expected = self.versions()
        return found != expected

    def was_moved(self) -> bool:
        """Whether its storage was resized or replaced since pack."""
        assert self.alias is not None
        storage = self.alias.untyped_storage()
        return storage.data_ptr() != self.address or storage.nbytes() != self.storage_bytes

    def _drop_alias(self) -> None:
        """Drop the memory but keep the version counter: `.data` replaces only the alias's storage."""
        assert self.alias is not None
        alias = self.alias = as_it_lies(self.alias)
        alias.data = empty(alias.dtype, alias.device)
        if self.root() is None:
            self.root = _gone  # frees the weak reference


def _counter_of(tensor: Tensor) -> Tensor:
    """Make a tensor without bytes that shares a tensor's version counter."""
    counter = as_it_lies(tensor.detach())
    counter.data = empty(tensor.dtype, tensor.device)
    return counter
