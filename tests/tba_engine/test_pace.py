"""What the planner takes the link for, given what a step's transfers have shown."""

from __future__ import annotations

from typing import Any

import pytest

from tba._auto.pace import Pace
from tba._config import OffloadConfig
from tba._transfer.cost import Cost, Way

MB = 10**6


def pace(out: Way, back: Way, **settings: Any) -> Pace:
    return Pace(OffloadConfig(tier="auto", **settings), Cost(out=out, back=back), 1)


@pytest.mark.parametrize(("limit", "seen", "taken_for"), [("100MB", 0.1, 100), ("100MB", 1.0, 40), (None, 0.1, 400)])
def test_a_link_is_not_faster_than_its_limit(limit: str | None, seen: float, taken_for: int) -> None:
    """Forty MB in so many seconds: a limit lets the first bytes after a rest through at once."""
    way = Way(nbytes=40 * MB, busy_s=seen)
    link = pace(way, way, max_write_rate=limit, max_read_rate=limit).learn(planned=False, on_device=False)
    assert link.write_bytes_per_s == link.read_bytes_per_s == taken_for * MB


def test_a_limited_link_that_has_carried_too_little_is_as_fast_as_its_limit() -> None:
    link = pace(Way(), Way(), max_write_rate="100MB").learn(planned=False, on_device=False)
    assert (link.write_bytes_per_s, link.read_bytes_per_s) == (100 * MB, 1000 * MB)
