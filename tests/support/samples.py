"""Samples: which cases of a test `make test` runs; `make test-all` runs every one.

`@pytest.mark.sampled(8)` leaves eight of a parametrised test's cases in `make test`, chosen so that each value of each
parameter is among them if eight are enough for that, and marks the others `exhaustive`. Random examples and seeds are
counted by `examples`.

`make test-share SHARE=n` runs what `make test` does, and one share in `SHARES` of the exhaustive cases, by their names.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from zlib import crc32

import pytest

MAKE_TEST = "not serial and not exhaustive"  # what it asks pytest for
CASES = pytest.StashKey[Counter[str]]()  # how many cases of each test it runs, by the test's name
ALL = os.environ.get("SAMPLES") == "all"  # as `make test-all` sets it
SHARES = 12
_FEWER, _LEAST = 5, 10

Indices = Mapping[str, int]  # of a case: what tells each parameter's value from its others


def examples(count: int) -> int:
    """How many of `count` random examples are tried: a fifth, and at least ten; all of them in `make test-all`."""
    return count if ALL else min(count, max(_LEAST, count // _FEWER))


def chosen(cases: Mapping[str, Indices], count: int) -> set[str]:
    """Choose `count` of a test's cases, by name: always those that show most values not yet among them."""
    left, seen, found = dict(cases), set[Hashable](), set[str]()
    for name in sorted(cases, key=lambda name: crc32(name.encode())):  # neighbours are much alike
        left[name] = left.pop(name)
    while left and len(found) < count:
        name = max(left, key=lambda name: sum(value not in seen for value in left[name].items()))
        seen.update(left.pop(name).items())
        found.add(name)
    return found


def mark(items: Collection[pytest.Item]) -> Counter[str]:
    """Mark as exhaustive what is not among the samples of its test; return how many cases are left of each test."""
    tests: dict[tuple[str, int], dict[str, pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            tests.setdefault((item.nodeid.partition("[")[0], *marker.args), {})[item.nodeid] = item
    for (_, count), cases in tests.items():
        few = chosen({name: _indices(item) for name, item in cases.items()}, count)
        for name, item in cases.items():
            if name not in few:
                item.add_marker(pytest.mark.exhaustive)
    left = Counter[str]()
    for item in items:
        left[item.nodeid.partition("[")[0]] += not _is_left(item)
    return left


def is_of_share(name: str, share: int) -> bool:
    """Whether an exhaustive case, by its name, is one of share number `share`, modulo `SHARES`."""
    return crc32(name.encode()) % SHARES == share % SHARES


def others_share(items: Collection[pytest.Item]) -> set[pytest.Item]:
    """Which cases are left to other shares than that of `SHARE`; none where it is not set."""
    share = os.environ.get("SHARE")
    if share is None:
        return set()
    exhaustive = (item for item in items if item.get_closest_marker("exhaustive") is not None)
    return {item for item in exhaustive if not is_of_share(item.nodeid, int(share))}


def _indices(item: pytest.Item) -> Indices:
    """By identity: all cases of a test share its values. (From pytest 9.2 on its own indices count the cases.)"""
    params: Mapping[str, object] = item.callspec.params  # type: ignore[attr-defined]
    return {name: id(value) for name, value in params.items()}


def _is_left(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("exhaustive", "serial"))
