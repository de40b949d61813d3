"""compact.compact_linear: a linear layer to the last bit, but for a weight gradient made of a projected input."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from compact import CodecError, Projection, SharedInput, compact_linear, key

WIDTH, OUT = 48, 40

# Every way torch takes through a linear layer: products fold dimensions, or not, by shape and stride.
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(WIDTH),
    "matrix": lambda: torch.randn(12, WIDTH),
    "one row": lambda: torch.randn(1, WIDTH),
    "no row": lambda: torch.randn(0, WIDTH),
    "by columns": lambda: torch.randn(WIDTH, 12).t(),
    "steps": lambda: torch.randn(24, 2 * WIDTH)[::2, :WIDTH],
    "3d": lambda: torch.randn(3, 7, WIDTH),
    "3d transposed": lambda: torch.randn(7, 3, WIDTH).transpose(0, 1),
    "3d slice": lambda: torch.randn(3, 7, 2 * WIDTH)[..., WIDTH:],
    "3d by columns": lambda: torch.randn(3, WIDTH, 7).transpose(1, 2),
    "3d expanded": lambda: torch.randn(1, 7, WIDTH).expand(3, 7, WIDTH),
    "4d": lambda: torch.randn(2, 3, 5, WIDTH),
    "4d transposed": lambda: torch.randn(3, 2, 5, WIDTH).transpose(0, 1),
    "4d by columns": lambda: torch.randn(2, 5, WIDTH, 3).permute(0, 3, 1, 2),
    "5d": lambda: torch.randn(2, 1, 3, 2, WIDTH),
}
Result = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _run(
    layer: Callable[..., Tensor],
    x: Tensor,
    bias: bool,
    dtype: torch.dtype,
    autocast: bool,
    loss: Callable[[Tensor], Tensor],
) -> Result:
    torch.manual_seed(1)
    # Keep the layout, strides of zero too.
    x = x.to(dtype).detach().requires_grad_()
    weight = (torch.randn(OUT, WIDTH) / 7).to(dtype).requires_grad_()
    added = torch.randn(OUT).to(dtype).requires_grad_() if bias else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(x, weight, added)
    loss(out).backward()
    return out.detach(), x.grad, None if added is None else added.grad, weight.grad


def _some(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return (out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "some": _some,
    "expanded gradient": lambda out: out.sum(),
    "transposed gradient": lambda out: out.transpose(0, -1).pow(2).sum(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, False),
        (torch.float64, False),
        (torch.bfloat16, False),
        (torch.float32, True),
        (torch.float64, True),
    ],
)
def test_all_but_the_weight_gradient_is_bit_equal(layout: str, bias: bool, dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[layout]()
    for loss in LOSSES.values():
        exact = _run(linear, x, bias, dtype, autocast, loss)
        found = _run(lambda *args: compact_linear(*args, rank=12, key=3), x, bias, dtype, autocast, loss)
        for wanted, got in zip(exact[:3], found[:3], strict=True):
            assert (wanted is None) == (got is None)
            if wanted is not None and got is not None:
                assert wanted.dtype == got.dtype
                assert torch.equal(wanted, got)
        assert found[3] is not None
        assert exact[3] is not None
        assert (found[3].shape, found[3].dtype) == (exact[3].shape, exact[3].dtype)


@pytest.mark.parametrize("kind", ["orthonormal", "sparse"])
def test_a_full_projection_gives_the_exact_weight_gradient(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8, WIDTH)
    exact = _run(linear, x, True, torch.float64, False, _some)[3]
    layer = partial(compact_linear, rank=48, key=3, kind=kind)
    found = _run(layer, x, True, torch.float64, False, _some)[3]
    torch.testing.assert_close(found, exact)


def _problem(tokens: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(4)
    x = torch.randn(tokens, WIDTH, dtype=torch.float64)
    weight = torch.randn(OUT, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.randn(tokens, OUT, dtype=torch.float64)


def _gradients(draws: int, rank: int, **settings: object) -> tuple[Tensor, Tensor]:
    """[draws, OUT, WIDTH] of weight gradients, and the exact one."""
    x, weight, d = _problem()
    made = []
    for draw in range(draws):
        out = compact_linear(x, weight, rank=rank, key=key(8, str(settings), draw), **settings)  # type: ignore[arg-type]
        made.append(torch.autograd.grad(out, weight, d)[0])
    return torch.stack(made), d.t() @ x


@pytest.mark.parametrize("kind", ["gaussian", "rademacher", "orthonormal", "sparse"])
def test_the_relative_variance_is_that_of_the_theory(kind: str) -> None:
    rank, draws = WIDTH // 4, 400
    found, exact = _gradients(draws, rank, kind=kind)
    error = ((found - exact).square().sum((1, 2)) / exact.square().sum()).mean().item()
    theory = (WIDTH + 1) / rank if kind in ("gaussian", "rademacher") else WIDTH / rank - 1
    assert error == pytest.approx(theory, rel=0.1)
    _bias_falls_with_the_root(found, exact)


def _bias_falls_with_the_root(found: Tensor, exact: Tensor) -> None:
    few = torch.stack([(part.mean(0) - exact).norm() for part in found.split(len(found) // 25)]).square().mean().sqrt()
    assert 0.5 < (few / (found.mean(0) - exact).norm() / 5).item() < 2


def test_saves_the_weight_and_the_projected_input_and_nothing_else() -> None:
    x = torch.randn(5, 6, WIDTH, requires_grad=True)
    weight, bias = torch.randn(OUT, WIDTH, requires_grad=True), torch.randn(OUT, requires_grad=True)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compact_linear(x, weight, bias, rank=12, key=3)
    assert [tuple(tensor.shape) for tensor in saved] == [(OUT, WIDTH), (30, 12)]
    assert saved[0].data_ptr() == weight.data_ptr()
    torch.testing.assert_close(saved[1], Projection("gaussian", WIDTH, 12, 3).project(x).view(30, 12))
    out.sum().backward()


def test_the_input_dies_before_backward() -> None:
    weight = torch.randn(OUT, WIDTH, requires_grad=True)
    x = torch.randn(5, WIDTH, requires_grad=True) * 2
    dead = weakref.ref(x)
    out = compact_linear(x, weight, rank=12, key=3)
    del x
    assert dead() is None
    out.sum().backward()


def test_hooks_may_replace_what_was_saved() -> None:
    x, weight = torch.randn(5, WIDTH, requires_grad=True), torch.randn(OUT, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(compact_linear(x, weight, rank=12, key=3).sum(), (x, weight))
    with torch.autograd.graph.save_on_cpu():
        out = compact_linear(x, weight, rank=12, key=3)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (x, weight)), plain))


def test_makes_only_the_gradients_that_are_asked_for() -> None:
    for needs_x in (True, False):
        for needs_weight in (True, False):
            for needs_bias in (True, False):
                x = torch.randn(5, WIDTH, requires_grad=needs_x)
                weight = torch.randn(OUT, WIDTH, requires_grad=needs_weight)
                bias = torch.randn(OUT, requires_grad=needs_bias)
                saved: list[tuple[int, ...]] = []

                def pack(tensor: Tensor, saved: list[tuple[int, ...]] = saved) -> Tensor:
                    saved.append(tuple(tensor.shape))
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    out = compact_linear(x, weight, bias, rank=12, key=3)
                assert ((5, 12) in saved) == needs_weight
                assert any(set(shape) == {OUT, WIDTH} for shape in saved) == needs_x
                assert (5, WIDTH) not in saved
                assert out.requires_grad == (needs_x or needs_weight or needs_bias)
                if out.requires_grad:
                    out.sum().backward()
                assert [x.grad is not None, weight.grad is not None, bias.grad is not None] == [
                    *(needs_x, needs_weight, needs_bias)
                ]


def test_without_grad_mode_it_is_the_plain_layer() -> None:
    x, weight = torch.randn(5, WIDTH), torch.randn(OUT, WIDTH, requires_grad=True)
    with torch.no_grad():
        out = compact_linear(x, weight, rank=12, key=3)
    assert not out.requires_grad
    assert torch.equal(out, linear(x, weight))
    with torch.inference_mode():
        assert torch.equal(compact_linear(x, weight, rank=12, key=3, shared=SharedInput()), linear(x, weight))


def test_output_may_be_changed_in_place() -> None:
    for shape in ((5, WIDTH), (2, 3, WIDTH)):
        x, weight = torch.randn(shape, requires_grad=True), torch.randn(OUT, WIDTH, requires_grad=True)
        bias = torch.randn(OUT, requires_grad=True)
        wanted = torch.autograd.grad(linear(x, weight, bias).relu_().sum(), (x, bias))
        out = compact_linear(x, weight, bias, rank=12, key=3).relu_()
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (x, bias)), wanted))


def test_a_second_derivative_is_refused_with_the_reason() -> None:
    x, weight = torch.randn(5, WIDTH, requires_grad=True), torch.randn(OUT, WIDTH, requires_grad=True)
    out = compact_linear(x, weight, rank=12, key=3)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert torch.equal(first.detach(), torch.autograd.grad(linear(x, weight).square().sum(), x)[0])
    with pytest.raises(RuntimeError, match="second derivative: it keeps a projection"):
        first.sum().backward()


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(CodecError, match="method 'crs' is not known: choose one of projection, wta-crs"):
        compact_linear(torch.ones(2, 3), torch.ones(4, 3), rank=1, key=0, method="crs")  # type: ignore[arg-type]


def test_an_edited_weight_is_noticed() -> None:
    x, weight = torch.randn(5, WIDTH, requires_grad=True), torch.randn(OUT, WIDTH, requires_grad=True)
    out = compact_linear(x, weight, rank=12, key=3)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_and_retained_graphs_give_the_same_gradients() -> None:
    x, weight = torch.randn(5, WIDTH, requires_grad=True), torch.randn(OUT, WIDTH, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return compact_linear(x, weight, rank=12, key=3).square().sum()

    out = forward(x)
    plain = torch.autograd.grad(out, (x, weight), retain_graph=True)
    again = torch.autograd.grad(out, (x, weight))
    made_again = torch.autograd.grad(checkpoint(forward, x, use_reentrant=False), (x, weight))
    for others in (again, made_again):
        assert all(map(torch.equal, others, plain))


def test_autocast_saves_in_its_own_dtype() -> None:
    x, weight = torch.randn(5, WIDTH, requires_grad=True), torch.randn(OUT, WIDTH, requires_grad=True)
    dtypes = []

    def pack(tensor: Tensor) -> Tensor:
        dtypes.append(tensor.dtype)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        out = compact_linear(x, weight, rank=12, key=3)
        out.sum().backward()  # within autocast, as some do
    assert dtypes == [torch.float32, torch.bfloat16]  # the weight as it is: its cast is made again
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32


def test_layers_that_share_an_input_share_its_projection() -> None:
    x, shared = torch.randn(5, WIDTH, requires_grad=True), SharedInput()
    weights = [torch.randn(OUT, WIDTH, requires_grad=True) for _ in range(3)]
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    def projections(**settings: int) -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for weight in weights:
                compact_linear(x, weight, rank=settings.get("rank", 12), key=settings.get("key", 3), shared=shared)
        return len({tensor.data_ptr() for tensor in saved if tensor.shape == (5, settings.get("rank", 12))})

    assert projections() == 1
    kept = [tensor for tensor in saved if tensor.shape == (5, 12)]
    assert projections(key=4) == 1
    assert all(not torch.equal(kept[0], tensor) for tensor in saved)
    assert projections(rank=13) == 1
    # And the gradient is that of a layer alone.
    alone = torch.autograd.grad(compact_linear(x, weights[0], rank=12, key=3).sum(), weights[0])
    together = torch.autograd.grad(compact_linear(x, weights[0], rank=12, key=3, shared=shared).sum(), weights[0])
    assert torch.equal(alone[0], together[0])


def test_a_shared_projection_is_dropped_when_the_input_changes_or_dies() -> None:
    shared = SharedInput()
    projection = Projection("gaussian", WIDTH, 12, 3)
    x = torch.randn(5, WIDTH)
    made: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        def make() -> Tensor:
            made.append(1)
            return projection.project(tensor)

        return shared.projected(tensor, projection, tensor.dtype, make)

    first = save(x)
    assert save(x) is first
    x.mul_(2)  # the same object, another version
    assert save(x) is not first
    save(x.clone())
    assert len(made) == 3
    dead = weakref.ref(save(x))
    assert dead() is not None
    del x
    assert dead() is None
    assert isinstance(pickle.loads(pickle.dumps(shared)), SharedInput)
    assert copy.deepcopy([shared, shared])[0] is not shared
