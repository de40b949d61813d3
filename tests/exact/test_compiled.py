"""Whole models, compiled by `tba.compile_backend`, are bit for bit those that PyTorch compiles by itself.

The reference has no operator of ours: so these tests also show that the compiler makes the same kernels.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from io_backends import Store
from support.compiled import own_compiler
from support.exactness import assert_bit_equal, run_training
from support.zoo import FAMILIES
from tba import ClosedError, CompileBackend, OffloadConfig, OffloadStats

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; there is no g++"),
    # From the compiler itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
WIDTH, BATCH = 64, 16
# All moves, however small, and little is in memory at once.
ALL: dict[str, Any] = {"tier": "nvme", "min_tensor_bytes": 64, "prefetch_bytes": 0, "staging_bytes": 1 << 14}


@pytest.fixture(scope="module")
def _compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _own_compiler(_compiled_code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_compiler(_compiled_code, monkeypatch):
        yield


@contextmanager
def backend(scratch: Path, store: Store | None = None, **settings: Any) -> Iterator[CompileBackend]:
    config = OffloadConfig(**({"storage_paths": scratch} | ALL | settings))
    made = CompileBackend(config, store=store)
    try:
        yield made
    finally:
        made.close()
        torch.compiler.reset()


class Net(nn.Module):
    """Linear layers with normalization, dropout and a residual path; returns the loss."""

    def __init__(self, layers: int = 3, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(functional.gelu(layer(self.norm(x))))
        return x.square().mean()


class Broken(Net):
    """The same with three graph breaks: four graphs."""

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.layers
        x = x + self.dropout(functional.gelu(one(self.norm(x))))
        torch._dynamo.graph_break()
        x = x + self.dropout(functional.gelu(two(self.norm(x)).exp()))
        torch._dynamo.graph_break()
        x = x + self.dropout(functional.gelu(three(self.norm(x)).sin()))
        torch._dynamo.graph_break()
        return functional.gelu(self.norm(x).exp()).square().mean()


class Fused(Net):
    """Three parts of one projection, which are views of one piece of memory, and attention over them."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(BATCH // 4, 4, WIDTH)
        for layer in self.layers:
            q, k, v = torch.cat([layer(heads), heads, layer(heads).sin()], -1).view(BATCH // 4, 4, 3, 4, 16).unbind(2)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape_as(heads)
        return self.norm(heads).square().mean()


class Outputs(Net):
    """Returns what it saves too, and edits a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(BATCH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x).exp()
        self.seen.add_(hidden.detach())
        again = self.layers[1](hidden).exp()
        self.kept = hidden, hidden.t(), again
        return (self.layers[2](again).sin() * hidden).sum()


class Checkpointed(Net):
    """Its layers are recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: functional.gelu(layer(self.norm(x))).exp(), x, use_reentrant=False)
        return x.square().mean()


def _batch(rows: int = BATCH) -> tuple[Tensor]:
    return (torch.randn(rows, WIDTH),)


def _dynamic() -> Callable[[], tuple[Tensor]]:
    sizes = iter([8, 12, 20, 32, 6])
    return lambda: _batch(next(sizes))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "net": (Net, _batch, {}),
    "breaks": (Broken, _batch, {}),
    "fused": (Fused, _batch, {}),
    "outputs": (Outputs, _batch, {}),
    "checkpointed": (Checkpointed, _batch, {}),
    "autocast": (Net, _batch, {"autocast": True}),
    "accumulated": (Net, _batch, {"forwards": 2}),
    "dynamic": (Net, _batch, {"steps": 5}),
    **{str(each): (each.make_model, each.make_batch, {}) for each in FAMILIES if each.name != "jagged"},
}


def _train(name: str, using: Any) -> Any:
    make_model, make_batch, settings = PROGRAMS[name]
    dynamic = name == "dynamic"

    def compiled() -> nn.Module:
        torch.compiler.reset()
        model = make_model()
        model.compile(backend=using, dynamic=dynamic or None)
        return model

    return run_training(compiled, _dynamic() if dynamic else make_batch, **settings)


@pytest.mark.parametrize(
    "name", ["net", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in PROGRAMS if name != "net")]
)
@pytest.mark.slow
def test_a_whole_model_is_what_the_compiler_makes_alone(name: str, scratch: Path) -> None:
    plain = _train(name, "inductor")
    with backend(scratch) as moving:
        _train(name, moving).assert_equals(plain)
        gc.collect()
        stats = moving.stats()
    assert 0 < stats.offloaded_bytes <= stats.written_bytes == stats.read_bytes, stats
    assert not stats.errors
    assert not stats.live_records


def _compiled(using: Any, model: nn.Module) -> nn.Module:
    torch.compiler.reset()
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.compile(backend=using)
    return model


def _gradients(model: nn.Module, loss: Tensor, **settings: Any) -> list[Tensor]:
    return [each.clone() for each in torch.autograd.grad(loss, list(model.parameters()), **settings)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_budget_holds_inside_one_graph(share: float, scratch: Path) -> None:
    x = torch.randn(BATCH, WIDTH)
    found: list[OffloadStats] = []
    gradients = []
    budget_bytes = 0
    for settings in ({}, {"tier": "auto", "prefetch_bytes": 1 << 16, "staging_bytes": 1 << 16}):
        if settings:
            budget_bytes = int(share * found[0].plain_peak_bytes)
            settings["memory_budget"] = budget_bytes
        with backend(scratch, **settings) as moving:
            model = _compiled(moving, Net(12, dropout=0.0))
            gradients.append(_gradients(model, model(x)))
            gc.collect()
            found.append(moving.stats())
    assert_bit_equal(gradients[1], gradients[0])
    everything, within = found
    assert everything.step_peak_bytes < budget_bytes
    assert within.step_peak_bytes <= budget_bytes
    assert 0 < within.written_bytes < everything.written_bytes


@pytest.mark.exhaustive
def test_graphs_are_kept_dropped_and_never_made(scratch: Path) -> None:
    x = torch.randn(BATCH, WIDTH)
    with backend(scratch) as moving, functorch_config.patch(donated_buffer=False):
        model = _compiled(moving, Net(dropout=0.0))
        loss = model(x)
        once = _gradients(model, loss, retain_graph=True)
        assert_bit_equal(_gradients(model, loss, retain_graph=True), once)
        assert_bit_equal(_gradients(model, loss), once)
        del loss
        gc.collect()
        before = moving.stats()
        with torch.no_grad():
            model(x)
        assert moving.stats().written_bytes == before.written_bytes
        model(x)  # its graph is dropped
        gc.collect()
        after = moving.stats()
        assert after.offloaded_bytes == 2 * before.offloaded_bytes  # written ones are padded
        assert after.read_bytes == before.read_bytes == 3 * before.written_bytes
        assert (after.live_records, after.resident_bytes) == (0, 0)
        loss = model(x)
        moving.close()
        with pytest.raises(ClosedError):
            loss.backward()
        assert_bit_equal(_gradients(model, model(x)), once)
