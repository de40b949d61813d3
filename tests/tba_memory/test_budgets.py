"""Budgets: the share of a node's memory and disk that one process gets."""

from __future__ import annotations

import pytest

from tba._memory.budgets import cpu_budget_bytes, local_ranks, nvme_budget_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": " 2 "}, 2)]
    + [({"LOCAL_WORLD_SIZE": text}, 1) for text in ("", "0", "-4", "two", "1.5")],
)
def test_ranks_that_share_a_node(environment: dict[str, str], ranks: int) -> None:
    assert local_ranks(environment) == ranks


def test_the_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert local_ranks() == 3


def test_half_of_the_memory_unless_asked() -> None:
    assert cpu_budget_bytes(None, 64 * GIB, 1) == 32 * GIB
    assert cpu_budget_bytes(None, 64 * GIB, 8) == 4 * GIB
    assert cpu_budget_bytes(10 * GIB, 64 * GIB, 4) == 10 * GIB // 4
    assert cpu_budget_bytes(0, 64 * GIB, 1) == 0


def test_four_fifths_of_the_free_disk_unless_asked() -> None:
    assert nvme_budget_bytes(None, 1000, 1) == 800
    assert nvme_budget_bytes(None, 1000, 4) == 200
    assert nvme_budget_bytes(2 * GIB, 1000, 2) == GIB
    assert nvme_budget_bytes(0, 1000, 1) == 0


def test_a_disk_that_does_not_say_its_room_has_no_cap() -> None:
    assert nvme_budget_bytes(None, None, 8) is None
    assert nvme_budget_bytes(GIB, None, 8) == GIB // 8


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_the_shares_together_stay_within_the_budget(ranks: int) -> None:
    for asked in (1, 100, 10 * GIB + 1):
        assert 0 <= asked - ranks * cpu_budget_bytes(asked, GIB, ranks) < ranks
