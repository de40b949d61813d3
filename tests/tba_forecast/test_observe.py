"""What a fake step shows is what the engine sees of a real one: saved bytes, places, order; and what lives besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.forecast import BATCH, FAMILIES, LEAST_BYTES, SEQUENCE, VOCAB
from support.models import Made
from tba import ConfigError, offload_context
from tba._forecast.hardware import DEVICES, Device
from tba._forecast.observe import Observed, _observe, observe
from tba._plan.facts import OUTSIDE, Facts, Link, Place

pytest.importorskip("transformers")

CARD = DEVICES["h100"]
CPU = replace(CARD, like_cuda=False)
STEPS = 4  # until a plan stands


def real_facts(name: str) -> Facts:
    """What the engine observes of real steps on the CPU."""
    model, batch = FAMILIES[name]()
    observed = observe(FAMILIES[name], CPU, min_tensor_bytes=LEAST_BYTES)
    budget = int(0.8 * sum(each.nbytes for each in observed.saved))
    with offload_context(model, memory_budget=budget, min_tensor_bytes=LEAST_BYTES) as offload:
        for _ in range(STEPS):
            out = model(**batch) if isinstance(batch, dict) else model(*batch)
            (out if isinstance(out, Tensor) else out.loss).backward()
            model.zero_grad()
    offload.close()
    assert offload.plan
    return offload.plan.facts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_bytes_and_places_are_those_of_the_engine(name: str) -> None:
    found, real = observe(FAMILIES[name], CPU, min_tensor_bytes=LEAST_BYTES), real_facts(name)
    assert len(real.saved) > 10
    assert [(each.place, each.nbytes) for each in found.saved] == [(each.place, each.nbytes) for each in real.saved]
    whole = [real.blocks[number] for number in real.kinds[""]]
    assert len(found.blocks) == len(whole)
    assert [each.input_bytes for each in found.blocks] == [each.input_bytes for each in whole]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fake_step_is_the_real_one_in_all_but_values(name: str) -> None:
    fake = observe(FAMILIES[name], CPU, min_tensor_bytes=LEAST_BYTES)
    real = _observe(*FAMILIES[name](), CPU, LEAST_BYTES, None)
    assert timeless(real) == timeless(fake)
    assert order_wanted(real) == order_wanted(fake)
    assert (fake.forward_s, fake.backward_s) == pytest.approx((real.forward_s, real.backward_s))


def timeless(found: Observed) -> Observed:
    saved = tuple(replace(each, saved_s=0, wanted_s=0) for each in found.saved)
    blocks = tuple(replace(each, begin_s=0, replay_s=0) for each in found.blocks)
    return replace(found, saved=saved, blocks=blocks, forward_s=0, backward_s=0)


def order_wanted(found: Observed) -> list[int]:
    return Facts(found.saved, found.blocks, found.forward_s, found.backward_s, Link(1, 1), 0).order_wanted


class Feed(nn.Module):
    """Two layers, of whose memory all is known."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x))).square().mean()


def feed() -> tuple[nn.Module, Any]:
    return Feed(), torch.randn(512, 64)


def test_flops_weights_and_what_lives_are_counted() -> None:
    found = observe(feed, CPU, min_tensor_bytes=LEAST_BYTES)
    product = 2 * 512 * 64 * 256
    assert found.flops == 2 * product + 3 * product  # the input needs no gradient
    assert found.weight_bytes == found.trained_bytes == 4 * found.trained == 4 * (2 * 64 * 256 + 256 + 64)
    wide, narrow = 512 * 256 * 4, 512 * 64 * 4
    assert [each.nbytes for each in found.saved] == [narrow, wide, wide, narrow]
    assert all(each.place == Place(OUTSIDE, number) for number, each in enumerate(found.saved))
    assert 2 * wide + 2 * narrow < found.plain_bytes <= 4 * wide + 3 * narrow + found.weight_bytes
    assert 0 < found.other_bytes < found.plain_bytes
    times = [each.saved_s for each in found.saved]
    assert times == sorted(times)
    assert 0 < times[-1] <= found.forward_s < found.backward_s


def test_what_is_too_small_to_plan_counts_once_and_weights_do_not() -> None:
    wide, narrow = 512 * 256 * 4, 512 * 64 * 4
    planned, small = (observe(feed, CPU, min_tensor_bytes=least) for least in (wide, wide + 1))
    assert (len(planned.saved), planned.small_bytes) == (2, 2 * narrow)
    assert (small.saved, small.small_bytes) == ((), 2 * wide + 2 * narrow)
    assert small.other_bytes >= small.small_bytes  # in the memory total
    assert (small.model, small.parameters, small.dtype, small.batch) == ("Feed", small.trained, "float32", (512, 64))


def test_a_step_takes_as_long_as_the_slower_of_products_and_memory() -> None:
    base = observe(feed, CPU)
    slow = replace(CPU, flops_per_s={dtype: rate / 1e6 for dtype, rate in CPU.flops_per_s.items()})
    found = observe(feed, slow)
    assert found.forward_s + found.backward_s == pytest.approx(base.flops / slow.flops_per_s[None], rel=0.01)
    fast = replace(CPU, flops_per_s=dict.fromkeys(CPU.flops_per_s, 1e30))
    narrow = replace(fast, memory_bytes_per_s=CPU.memory_bytes_per_s / 2)
    assert observe(feed, narrow).forward_s == pytest.approx(2 * observe(feed, fast).forward_s)


