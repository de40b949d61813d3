"""Standing around forwards: what it sees, and that nothing of it is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tba._blocks.forwards import Forwards
from tba._blocks.recompute import recompute


def test_around_is_given_the_call_and_hooks_stay_outside() -> None:
    calls: list[Any] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: calls.append("hook"))

    def around(module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append((module, args, kwargs))
        return forward(*args, **kwargs)

    forwards, x = Forwards(), torch.ones(2)
    forwards.put([layer], around)
    layer(x)
    assert calls == [(layer, (x,), {}), "hook"]
    forwards.remove()
    layer(x)
    assert calls == [(layer, (x,), {}), "hook", "hook"]
    assert "forward" not in vars(layer)


def test_modules_that_are_changed_otherwise_are_left() -> None:
    layer = nn.Linear(2, 2)
    theirs = layer.forward = lambda x: x
    forwards = Forwards()
    forwards.put([layer], lambda *_: None)
    forwards.remove()
    assert layer.forward is theirs


def test_code_compiled_around_a_module_is_what_it_is_without() -> None:
    """The compiler may trace a module that nothing tells of being inside compiled code."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    layer, x, forwards = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(2), Forwards()
    compiled = torch.compile(lambda x: layer(x) * 2, backend=backend, fullgraph=True)
    plain = compiled(x)
    for _ in range(3):
        forwards.put([layer], lambda *_: pytest.fail("traced"))
        assert torch.equal(compiled(x), plain)
        forwards.remove()
        assert torch.equal(compiled(x), plain)
    assert len(graphs) == 2  # with and without, and not again for each time
    assert graphs[0] == graphs[1]


def test_putting_again_takes_off_what_was_put() -> None:
    one, other, forwards = nn.Linear(2, 2), nn.Linear(2, 2), Forwards()
    forwards.put([one], lambda *_: None)
    forwards.put([other], lambda *_: None)
    assert "forward" not in vars(one)
    assert "forward" in vars(other)
    forwards.remove()
    assert "forward" not in vars(copy.deepcopy(other))


PLAIN = (lambda tensor: tensor.detach(), lambda kept: kept)  # packs and gives what blocks are given


@pytest.mark.parametrize(
    "name", ["debug", "early_stop", "context_fn", "function", "use_reentrant", "determinism_check"]
)
def test_recompute_gives_a_block_its_own_arguments_though_checkpoint_has_some_of_that_name(name: str) -> None:
    def forward(x: Tensor, **kwargs: float) -> Tensor:
        return (x * kwargs[name]).exp()

    x = torch.ones(3, requires_grad=True)
    recompute(nn.Module(), forward, (x,), {name: 2.0}, *PLAIN)[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.full((3,), 2.0).exp())
