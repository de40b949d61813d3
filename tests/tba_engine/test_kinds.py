"""Kinds of steps: which are remembered."""

from __future__ import annotations

from tba._auto.kinds import Kinds


def test_the_kind_that_was_called_longest_ago_is_forgotten_and_what_is_not_seen_never() -> None:
    kinds = Kinds()
    unseen, first, second = kinds.unseen, kinds.call("first"), kinds.call("second")
    assert kinds.call("first") is first
    for number in range(15):
        kinds.call(number)
    assert kinds.of("first") is first
    assert kinds.of("second") is not second
    assert any(each is unseen for each in kinds)


def test_a_kind_that_ranks_speak_of_before_its_forward_begins_is_the_one_that_is_called() -> None:
    kinds = Kinds()
    assert kinds.call("first") is not kinds.of("second")
    assert kinds.call("second") is kinds.of("second")
