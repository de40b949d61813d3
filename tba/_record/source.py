"""Source: the range of a storage that a record has, and whether it was edited since pack.

A source is identified by the storage *object* (a mark on it lists its records weakly), by the tensor whose version
counter is shared (`root`: the base of a view if the two still share memory, else the tensor), and by the version. A
detached alias may have been edited through `.data` without a trace, so it counts as another tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .view import empty, is_over

# So many aliases share a record, which then moves once for all of them; the next makes another. Nobody can tell which
# of them share a counter, so each look at a record asks all: without a limit, n aliases would take n * n looks.
_MOST_JOINED = 256


def _gone() -> None:
    """Take the place of a reference to a root that is gone."""


class Source:
    """A range `[begin, end)` of a storage at one version.

    A large step has very many of them, and Python's garbage collector looks at each object that may hold others again
    and again. So there are few such objects beside a source: no empty list, and tuples of nothing but plain values.

    Attributes:
        alias: detached tensor over the whole storage while the bytes are in memory; after that, until the copy is
            confirmed, a tensor without bytes that still shares the version counter.
        version: of the alias at pack; another value later means that it was edited in place.
        saved_version: of the tensor at pack, by which a later save recognises it.
        counter: tensor without bytes that shares the version counter for as long as the record lives; None if it is
            not needed.
        joined: version counters of others that show these bytes (saved aliases, wrapper subclasses), and their
            versions at pack: an edit through any of them counts.
        aliases: the tensors among them that joined one by one, by identity: one that is saved again adds nothing.
        together: how many of them one call of compiled code saved with the first tensor (`joint`).
        leaf: whether no operator of the graph made it, so that a program may edit it through `.data` at any time.
        own: whether the alias now shows memory of the engine's own, which nobody else can edit.
        address, storage_bytes: of the storage at pack; another value later means that it was resized or replaced.
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

    def is_of(self, root: Tensor) -> bool:
        """Whether a save of `root`, at the version at which this was saved, is a save of these bytes."""
        return self.root() is root and all(counter._version == version for counter, version in self.joined)

    def join(self, tensor: Tensor, *, together: bool) -> None:
        """Add a tensor that shows some of these bytes and may have a version counter of its own.

        `together`: the call that saved the first one saves it too.
        """
        known = self.aliases.get(id(tensor))
        if not together and known is not None and known() is tensor:
            return  # its counter is as it was then: else nothing would have joined now
        self.watch(_counter_of(tensor))
        if together:
            self.together += 1
        else:
            self.aliases[id(tensor)] = weakref.ref(tensor)

    @property
    def is_full(self) -> bool:
        """Whether as many have joined as may: all their counters are looked at whenever one more would."""
        return len(self.joined) >= _MOST_JOINED

    def watch(self, counter: Tensor) -> None:
        """Count what bumps the version of `counter` as an edit from now on."""
        if isinstance(self.joined, tuple):
            self.joined = []
        self.joined.append((counter, counter._version))

    def belong(self, root: Tensor, counter: Tensor) -> None:
        """Be known by the wrapper subclass whose inner tensor this is; `root` of that, and its version counter."""
        self.root = weakref.ref(root)
        self.saved_version = root._version
        self.watch(counter)

    def keep_counter(self, root: Tensor) -> None:
        """Keep the version counter, so that `counter` tells of edits even after the bytes have left memory."""
        self.counter = _counter_of(root)

    def versions(self) -> tuple[int, int]:
        """Return the version found and the one expected, of a tensor that was edited if there is one."""
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

    def _forget_root(self) -> None:
        """Let the reference to a root go that is gone."""
        if self.root() is None:
            self.root = _gone

    def _drop_alias(self) -> None:
        """Let the memory go but keep the version counter: `.data` replaces the storage of the alias only."""
        alias = self.alias
        assert alias is not None
        alias.data = empty(alias.dtype, alias.device)


def _counter_of(tensor: Tensor) -> Tensor:
    """Make a tensor without bytes that shares a tensor's version counter."""
    counter = tensor.detach()
    counter.data = empty(tensor.dtype, tensor.device)
    return counter
