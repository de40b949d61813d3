"""Wrapper subclasses: their inner tensors move as any others, and the wrapper comes back as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from support.engine import Gate, engine, save
from support.exactness import Run, assert_adds_up, assert_bit_equal, assert_through_file, run_training
from support.zoo import JaggedModel, jagged

N = 64
BYTES = 4 * N * N


def two(seed: int = 0, *, requires_grad: bool = True) -> Any:
    """A wrapper around two tensors, made by an operator if it requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(N, N, generator=generator), torch.randn(N, N, generator=generator)
    leaf = TwoTensor(a, b)
    return leaf.requires_grad_() + 0 if requires_grad else leaf


def nested(layout: torch.layout = torch.jagged) -> Tensor:
    """A nested tensor of rows of several lengths, made by an operator."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(length, 2 * N, generator=generator) for length in (9, N - 14, 5)]
    return torch.nested.nested_tensor(rows, layout=layout).requires_grad_() + 0


# What keeps its elements in other tensors, of `2 * BYTES`.
MADE: dict[str, Callable[[], Any]] = {"two": two, "jagged": nested, "strided": lambda: nested(torch.strided)}
OF_EACH = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def inner(tensor: Any) -> list[Tensor]:
    return [tensor.detach().values()] if tensor.is_nested else [tensor.a, tensor.b]


def saved(x: Any) -> Any:
    """A graph whose only saved tensor is `x`: of PyTorch's own, as Functions return no strided nested tensors."""
    return functional.gelu(x) if x.is_nested else save(x)


def shown(result: Any) -> Any:
    """The tensor that the node of `result` has saved, unpacked."""
    if result.is_nested:
        return result.grad_fn._saved_self
    (found,) = result.grad_fn.saved_tensors
    return found


def total(result: Any) -> Tensor:
    """The sum of a result's elements."""
    summed: Tensor = torch.nested.to_padded_tensor(result, 0.0).sum() if result.is_nested else result.sum()
    return summed


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A device mesh of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_wrapper_comes_back_with_type_shape_stride_and_bits(scratch: Path) -> None:
    x = two()
    saved = [x, x.t(), x[:, 8:40], TwoTensor(x.detach(), x.detach() * 2).requires_grad_()]
    with engine(scratch) as offload:
        with offload:
            results = [save(each) for each in saved]
        assert not offload.stats().kept_by_reason
        offload.flush()
        for each, result in zip(saved, results, strict=True):
            found = shown(result)
            assert type(found) is TwoTensor
            assert found.requires_grad == each.requires_grad
            assert (found.shape, found.stride(), found.dtype) == (each.shape, each.stride(), each.dtype)
            deep = type(each.a) is TwoTensor
            for ours, theirs in zip(inner(found), inner(each), strict=True):
                assert_bit_equal(inner(ours) if deep else ours, inner(theirs) if deep else theirs)
        assert offload.stats().read_bytes > 0


def test_statistics_count_inner_bytes_and_a_wrapper_moves_once(scratch: Path) -> None:
    x = two()
    weight = nn.Parameter(two(1, requires_grad=False))
    frozen = nn.Parameter(two(2, requires_grad=False), requires_grad=False)
    with engine(scratch) as offload:
        with offload:
            results = [x @ weight, x.t() @ frozen.t(), save(x), save(x.view(-1))]
        offload.flush()
        torch.stack([result.sum() for result in results]).sum().backward()
        stats = offload.stats()
        assert_through_file(stats)
        assert stats.offloaded_bytes == 2 * BYTES
        # `x` by itself and once more as a view; twice it is only asked for its gradient.
        assert stats.duplicate_bytes == 4 * BYTES
        assert stats.weight_bytes == 4 * BYTES


def test_weights_within_a_wrapper_are_known_by_the_model(scratch: Path) -> None:
    """A view that autograd does not link to the parameter is recognised by its storage."""
    layer = nn.Linear(N, N, bias=False)
    layer.weight = nn.Parameter(two(1, requires_grad=False))
    alias = TwoTensor(layer.weight.a, layer.weight.b).requires_grad_()
    with engine(scratch, model=layer) as offload:
        with offload:
            result, other = save(alias), save(two())
        stats = offload.stats()
        assert (stats.weight_bytes, stats.offloaded_bytes) == (2 * BYTES, 2 * BYTES)
        del other
        found = shown(result)
        assert_bit_equal(inner(found), inner(alias))


@OF_EACH
def test_the_memory_of_inner_tensors_is_given_back(make: Callable[[], Any], scratch: Path) -> None:
    x = make()
    storages = [weakref.ref(part.untyped_storage()) for part in inner(x)]
    with engine(scratch) as offload:
        with offload:
            result = saved(x)
            del x
        offload.flush()
        assert all(storage() is None for storage in storages)
        total(result).backward()


