"""Kinds: the kinds of steps that a model is trained by."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from .kind import Kind

_MOST = 16  # beyond which the one whose forward was called longest ago is forgotten


class Kinds:
    """The kinds of steps, by what describes a call of the model's forward.

    Attributes:
        unseen: of steps whose forward is not seen.
    """

    def __init__(self) -> None:
        self.unseen = Kind()
        self._by_key: dict[Hashable, Kind] = {}

    def __iter__(self) -> Iterator[Kind]:
        yield self.unseen
        yield from self._by_key.values()

    def of(self, key: Hashable) -> Kind:
        """Return the one that `key` describes."""
        return self._by_key.setdefault(key, Kind())

    def call(self, key: Hashable) -> Kind:
        """Return it for a forward that begins."""
        kind = self._by_key.pop(key, None) or Kind()
        self._by_key[key] = kind  # at the end: the last that was called is the last to be forgotten
        if len(self._by_key) > _MOST:
            del self._by_key[next(iter(self._by_key))]
        return kind
