"""Pages: which pages of a memory range have been touched, and which may be freed. Pure: no system calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain


class Pages:
    """The touched pages of a range of `nbytes`, by number. The range may end within a page. Not thread-safe."""

    def __init__(self, page_bytes: int, nbytes: int) -> None:
        self.page_bytes = page_bytes
        self.nbytes = nbytes
        self.touched: set[int] = set()

    def touch(self, offset: int, length: int) -> int:
        """Mark bytes as used; return how many pages that touches for the first time."""
        pages = range(offset // self.page_bytes, -(-(offset + length) // self.page_bytes))
        if self.touched.issuperset(pages):
            return 0
        before = len(self.touched)
        self.touched.update(pages)
        return len(self.touched) - before

    def idle(self, free: Iterable[tuple[int, int]], most: int) -> list[int]:
        """Offsets of the highest `most` touched pages within free ranges, as the lowest are reused first."""
        whole = chain.from_iterable(range(-(-offset // self.page_bytes), self._until(offset + n)) for offset, n in free)
        return [page * self.page_bytes for page in sorted(self.touched.intersection(whole), reverse=True)[:most]]

    def gone(self, offset: int) -> None:
        """Mark a page as freed."""
        self.touched.discard(offset // self.page_bytes)

    def _until(self, end: int) -> int:
        """The number after the last page that ends by then."""
        return -(-end // self.page_bytes) if end == self.nbytes else end // self.page_bytes
