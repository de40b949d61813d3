"""Gathered: weights that hooks around a block's parts gather and release, as DeepSpeed's ZeRO-3 and FSDP do.

Who holds which weight just now, and what the hooks note on modules and weights, is theirs: it differs from one run of
the block to the next, and is not put back, as the hooks of another run count on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_FSDP = ("FSDPModule", "FullyShardedDataParallel")  # of version 2 and 1; neither need be imported
DEEPSPEED = "deepspeed.runtime"  # its hooks gather weights and count where they are: nothing of a block's forward
_NOTES = ("ds_", "applied_pre_backward_ref_cnt", "_external_params")  # DeepSpeed's, on modules


def gathers(module: nn.Module) -> bool:
    """Whether hooks inside of a module gather weights: of DeepSpeed's ZeRO-3, or of FSDP around its parts."""
    parts = [part for part in module.modules() if part is not module]
    sharded = any(kind.__name__ in _FSDP for part in parts for kind in type(part).__mro__)
    return sharded or any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def notes(names: Iterable[str]) -> tuple[str, ...]:
    """Give those of a module's attributes that such hooks keep."""
    names = tuple(names)
    return tuple(name for name in names if name.startswith(_NOTES)) if "ds_id" in names else ()


def are_hooks(module: str | None) -> bool:
    """Whether the functions of a Python module, by its name, are such hooks of DeepSpeed's."""
    return str(module).startswith(DEEPSPEED)
