"""Selective checkpointing through the engine: chosen results are records, not run again, and bit-equal to plain."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint

from support.exactness import assert_bit_equal
from tba import Offloader, OffloadWarning, offload_context
from tba.integrations.checkpoint import create_selective_checkpoint_contexts

ADDMM, GELU = torch.ops.aten.addmm.default, torch.ops.aten.gelu.default
BATCH, WIDTH, BLOCKS = 64, 64, 3
PLAIN = nullcontext()
HIDDEN_BYTES = BATCH * 4 * WIDTH * 4
OUT_BYTES = BATCH * WIDTH * 4
SWITCH = "respect_saved_tensors_hooks"  # of torch's checkpoint, from 2.14 on
HAS_SWITCH = SWITCH in inspect.signature(checkpoint).parameters


class Block(nn.Module):
    """A residual MLP with dropout on both sides of its second linear layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(functional.gelu(self.up(x)), self.dropout)
        out: Tensor = x + functional.dropout(self.down(hidden), self.dropout)
        return out


class Calls(TorchDispatchMode):
    """Counts the operators that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def _model(dropout: float = 0.0) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([Block(dropout) for _ in range(BLOCKS)])


def _forward(model: nn.ModuleList, x: Tensor, context_fn: Callable[..., Any] | None) -> Tensor:
    for block in model:
        x = block(x) if context_fn is None else checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
    return x


def _gradients(
    model: nn.ModuleList, context_fn: Callable[..., Any] | None, offload: Offloader | None = None, backwards: int = 1
) -> tuple[list[list[Tensor]], Counter[Any]]:
    """Gradients of each backward of one forward, and what ran in the first."""
    torch.manual_seed(5)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with offload if offload is not None else nullcontext():
        loss = _forward(model, x * 1, context_fn).square().mean()
    if offload is not None:
        offload.flush()
    found, counts = [], Counter[Any]()
    for number in range(backwards):
        with Calls() as calls:
            found.append(list(torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=number + 1 < backwards)))
        counts = counts or calls.counts
    return found, counts


def _selective(*operators: Any) -> Callable[..., Any]:
    return partial(create_selective_checkpoint_contexts, list(operators))


def _engine(model: nn.Module, scratch: Path, **settings: Any) -> Offloader:
    return offload_context(
        model, storage_paths=scratch, **({"tier": "nvme", "min_tensor_bytes": 4096, "prefetch_bytes": 0} | settings)
    )


@pytest.mark.parametrize("compress", [None, "exact", "safe8"])
def test_chosen_results_go_to_the_tier_and_do_not_run_again(scratch: Path, compress: str | None) -> None:
    model = _model()
    plain, _ = _gradients(model, None)
    whole, recomputed = _gradients(model, _selective())
    assert recomputed[ADDMM] == BLOCKS  # of each block the first: recomputation stops early
    offload = _engine(model, scratch)
    inputs, _ = _gradients(model, _selective(), offload)
    stats = offload.stats()
    offload.close()
    assert stats.offloaded_bytes == BLOCKS * OUT_BYTES + OUT_BYTES  # the blocks' inputs, and what the loss saves
    offload = _engine(model, scratch, compress=compress)
    found, counts = _gradients(model, _selective(ADDMM), offload)
    stats = offload.stats()
    offload.close()
    for gradients in (whole, inputs):
        assert_bit_equal(gradients, plain)
    if compress != "safe8":  # which rounds what the loss saves
        assert_bit_equal(found, plain)
    assert counts[ADDMM] == 0
    assert counts[GELU] == BLOCKS
    assert stats.offloaded_bytes == BLOCKS * (OUT_BYTES + HIDDEN_BYTES + OUT_BYTES) + OUT_BYTES
    assert stats.live_records == stats.resident_bytes == 0


def test_a_lossy_preset_leaves_results_exact(scratch: Path) -> None:
    """What others are computed from: of all that is saved, only what the loss saves is rounded."""
    model = _model()
    counted = []
    for operators in ((), (ADDMM, GELU)):
        offload = _engine(model, scratch, compress="safe8")
        _gradients(model, _selective(*operators), offload)
        counted.append(offload.stats().encoded_bytes)
        offload.close()
    assert counted[0] == counted[1]


@pytest.mark.parametrize("operators", [(ADDMM,), (GELU,), (ADDMM, GELU)], ids=["linear", "gelu", "both"])
@pytest.mark.parametrize("tier", ["nvme", "keep", "auto", None])
def test_a_kept_graph_is_asked_again(scratch: Path, operators: tuple[Any, ...], tier: str | None) -> None:
    model = _model()
    plain, _ = _gradients(model, None)
    offload = _engine(model, scratch, tier=tier) if tier is not None else None
    found, counts = _gradients(model, _selective(*operators), offload, backwards=3)
    assert all(counts[each] == 0 for each in operators)
    for gradients in found:
        assert_bit_equal(gradients, plain[0])
    if offload is not None:
        assert offload.stats().live_records == 0
        offload.close()


@pytest.mark.parametrize("preserve", [True, False])
def test_a_stored_random_operator_leaves_the_generator_where_it_would_have(scratch: Path, preserve: bool) -> None:
    """The second dropout runs again, and draws what it drew in forward though the first does not run."""

    def region(x: Tensor) -> Tensor:
        return functional.dropout(torch.rand_like(x) * x.sin(), 0.5).exp() if preserve else torch.rand_like(x) * x.sin()

    def run(context_fn: Callable[..., Any] | None, offload: Any = PLAIN) -> list[Tensor]:
        torch.manual_seed(11)
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        with offload:
            if context_fn is None:
                y = region(x * 1)
            else:
                y = checkpoint(region, x * 1, use_reentrant=False, context_fn=context_fn, preserve_rng_state=preserve)
        between = torch.rand(4)
        gradient = torch.autograd.grad(y.square().sum(), x)[0]
        return [y.detach(), gradient, between, torch.rand(4)]

    model = nn.Linear(2, 2)
    offload = _engine(model, scratch)
    assert_bit_equal(run(_selective(torch.ops.aten.rand_like.default), offload), run(None))
    offload.close()


def test_views_and_in_place_operators_run_again(scratch: Path) -> None:
    """Under a policy that saves all: a stored in-place result would leave its argument unedited in the second run."""

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        y[:, :2].mul_(3)
        y.t().add_(1)
        return y * y.cos()

    def run(checkpointed: bool, offload: Any = PLAIN) -> Tensor:
        x = torch.linspace(0, 1, BATCH * WIDTH).reshape(BATCH, WIDTH).requires_grad_()
        context_fn = partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: op is not SIN)
        with offload:
            out = checkpoint(region, x * 1, use_reentrant=False, context_fn=context_fn) if checkpointed else region(x)
        return torch.autograd.grad(out.sum(), x)[0]

    SIN = torch.ops.aten.sin.default
    plain = run(False)
    offload = _engine(nn.Linear(2, 2), scratch)
    assert_bit_equal(run(True, offload), plain)
    assert offload.stats().offloaded_bytes > 0
    offload.close()
    assert_bit_equal(run(True), plain)


@pytest.mark.parametrize("tier", ["keep", None])
def test_an_edit_of_a_stored_result_raises_pytorchs_error(scratch: Path, tier: str | None) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin()
        y.add_(1)
        return y.cos()

    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    with _engine(nn.Linear(2, 2), scratch, tier=tier) if tier is not None else nullcontext():
        y = checkpoint(region, x * 1, use_reentrant=False, context_fn=_selective(torch.ops.aten.sin.default))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("tier", ["nvme", "keep", None])
def test_nothing_is_alive_when_a_graph_is_dropped(scratch: Path, tier: str | None) -> None:
    """Without the garbage collector, which cannot see through autograd's nodes."""
    model = _model()
    offload = _engine(model, scratch, tier=tier) if tier is not None else None
    made: list[weakref.ref[Any]] = []

    def context_fn() -> Any:
        contexts = create_selective_checkpoint_contexts([ADDMM, GELU])
        made.append(weakref.ref(contexts[1]))
        return contexts

    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            with offload if offload is not None else PLAIN:
                loss = _forward(model, torch.randn(BATCH, WIDTH) * 1, context_fn).sum()
            assert all(each() is not None for each in made[-BLOCKS:])
            if tier == "nvme":
                assert offload.stats().live_records >= 3 * BLOCKS
            if backward:
                loss.backward()
            del loss
            assert all(each() is None for each in made)
            if offload is not None:
                assert offload.stats().live_records == 0
    finally:
        gc.enable()
    if offload is not None:
        offload.close()


