"""No plan: stands where there is no plan, and says why."""

from __future__ import annotations

import html
import os
from dataclasses import dataclass
from typing import Literal, NoReturn

from .._errors import ConfigError
from .._text import short

_HOOKS = {"off": "; hooks are off", "count": "; hooks only count"}


@dataclass(frozen=True)
class NoPlan:
    """In place of a `Plan`: printed, it says why there is none. It is false, so that `if offload.plan:` asks for one.

    Attributes:
        reason: in words.
    """

    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return self.reason

    def _repr_html_(self) -> str:
        """Show the reason in a notebook."""
        return f"<p>{html.escape(self.reason)}</p>"

    def picture(self, path: str | os.PathLike[str]) -> NoReturn:
        """Draw nothing. Raises ConfigError, which says why."""
        raise ConfigError(f"there is no plan to draw: {self.reason}")


def no_plan(
    tier: str, *, step_bytes: int, aside_bytes: int, room_bytes: int, limited: bool, moved: bool, steps: int, hooks: str
) -> NoPlan:
    """Say why there is no plan after so many `steps`.

    Args:
        step_bytes: that the saved tensors of the last one need.
        aside_bytes: of these, what cannot move, such as small tensors: no budget counts it.
        room_bytes: that memory has for them: the budget, if it is `limited`.
        moved: some of them did not fit.
        hooks: "on", "off" or "count".
    """
    if tier != "auto":
        does = "moves nothing" if tier == "keep" else "moves everything it can"
        return NoPlan(f"no plan: tier {tier!r} {does}; tier 'auto' plans")
    if not steps:
        return NoPlan("no plan yet: no step has ended")
    room = f" {short(room_bytes)}{'' if limited else ' of free memory'}" if room_bytes else ""
    if moved:
        watched = f"{steps:,} step{'s' * (steps != 1)} watched so far"
        return NoPlan(f"no plan yet: {short(step_bytes)} does not fit{room}; {watched}")
    hooks = _HOOKS.get(hooks, "")
    if limited and 0 < step_bytes - aside_bytes <= room_bytes < step_bytes:
        what = (
            f"the {short(step_bytes - aside_bytes)} that can move fits{room}, beside {short(aside_bytes)} that cannot"
        )
        return NoPlan(f"no plan: {what}{hooks}")
    return NoPlan(f"no plan: {short(step_bytes)} fits{room}{hooks}")
