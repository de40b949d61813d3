r"""Torchtitan: an override that offloads what the Trainer's model saves for backward. No code changes.

torchrun ... -m torchtitan.train --module llama3 --config llama3_8b --training.disable_cuda_graphs \
    --override.imports 'tba.integrations.torchtitan.offload={"tier": "nvme"}'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch import nn
from torch._ops import OpOverload
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from compact import Preset

from .. import ConfigError, Offloader, attach
from ._figures import end, figures
from ._framework import checked, framework, refuse
from .checkpoint import create_selective_checkpoint_contexts

_override = framework("torchtitan.config.override", extra="torchtitan")
_Metrics: Any = framework("torchtitan.components.metrics", extra="torchtitan").MetricsProcessor
_SelectiveAC: Any = framework("torchtitan.distributed.activation_checkpoint", extra="torchtitan").SelectiveAC


@_override.override(target=_Metrics.Config, description="offload activations, and show what was moved")  # type: ignore[untyped-decorator]
def offload(
    config: Any,
    *,
    tier: str | None = None,
    memory_budget: int | str | None = None,
    compress: str | Preset | None = None,
    **settings: Any,
) -> Any:
    """Return the configuration of a metrics processor that attaches to every model part of the Trainer.

    torchtitan gives the metrics processor the parts, when they are parallel and have their weights, and logs and ends
    there. What was moved is among the metrics as `tba/...`. Each part of a pipeline has its own Offloader, and so its
    own `memory_budget`. What the loss saves outside the model stays where it is.

    Args:
        config: of the metrics, as the Trainer has it.
        tier: "nvme", "cpu", "keep" or "auto". Default: `TBA_TIER`, else "auto".
        memory_budget: memory that saved tensors may hold under tier "auto", such as "8GiB". Default: free memory less a
            margin.
        compress: a preset of `compact`. Default: none.
        settings: the other fields of `OffloadConfig`.

    Raises:
        ConfigError: a setting is unknown or malformed. When the Trainer is made: torchtitan offloads activations
            itself, or runs the model where no hook sees it.
    """
    settings = checked(settings, tier=tier, memory_budget=memory_budget, compress=compress)
    kind = _offloading(type(config)._owner)
    return _override.derive(config, kind.Config, tba=settings)


class _Selective(_SelectiveAC):  # type: ignore[misc]
    """Stores what torchtitan would save, and the matrix products that it would recompute to save memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(_SelectiveAC.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config = self.config
        save_ops = [each for each in self.get_save_ops() if isinstance(each, OpOverload)]
        wrapped: nn.Module = checkpoint_wrapper(
            module,
            context_fn=partial(create_selective_checkpoint_contexts, save_ops),
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=False,
            debug=config.debug,
        )
        return wrapped


@_override.override(target=_SelectiveAC.Config, description="store what is saved as any other saved tensor", exact=True)  # type: ignore[untyped-decorator]
def selective(config: Any) -> Any:
    """Return the configuration of selective checkpointing whose saved results are compressed and moved.

    Use it with `offload`. torchtitan's own keeps results in a cache that no hook sees. Here every result of
    `SelectiveAC.get_save_ops` is stored, and every matrix product, because that takes no device memory; flex attention,
    which is no single operator, reruns.

    Args:
        config: of selective checkpointing, as the Trainer has it.
    """
    return _override.derive(config, _Selective.Config)


@cache
def _offloading(owner: Any) -> Any:
    """Derive from a class of metrics processors, torchtitan's or a user's."""

    class Offloading(owner):  # type: ignore[misc]
        """Attaches to the model parts, logs what was moved, and ends."""

        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):  # type: ignore[misc]
            """As the other's, with our settings."""

            tba: dict[str, Any] = field(default_factory=dict)

        def __init__(self, config: Any, *, config_dict: Mapping[str, Any] | None = None, **given: Any) -> None:
            _look(config_dict or {})
            self._settings = config.tba
            self.offloads: list[Offloader] = []
            super().__init__(config, config_dict=config_dict, **given)

        @property
        def model_parts(self) -> Sequence[nn.Module] | None:
            """What the Trainer trains on this rank: one module, or several in an interleaved pipeline."""
            return self._parts

        @model_parts.setter
        def model_parts(self, parts: Sequence[nn.Module] | None) -> None:
            self._parts = parts
            self.offloads = [attach(part, **self._settings) for part in parts or ()]

        def log(self, *args: Any, extra_metrics: Mapping[str, Any] | None = None, **given: Any) -> None:
            """Log as the other does, and what was moved."""
            super().log(*args, extra_metrics=dict(extra_metrics or {}) | _sum(self.offloads), **given)

        def close(self) -> None:
            """End. Statistics of `offloads` can still be asked."""
            for each in self.offloads:
                end(each)
            super().close()

    return Offloading


def _sum(offloads: Sequence[Offloader]) -> dict[str, float]:
    """Add up the figures of all parts; each has the process's peak of memory."""
    shown = [figures(each) for each in offloads]
    return {name: (max if "peak" in name else sum)(each[name] for each in shown) for name in (shown or [{}])[0]}


def _look(config: Mapping[str, Any]) -> None:
    """Raise if the Trainer's configuration leaves nothing to offload."""
    refuse(_others(config))
    if config.get("training", {}).get("disable_cuda_graphs") is False:
        raise ConfigError(
            "torchtitan replays forward and backward as a CUDA graph, and what is saved in one stays where it is; add "
            "--training.disable_cuda_graphs, or delete tba.integrations.torchtitan.offload from --override.imports"
        )
    if config.get("compile", {}).get("mode") == "aot_fx_trace":
        raise ConfigError(
            "torchtitan's graph_trainer traces forward and backward as one graph, where no hook is called; train with "
            "--module llama3 (or another model) instead of --module graph_trainer..., or delete "
            "tba.integrations.torchtitan.offload from --override.imports"
        )


def _others(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if config.get("compile", {}).get("memory_policy") == "sac_and_offload":
        yield "torchtitan's sac_and_offload", "--compile.memory_policy sac_and_offload"
