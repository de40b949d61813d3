"""A model compiled as one graph has everything back when its backward begins: it all stays, and the user is told.

`Graph` stands for compiled code: torch marks the Functions that it makes of that with `_aot_id`, as it is marked here.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from support.compiled import call
from support.engine import activation, engine, save
from support.exactness import assert_bit_equal
from tba import OffloadWarning, attach

X_BYTES = 64 * 64 * 4
ONE_GRAPH = "compiled as one graph"


class Graph(torch.autograd.Function):
    """x -> x^8; saves x, x^2 and x^4, each 64 x 64, and an eighth of that."""

    _aot_id = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        powers = [x.detach().clone(), x**2, x**4]
        ctx.save_for_backward(*powers)
        return x**8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        one, two, four = ctx.saved_tensors
        return 8 * one * two * four * gradients[0]


class Other(Graph):
    _aot_id = 1


class Eager(Graph):
    """A Function of a program: what it saves comes back at once too, but others are not told apart by a number."""

    _aot_id = None


def _gradient(leaf: Tensor, out: Tensor) -> Tensor:
    return torch.autograd.grad(out.sum(), leaf)[0]


def test_what_a_graph_of_the_whole_model_saves_stays_from_the_second_step_on(scratch: Path) -> None:
    leaf, x = activation(64, 64)
    expected = _gradient(leaf, call(Graph, x))
    written = []
    with engine(scratch) as offload:
        for step in range(4):
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with offload:
                    out = call(Graph, leaf + 0)
                offload.flush()
                assert_bit_equal(_gradient(leaf, out), expected)
                del out
                stats = offload.stats()  # ends the step
            assert [str(w.message).count(ONE_GRAPH) for w in told] == ([1] if step == 0 else [])
            assert stats.last_step is not None
            assert stats.last_step.offloaded_bytes == (3 * X_BYTES if step == 0 else 0)
            assert stats.last_step.kept_by_reason.get(ONE_GRAPH, 0) == (0 if step == 0 else 3 * X_BYTES)
            assert stats.written_bytes == stats.read_bytes
            written.append(stats.written_bytes)
            assert stats.saved_bytes == (step + 1) * 3 * X_BYTES
            assert stats.resident_bytes == stats.live_records == 0
    assert written == 4 * [written[0]]
    assert written[0] >= 3 * X_BYTES


@pytest.mark.parametrize("graphs", [(Graph, Other), (Graph, Graph), (Eager,)], ids=["two", "twice", "eager"])
def test_what_comes_back_part_by_part_moves(scratch: Path, graphs: tuple[type[Graph], ...]) -> None:
    with engine(scratch) as offload:
        for _ in range(3):
            _, x = activation(64, 64)
            with offload:
                for graph in graphs:
                    x = graph.apply(x)
            offload.flush()
            x.sum().backward()
            del x
            stats = offload.stats()
            assert stats.last_step is not None
            assert stats.last_step.offloaded_bytes == len(graphs) * 3 * X_BYTES
            assert ONE_GRAPH not in stats.kept_by_reason


def test_a_graph_that_is_no_longer_most_of_a_step_moves_again(scratch: Path) -> None:
    moved = []
    with engine(scratch) as offload:
        for more in (0, 0, 3, 3):
            _, x = activation(64, 64)
            with pytest.warns(OffloadWarning, match=ONE_GRAPH) if not moved else warnings.catch_warnings():
                with offload:
                    out = call(Graph, x)
                    for _ in range(more):
                        out = save(out * 1)
                offload.flush()
                out.sum().backward()
                del out
                step = offload.stats().last_step
            assert step is not None
            moved.append(step.offloaded_bytes // X_BYTES)
    assert moved == [3, 0, 3, 6]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("wrapped", [True, False], ids=["torch.compile(model)", "model.compile()"])
def test_an_attached_model_is_compiled_without_a_break(scratch: Path, wrapped: bool) -> None:
    torch.compiler.reset()
    counters.clear()
    model = _Net()
    compiled: Any = model
    offload = attach(model, tier="nvme", min_tensor_bytes=0, storage_paths=scratch)
    if wrapped:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        model.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 64)
    compiled(x).sum().backward()
    with pytest.warns(OffloadWarning, match=ONE_GRAPH):
        offload.stats()
    for _ in range(2):
        compiled(x).sum().backward()
    stats = offload.stats()
    offload.close()
    torch.compiler.reset()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    assert stats.offloaded_bytes > 0
    assert stats.kept_by_reason[ONE_GRAPH] == 2 * stats.offloaded_bytes
