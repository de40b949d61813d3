"""Calls: call a model with a batch of any form, and find the loss in its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._errors import ConfigError

Loss = Callable[[Any], Tensor]


def call(model: nn.Module, batch: Any, who: str) -> Any:
    """Call a model with a tensor, a tuple or list (positional) or a mapping (by keyword). Raises ConfigError."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise ConfigError(
        f"{who} was given a batch of type {type(batch).__name__}: give a tensor, a tuple of positional arguments or a "
        "mapping of keyword arguments"
    )


def scalar(output: Any, loss: Loss | None, who: str) -> Tensor:
    """Reduce a model's output to its loss. Raises ConfigError where there is none."""
    value: Any
    if loss is not None:
        value, source = loss(output), "loss(output)"
    elif isinstance(output, Tensor):
        value, source = output.sum(), "the model's output"
    else:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        source = f"`loss` of the model's {type(output).__name__}"
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and not value.requires_grad:
            what += " that requires no gradient"
        raise ConfigError(
            f"{who} needs a scalar loss, but {source} is {what}: put labels into the batch, or give "
            "`loss=`, a function of the model's output"
        )
    return value
