"""Blocks that keep hidden state are under a budget as plain PyTorch leaves them: losses, gradients, weights and state.

`python -m tests.campaigns state` tries thousands of random models; here are some of them, and each kind of state once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.state.kinds import WHATS, WHENS, WHERES
from campaigns.state.program import State, describe, draw, each_kind, simple, sources
from campaigns.state.specials import SPECIALS
from campaigns.state.trial import canonical, run_program
from support.clock import SHORT_S, Counted, put

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of programs, by PyTorch


@pytest.fixture(autouse=True)
def _short_operators() -> None:
    put(Counted(SHORT_S))  # as fast beside the link as they are: a second run pays


@pytest.mark.parametrize("state", each_kind(), ids=str)
def test_a_block_that_keeps_it_is_as_plain_leaves_it(state: State, scratch: Path) -> None:
    outcome = run_program(simple(state), scratch)
    assert outcome.verdict == "equal", f"{outcome.detail}\n{describe(simple(state))}"
    assert outcome.recomputed or outcome.sent_bytes


@pytest.mark.parametrize("seed", range(20))
def test_a_random_model_with_hidden_state_is_as_plain_leaves_it(seed: int, scratch: Path) -> None:
    outcome = run_program(draw(seed), scratch)
    assert outcome.verdict in ("equal", "refused"), f"{outcome.text}: {outcome.detail}"


@pytest.mark.parametrize("seed", range(3))
def test_blocks_without_state_still_recompute(seed: int, scratch: Path) -> None:
    stateless = [program for program in map(draw, range(100)) if not program.states and program.slow]
    outcome = run_program(stateless[seed], scratch)
    assert outcome.verdict == "equal", outcome.detail
    assert outcome.recomputed > 0, outcome.why_not


def test_each_kind_is_drawn_and_its_code_is_told() -> None:
    programs = [draw(seed) for seed in range(3000)]
    assert programs == [draw(seed) for seed in range(3000)]
    drawn = {name for program in programs for state in program.states for name in state.names()}
    assert drawn == {*WHATS, *WHERES, *WHENS, *SPECIALS}
    assert {name for state in each_kind() for name in state.names()} == drawn
    for program in programs[:50]:
        assert sources(program)[0] in describe(program)


def test_a_state_is_compared_by_what_it_holds() -> None:
    class Slots:
        __slots__ = ("count",)

    one, other = Slots(), Slots()
    one.count, other.count = 1, 2
    assert canonical(one) != canonical(other)
    assert canonical([{"a": {2, 1}}]) == canonical([{"a": {1, 2}}])
    assert canonical(iter([1, 2])) == ["next", 1, 2]
