"""Registry: one Offloader per model and settings, so that a context inside the loop costs nothing.

The registry refers weakly to models: when a model dies, its Offloaders leave the registry, and each closes when the
last graph that uses it is freed. An Offloader without a model is never registered.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from compact import Preset

from ._config import OffloadConfig
from ._errors import ConfigError
from ._offloader import Offloader, conflict

# What may be named as blocks: see `OffloadConfig.blocks`.
Blocks = str | type[nn.Module] | nn.Module | Iterable[str | type[nn.Module] | nn.Module]


class _Known:
    """Offloaders of a model, and the last request: checking settings takes longer than a small step."""

    def __init__(self) -> None:
        self.by_settings: dict[OffloadConfig, Offloader] = {}
        self.asked: tuple[Any, ...] = ()
        self.given: Offloader | None = None


_offloaders: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
_until_asked: weakref.WeakSet[Offloader] = weakref.WeakSet()


def offload_context(
    model: nn.Module | None = None,
    tier: str | None = None,
    *,
    memory_budget: int | str | None = None,
    compress: str | Preset | None = None,
    blocks: Blocks | None = None,
    config: OffloadConfig | None = None,
    **overrides: Any,
) -> Offloader:
    """Return the context in which saved tensors are offloaded to `tier` until backward needs them.

    Put it around a forward, a step or a whole training loop. With a model, it may be inside the loop, because the same
    model and settings give the same `Offloader`. Without a lossy preset, gradients are bit-identical to plain
    PyTorch's. Entering a second context of the same model with other settings inside the first is an error.

    Args:
        model: its parameters and buffers are recognised as weights and never moved. None: parameters are still
            recognised, buffers are not.
        tier: "nvme" (a scratch file), "cpu" (pinned host memory, for tensors of a GPU), "keep" (nothing moves) or
            "auto" (nothing moves while it fits in memory). Default: `TBA_TIER`, else "auto".
        memory_budget: memory that saved tensors may hold under tier "auto", such as "8GiB" or a number of bytes.
            Default: `TBA_MEMORY_BUDGET`, else free memory less a margin.
        compress: a preset of `compact` by name, or a `compact.Preset`, which compresses saved tensors under any tier.
            "exact" is lossless; "safe8", "balanced", "max" and "compact" (with `rank=`) change gradients.
        blocks: the modules that tier "auto" may recompute: a class or its name, a path such as "model.layers" (its
            children), or a list of those or of modules. Default: found by what they save.
        config: settings to start from; `overrides` are single fields of `OffloadConfig`.

    Raises:
        ConfigError: a setting is unknown or malformed, there is nothing for the preset "compact" to project, or the
            model has no such blocks.
        RankError: a rank exceeds the width of a layer, which the message names.
        StorageError: the storage path cannot be used.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module or None, got {type(model).__name__}: {model!r}")
    if blocks is not None:
        overrides["blocks"] = _named(model, blocks)
    if model is None:
        return Offloader(None, _resolve(tier, memory_budget, compress, config, overrides))
    known = _offloaders.setdefault(model, _Known())
    for each in [each for each in known.by_settings.values() if each in _until_asked] if _until_asked else ():
        if not each.entered:
            _until_asked.discard(each)
            each.untie()
    asked = tier, memory_budget, compress, config, overrides, _environment()
    if known.asked == asked and known.given is not None and not known.given.closed:
        return known.given
    settings = _resolve(tier, memory_budget, compress, config, overrides)
    offloader = known.by_settings.get(settings)
    if offloader is None or offloader.closed:
        known.by_settings = {each: open_ for each, open_ in known.by_settings.items() if not open_.closed}
        offloader = known.by_settings[settings] = Offloader(model, settings)
    known.asked, known.given = asked, offloader
    return offloader


def attach(
    model: nn.Module,
    tier: str | None = None,
    *,
    memory_budget: int | str | None = None,
    compress: str | Preset | None = None,
    blocks: Blocks | None = None,
    config: OffloadConfig | None = None,
    **overrides: Any,
) -> Offloader:
    """Offload during every forward of `model` from now on, for training loops that are not yours.

    The context is entered before the model's forward and left after it, also if it raises. `close()` of the returned
    Offloader ends this. Copies of the model (`copy.deepcopy`, pickle) are not attached. Arguments, such as
    `memory_budget="8GiB"`, and errors are those of `offload_context`.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach needs a torch.nn.Module, got {type(model).__name__}: {model!r}")
    offloader = offload_context(
        model, tier, memory_budget=memory_budget, compress=compress, blocks=blocks, config=config, **overrides
    )
    for other in _offloaders[model].by_settings.values():
        if other is not offloader and (other.tied or other.entered) and not other.closed:
            raise conflict(model, offloader.config, other)
    try:
        offloader.tie_to(model)
    except RuntimeError:  # a ScriptModule takes no hooks
        if not offloader.entered:
            offloader.close()
        raise
    return offloader


def attach_until_asked(model: nn.Module) -> Offloader:
    """Attach with the environment's settings, until the program itself asks for an Offloader of this model."""
    offloader = attach(model)
    _until_asked.add(offloader)
    return offloader


def is_offloaded(model: nn.Module) -> bool:
    """Whether this very module has an Offloader that is not closed."""
    known = _offloaders.get(model)
    return known is not None and any(not each.closed for each in known.by_settings.values())


def _named(model: nn.Module | None, blocks: Blocks) -> str | tuple[str | type[nn.Module], ...]:
    """Replace modules by their paths in the model: settings outlive models and are compared, so they hold none."""
    if isinstance(blocks, str) or not isinstance(blocks, type | nn.Module | Iterable):
        return blocks
    parts = (blocks,) if isinstance(blocks, type | nn.Module) else tuple(blocks)
    if not any(isinstance(part, nn.Module) for part in parts):
        return parts  # type: ignore[return-value]  # which mypy does not conclude
    paths = {module: path for path, module in model.named_modules()} if model is not None else {}
    for part in parts:
        if isinstance(part, nn.Module) and not paths.get(part):
            raise ConfigError(
                f"blocks: a {type(part).__name__} was given that is no module inside of the {type(model).__name__}; "
                "give modules of the model itself"
            )
    return tuple(paths[part] if isinstance(part, nn.Module) else part for part in parts)


def _resolve(
    tier: str | None,
    memory_budget: int | str | None,
    compress: str | Preset | None,
    config: OffloadConfig | None,
    overrides: dict[str, Any],
) -> OffloadConfig:
    given = {"tier": tier, "memory_budget": memory_budget, "compress": compress}
    given = {name: value for name, value in given.items() if value is not None} | overrides
    if config is None:
        return OffloadConfig(**given)
    if not isinstance(config, OffloadConfig):
        raise ConfigError(f"config must be an OffloadConfig, got {type(config).__name__}: {config!r}")
    return config.model_copy(update=given) if given else config


def _environment() -> list[tuple[bytes, bytes]]:
    """List the environment variables that settings may come from."""
    environment = os.environb  # in bytes: nothing has to be decoded
    return [(name, environment[name]) for name in environment if name[:4].upper() == b"TBA_"]


os.register_at_fork(after_in_child=_offloaders.clear)
