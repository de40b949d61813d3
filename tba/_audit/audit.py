"""Audit: the memory each preset would save on a model and the gradient error it would cause, before training.

One forward and backward of plain PyTorch gives the reference gradient; then each preset runs one under the engine's own
hooks with tier `keep` (`observer`). So tensors are compressed, recomputed or kept exactly as in a training with
`compress=`, and the error is the same. All runs see the same weights, batch, dropout masks and buffers.

Every saved tensor counts; a training ignores those smaller than `min_tensor_bytes`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compact import Preset, PresetError, Saved
from compact import preset as preset_named

from .._device.generators import DeviceStates
from .._errors import ConfigError
from .._torch.user_frames import warn
from .calls import Loss, call, scalar
from .observer import Observer
from .outcome import Outcome
from .report import Audit

PRESETS_AUDITED = ("exact", "safe8", "balanced", "max", "compact")

# A parameter whose gradient's root mean square is below this share of the whole gradient's is never reported as the
# worst: if the true gradient is zero (a bias on attention's keys), the computed one and its error are all rounding.
_LEAST_SHARE = 1e-4

Gradients = dict[str, Tensor]


def audit(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    presets: Iterable[str | Preset] = PRESETS_AUDITED,
    seed: int = 0,
) -> Audit:
    """Measure bytes of each class of saved tensor, and the gradient's error, under each preset, without training.

    Nothing is stored. Afterwards the model's gradients, buffers and training flags, and the states of the random
    generators of torch (CPU and CUDA) and of `random`, are unchanged. A model in evaluation mode is audited in training
    mode. Gradients come from `torch.autograd.grad`: hooks on accumulated gradients do not run. Operators without
    deterministic kernels differ from run to run on a GPU; that shows as error, even under "exact".

    Args:
        model: with parameters that require gradients.
        batch: its arguments: a tensor, a tuple or list (positional), or a mapping (by keyword).
        loss: reduces the model's output to a scalar. Default: the output's `loss`, or the sum of a single tensor.
        presets: names (`compact.PRESETS`), or your own tables, such as
            `compact.preset("safe8").override({"norm_input": compact.Exact()})`.
        seed: seeds the dropout masks and the codecs' noise.

    Returns:
        The findings; print them, or see `Audit`.

    Raises:
        ConfigError: a preset is unknown or named twice; the batch or output has another type; nothing requires a
            gradient or is saved; a gradient is not finite; a rank exceeds every layer's width.
        RuntimeError: PyTorch's own, for a model that checkpoints with `use_reentrant=True`.

    Warns:
        OffloadWarning: a lossy preset found no saved tensor to compress.
    """
    tables = _tables(presets)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("audit was given a model none of whose parameters requires a gradient: nothing would train")
    with _as_it_was(model, seed) as begin, torch.enable_grad():
        run = partial(_gradients, model, batch, loss, begin)
        return _findings(tables, run, partial(Observer, model, seed=seed))


def _gradients(
    model: nn.Module, batch: Any, loss: Loss | None, begin: Callable[[], None], hooks: AbstractContextManager[None]
) -> Gradients:
    """Run a forward under these hooks and a backward; return the gradients of the parameters that have one."""
    begin()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with hooks:
        value = scalar(call(model, batch, "audit"), loss, "audit")
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {name: _as_real(g) for name, g in zip(parameters, found, strict=True) if g is not None}


def _findings(
    tables: Sequence[Preset],
    run: Callable[[AbstractContextManager[None]], Gradients],
    observer: Callable[[Preset], Observer],
) -> Audit:
    exact = run(nullcontext())
    norm = _checked_norm(exact)

    def outcome(seen: Observer) -> Outcome:
        with closing(seen.mover):
            return _compare(run(seen.forward()), exact, seen.after_bytes)

    plain = observer(preset_named("exact"))  # saves what plain PyTorch saves
    outcomes = {"exact": outcome(plain)}
    _check_reached(plain)
    for table in tables:
        if table.name != "exact":
            seen = observer(table)
            outcomes[table.name] = outcome(seen)
            _check_effect(table, seen)
    return Audit(
        before_bytes=plain.before_bytes,
        outcomes={table.name: outcomes[table.name] for table in tables},
        unrecognised=dict(plain.unrecognised_bytes()),
        weight_bytes=plain.counters.weight_bytes,
        duplicate_bytes=plain.counters.duplicate_bytes,
        gradient_norm=norm,
    )


def _tables(presets: Iterable[str | Preset]) -> list[Preset]:
    try:
        tables = [preset_named(entry) if isinstance(entry, str) else entry for entry in presets]
    except PresetError as error:
        raise ConfigError(f"audit was given an unknown preset: {error}") from error
    names = [table.name for table in tables]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"audit was given the presets {names}: give at least one, and each name once")
    return tables


def _checked_norm(exact: Gradients) -> float:
    """Compute the norm of the plain gradient. Raises ConfigError unless it is finite and above 0."""
    strange = [name for name, g in exact.items() if not bool(torch.isfinite(g).all())]
    if strange:
        raise ConfigError(
            f"plain PyTorch gives a gradient that is not finite for {strange[0]} ({len(strange)} of {len(exact)} "
            "parameters): nothing can be compared with it; audit in another dtype, or with another batch"
        )
    size = math.sqrt(sum(_dot(g, g) for g in exact.values()))
    if size == 0.0:
        raise ConfigError(
            "plain PyTorch gives a gradient of zero for every parameter: give a batch and a loss that it learns from"
        )
    return size


def _compare(found: Gradients, exact: Gradients, after_bytes: Mapping[Saved, int]) -> Outcome:
    parts = {}
    for name, plain in exact.items():
        mine, difference = found[name], found[name].double() - plain.double()
        pairs = (difference, difference), (plain, plain), (mine, mine), (mine, plain)
        parts[name] = tuple(_dot(a, b) for a, b in pairs)
    error2, size2, found2, dot = map(sum, zip(*parts.values(), strict=True))
    least = _LEAST_SHARE**2 * size2 / sum(g.numel() for g in exact.values())
    errors = {
        name: math.sqrt(e2 / s2) if math.isfinite(e2) else math.inf
        for name, (e2, s2, *_) in parts.items()
        if s2 and s2 >= least * exact[name].numel()
    }
    worst = max(errors, key=errors.__getitem__)
    error = math.sqrt(error2 / size2) if math.isfinite(error2) else math.inf
    return Outcome(
        after_bytes=after_bytes,
        cosine=1.0 if not error2 else dot / math.sqrt(found2 * size2) if found2 else 0.0,
        relative_error=error,
        worst=worst if errors[worst] else "",
        worst_error=errors[worst],
    )


def _as_real(gradient: Tensor) -> Tensor:
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.detach().double().flatten(), b.detach().double().flatten()))


def _check_reached(plain: Observer) -> None:
    if not sum(plain.before_bytes.values()):
        raise ConfigError(
            "no saved tensor but weights reached audit: this model saves nothing, or a context inside it has the "
            "innermost saved-tensor hooks (an attached Offloader: detach it; save_on_cpu: leave it out)"
        )


def _check_effect(table: Preset, observer: Observer) -> None:
    lossy = [kind.value for kind, codec in table.table.items() if not codec.properties.exact]
    if lossy and not observer.lossy:
        warn(
            f"preset {table.name!r} has nothing to compress here: the model saves no tensor of the classes "
            f"{', '.join(lossy)}; see `unrecognised` for what it saves"
        )


@contextmanager
def _as_it_was(model: nn.Module, seed: int) -> Iterator[Callable[[], None]]:
    """Restore buffers, training flags and random generators at the end; yields a function that starts a run."""
    devices = DeviceStates()
    training = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers), {*module._non_persistent_buffers_set}) for module in model.modules()]
    contents = [(b, b.clone()) for _, named, _ in buffers for b in named.values() if b is not None]
    generator = random.getstate()

    def reset() -> None:
        for module, named, apart in buffers:
            for name in [name for name in module._buffers if name not in named]:
                del module._buffers[name]
            for name, buffer in named.items():
                module._buffers[name] = buffer
            module._non_persistent_buffers_set.intersection_update(apart)
        for buffer, content in contents:
            if not torch.equal(buffer, content):  # a needless copy would bump the version of a saved tensor
                with torch.no_grad():
                    buffer.copy_(content)

    def begin() -> None:
        reset()
        # Not torch.manual_seed, which leaves a device that is not initialised yet with another seed.
        torch.default_generator.manual_seed(seed)
        devices.seed(seed)
        random.seed(seed)

    with devices.forked():
        try:
            if not model.training:
                model.train()
            yield begin
        finally:
            reset()
            for module, flag in training:
                module.training = flag
            random.setstate(generator)
