"""No plan: one line says why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from tba import ConfigError
from tba._plan.no_plan import no_plan

MIB = 1 << 20


@pytest.mark.parametrize(
    ("tier", "changes", "line"),
    [
        ("nvme", {}, "no plan: tier 'nvme' moves everything it can; tier 'auto' plans"),
        ("keep", {}, "no plan: tier 'keep' moves nothing; tier 'auto' plans"),
        ("auto", {"steps": 0}, "no plan yet: no step has ended"),
        ("auto", {"hooks": "count"}, "no plan: 244 MiB fits 8 GiB; hooks only count"),
        ("auto", {"hooks": "off", "limited": False}, "no plan: 244 MiB fits 8 GiB of free memory; hooks are off"),
        ("auto", {"room_bytes": 0}, "no plan: 244 MiB fits"),
        (
            "auto",
            {"room_bytes": 200 * MIB, "aside_bytes": 50 * MIB},
            "no plan: the 194 MiB that can move fits 200 MiB, beside 50 MiB that cannot",
        ),
        (
            "auto",
            {"room_bytes": 80 * MIB, "moved": True},
            "no plan yet: 244 MiB does not fit 80 MiB; 1 step watched so far",
        ),
    ],
)
def test_why_there_is_no_plan_is_one_line(tier: str, changes: dict[str, Any], line: str) -> None:
    known = {"step_bytes": 244 * MIB, "room_bytes": 8192 * MIB, "limited": True, "moved": False, "steps": 1}
    known |= {"aside_bytes": 0}
    found = no_plan(tier, **({"hooks": "on"} | known | changes))
    assert (str(found), bool(found)) == (line, False)
    with pytest.raises(ConfigError) as caught:
        found.picture("plan.png")
    assert str(caught.value) == f"there is no plan to draw: {line}"