def test_nested_regions_are_exact(scratch: Path) -> None:
    model = _model()
    plain, _ = _gradients(model, None)

    def run(offload: Any) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        inner = partial(_forward, model, context_fn=_selective(ADDMM))
        with offload:
            loss = checkpoint(inner, x * 1, use_reentrant=False).square().mean()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    assert_bit_equal(run(nullcontext()), plain[0])
    offload = _engine(model, scratch)
    assert_bit_equal(run(offload), plain[0])
    assert offload.stats().live_records == 0
    offload.close()


@pytest.mark.filterwarnings("ignore:.*compiled as one graph:tba.OffloadWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("where", ["around", "inside"])
def test_compiled_code_is_exact(scratch: Path, where: str) -> None:
    model = _model()
    plain, _ = _gradients(model, None)
    torch.compiler.reset()
    offload = _engine(model, scratch)
    torch.manual_seed(5)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    if where == "around":
        run = torch.compile(partial(_forward, model, context_fn=_selective(ADDMM)), backend="aot_eager")
    else:
        compiled = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in model])
        run = partial(_forward, compiled, context_fn=_selective(ADDMM))
    with offload:
        loss = run(x * 1).square().mean()
    offload.flush()
    assert_bit_equal(list(torch.autograd.grad(loss, [x, *model.parameters()])), plain[0])
    offload.close()
    torch.compiler.reset()


