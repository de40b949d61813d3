"""On a GPU: gradients are plain PyTorch's to the last bit, through each tier, for each family, dtype and view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.exactness import Run, assert_bit_equal, raw_bytes
from support.gpt import GPT, GPTConfig
from support.gpu import DEVICE, STEPS, TIERS, assert_moved, deterministic, gpu_only, offloader, open_device, train
from support.models import Looks, Made, llama
from tba import Offloader, OffloadStats, offload_context

pytestmark = gpu_only

BATCH, SEQUENCE, WIDTH, VOCAB = 4, 32, 64, 61


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    open_device()
    with deterministic():
        yield


class ConvNet(nn.Module):
    """Convolutions with batch norm and in-place ReLU, strided instead of pooled; [B, 3, 16, 16] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 32)):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(images).mean((2, 3))), labels)


class Recurrent(nn.Module):
    """Embedding, two LSTM layers of cuDNN, head; [B, S] -> loss. No dropout: cuDNN keeps a random state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.layers(self.tokens(tokens))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Reentrant(nn.Module):
    """A GPT whose blocks are recomputed by the older kind of checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.gpt.tokens(tokens) + self.gpt.positions(places)
        for block in self.gpt.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return functional.cross_entropy(self.gpt.head(self.gpt.norm(x)).flatten(0, 1), targets.flatten())


def gpt(*, recompute: bool = False, dtype: torch.dtype = torch.float32) -> GPT:
    config = GPTConfig(layers=2, width=WIDTH, heads=2, sequence=SEQUENCE, vocab=VOCAB, dropout=0.1)
    return GPT(config, checkpoint=recompute).to(dtype)


def text() -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE)), torch.randint(0, VOCAB, (BATCH, SEQUENCE))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, 16, 16), torch.randint(0, 10, (BATCH,))


