"""Lightning: `Trainer.fit`, with the callback of `tba.integrations.lightning`."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from matrix.arms import STEPS, Arm, batches
from matrix.models import llama
from tba.integrations.lightning import OffloadCallback


class Module(lightning.LightningModule):
    """A language model whose `training_step` does not go through `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Watch(lightning.Callback):
    """Follows the Offloader of the callback that stands before it."""

    def __init__(self, arm: Arm, callback: OffloadCallback | None) -> None:
        self._arm, self._callback = arm, callback

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._arm.watch(self._callback.offload if self._callback is not None else None, pl_module)


def compiled(arm: Arm) -> None:
    """Lightning Trainer, with a model that is compiled whole"""
    torch.compiler.reset()
    arm.only_move()
    fit(arm, compiles=True)


def fit(arm: Arm, *, compiles: bool = False) -> None:
    """Lightning Trainer"""
    callback = OffloadCallback(**arm.settings) if arm.settings is not None else None
    module = Module()
    if compiles:
        module.model.compile()
    tokens = torch.cat(list(batches(90, (3, 70))))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*([callback] if callback is not None else []), Watch(arm, callback)],
        )
        trainer.fit(module, DataLoader(tokens, batch_size=3))
    arm.losses = module.losses
    arm.end(module)
    if arm.settings is not None:
        assert trainer.logged_metrics["tba/offloaded_bytes"] > 0
