"""ZeRO-3: one rank of a training by DeepSpeed, whose engine gathers weights, and steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tba.integrations.deepspeed import initialize

from .._workload.llama import loss_of

_CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # every weight is sharded
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}


class Zero3:
    """One rank.

    Args:
        model: which is sharded.
        batch: examples of a step on this rank.
        settings: of `tba.attach`; None trains without it.
        rank, ranks: of this process, and in all.

    Attributes:
        module: what is trained.
        offload: the Offloader, if there is one.
    """

    def __init__(
        self, model: nn.Module, batch: int, settings: Mapping[str, Any] | None, *, rank: int, ranks: int
    ) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        config = _CONFIG | {"train_micro_batch_size_per_gpu": batch}
        if settings is not None:
            config["tba"] = settings
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.module, *_ = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        self.offload = self.module.offload

    def step(self, tokens: Tensor) -> Tensor:
        """Run forward, backward and the optimizer; return the loss."""
        loss = loss_of(self.module(tokens), tokens)
        self.module.backward(loss)
        self.module.step()
        return loss

    @property
    def weights(self) -> list[Tensor]:
        """This rank's part of each weight."""
        return [parameter.ds_tensor for parameter in self.module.parameters()]
