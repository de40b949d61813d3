"""Megatron-Core: a `forward_step_func` whose saved tensors are offloaded, under every schedule.

from tba.integrations.megatron import OffloadedForwardStep

forward_step = OffloadedForwardStep(forward_step, tier="nvme")
forward_backward_func(forward_step_func=forward_step, **others)  # or: pretrain(..., forward_step_func=forward_step)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from compact import Preset

from .. import ConfigError, Offloader, offload_context
from ._figures import end, figures
from ._framework import checked, framework, refuse

__all__ = ["OffloadedForwardStep", "figures"]

_library = framework("megatron.core.utils", extra="megatron")


class OffloadedForwardStep:
    """A forward step that offloads what the model and the loss function save for backward.

    Megatron-Core's schedules call it once per micro-batch, and run backward themselves. If gradients are off, it does
    nothing. Each chunk of an interleaved pipeline has its own Offloader, and so its own `memory_budget`.

    Args:
        forward_step_func: as Megatron-Core requires: called with a data iterator and a model chunk, it returns the
            output and the loss function.
        tier: "nvme", "cpu", "keep" or "auto". Default: `TBA_TIER`, else "auto".
        memory_budget: memory that saved tensors may hold under tier "auto", such as "8GiB". Default: free memory less a
            margin.
        compress: a preset of `compact`. Default: none.
        settings: the other fields of `OffloadConfig`.

    Raises:
        ConfigError: a setting is unknown or malformed. In the first step: Megatron-Core offloads activations itself, or
            runs the model where no hook sees it.
    """

    def __init__(
        self,
        forward_step_func: Callable[..., Any],
        *,
        tier: str | None = None,
        memory_budget: int | str | None = None,
        compress: str | Preset | None = None,
        **settings: Any,
    ) -> None:
        settings = checked(settings, tier=tier, memory_budget=memory_budget, compress=compress)
        functools.update_wrapper(self, forward_step_func)
        self._forward_step, self._settings = forward_step_func, settings
        self._made: weakref.WeakKeyDictionary[nn.Module, Offloader] = weakref.WeakKeyDictionary()

    @property
    def offloads(self) -> list[Offloader]:
        """The Offloaders of this rank, one for each model chunk that has run a step."""
        return list(self._made.values())

    def __call__(self, data_iterator: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward step of a micro-batch; the loss function that it returns offloads too."""
        if not torch.is_grad_enabled():
            return self._forward_step(data_iterator, model, *args, **kwargs)
        offload = self._of(model)
        with offload:
            returned = self._forward_step(data_iterator, model, *args, **kwargs)
        if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1])):
            raise ConfigError(
                f"the forward step returned {type(returned).__name__}, not an output and a loss function, so the model "
                "runs where nothing can be offloaded; delete overlap_moe_expert_parallel_comm=True from "
                "TransformerConfig(...) if it is set"
            )
        output, loss_func = returned

        @functools.wraps(loss_func)
        def loss(*args: Any, **kwargs: Any) -> Any:
            with offload:
                return loss_func(*args, **kwargs)

        return output, loss

    def close(self) -> None:
        """End. Statistics of `offloads` still work."""
        for offload in self.offloads:
            end(offload)

    def _of(self, model: nn.Module) -> Offloader:
        offload = self._made.get(model)
        if offload is None or offload.closed:
            config = _library.get_model_config(model)
            refuse(_others(config))
            _look_for_graphs(config)
            offload = self._made[model] = offload_context(model, **self._settings)
        return offload


def _others(config: Any) -> Iterator[tuple[str, str]]:
    for setting in ("cpu_offloading", "fine_grained_activation_offloading"):
        if getattr(config, setting, False):
            yield f"Megatron-Core's {setting}", f"{setting}=True from TransformerConfig(...)"


def _look_for_graphs(config: Any) -> None:
    graphs = getattr(config, "cuda_graph_impl", None) or "none"
    if graphs != "none":
        raise ConfigError(
            "Megatron-Core replays layers as CUDA graphs, and what is saved in one stays where it is; delete "
            f'cuda_graph_impl="{graphs}" from TransformerConfig(...), or the line that wraps the forward step'
        )