@OF_EACH
def test_an_edit_of_a_wrapper_before_the_copy_is_finished_is_an_error(make: Callable[[], Any], scratch: Path) -> None:
    x, gate = make(), Gate("write")
    with engine(scratch, gate, prefetch_bytes=0) as offload:
        with offload:
            result = saved(x)
        with torch.no_grad():
            x.add_(1)
        assert x.is_nested or x.a._version == 0  # the inner tensor's counter does not tell
        gate.open()
        offload.flush()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*expected version"):
            total(result).backward()


@OF_EACH
def test_an_edit_after_the_copy_is_legal_and_a_later_save_is_another_record(
    make: Callable[[], Any], scratch: Path
) -> None:
    x = make()
    before = [part.clone() for part in inner(x)]
    with engine(scratch) as offload:
        with offload:
            first = saved(x)
            offload.flush()
            with torch.no_grad():
                x.add_(1)
            second = saved(x)
        offload.flush()
        assert_bit_equal(inner(shown(second)), inner(x))
        assert_bit_equal(inner(shown(first)), before)
        assert offload.stats().offloaded_bytes == 4 * BYTES


def test_a_wrapper_edited_after_another_of_its_memory_was_saved(scratch: Path) -> None:
    """Two wrappers around one tensor do not count each other's edits, nor does the tensor."""
    x = two()
    other = TwoTensor(x.a, x.b)
    with engine(scratch) as offload:
        with offload:
            first = save(x)
            offload.flush()  # the copy has what was
            other.add_(1)
            second = save(other.requires_grad_())
        offload.flush()
        assert_bit_equal(inner(shown(second)), inner(other))
        del first


class Scaled(Tensor):
    """Numbers of eight bits and a scale, as quantised tensors are made of; computed with as floats."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)
        scaled.numbers, scaled.scale = numbers, scale
        return scaled

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Any:
        return Scaled(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self = args[0]
        if func is torch.ops.aten.detach.default:
            return Scaled(self.numbers, self.scale)
        if func is torch.ops.aten.mul_.Tensor:
            self.scale.mul_(args[1])
            return self
        return func(*(each.numbers * each.scale if isinstance(each, Scaled) else each for each in args))


def test_what_stays_in_memory_of_a_wrapper_is_guarded_too(scratch: Path) -> None:
    x = Scaled(torch.randint(-128, 128, (N, N), dtype=torch.int8), torch.tensor([0.5])).requires_grad_()
    with engine(scratch, min_tensor_bytes=64) as offload:
        with offload:
            result = save(x)
        offload.flush()
        stats = offload.stats()
        assert stats.offloaded_bytes == N * N
        assert dict(stats.kept_by_reason) == {"below min_tensor_bytes": 4}
        assert_adds_up(stats)
        found = shown(result)
        assert type(found) is Scaled
        assert_bit_equal([found.numbers, found.scale], [x.numbers, x.scale])
        x.detach().mul_(3)
        with pytest.raises(RuntimeError, match=r"Scaled \[64, 64\]\] is at version 1; expected version 0"):
            result.sum().backward()


def _with_gaps() -> Tensor:
    values = torch.randn(2, N, N).requires_grad_() + 0
    return torch.nested.narrow(values, 1, torch.tensor([0, 7]), torch.tensor([9, 30]), layout=torch.jagged)


@pytest.mark.parametrize(
    "make",
    [
        nested,
        lambda: nested().transpose(1, 2),
        _with_gaps,
        lambda: nested(torch.strided),
    ],
    ids=["jagged", "jagged transposed", "with gaps", "strided"],
)
def test_a_nested_tensor_comes_back_with_its_sizes_and_bits(make: Callable[[], Any], scratch: Path) -> None:
    x = make()
    with engine(scratch) as offload:
        with offload:
            result = saved(x)
        offload.flush()
        found, stats = shown(result), offload.stats()
        assert (type(found), found.layout, found.requires_grad) == (type(x), x.layout, True)
        if x.layout is torch.jagged:
            assert (found.shape, found.stride()) == (x.shape, x.stride())  # lengths are equal for the same offsets only
            assert found.offsets() is x.offsets()
            assert found.lengths() is x.lengths()
        assert_bit_equal(inner(found), inner(x))
        assert_bit_equal(list(found.detach().unbind()), list(x.detach().unbind()))
        assert_through_file(stats)
        assert stats.offloaded_bytes == 2 * BYTES
        result.detach() + found  # of one length


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_nested_tensor_moves_once_with_its_rows_and_views(layout: torch.layout, scratch: Path) -> None:
    x = nested(layout)
    with engine(scratch) as offload:
        with offload:
            views = x.chunk(2, -1) if layout is torch.jagged else ()
            results = [saved(x), saved(x), *map(saved, views), *map(saved, x.unbind())]
        offload.flush()
        torch.stack(
            [result.sum() if not result.is_nested else result.values().sum() for result in results]
        ).sum().backward()
        stats = offload.stats()
        assert_through_file(stats)
        assert stats.offloaded_bytes == 2 * BYTES
        assert stats.duplicate_bytes >= 2 * 2 * BYTES


def test_an_edit_of_a_nested_tensor_that_stays_is_an_error_too(scratch: Path) -> None:
    x = nested(torch.strided)
    with engine(scratch, tier="keep") as offload:
        with offload:
            result = saved(x)
        x.detach().add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
            total(result).backward()


def test_a_second_backward_through_jagged_tensors_is_exact(scratch: Path) -> None:
    def train(offload: Any) -> Any:
        leaf = torch.linspace(-1, 1, 2 * N * N).view(N, -1).requires_grad_()
        with offload:
            x = torch.nested.nested_tensor_from_jagged(leaf * 1, torch.tensor([0, 9, 50, N]))
            loss = (x.sigmoid() * x).values().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach(), leaf.grad]

    with engine(scratch) as offload:
        assert_bit_equal(train(offload), train(nullcontext()))
        assert offload.stats().offloaded_bytes == 3 * 2 * BYTES  # `x`, its sigmoid and the product


@pytest.mark.parametrize("tier", ["nvme", "keep"])
def test_a_transformer_on_jagged_tensors_is_exact_under_an_exact_preset(tier: str, scratch: Path) -> None:
    def train(**how: Any) -> Run:
        return run_training(JaggedModel, lambda: (jagged(), jagged()), **how)

    with engine(scratch, tier=tier, compress="exact") as offload:
        train(context=lambda _: offload, between=offload.flush).assert_equals(train())
        stats = offload.stats()
    assert stats.encoded_bytes > stats.packed_bytes > 0
    assert set(stats.kept_by_reason) <= {"tier keep"}


def test_a_lossy_preset_packs_factors_of_jagged_products_that_are_not_broadcast(scratch: Path) -> None:
    x, row = nested(), torch.ones(2 * N, requires_grad=True) * 1
    with engine(scratch, compress="safe8") as offload:
        with offload:
            loss = (x * row * functional.dropout(x, 0.5)).values().sum()
        offload.flush()
        loss.backward()
        stats = offload.stats()
        assert_adds_up(stats)
    # Of `x`, which `row` needs exactly, both factors and the mask; `row` stays exact.
    assert stats.encoded_bytes > 2 * 2 * BYTES
    assert stats.packed_bytes < stats.encoded_bytes / 2


class Values(torch.autograd.Function):
    """The values of a jagged tensor; saves its offsets, as compiled code does, and makes the gradient with them."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.save_for_backward(x.offsets())
        return x.detach().values() * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(gradients[0], *ctx.saved_tensors)


