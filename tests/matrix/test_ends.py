"""Ends of a training: wherever it raises, nothing of ours stays attached or alive, and no write has failed."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from matrix.arms import SMALL, alive
from matrix.rows.lightning import Module
from matrix.trainings import Failing, ended, fit, trainer
from tba import OffloadWarning
from tba.integrations import lightning as with_lightning
from tba.integrations.transformers import OffloadCallback


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_log"])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_training_that_raises_leaves_nothing_alive(tmp_path: Path, event: str, error: BaseException) -> None:
    offload = OffloadCallback(**SMALL)
    made = trainer(tmp_path, Failing(event, error))
    made.add_callback(offload)
    with pytest.raises(type(error)):
        made.train()
    ended(offload)
    assert "_run_epoch" not in vars(made)


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin"])
def test_a_callback_that_raises_before_the_first_epoch_leaves_nothing_attached(
    tmp_path: Path, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tba")
    offload, failing = OffloadCallback(**SMALL), Failing(event, ValueError("mine"), steps=0)
    made = trainer(tmp_path, offload, failing)
    with pytest.raises(ValueError, match="mine"):
        made.train()
    assert not made.model._forward_pre_hooks
    assert not made.model._forward_hooks
    assert alive() == []
    made.remove_callback(failing)
    caplog.clear()
    made.train()
    stats = ended(offload)
    assert [message for message in caplog.messages if message.startswith("saved tensors")] == [
        stats.verdict.removesuffix("; closed")
    ]
    assert stats.steps == 3
    assert stats.offloaded_bytes > 0
    assert not {"_run_epoch", "_finalize_training"} & set(vars(made))
    assert "on_epoch_begin" not in vars(made.callback_handler)


def test_a_callback_that_was_removed_after_training_had_not_begun_attaches_nothing(tmp_path: Path) -> None:
    offload, failing = OffloadCallback(**SMALL), Failing("on_train_begin", ValueError("mine"), steps=0)
    made = trainer(tmp_path, offload, failing)
    with pytest.raises(ValueError, match="mine"):
        made.train()
    made.remove_callback(failing)
    made.remove_callback(offload)
    made.train()
    assert ended(offload).saved_bytes == 0


def test_a_callback_that_is_removed_while_it_is_attached_ends(tmp_path: Path) -> None:
    class Removing(TrainerCallback):
        """Removes the other after the first step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                made.remove_callback(offload)

    offload = OffloadCallback(**SMALL)
    made = trainer(tmp_path, offload, Removing())
    made.train()
    assert ended(offload).steps == 1
    assert not made.model._forward_pre_hooks


@pytest.mark.parametrize(("event", "steps"), [("on_epoch_begin", 1), ("on_epoch_end", 3), ("on_train_end", 3)])
def test_a_callback_that_raises_between_epochs_leaves_nothing_alive(tmp_path: Path, event: str, steps: int) -> None:
    offload, failing = OffloadCallback(**SMALL), Failing(event, ValueError("mine"), steps)
    made = trainer(tmp_path, failing, offload, per_device_train_batch_size=9 // steps)  # one epoch, or three of a step
    with pytest.raises(ValueError, match="mine"):
        made.train()
    assert ended(offload).steps == steps
    assert not made.model._forward_pre_hooks


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raises_with_writes_under_way_counts_no_failure(tmp_path: Path, where: str) -> None:
    class Broken(Trainer):
        """Raises in the second step."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 1:
                if where == "forward":
                    raise ValueError("mine")
                loss.register_hook(_raise)
            return loss

    offload = OffloadCallback(**SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OffloadWarning)
        with pytest.raises(ValueError, match="mine"):
            trainer(tmp_path, offload, kind=Broken).train()
    stats = ended(offload)
    assert stats.errors == 0
    assert stats.offloaded_bytes > 0


def _raise(_: Any) -> None:
    raise ValueError("mine")


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_lightning_training_that_raises_leaves_nothing_alive(tmp_path: Path, error: BaseException) -> None:
    class Broken(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            if index == 1:
                raise error
            return loss

    offload = with_lightning.OffloadCallback(**SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OffloadWarning)  # no write that is called off has failed
        with pytest.raises((type(error), SystemExit)):
            fit(tmp_path, Broken(), offload)
    stats = ended(offload)
    assert stats.errors == 0
    assert stats.offloaded_bytes > 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
