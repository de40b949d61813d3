"""Acted: what the execution of plans has done to a step."""

from __future__ import annotations

from typing import NamedTuple


class Acted(NamedTuple):
    """What has been done to a step by plan.

    Attributes:
        planned: moved or recomputed some of it by a plan.
        recomputed: had blocks recompute.
        tried: had blocks run twice, to see whether they may recompute.
    """

    planned: bool = False
    recomputed: bool = False
    tried: bool = False
