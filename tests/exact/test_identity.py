"""Identity: views come back exact, storages are moved once, weights never, and the hooks are invisible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from support.engine import activation, engine, save
from support.exactness import CPU, assert_adds_up, assert_bit_equal
from support.gpu import take_what_is_free
from support.models import Looks, Made
from tba import OffloadWarning

BASE = 24


def _base(device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(BASE, BASE, generator=torch.Generator().manual_seed(1))
    base = (300 * numbers).to(dtype).to(device)
    return base.requires_grad_() + 0 if base.is_floating_point() or base.is_complex() else base


VIEWS = {
    "whole": lambda x: x,
    "square transpose": lambda x: x.t(),
    "offset 1": lambda x: x[1:],
    "offset inside": lambda x: x[3:7, 5:9],
    "strided": lambda x: x[::2, ::3],
    "column": lambda x: x[:, 5],
    "expanded": lambda x: x[:1].expand(5, BASE),
    "expanded scalar": lambda x: x[2, 3].expand(4, 4),
    "zero-dimensional": lambda x: x[2, 3],
    "one element": lambda x: x[2:3, 3:4],
    "permuted": lambda x: x.view(2, 3, 4, BASE).permute(3, 1, 0, 2),
    "channels last": lambda x: x.reshape(1, 4, 6, 24).to(memory_format=torch.channels_last),
    "overlapping": lambda x: x.as_strided((10, 4), (2, 1), 7),
    "conjugated": lambda x: torch.view_as_complex(x.view(BASE, BASE // 2, 2)).conj(),
    "negated": lambda x: torch.view_as_complex(x.view(BASE, BASE // 2, 2)).conj().imag,
    "real part": lambda x: torch.view_as_complex(x.view(BASE, BASE // 2, 2)).real,
    "part of the conjugated": lambda x: torch.view_as_complex(x.view(BASE, BASE // 2, 2)).conj()[1:7, ::2],
    "conjugated, no view": lambda x: torch.view_as_complex(x.view(BASE, BASE // 2, 2)).conj().detach(),
    "negated, no view": lambda x: torch.view_as_complex(x.view(BASE, BASE // 2, 2)).conj().imag.detach(),
    "other dtype": lambda x: x.detach().view(torch.int32)[3:],
    "diagonal": lambda x: x.diagonal(3),
}


def _keeping(x: Tensor, back: list[Tensor]) -> Tensor:
    """A graph that saves `x` alone, and whose backward puts what came back into a list."""
    leaf = torch.ones((), device=x.device, requires_grad=True)
    result: Tensor = Looks.apply(leaf, lambda _, *saved: back.extend(saved), x)
    return result


def _facts(x: Tensor) -> tuple[Any, ...]:
    """All that is to come back but the bytes. cuBLAS chooses its kernel by the address, to 256 bytes: other bits."""
    at = x.data_ptr() % 256 if not x.is_cpu else 0
    return x.shape, x.stride(), x.dtype, x.device, x.is_conj(), x.is_neg(), at


@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS)
def test_a_view_comes_back_with_shape_stride_offset_dtype_and_bits(
    look: Callable[[Tensor], Tensor], device: torch.device, scratch: Path, store_kind: str
) -> None:
    back: list[Tensor] = []
    with engine(scratch, store_kind=store_kind) as offload:
        view = look(_base(device))
        expected = view.detach().clone(memory_format=torch.preserve_format)
        facts = _facts(view)
        whole = view.untyped_storage().nbytes() <= 2 * (view.numel() * view.itemsize)
        offset = view.storage_offset()
        with offload:
            result = _keeping(view, back)
        del view
        offload.flush()
        take_what_is_free(device)
        result.backward()
        stats = offload.stats()
    assert _facts(back[0]) == facts
    assert_bit_equal(back[0].detach().clone(memory_format=torch.preserve_format), expected)
    assert stats.forwarded_bytes == 0
    assert stats.read_bytes >= stats.offloaded_bytes > 0
    if whole:
        assert back[0].storage_offset() == offset


@pytest.mark.parametrize("first", ["real", "conjugated"])
def test_conjugated_and_real_views_of_a_storage_come_back_exact(
    first: str, device: torch.device, scratch: Path, store_kind: str
) -> None:
    back: list[Tensor] = []
    with engine(scratch, store_kind=store_kind) as offload:
        base = _base(device).detach()
        complex_view = torch.view_as_complex(base.view(BASE, BASE // 2, 2)).conj()
        saved = [base, complex_view, complex_view.imag, complex_view.detach()]
        if first == "conjugated":
            saved.reverse()
        expected = [tensor.resolve_conj().resolve_neg().clone() for tensor in saved]
        leaf = torch.ones((), device=device, requires_grad=True)
        with offload:
            result: Tensor = Looks.apply(leaf, lambda _, *tensors: back.extend(tensors), *saved)
        for moved in (False, True):  # out of memory, and back in it
            if moved:
                del base, complex_view, saved
                offload.flush()
            back.clear()
            result.backward(retain_graph=True)
            assert_bit_equal([tensor.resolve_conj().resolve_neg() for tensor in back], expected)


@pytest.mark.parametrize("saved_before", [False, True])
@pytest.mark.parametrize("moved", ["base", "view"])
def test_a_view_that_shares_no_memory_with_its_base_comes_back_exact(
    moved: str, saved_before: bool, scratch: Path, store_kind: str
) -> None:
    """`x.data = other` gives one of the two other memory; they share a version counter all the same."""
    weight = torch.randn(BASE, BASE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with engine(scratch, store_kind=store_kind) as offload:
        base = weight * 1
        view = base.t()
        with offload:
            early = save(base) if saved_before else None
            {"base": base, "view": view}[moved].data = torch.full((BASE, BASE), 2.0)
            expected = [view.detach().cos().t(), base.detach().cos(), -view.detach().sin().t()]
            results = [view.sin(), base.sin(), view.cos()]
        del base, view
        offload.flush()
        gradients = [torch.autograd.grad(result.sum(), weight, retain_graph=True)[0] for result in results]
        stats = offload.stats()
    assert_bit_equal([found.contiguous() for found in gradients], [wanted.contiguous() for wanted in expected])
    assert early is None or early.requires_grad
    assert stats.forwarded_bytes == 0
    assert stats.read_bytes >= 2 * weight.nbytes


FLOATS = (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_dtype_comes_back_exact(dtype: torch.dtype, device: torch.device, scratch: Path) -> None:
    back: list[Tensor] = []
    x = _base(device).detach().to(dtype)
    x.view(torch.uint8).view(-1)[:8] = 0xFF  # not a number, in most
    expected, facts = x.clone(), _facts(x)
    with engine(scratch) as offload:
        with offload:
            result = _keeping(x, back)
        del x
        offload.flush()
        take_what_is_free(device)
        result.backward()
        assert offload.stats().read_bytes > 0
    assert _facts(back[0]) == facts
    assert_bit_equal(back[0], expected)


def test_one_storage_is_moved_once_however_many_views_are_saved(
    device: torch.device, scratch: Path, store_kind: str
) -> None:
    leaf, x = activation(64, 64, device=device)
    with engine(scratch, store_kind=store_kind) as offload:
        with offload:
            q, k, v = torch.split(x * 1, [21, 21, 22], dim=1)
            total = save(q).sum() + save(k).sum() + save(v).sum() + save(q.t()).sum()
        offload.flush()
        total.backward()
        stats = offload.stats()
    assert stats.written_bytes < 2 * x.nbytes  # the fused storage once (plus a block), and nothing else of size
    assert stats.duplicate_bytes >= k.nbytes + v.nbytes + q.nbytes
    assert stats.read_bytes <= stats.written_bytes
    assert leaf.grad is not None
    expected = 2 * leaf.detach()
    expected[:, :21] *= 2
    assert_bit_equal(leaf.grad, expected)


def test_equal_views_at_different_offsets_are_different(scratch: Path) -> None:
    # q, k and v of a fused projection have equal shape and stride: a key without the offset mixes them up.
    leaf, x = activation(8, 3 * 16)
    plain = x.detach().clone().requires_grad_()
    a, b, c = plain.chunk(3, dim=1)
    (a * b * c).sum().backward()
    with engine(scratch) as offload:
        with offload:
            q, k, v = x.chunk(3, dim=1)
            total = (q * k * v).sum()
        offload.flush()
        total.backward()
    assert_bit_equal(leaf.grad, plain.grad)


def test_a_reused_address_is_another_storage(scratch: Path, store_kind: str) -> None:
    results, addresses = [], set()
    with engine(scratch, store_kind=store_kind) as offload:
        leaves = [activation(64, 64, seed=seed)[0] for seed in range(400)]
        for leaf in leaves:
            with offload:
                y = leaf * 1
                addresses.add(y.data_ptr())
                results.append((leaf, save(y).sum()))
            del y
            offload.flush()
            if len(addresses) <= len(results) - 10:
                break
        assert len(addresses) < len(results), "the allocator reused no address; the test proves nothing"
        for leaf, result in results:
            result.backward()
            assert_bit_equal(leaf.grad, 2 * leaf.detach())


def test_a_changed_version_is_another_record(scratch: Path, store_kind: str) -> None:
    leaf = torch.ones(1000, requires_grad=True)
    x = leaf.detach() + 0
    with engine(scratch, store_kind=store_kind) as offload:
        with offload:
            first = leaf * x  # saves x as it is now
            offload.flush()
            x.add_(1)
            second = leaf * x
            offload.flush()
        (gradient,) = torch.autograd.grad(first.sum(), leaf)
        assert torch.equal(gradient, torch.ones(1000))
        (gradient,) = torch.autograd.grad(second.sum(), leaf)
        assert torch.equal(gradient, torch.full((1000,), 2.0))
        assert offload.stats().duplicate_bytes == 0


def test_a_small_view_of_a_large_storage_does_not_take_it_along(
    device: torch.device, scratch: Path, store_kind: str
) -> None:
    leaf, x = activation(1000, 1000, device=device)
    with engine(scratch, store_kind=store_kind) as offload:
        with offload:
            result = save(x[17])
        offload.flush()
        assert offload.stats().written_bytes <= 3 * 4096
        result.sum().backward()
    assert leaf.grad is not None
    assert_bit_equal(leaf.grad[17], 2 * leaf.detach()[17])


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_never_move(autocast: bool, scratch: Path) -> None:
    layers: dict[str, Any] = {"linear": nn.Linear(32, 32), "frozen": nn.Linear(32, 32).requires_grad_(False)}
    model: Any = Made(
        lambda self, x: self.norm(self.frozen(self.linear(x)) @ self.scale + self.linear.weight[:1]),
        **layers,
        norm=nn.BatchNorm1d(32),
        scale=torch.rand(32, 32),
    )
    x = torch.randn(16, 32, requires_grad=True)
    with engine(scratch, model=model) as offload:
        with offload, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x * 1).float().sum()
        offload.flush()
        stats = offload.stats()
        loss.backward()
    weights = [model.linear.weight, model.frozen.weight, model.scale, model.norm.weight]
    if not autocast:  # a frozen weight's and a buffer's cast copy is not linked to it by autograd: see docs/limits.md
        assert stats.weight_bytes >= sum(w.nbytes for w in weights)
        assert stats.offloaded_bytes <= 8 * x.nbytes
    assert stats.weight_bytes >= model.linear.weight.nbytes // (2 if autocast else 1)
    assert_adds_up(stats)


def test_fsdp2_gathered_weights_are_left_alone(scratch: Path, tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        plain = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        plain.load_state_dict(model.state_dict())
        mesh = init_device_mesh("cpu", (1,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        x = torch.randn(8, 64)
        with engine(scratch, model=model) as offload:
            for _ in range(2):
                with offload:
                    loss = model(x * 1).square().sum()
                offload.flush()
                loss.backward()
                plain(x).square().sum().backward()
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert mine.grad is not None
                    assert_bit_equal(mine.grad.full_tensor(), theirs.grad)
            stats = offload.stats()
        assert stats.weight_bytes >= 2 * 64 * 64 * 4
        assert stats.offloaded_bytes < 64 * 64 * 4 * 2
    finally:
        dist.destroy_process_group()


def test_hooks_are_invisible_to_the_default_generator_autocast_and_modes(scratch: Path, store_kind: str) -> None:
    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is not torch.ops.aten.detach.default:  # autograd's own, when it saves an operator's output
                heard.append(str(func))
            return func(*args, **(kwargs or {}))

    def step() -> tuple[list[str], Tensor, Tensor]:
        heard.clear()
        leaf, x = activation(32, 32)
        with Listener():
            with torch.autocast("cpu", torch.bfloat16):
                y = (x @ x).float().exp()
            offload.flush()
            y.sum().backward()
        assert leaf.grad is not None
        return list(heard), leaf.grad, torch.get_rng_state()

    heard: list[str] = []
    torch.manual_seed(4)
    with engine(scratch, store_kind=store_kind) as offload:
        plain = step()
        with offload:
            ours = step()
    assert ours[0] == plain[0]
    assert_bit_equal(ours[1], plain[1])
    assert torch.equal(ours[2], plain[2])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_hooks_are_invisible_to_forward_mode_over_a_double_backward(scratch: Path) -> None:
    """Its tangents are zero tensors in part, which have a storage without memory."""
    weight, direction = torch.randn(8, 8).requires_grad_(), torch.randn(8, 8)

    def product() -> Tensor:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(weight, direction) * 2
            (gradient,) = torch.autograd.grad((x.sin() * x).sum(), weight, create_graph=True)
            tangent = forward_ad.unpack_dual(gradient).tangent
            assert tangent is not None
            return tangent.detach()

    plain = product()
    with engine(scratch) as offload:
        with offload:
            found = product()
        assert offload.stats().kept_by_reason["no storage"]
    assert_bit_equal(found, plain)


def test_hooks_are_invisible_to_a_flop_counter_and_a_default_device(scratch: Path) -> None:
    leaf, x = activation(32, 32)
    counts = []
    with engine(scratch) as offload:
        for enter in (False, True):
            leaf.grad = None
            with FlopCounterMode(display=False) as counter, torch.device("meta"):
                if enter:
                    with offload:
                        y = x @ x
                    offload.flush()
                else:
                    y = x @ x
                y.backward(torch.ones_like(x), retain_graph=False)
            counts.append(counter.get_total_flops())
            leaf, x = activation(32, 32)
        assert offload.stats().read_bytes > 0
    assert counts[0] == counts[1] > 0


def test_odd_tensors_are_kept_and_counted_by_type(scratch: Path) -> None:
    class Odd(Tensor):
        pass

    with engine(scratch) as offload:
        with pytest.warns(OffloadWarning, match="moved nothing"), offload:  # noqa: PT031  # leaving is what warns
            odd = torch.randn(4, 4).as_subclass(Odd).requires_grad_()
            sparse = torch.eye(4).to_sparse()
            dense = torch.randn(4, 4, requires_grad=True)
            meta = torch.empty(4, 4, device="meta", requires_grad=True)
            results = [save(odd), torch.sparse.mm(sparse, dense), save(meta)]
        reasons = offload.stats().kept_by_reason
        assert_adds_up(offload.stats())
    assert {"Odd", "torch.sparse_coo", "meta"} <= set(reasons)
    results[1].sum().backward()


def test_an_inference_tensor_gives_torchs_own_error(scratch: Path) -> None:
    with torch.inference_mode():
        x = torch.ones(4, 4)
    w = torch.ones(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError) as plain:
        _ = x @ w
    with (
        engine(scratch) as offload,
        pytest.raises(RuntimeError) as ours,
        offload,
    ):
        _ = x @ w
    assert str(ours.value) == str(plain.value)
