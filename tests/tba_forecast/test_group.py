"""Groups of ranks: how a model is cut among them, which share a node, and what makes no sense."""

from __future__ import annotations

import pytest

from tba import ConfigError
from tba._forecast.group import Group, group_of


@pytest.mark.parametrize(
    ("asked", "world", "replicas"),
    [
        ((16, 4, 2, 8), 16, 2),
        ((None, 4, 2, 1), 8, 1),
        ((None, 1, 1, 1), 1, 1),
        ((None, 1, 1, 8), 8, 8),  # a node full of replicas
        ((None, 3, 1, 2), 6, 2),
        ((None, 64, 1, 8), 64, 1),
    ],
)
def test_the_world_is_what_was_asked_for_or_fills_nodes(
    asked: tuple[int | None, int, int, int], world: int, replicas: int
) -> None:
    found = group_of(*asked)
    assert (found.world, found.replicas) == (world, replicas)
    assert found.replicas * found.fsdp * found.tensor == world


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((12, 4, 2, 1), "--world 12 is no multiple of --fsdp 4 times --tp 2, the 8 ranks .*: give --world 16, or"),
        ((3, 4, 1, 1), "--world 3 is no multiple of --fsdp 4 times --tp 1, .*: give --world 4, or"),
        ((4, 1, 1, 8), "--ranks-per-node 8 is more than --world 4"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(asked: tuple[int | None, int, int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        group_of(*asked)


def test_ranks_of_a_replica_follow_one_another_and_nodes_fill_in_turn() -> None:
    group = Group(12, 2, 2, 8)
    assert [list(group.replica_of(rank)) for rank in (0, 3, 4, 11)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert [group.sharing_node_of(rank) for rank in (0, 7, 8, 11)] == [8, 8, 4, 4]


def test_a_group_tells_how_a_model_is_cut() -> None:
    assert str(Group()) == "1 rank"
    assert str(Group(8, 8)) == "8 ranks: 8 FSDP"
    assert str(Group(1024, 64, 8)) == "1,024 ranks: 2 replicas x 64 FSDP x 8 tensor"