def test_on_a_card_dropout_saves_bytes_and_attention_no_probabilities() -> None:
    cpu = observe(FAMILIES["bert"], CPU, min_tensor_bytes=LEAST_BYTES)
    card = observe(FAMILIES["bert"], CARD, min_tensor_bytes=LEAST_BYTES)
    probabilities = BATCH * 4 * SEQUENCE * SEQUENCE * 4
    assert probabilities in {each.nbytes for each in cpu.saved}
    assert probabilities not in {each.nbytes for each in card.saved}
    masks = BATCH * SEQUENCE * 64
    assert sum(each.nbytes == masks for each in card.saved) >= 2 * len(card.blocks)
    assert masks not in {each.nbytes for each in cpu.saved}


class Attention(nn.Module):
    """Attention of 8 query heads over fewer key heads; values may be narrower."""

    def __init__(self, value_width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(64, 8 * 32, dtype=torch.bfloat16)
        self.key = nn.Linear(64, heads * 32, dtype=torch.bfloat16)
        self.value = nn.Linear(64, heads * value_width, dtype=torch.bfloat16)
        self.heads = heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.query, 8), (self.key, self.heads), (self.value, self.heads))
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads < 8).float().sum()


@pytest.mark.parametrize(("value_width", "heads"), [(32, 8), (32, 2), (16, 8), (16, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_card_saves_its_inputs_and_its_output(value_width: int, heads: int, masked: bool) -> None:
    def make() -> tuple[nn.Module, Any]:
        mask = torch.ones(256, 256, dtype=torch.bool) if masked else None
        return Attention(value_width, heads), (torch.randn(2, 256, 64, dtype=torch.bfloat16), mask)

    found = observe(make, CARD, min_tensor_bytes=LEAST_BYTES)
    rows = 2 * 256
    query, out = rows * 8 * 32 * 2, rows * 8 * value_width * 2
    sizes = [each.nbytes for each in found.saved]
    assert query in sizes
    assert out in sizes
    assert rows * 8 * 256 * 2 not in sizes  # probabilities
    assert found.flops >= 2 * 2 * 8 * 256 * 256 * (32 + value_width) + 3 * 2 * rows * 64 * 8 * 32


def test_attention_of_three_dimensions_is_what_torch_makes_of_it() -> None:
    """From 2.14 on that of four, which a card fuses; before, single products, as on a CPU."""

    def of_three(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.layer(x).chunk(3, -1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    def of_four(self: Any, x: Tensor) -> Tensor:
        return of_three(self, x.unsqueeze(0))

    def seen(forward: Callable[..., Tensor], device: Device) -> Observed:
        def make() -> tuple[nn.Module, Any]:
            return Made(forward, layer=nn.Linear(64, 3 * 64)), torch.randn(4, 256, 64)

        return observe(make, device, min_tensor_bytes=LEAST_BYTES)

    cpu, card, fused = seen(of_three, CPU), seen(of_three, CARD), seen(of_four, CARD)
    like = fused if torch.__version__ >= "2.14" else cpu
    assert sorted(each.nbytes for each in card.saved) == sorted(each.nbytes for each in like.saved)
    probabilities = 4 * 256 * 256 * 4
    assert (probabilities in {each.nbytes for each in card.saved}) is (like is cpu)
    assert card.flops >= 5 * 2 * 4 * 256 * 256 * 64


def test_a_cast_of_a_weight_is_not_saved_under_autocast() -> None:
    plain, cast = (
        observe(feed, CPU, min_tensor_bytes=1),
        observe(feed, CPU, min_tensor_bytes=1, autocast=torch.bfloat16),
    )
    assert sum(each.nbytes for each in cast.saved) < sum(each.nbytes for each in plain.saved)
    weight = 64 * 256 * 2
    assert weight not in {each.nbytes for each in cast.saved}


def test_what_recomputes_already_counts_once() -> None:
    def recomputed(self: Any, x: Tensor) -> Any:
        return sum(checkpoint(layer, x, use_reentrant=False) for layer in self.layers)

    layers = nn.ModuleList(Feed() for _ in range(2))
    found = observe(lambda: (Made(recomputed, layers=layers), torch.randn(512, 64)), CPU, min_tensor_bytes=LEAST_BYTES)
    assert [each.nbytes for each in found.saved] == [512 * 64 * 4]
    assert found.blocks == ()


def test_a_model_without_loss_or_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a scalar"):
        observe(lambda: (Made(lambda self, x: (self.layer(x), x), layer=nn.Linear(8, 8)), torch.randn(4, 8)), CPU)
    with pytest.raises(ConfigError, match="nothing would train"):
        observe(lambda: (nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8)), CPU)


def test_a_causal_model_with_a_padding_mask_keeps_it() -> None:
    def masked() -> tuple[nn.Module, Any]:
        model, batch = FAMILIES["llama"]()
        return model, {**batch, "attention_mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64)}

    without = observe(FAMILIES["llama"], CPU, min_tensor_bytes=LEAST_BYTES)
    found = observe(masked, CPU, min_tensor_bytes=LEAST_BYTES)
    assert len(found.saved) > len(without.saved)
    assert without.tokens == found.tokens == BATCH * SEQUENCE
    assert without.trained > VOCAB
