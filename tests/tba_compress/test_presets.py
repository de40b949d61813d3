"""`compress=`: what saved tensors shrink to, over every tier, and what backward then gets."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from compact import PRESETS, Preset, Quantized, Sampled, Spec, convert
from support.engine import ALL_INT8, Gate, activation, engine, save
from support.exactness import CPU, equal, gradients_of
from support.models import Mixed
from tba import ConfigError, OffloadConfig, Offloader, offload_context
from tba._compress.compressor import advice
from tba._transfer.cost import Cost

TIERS = ("keep", "cpu", "nvme", "auto")
# Every tensor, whoever saved it: so that small graphs of any operator go through the codec.
LINEAR_INT4 = Preset("linear", {})
LINEAR_INT4 = LINEAR_INT4.override({"linear_input": Quantized("int4", rounding="stochastic", rotate=True)})


def train(
    tier: str | None,
    compress: Any = None,
    *,
    make: Callable[[], nn.Module] = Mixed,
    flush: bool = False,
    device: torch.device = CPU,
    **settings: Any,
) -> tuple[list[Tensor], Any]:
    """The gradients of two steps, and the statistics; without a tier by plain PyTorch."""
    torch.manual_seed(0)
    model = make().to(device)
    ids = torch.randint(0, 50, (8, 32)).to(device)
    offload = (
        Offloader(model, OffloadConfig(tier=tier, compress=compress, min_tensor_bytes=0, **settings)) if tier else None
    )
    return gradients_of(model, ids, offload, steps=2, flush=flush)


@pytest.mark.filterwarnings("ignore:tier='cpu' moved nothing")
@pytest.mark.parametrize("tier", TIERS)
def test_exact_gives_the_same_bits_from_fewer_bytes(tier: str, device: torch.device) -> None:
    plain, _ = train(None, device=device)
    ours, stats = train(tier, "exact", flush=tier != "auto", device=device)
    assert equal(ours, plain)
    assert 0 < stats.packed_bytes <= 0.55 * stats.encoded_bytes
    assert stats.derived_bytes > 0
    assert stats.saved_bytes == stats.weight_bytes + stats.duplicate_bytes + stats.kept_bytes + stats.offloaded_bytes
    assert (stats.live_records, stats.errors) == (0, 0)


def test_less_is_written_and_read() -> None:
    _, plain = train("nvme", flush=True)
    _, exact = train("nvme", "exact", flush=True)
    saved = exact.encoded_bytes - exact.packed_bytes + exact.derived_bytes
    assert min(exact.packed_bytes, exact.derived_bytes) > 0
    # Of each extent up to two blocks are padding.
    assert abs(plain.written_bytes - exact.written_bytes - saved) < 4096 * 2 * 40
    assert exact.written_bytes == exact.read_bytes


@pytest.mark.filterwarnings("ignore:tier='cpu' moved nothing")
def test_what_a_codec_makes_does_not_depend_on_tier_or_timing(device: torch.device) -> None:
    plain, _ = train(None, device=device)
    first, stats = train("nvme", ALL_INT8, flush=True, device=device)
    assert stats.packed_bytes < 0.35 * stats.encoded_bytes
    assert not equal(first, plain)
    for a, b in zip(first, plain, strict=True):
        assert functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.999
    assert equal(train("nvme", ALL_INT8, device=device)[0], first)  # forwarded
    for tier in ("keep", "cpu", "auto"):
        assert equal(train(tier, ALL_INT8, device=device)[0], first)
    assert equal(train("nvme", ALL_INT8, device=device, prefetch_bytes=0, staging_bytes=1 << 20)[0], first)


@pytest.mark.parametrize("codec", [Quantized("e4m3"), Quantized("e5m2"), Quantized("int8", along="tokens")], ids=str)
def test_a_class_may_be_given_any_codec(codec: Quantized) -> None:
    plain, _ = train(None)
    ours, stats = train("nvme", Preset("mine").override({"activation_input": codec}), flush=True)
    _, exact = train("nvme", "exact", flush=True)
    nbytes = 8 * 32 * 128 * 4  # of what GELU saves, in each of two steps
    packed = 2 * codec.packed_nbytes(Spec.of(torch.empty(8, 32, 128)))
    assert (stats.encoded_bytes - exact.encoded_bytes, stats.packed_bytes - exact.packed_bytes) == (2 * nbytes, packed)
    assert not equal(ours, plain)
    for a, b in zip(ours, plain, strict=True):
        assert functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99


@pytest.mark.filterwarnings("ignore:tier='cpu' moved nothing")
def test_sampled_rows_move_as_any_tensor_and_change_weight_gradients_alone(device: torch.device) -> None:
    plain, _ = train(None, device=device)
    sampled = PRESETS["compact"].override({"linear_input": Sampled(0.25)})
    first, stats = train("nvme", sampled, flush=True, device=device)
    _, projected = train("nvme", PRESETS["compact"], flush=True, device=device)
    # The input of gate and up, and that of down, in each of two steps: 64 of 256 rows, with an index and a factor each.
    assert stats.saved_bytes - projected.saved_bytes == 2 * 2 * 64 * 8 + 2 * 64 * 8
    assert stats.offloaded_bytes >= projected.offloaded_bytes > 0
    assert abs(stats.written_bytes - projected.written_bytes) < 4096 * 2 * 6
    names = list(dict(Mixed().named_parameters())) * 2
    differ = [name for name, ours, exact in zip(names, first, plain, strict=True) if not torch.equal(ours, exact)]
    assert differ == ["gate.weight", "up.weight", "down.weight"] * 2
    for tier in TIERS:
        assert equal(train(tier, sampled, device=device)[0], first)

    def make() -> nn.Module:
        model = Mixed()
        convert(model, rank=0.25, method="wta-crs")
        return model

    converted, _ = train(None, make=make, device=device)
    assert not equal(converted, plain)
    for tier in TIERS:
        assert equal(train(tier, make=make, device=device)[0], converted)


@pytest.mark.filterwarnings("ignore:tier='cpu' moved nothing")
@pytest.mark.parametrize("tier", TIERS)
def test_what_backward_recomputes_is_exact_in_every_tier(scratch: Path, tier: str) -> None:
    leaf = torch.randn(64, 64, requires_grad=True)
    with engine(scratch, tier=tier, compress=ALL_INT8) as offload, offload:
        y = checkpoint(lambda x: x.exp().sin(), leaf, use_reentrant=True).sum()
        y.backward()
        stats = offload.stats()
    # The checkpoint itself saved the leaf, in forward.
    assert (stats.encoded_bytes, stats.kept_by_reason["recomputed"]) == (leaf.nbytes, 2 * leaf.nbytes)


def test_the_seed_decides_what_is_random() -> None:
    stochastic = ALL_INT8.override({"unknown": Quantized("int4", rounding="stochastic")})
    one, _ = train("keep", stochastic, seed=1)
    assert equal(train("keep", stochastic, seed=1)[0], one)
    assert not equal(train("keep", stochastic, seed=2)[0], one)
    state = torch.get_rng_state()
    train("keep", stochastic)
    torch.manual_seed(0)
    Mixed()
    torch.randint(0, 50, (8, 32))
    after = torch.get_rng_state()
    train("keep", stochastic)
    assert torch.equal(torch.get_rng_state(), after)  # the engine draws nothing from the default generator
    torch.set_rng_state(state)


def test_memory_goes_as_soon_as_the_operator_has_finished(scratch: Path) -> None:
    array = np.ones(1 << 18, dtype=np.float32)
    watched = weakref.ref(array)
    with engine(scratch, tier="keep", compress=ALL_INT8) as offload:
        x = torch.from_numpy(array)
        del array
        weight = torch.ones((), requires_grad=True)
        with offload:
            y = weight * x
            del x
            assert watched() is not None  # its operator may still run, for all that is known
            other = save(weight + 1)
            assert watched() is None
        (y.sum() + other).backward()
        assert weight.grad is not None
        assert torch.isclose(weight.grad, torch.tensor(float(1 << 18) + 4.0))
        stats = offload.stats()
    assert (stats.written_bytes, stats.kept_bytes > 0) == (0, True)


@pytest.mark.parametrize("prefetch_bytes", [0, 64])
def test_what_takes_no_bytes_is_neither_written_nor_read(scratch: Path, prefetch_bytes: int) -> None:
    with engine(scratch, compress="exact", prefetch_bytes=prefetch_bytes) as offload:
        leaf = torch.randn(64, 64, requires_grad=True)
        with offload:
            taken = leaf.gather(0, torch.zeros(64, 64, dtype=torch.int64))
            y = (taken.exp() + leaf.sin()).sum()
        offload.flush()
        wanted = 3 * (leaf.detach().cos() + torch.cat((64 * leaf.detach()[:1].exp(), torch.zeros(63, 64))))
        for _ in range(3):  # over a graph that is kept: what one backward has read makes room in the next
            y.backward(retain_graph=True)
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, wanted)
        stats = offload.stats()
    assert (stats.encoded_bytes, stats.packed_bytes) == (64 * 64 * 8, 0)


def test_an_edit_after_the_codec_has_run_is_legal_and_one_before_is_an_error(scratch: Path) -> None:
    with engine(scratch, compress=ALL_INT8) as offload:
        leaf, x = activation(64, 64)
        wanted = 2 * x.detach().clone()
        with offload:
            y = save(x)
            save(activation(4, 4)[1])  # now the operator has finished
            x.detach().zero_()
        y.sum().backward()
        assert leaf.grad is not None
        assert (leaf.grad - wanted).abs().max() < 0.1
        with offload:
            leaf, x = activation(64, 64)
            y = save(x)
            x.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_write_under_way_is_of_the_packed_bytes(scratch: Path) -> None:
    gate = Gate("write")
    with engine(scratch, gate, compress=ALL_INT8, prefetch_bytes=0) as offload:
        leaf, x = activation(64, 64)
        with offload:
            y = save(x)
        x.detach().zero_()  # the copy was finished by the codec: nothing is poisoned
        y.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.abs().max() > 1
        gate.open()


def test_not_a_number_comes_back_where_it_was() -> None:
    x = torch.randn(64, 64)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    x.requires_grad_()
    with Offloader(None, OffloadConfig(tier="keep", compress=ALL_INT8, min_tensor_bytes=0)) as offload:
        y = save(x * 1)
    y.backward(torch.ones(64, 64))
    assert x.grad is not None
    assert torch.equal(x.grad.isnan(), x.detach().isnan())
    assert torch.equal(x.grad.isinf(), x.detach().isinf())
    offload.close()


def test_a_saver_that_needs_more_gets_a_record_of_its_own(scratch: Path) -> None:
    """One tensor saved by a linear layer, in 4 bits, and then by a norm, exactly."""

    def step(offload: Offloader | None) -> list[Tensor]:
        torch.manual_seed(0)
        linear, norm = nn.Linear(64, 64), nn.LayerNorm(64)
        leaf, x = activation(32, 64)
        with offload or nullcontext():
            loss = linear(x).square().sum() + norm(x).square().sum()
        if offload is not None:
            offload.flush()
        inputs = [leaf, linear.bias, norm.weight, norm.bias, linear.weight]
        return list(torch.autograd.grad(loss, inputs))

    plain = step(None)
    with engine(scratch, compress=LINEAR_INT4) as offload:
        ours = step(offload)
        stats = offload.stats()
    assert equal(ours[:4], plain[:4])  # the input's gradient too: a linear layer's needs no saved input
    assert not torch.equal(ours[4], plain[4])
    assert functional.cosine_similarity(ours[4].flatten(), plain[4].flatten(), 0) > 0.98
    assert stats.encoded_bytes == 32 * 64 * 4


@pytest.mark.filterwarnings("ignore:.*compiled as one graph:tba.OffloadWarning")
@pytest.mark.parametrize("tier", ["keep", "nvme"])
def test_under_torch_compile(tier: str) -> None:
    def make() -> nn.Module:
        model = Mixed()
        model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
        return model

    plain, _ = train(None, make=make)
    assert equal(train(tier, "exact", make=make)[0], plain)


def test_copies_of_the_model_and_the_registry_know_presets() -> None:
    model = Mixed()
    first = offload_context(model, "keep", compress="safe8")
    assert offload_context(model, "keep", compress="safe8") is first
    assert offload_context(model, "keep", compress=PRESETS["balanced"]) is not first
    assert offload_context(model, "keep", compress=ALL_INT8) is offload_context(model, "keep", compress=ALL_INT8)
    assert copy.deepcopy(model) is not model
    first.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compress": "safe9"}, r"compress='safe9' is not None, a compact.Preset or one of .*; did you mean safe8\?"),
        ({"compress": 8}, "compress=8 is not None, a compact.Preset or one of 'exact'"),
        ({"rank": 8}, "rank=8 was given with compress=None, which projects nothing"),
        ({"compress": "safe8", "rank": 0.5}, "rank=0.5 was given with compress='safe8'"),
        ({"compress": "compact", "rank": 0}, "rank=0 is not a whole number above 0"),
        ({"compress": "compact", "rank": 1.5}, "rank=1.5 is not a whole number above 0"),
        ({"compress": "compact", "rank": 1.0}, "rank=1.0 is not a whole number above 0, or a share .* below 1"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        OffloadConfig(**settings)


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_COMPRESS", "compact")
    monkeypatch.setenv("TBA_RANK", "0.125")
    assert (OffloadConfig().compress, OffloadConfig().rank) == ("compact", 0.125)
    monkeypatch.setenv("TBA_RANK", "32")
    assert OffloadConfig().rank == 32
    monkeypatch.setenv("TBA_COMPRESS", "none")
    monkeypatch.delenv("TBA_RANK")
    assert OffloadConfig().compress is None


def test_a_preset_that_costs_more_than_it_saves_is_told_of() -> None:
    line = advice("safe8", codec_s=0.2, gain_s=0.06, step_s=2.0)
    assert line.startswith("compress='safe8': packing, unpacking and recomputing tensors take 10% of a step")
    assert "3% to write and read back" in line
    assert advice("safe8", codec_s=0.2, gain_s=0.17, step_s=2.0) == ""  # within 2 % of the step


def test_it_is_told_of_once_and_not_where_the_link_binds(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(further_byte_s: float) -> list[str]:
        monkeypatch.setattr(Cost, "per_further_byte_s", property(lambda cost: further_byte_s))
        caplog.clear()
        x = activation(64, 64)[1].detach()
        layer = nn.Linear(64, 64)
        with engine(scratch, tier="nvme", compress="safe8") as offload, offload:
            for _ in range(8):
                functional.gelu(layer(x)).square().mean().backward()
        return [record.message for record in caplog.records if record.message.startswith("compress='safe8'")]

    assert len(lines(1e-15)) == 1
    assert lines(1.0) == []
