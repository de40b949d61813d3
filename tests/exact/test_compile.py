"""Compiled blocks with their activations through the file are bit for bit the same compiled blocks without.

The hooks stand outside of the compiled region: it packs all it saves after its forward and unpacks all of it when its
backward begins. Inductor may then overwrite what it was given (donated buffers), which each case counts in a probe.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compiled import own_compiler
from support.engine import engine
from support.exactness import adamw, assert_bit_equal, assert_through_file, run_training
from support.gpt import Block, GPTConfig
from support.models import LlamaLayer, llama
from support.zoo import ConvBlock, JaggedModel, jagged
from tba import Offloader, OffloadStats, OffloadWarning, offload_context

pytestmark = [
    # From the compiler itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

BATCH, SEQUENCE, WIDTH = 2, 16, 32


def _gpt() -> nn.Module:
    return Block(GPTConfig(layers=1, width=WIDTH, heads=2, sequence=SEQUENCE, vocab=61, dropout=0.1))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()
    )


BLOCKS = {
    "gpt": (_gpt, (BATCH, SEQUENCE, WIDTH)),
    "llama": (LlamaLayer, (BATCH, SEQUENCE, WIDTH)),
    "conv": (lambda: ConvBlock(8), (BATCH, 8, 8, 8)),
    "mlp": (_mlp, (BATCH, SEQUENCE, WIDTH)),
}
# Blocks whose backward, compiled by inductor, writes to some of what it is given.
DONATES = {"gpt", "llama", "conv"}
WITH_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler; there is no g++")
LEFT_INDUCTOR = pytest.param("inductor", marks=[pytest.mark.exhaustive, WITH_COMPILER])
BLOCK = pytest.mark.parametrize("name", BLOCKS)


@pytest.fixture(scope="module")
def _compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _own_compiler(_compiled_code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_compiler(_compiled_code, monkeypatch):
        yield


def _step(compiled: nn.Module, shape: tuple[int, ...], offload: Offloader | None = None) -> tuple[Tensor, Tensor]:
    """Two uses of the block with an eager operator between, so that both kinds of backward share a saved tensor."""
    leaf = torch.randn(shape, requires_grad=True)
    with offload if offload is not None else nullcontext():
        middle = compiled(leaf * 1)
        loss = (compiled(middle * middle.sigmoid()) * torch.randn(shape)).mean()
    if offload is not None:
        offload.flush()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _train(block: nn.Module, compiled: nn.Module, shape: tuple[int, ...], offload: Offloader | None = None) -> Any:
    start = copy.deepcopy(block.state_dict())
    torch.manual_seed(7)
    optimizer = adamw(block.parameters())
    results = []
    for _ in range(3):
        loss, gradient = _step(compiled, shape, offload)
        results.append([loss, gradient, *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
        optimizer.step()
        optimizer.zero_grad()
    end = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    block.load_state_dict(start)
    return [results, end]


def _overwritten(compiled: nn.Module, shape: tuple[int, ...]) -> int:
    """How many tensors that unpack returned the backward has written to."""
    handed: list[tuple[Tensor, Tensor]] = []

    def unpack(tensor: Tensor) -> Tensor:
        handed.append((tensor.clone(), tensor.clone()))
        return handed[-1][0]

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        loss = compiled(torch.randn(shape, requires_grad=True) * 1).square().mean()
    loss.backward()
    assert handed
    return sum(not torch.equal(given, before) for given, before in handed)


def _compare(name: str, backend: str, scratch: Path) -> tuple[nn.Module, tuple[int, ...]]:
    make, shape = BLOCKS[name]
    torch.manual_seed(5)
    block = make().train()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    plain = _train(block, compiled, shape)
    assert_bit_equal(_train(block, compiled, shape), plain, "plain against itself:")
    with torch.compiler.set_stance("fail_on_recompile"):  # the hooks are invisible to the compiler
        offload = offload_context(block, tier="nvme", min_tensor_bytes=0, storage_paths=scratch)
        moved = _train(block, compiled, shape, offload)
    stats = offload.stats()
    offload.close()
    assert_bit_equal(moved, plain)
    assert_through_file(stats)
    assert stats.weight_bytes > 0
    return compiled, shape


def _moved(model: nn.Module, block: nn.Module, scratch: Path) -> OffloadStats:
    """The statistics of a step of `block`, which is `model` or that compiled."""
    leaf = torch.randn(BATCH, SEQUENCE, 8 * WIDTH, requires_grad=True)
    with offload_context(model, tier="nvme", min_tensor_bytes=4096, storage_paths=scratch) as offload:
        loss = block(leaf * 1).square().mean()
    offload.flush()
    loss.backward()
    stats = offload.stats()
    offload.close()
    return stats


@pytest.mark.parametrize("backend", ["aot_eager", LEFT_INDUCTOR])
@pytest.mark.filterwarnings("ignore:.*compiled as one graph:tba.OffloadWarning")
def test_a_compiled_block_writes_what_the_block_writes(backend: str, scratch: Path) -> None:
    block = Block(GPTConfig(layers=1, width=8 * WIDTH, heads=2, sequence=SEQUENCE))
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    eager, moved = _moved(block, block, scratch), _moved(block, compiled, scratch)
    assert moved.read_bytes == moved.written_bytes
    assert 0.9 * eager.written_bytes < moved.written_bytes < 1.03 * eager.written_bytes


@BLOCK
def test_aot_eager_block_is_exact(name: str, scratch: Path) -> None:
    _compare(name, "aot_eager", scratch)


@pytest.mark.parametrize(
    "name", ["conv", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in BLOCKS if name != "conv")]
)
@pytest.mark.slow
@WITH_COMPILER
def test_inductor_block_is_exact(name: str, scratch: Path) -> None:
    compiled, shape = _compare(name, "inductor", scratch)
    if name in DONATES:
        assert _overwritten(compiled, shape) > 0


# -- a whole model, and block by block -----------------------------------------------------------------------------

LAYERS = 4


def _stack() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*[_mlp() for _ in range(LAYERS)])


def _steps(compiled: nn.Module, offload: Offloader | None) -> tuple[list[Any], list[OffloadStats]]:
    """Results of three steps of the stack, and their statistics."""
    torch.manual_seed(7)
    results: list[Any] = []
    each: list[OffloadStats] = []
    for _ in range(3):
        leaf = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
        with offload if offload is not None else nullcontext():
            loss = compiled(leaf * 1).mean()
        if offload is not None:
            offload.flush()
        results.append([loss.detach(), *torch.autograd.grad(loss, [leaf, *compiled.parameters()])])
        del loss
        if offload is not None:
            stats = offload.stats()
            assert stats.last_step is not None
            each.append(stats.last_step)
    return results, each


def _engine(model: nn.Module, scratch: Path, compress: str | None) -> Offloader:
    return offload_context(
        model, tier="nvme", min_tensor_bytes=0, prefetch_bytes=0, compress=compress, storage_paths=scratch
    )


@pytest.mark.parametrize("compress", [None, "exact"])
def test_block_by_block_moves_in_every_step(compress: str | None, scratch: Path) -> None:
    model = _stack()
    compiled = nn.Sequential(*[torch.compile(block, backend="aot_eager", fullgraph=True) for block in model])
    plain, _ = _steps(compiled, None)
    offload = _engine(model, scratch, compress)
    found, each = _steps(compiled, offload)
    assert_bit_equal(found, plain)
    for step in each:
        # A block's output that the next one saves too joins the first record, unless that has been written already.
        assert step.offloaded_bytes > 0
        assert step.offloaded_bytes + step.duplicate_bytes == each[0].offloaded_bytes + each[0].duplicate_bytes
        assert "compiled as one graph" not in step.kept_by_reason
    offload.close()


@pytest.mark.parametrize("backend", ["aot_eager", LEFT_INDUCTOR])
def test_a_lossy_preset_leaves_compiled_blocks_exact_and_says_so(backend: str, scratch: Path) -> None:
    model, compress = _stack(), "safe8"
    compiled = nn.Sequential(*[torch.compile(block, backend=backend, fullgraph=True) for block in model])
    plain, _ = _steps(compiled, None)
    offload = _engine(model, scratch, compress)
    with pytest.warns(OffloadWarning, match=f"compress='{compress}': what compiled code saves stays exact") as told:
        found, each = _steps(compiled, offload)
    assert len(told) == 1
    assert_bit_equal(found, plain)
    assert all(step.encoded_bytes < 0.2 * step.offloaded_bytes for step in each)  # integers, without loss
    offload.close()


def test_eager_blocks_are_not_told_about_compiled_code(scratch: Path) -> None:
    model = _stack()
    offload = _engine(model, scratch, "safe8")
    _, each = _steps(model, offload)  # a warning would be an error
    assert all(step.encoded_bytes > 0 for step in each)
    offload.close()


# -- by plan ---------------------------------------------------------------------------------------------------------


def _language_model() -> nn.Module:
    """Two layers of Llama, each with two modules that would be blocks, were the layer not compiled."""
    torch.manual_seed(5)
    return llama(width=64, inner=160)  # type: ignore[no-any-return]


def _compile(model: nn.Module, how: str, backend: str) -> nn.Module:
    """Compile the layers, or the whole, in one of the ways there are; what is to be called then."""
    if how == "outside":  # nothing in the model tells
        compiled: nn.Module = torch.compile(model, backend=backend)
        return compiled
    for layer in model.model.layers:
        if how == "layers":
            layer.compile(backend=backend)
        else:
            layer.forward = torch.compile(layer.forward, backend=backend)
    return model


def _losses_and_gradients(model: nn.Module, compiled: nn.Module, offload: Offloader | None) -> list[Any]:
    start = copy.deepcopy(model.state_dict())
    optimizer = adamw(model.parameters())
    tokens = torch.Generator().manual_seed(3)
    results: list[Any] = []
    for _ in range(6):
        batch = torch.randint(0, 61, (2, 32), generator=tokens)
        with offload if offload is not None else nullcontext():
            loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        optimizer.step()
        optimizer.zero_grad()
        del loss
    results.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    model.load_state_dict(start)
    return results


@pytest.mark.parametrize("how", ["layers", "forwards", pytest.param("outside", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("backend", ["aot_eager", LEFT_INDUCTOR])
@pytest.mark.filterwarnings("ignore:.*compiled as one graph:tba.OffloadWarning")
def test_a_plan_leaves_compiled_code_as_it_is(backend: str, how: str, scratch: Path) -> None:
    """What stands around the forward of a module inside would have it compiled again, to other kernels."""
    model = _language_model()
    compiled = _compile(model, how, backend)
    plain = _losses_and_gradients(model, compiled, None)
    assert_bit_equal(_losses_and_gradients(model, compiled, None), plain, "plain against itself:")
    settings: dict[str, Any] = {"min_tensor_bytes": 4096, "prefetch_bytes": "32KiB", "storage_paths": scratch}
    with offload_context(model, tier="keep", min_tensor_bytes=4096) as keep:
        compiled(input_ids=torch.zeros(2, 32, dtype=torch.int64))
    budget_bytes = 2 * keep.stats().kept_by_reason["tier keep"] // 3
    keep.close()
    offload = offload_context(model, tier="auto", memory_budget=budget_bytes, **settings)
    # Where nothing tells, the compiler looks at the model again, once, and comes to equal code.
    stance = "default" if how == "outside" else "fail_on_recompile"
    with torch.compiler.set_stance(stance):
        planned = _losses_and_gradients(model, compiled, offload)
    assert_bit_equal(planned, plain)
    assert offload.stats().read_bytes > 0
    if (how, backend) == ("outside", "inductor"):
        assert not offload.plan  # what it saves moves within its graph
    else:
        assert offload.plan
        assert offload.plan.sends
        assert not offload.plan.recomputed
    offload.close()


@pytest.mark.parametrize(
    "settings", [{"tier": "nvme"}, {"tier": "auto", "memory_budget": 1 << 16}], ids=["nvme", "auto"]
)
def test_compiled_layers_of_jagged_tensors_are_exact(settings: dict[str, Any], scratch: Path) -> None:
    """Attention breaks their graphs, and an operator that is not compiled calls the hooks, which are not either."""

    def made() -> nn.Module:
        model = JaggedModel()
        for layer in (model.one, model.two):
            layer.forward = torch.compile(layer.forward, backend="aot_eager")  # type: ignore[method-assign]
        return model

    batch = jagged(), jagged()
    plain = run_training(made, lambda: batch, steps=5)
    with engine(scratch, **settings) as offload:
        run_training(made, lambda: batch, steps=5, between=offload.flush, context=lambda _: offload).assert_equals(
            plain
        )
        assert offload.stats().read_bytes > 0