def test_offsets_that_are_saved_stay_the_very_tensor(scratch: Path) -> None:
    x = nested()
    with engine(scratch) as offload:
        with offload:
            result = Values.apply(saved(x))
        offload.flush()
        result.sum().backward()  # PyTorch refuses a gradient of other lengths
        assert dict(offload.stats().kept_by_reason) == {"offsets of jagged tensors": 4 * 8}


def _linear_of_dtensors(mesh: Any) -> tuple[nn.Module, Any]:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Linear(N, N))
    for each in (layer[0], layer[2]):
        parallelize_module(each, mesh, ColwiseParallel(use_local_output=False, output_layouts=Replicate()))
    x = DTensor.from_local(torch.randn(N, N), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    return layer, x


@pytest.mark.parametrize("settings", [{}, {"compress": "exact"}, {"tier": "keep", "compress": "exact"}], ids=str)
def test_dtensors_are_exact(scratch: Path, mesh: Any, settings: dict[str, Any]) -> None:
    gradients = []
    for plain in (True, False):
        layer, x = _linear_of_dtensors(mesh)
        with engine(scratch, model=layer, **settings) as offload:
            if plain:
                loss = layer(x).square().mean()
            else:
                with offload:
                    loss = layer(x).square().mean()
                offload.flush()
            loss.backward()
            gradients.append([p.grad.to_local() for p in layer.parameters()])
            stats = offload.stats()
    assert_bit_equal(*gradients)
    assert "DTensor" not in stats.kept_by_reason
    assert stats.offloaded_bytes > 0 or settings["tier"] == "keep"
    assert stats.weight_bytes > 0


@pytest.mark.parametrize("preset", ["safe8", "compact"])
def test_a_lossy_preset_knows_the_class_of_a_sharded_tensor(scratch: Path, mesh: Any, preset: str) -> None:
    layer, x = _linear_of_dtensors(mesh)
    with engine(scratch, model=layer, compress=preset) as offload:
        with offload:
            loss = layer(x).square().mean()
        offload.flush()
        loss.backward()
        stats = offload.stats()
    assert stats.encoded_bytes >= 2 * BYTES
    assert stats.packed_bytes < stats.encoded_bytes / 2


def test_a_result_of_a_collective_is_waited_for(scratch: Path, mesh: Any) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    value = torch.randn(N, N)
    with engine(scratch) as offload:
        with offload:
            reduced = all_reduce(value.clone(), "sum", mesh)
            assert type(reduced) is AsyncCollectiveTensor
            result = save(reduced.requires_grad_())
        offload.flush()
        found = shown(result)
        assert_bit_equal(found * 1, value)
        stats = offload.stats()
        assert (stats.offloaded_bytes, stats.kept_bytes) == (BYTES, 0)
