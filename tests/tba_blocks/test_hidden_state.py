"""Blocks that keep hidden state are under a budget as plain PyTorch leaves them: losses, gradients, weights and state.

`python -m tests.campaigns state` tries thousands of random models; here are some of them, and each kind of state once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from campaigns.__main__ import app
from campaigns.state import trial
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


class _Twice:
    """What a budget must not be: every block runs once more in each forward, and what it returns is dropped."""

    plan = None

    def __init__(self, net: Any, *_: Any, **__: Any) -> None:
        self._layers: list[nn.Module] = list(net.layers)

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.forward = _twice(layer.forward)  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        for layer in self._layers:
            del layer.forward

    def close(self) -> None: ...


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    def runs(x: torch.Tensor) -> Any:
        forward(x)
        return forward(x)

    return runs


@pytest.mark.parametrize("state", each_kind()[: len(WHATS) : 4], ids=str)
def test_a_block_that_runs_twice_is_seen(state: State, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "offload_context", _Twice)
    assert run_program(simple(state), scratch).verdict == "wrong"


@pytest.mark.parametrize("arguments", [["--seeds", "5"], ["--seeds", "5:5"], ["--kind", "no such kind"]], ids=str)
def test_the_command_refuses_seeds_and_kinds_that_it_does_not_know(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["state", *arguments]).exit_code == 2
