"""Accelerate: attaches to a model that `Accelerator.prepare` has returned.

from tba.integrations.accelerate import attach

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
offload = attach(accelerator, model, tier="nvme")
"""

from __future__ import annotations

from typing import Any

from torch import nn

from compact import Preset

from .. import ConfigError, Offloader
from .. import attach as _attach
from ._figures import figures
from ._framework import framework, of_accelerate, refuse

__all__ = ["attach", "figures"]

_library = framework("accelerate", extra="hf")


def attach(
    accelerator: Any,
    model: nn.Module,
    tier: str | None = None,
    *,
    memory_budget: int | str | None = None,
    compress: str | Preset | None = None,
    **settings: Any,
) -> Offloader:
    """Offload during every forward of a prepared model from now on. `close()` on the result ends it.

    `accelerator.log(figures(offload), step=...)` sends what was moved to the trackers.

    Args:
        accelerator: the one that prepared the model, with any plugin (FSDP, DeepSpeed) or none.
        model: what `accelerator.prepare` returned for the model.
        tier: "nvme", "cpu", "keep" or "auto". Default: `TBA_TIER`, else "auto".
        memory_budget: memory that saved tensors may hold under tier "auto", such as "8GiB". Default: free memory less a
            margin.
        compress: a preset of `compact`. Default: none.
        settings: the other fields of `OffloadConfig`.

    Raises:
        ConfigError: the model is not prepared, a plugin offloads activations itself, or a setting is wrong.
    """
    if not isinstance(accelerator, _library.Accelerator):
        raise ConfigError(f"attach needs an accelerate.Accelerator first, got {type(accelerator).__name__}")
    inner = accelerator.unwrap_model
    if not any(inner(prepared) is inner(model) for prepared in accelerator._models):
        raise ConfigError(
            f"this {type(model).__name__} is not what the Accelerator trains; write `model = "
            "accelerator.prepare(model)` before attach(accelerator, model), and give it what prepare returned"
        )
    where = "activation_checkpointing_offload=True from FullyShardedDataParallelPlugin(...)"
    refuse(of_accelerate(accelerator.state, where))
    return _attach(model, tier, memory_budget=memory_budget, compress=compress, **settings)