@pytest.mark.parametrize("policy", [[torch.ops.aten.mm], torch.ops.aten.mm, ["mm"], 3], ids=str)
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"\[torch\.ops\.aten\.mm\.default\], was expected; got"):
        create_selective_checkpoint_contexts(policy)


def test_a_policy_that_decides_nothing_is_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    context_fn = partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: None)
    with pytest.raises(TypeError, match="returned None, not a CheckpointPolicy"):
        checkpoint(torch.sin, x, use_reentrant=False, context_fn=context_fn)


def test_a_policy_is_called_as_torch_calls_one() -> None:
    """From torch 2.12 on with the operator's result."""
    shown = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
    seen: list[bool] = []

    def policy(context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any) -> bool:
        assert not context.is_recompute
        seen.append(isinstance(getattr(context, "op_output", None), Tensor))
        return True

    x = torch.randn(4, requires_grad=True)
    context_fn = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False, context_fn=context_fn).sum().backward()
    assert seen == [shown, shown]


def test_a_region_that_changes_is_told() -> None:
    more = []

    def region(x: Tensor) -> Tensor:
        for _ in more:
            x = x.cos()
        return x.sin().sin()

    x = torch.randn(4, requires_grad=True)
    y = checkpoint(region, x, use_reentrant=False, context_fn=_selective(ADDMM))
    more.append(1)
    with pytest.raises(RuntimeError, match=r"aten\.cos\.default ran 0 times in forward and now runs once more"):
        y.sum().backward()


def test_offload_policies_store_as_save_does(scratch: Path) -> None:
    model = _model()
    plain, _ = _gradients(model, None)
    offload = _engine(model, scratch)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op is ADDMM else CheckpointPolicy.PREFER_RECOMPUTE

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, counts = _gradients(model, partial(create_selective_checkpoint_contexts, policy), offload)
    assert_bit_equal(found, plain)
    assert counts[ADDMM] == 0
    offload.close()


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("tier", ["nvme", "auto"])
def test_torchs_own_keeps_results_where_no_hook_sees_them_and_statistics_say_so(scratch: Path, tier: str) -> None:
    model = _model()
    plain, _ = _gradients(model, None)
    offload = _engine(model, scratch, tier=tier)
    # Where torch could show it, a cache that the program may edit is left alone.
    theirs = partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [ADDMM], allow_cache_entry_mutation=HAS_SWITCH
    )
    with pytest.warns(OffloadWarning, match="from tba.integrations.checkpoint import create_selective") as told:
        found, _ = _gradients(model, theirs, offload)
    assert [each.category for each in told].count(OffloadWarning) == 1
    _gradients(model, theirs, offload)  # told once: a second warning would be an error
    assert_bit_equal(found, plain)
    stats = offload.stats()
    assert stats.unseen_bytes == 2 * BLOCKS * (HIDDEN_BYTES + OUT_BYTES)
    assert stats.last_step is not None
    assert stats.last_step.unseen_bytes == BLOCKS * (HIDDEN_BYTES + OUT_BYTES)
    assert "where no hook sees them; tba.integrations.checkpoint stores them" in str(stats)
    _gradients(model, _selective(ADDMM), offload)
    assert offload.stats().unseen_bytes == stats.unseen_bytes
    offload.close()


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch's selective checkpointing keeps:tba.OffloadWarning")
def test_each_of_two_engines_in_one_backward_counts_the_caches_of_its_own(scratch: Path) -> None:
    theirs = partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [ADDMM], allow_cache_entry_mutation=HAS_SWITCH
    )
    models = [_model(), _model()]
    engines = [_engine(model, scratch) for model in models]
    for steps in (1, 2):
        loss = torch.zeros(())
        for model, offload in zip(models, engines, strict=True):
            with offload:
                loss = loss + _forward(model, torch.randn(BATCH, WIDTH, requires_grad=True) * 1, theirs).square().mean()
        loss.backward()
        unseen_bytes = [offload.stats().unseen_bytes for offload in engines]
        assert unseen_bytes == [steps * BLOCKS * (HIDDEN_BYTES + OUT_BYTES)] * 2
    for offload in engines:
        offload.close()