@dataclass(frozen=True)
class Family:
    """A model, how to feed it, and whether under autocast."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, ...]] = text
    autocast: bool = False


FAMILIES = (
    Family("gpt", gpt),
    Family("gpt-bf16", lambda: gpt(dtype=torch.bfloat16)),
    Family("gpt-fp16", lambda: gpt(dtype=torch.float16)),
    Family("gpt-autocast", gpt, autocast=True),
    Family("gpt-checkpoint", lambda: gpt(recompute=True)),
    Family("gpt-checkpoint-autocast", lambda: gpt(recompute=True), autocast=True),
    Family("gpt-reentrant", Reentrant),
    Family("convnet", ConvNet, images),
    Family("convnet-autocast", ConvNet, images, autocast=True),
    Family("lstm", Recurrent),
)


def reproducible(family: Family) -> Run:
    """Plain training, the same to the bit when it is run again; where it is not, nothing can be compared with it."""
    try:
        plain = train(family.make_model, family.make_batch, autocast=family.autocast)
        train(family.make_model, family.make_batch, autocast=family.autocast).assert_equals(plain)
    except AssertionError as difference:
        pytest.skip(f"plain training is not reproducible here: {difference}")
    except RuntimeError as refusal:
        if "deterministic" not in str(refusal):
            raise
        pytest.skip(f"an operator has no deterministic kernel: {refusal}")
    return plain


def compare(family: Family, tier: str, scratch: Path) -> None:
    """Three steps through the tier, every saved tensor flushed in between, against the same three steps plain."""
    plain = reproducible(family)

    def through(tier: str, **settings: Any) -> OffloadStats:
        made: list[Offloader] = []

        def make_offload(model: nn.Module) -> Offloader:
            made.append(offload_context(model, tier, min_tensor_bytes=0, storage_paths=scratch, **settings))
            return made[-1]

        try:
            moved = train(family.make_model, family.make_batch, make_offload, autocast=family.autocast)
            stats = made[0].stats()
        finally:
            made[0].close()
        moved.assert_equals(plain)
        assert stats.weight_bytes > 0
        return stats

    if tier != "auto":
        assert_moved(through(tier), tier)
        return
    kept = through("keep")
    # An LSTM of two layers saves four fifths of a step in one operator.
    stats = through("auto", memory_budget=kept.kept_bytes * 85 // (100 * STEPS))
    assert stats.offloaded_bytes > 0
    assert stats.errors == 0


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_training_is_exact(family: Family, tier: str, scratch: Path) -> None:
    compare(family, tier, scratch)


@pytest.mark.filterwarnings("default")
def test_a_llama_of_transformers_is_exact(scratch: Path) -> None:
    pytest.importorskip("transformers")

    def loss(self: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.llama(input_ids=tokens, labels=labels).loss
        return found

    def make_model() -> nn.Module:
        sizes = {"vocab": VOCAB, "width": WIDTH, "inner": 2 * WIDTH}
        return Made(loss, llama=llama(**sizes, positions=SEQUENCE))

    compare(Family("llama", make_model), "nvme", scratch)


def test_auto_moves_nothing_that_fits(scratch: Path) -> None:
    plain = train(gpt, text)
    made: list[Offloader] = []

    def make_offload(model: nn.Module) -> Offloader:
        made.append(offload_context(model, tier="auto", min_tensor_bytes=0, storage_paths=scratch))
        return made[-1]

    train(gpt, text, make_offload).assert_equals(plain)
    stats = made[0].stats()
    made[0].close()
    assert stats.saved_bytes > 0
    assert stats.offloaded_bytes == stats.written_bytes == stats.file_bytes == 0


# -- single tensors ----------------------------------------------------------------------------------------------------


def round_trip(tensors: list[Tensor], offload: Offloader) -> list[Tensor]:
    """What backward gets for `tensors`, which must not be referenced by anybody else."""
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    back: list[Tensor] = []
    with offload:
        y = Looks.apply(x, lambda _, *saved: back.extend(saved), *tensors)
    assert isinstance(y, Tensor)
    tensors.clear()
    offload.flush()
    for _ in range(4):  # memory that has come free does not keep what was in it
        torch.full((1 << 20,), float("nan"), device=DEVICE)
    y.sum().backward()
    return back


def _dtypes() -> dict[str, Tensor]:
    numbers = torch.arange(-600, 600, device=DEVICE)
    tensors = {
        str(dtype).removeprefix("torch."): (numbers / 7).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)
    }
    tensors["bool"] = numbers % 3 == 0
    tensors["uint8"] = (numbers % 256).to(torch.uint8)
    tensors["float8"] = (numbers / 7).to(torch.float8_e4m3fn)
    tensors["complex64"] = torch.complex(numbers / 7, numbers / 11)
    tensors["complex128"] = torch.complex(numbers.double() / 7, numbers.double() / 11)
    tensors["nan"] = torch.full((300,), float("nan"), device=DEVICE)
    tensors["scalar"] = torch.tensor(3.5, device=DEVICE)
    return tensors


def _views() -> dict[str, Tensor]:
    def base(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE)

    waves = torch.complex(base(30, 20), base(30, 20))
    return {
        "transposed": base(40, 40).t(),
        "offset": base(200)[1:],
        "every second": base(400)[::2],
        "expanded": base(16, 1).expand(16, 50),
        "channels last": base(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "permuted": base(3, 4, 5).permute(2, 0, 1),
        "small part of much": base(1 << 18)[1001:1301],
        "strided part of much": base(512, 512)[3:7, 5:500:3],
        "overlapping": base(200).as_strided((30, 20), (2, 3), 1),
        "diagonal": base(50, 50).diagonal(3),
        "flipped bytes": base(64).view(torch.int32)[3:],
        "conj": waves.clone().conj(),
        "conj part": waves.clone().conj()[1:7, ::2],
        "imag of conj": waves.clone().conj().imag,  # has the negative bit
        "neg": torch._neg_view(base(77)),
        "one element": base(1000)[777],
    }


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("make", [_dtypes, _views], ids=["dtypes", "views"])
def test_a_tensor_comes_back_as_it_was(make: Callable[[], dict[str, Tensor]], tier: str, scratch: Path) -> None:
    originals = make()
    names = list(originals)
    facts = [
        (t.dtype, t.shape, t.stride(), t.device, t.is_conj(), t.is_neg(), t.data_ptr() % 256)
        for t in originals.values()
    ]
    contents = [raw_bytes(t).cpu() for t in originals.values()]
    with offloader(tier, scratch) as offload:
        tensors = list(originals.values())
        originals.clear()
        back = round_trip(tensors, offload)
        stats = offload.stats()
    assert len(back) == len(names)
    for name, t, fact, content in zip(names, back, facts, contents, strict=True):
        # The address matters to 256 bytes: cuBLAS chooses its kernel by it, and another kernel gives other bits.
        found = (t.dtype, t.shape, t.stride(), t.device, t.is_conj(), t.is_neg(), t.data_ptr() % 256)
        assert found == fact, name
        assert_bit_equal(raw_bytes(t).cpu(), content, name)
    assert_moved(stats, tier)


@pytest.mark.parametrize("tier", TIERS)
def test_views_of_one_storage_move_it_once(tier: str, scratch: Path) -> None:
    fused = torch.randn(64, 3 * 64, device=DEVICE)
    parts = list(fused.chunk(3, dim=-1))
    nbytes, contents = fused.nbytes, [raw_bytes(part).cpu() for part in parts]
    del fused
    with offloader(tier, scratch) as offload:
        back = round_trip(parts, offload)
        stats = offload.stats()
    for part, content in zip(back, contents, strict=True):
        assert_bit_equal(raw_bytes(part).cpu(), content)
    assert nbytes <= stats.written_bytes < nbytes + 4096
    assert stats.duplicate_bytes == nbytes * 2 // 3


def test_a_small_part_of_a_large_storage_does_not_move_the_rest(scratch: Path) -> None:
    with offloader("nvme", scratch) as offload:
        tensors = [torch.randn(1 << 20, device=DEVICE)[5000:6000]]
        content = raw_bytes(tensors[0]).cpu()
        (back,) = round_trip(tensors, offload)
        assert_bit_equal(raw_bytes(back).cpu(), content)
        assert offload.stats().written_bytes < 16384


def test_tensors_of_host_and_device_go_side_by_side(scratch: Path) -> None:
    for tier in TIERS:
        with offloader(tier, scratch) as offload:
            tensors = [torch.randn(3000), torch.randn(3000, device=DEVICE)]
            contents = [raw_bytes(t).cpu() for t in tensors]
            back = round_trip(tensors, offload)
            assert [t.device.type for t in back] == ["cpu", DEVICE.type]
            for t, content in zip(back, contents, strict=True):
                assert_bit_equal(raw_bytes(t).cpu(), content)
            assert offload.stats().kept_bytes == (12000 if tier == "cpu" else 0)
