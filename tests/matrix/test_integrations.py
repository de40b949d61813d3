"""Integrations at work: what reaches the logs, trainings after trainings, models that change, settings amiss."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from transformers import TrainerCallback

from matrix.arms import SMALL, alive, equal
from matrix.launch import launch
from matrix.models import llama
from matrix.rows.lightning import Module
from matrix.trainings import ended, fit, trainer
from tba import ConfigError
from tba.integrations import accelerate as with_accelerate
from tba.integrations import lightning as with_lightning
from tba.integrations.transformers import OffloadCallback

LIMIT_S = 300


def test_what_was_moved_reaches_reporters_that_were_there_before(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    made = trainer(tmp_path, Reporter(), OffloadCallback(**SMALL))
    made.train()
    moved = [logs["tba/offloaded_bytes"] for logs in seen if "loss" in logs]
    assert len(moved) == 3
    assert 0 < moved[0] < moved[1] < moved[2]
    assert [logs["tba/offloaded_bytes"] for logs in made.state.log_history if "loss" in logs] == moved
    assert all(logs["tba/peak_memory_bytes"] > 0 for logs in seen)


def test_a_second_training_attaches_again(tmp_path: Path) -> None:
    offload = OffloadCallback(**SMALL)
    made = trainer(tmp_path, offload)
    made.train()
    first = offload.offload
    made.train()
    assert offload.offload is not first
    assert ended(offload).offloaded_bytes > 0


def test_a_training_that_is_resumed_offloads_to_the_same_weights(tmp_path: Path) -> None:
    whole = trainer(tmp_path, save_strategy="steps", save_steps=1)
    whole.train()
    offload = OffloadCallback(**SMALL)
    resumed = trainer(tmp_path, offload)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    stats = ended(offload)
    assert stats.steps == 2
    assert stats.offloaded_bytes > 0
    assert equal(resumed.model.state_dict(), whole.model.state_dict())


def test_a_copy_of_a_callback_has_its_settings_and_nothing_of_a_training(tmp_path: Path) -> None:
    used = OffloadCallback(**SMALL)
    trainer(tmp_path, used).train()
    for copied in (copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert copied.offload is None
        trainer(tmp_path, copied).train()
        assert copied.offload.stats().offloaded_bytes > 0
    other = with_lightning.OffloadCallback(**SMALL)
    other.on_train_start(lightning.Trainer(accelerator="cpu", logger=False), Module())
    assert other.offload is not None
    assert pickle.loads(pickle.dumps(other)).offload is None
    assert copy.deepcopy(other).offload is None
    other.offload.close()


def test_two_trainings_in_turns_do_not_disturb_each_other(tmp_path: Path) -> None:
    class Inner(TrainerCallback):
        """Trains another model in the middle of a training."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                trainer(tmp_path, inner).train()

    outer, inner = OffloadCallback(**SMALL), OffloadCallback(**SMALL)
    trainer(tmp_path, outer, Inner()).train()
    for callback in (outer, inner):
        stats = ended(callback)
        assert stats.steps == 3
        assert stats.offloaded_bytes > 0


def test_a_model_replaced_while_training_is_an_error(tmp_path: Path) -> None:
    class Replacing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            made.model = llama()

    made = trainer(tmp_path, OffloadCallback(**SMALL), Replacing())
    with pytest.raises(ConfigError, match=r"trainer\.model was replaced after OffloadCallback had attached"):
        made.train()
    assert alive() == []


@pytest.mark.parametrize("kind", [OffloadCallback, with_lightning.OffloadCallback])
def test_a_wrong_setting_is_told_before_training(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean nvme"):
        kind(tier="nvm")
    with pytest.raises(ConfigError, match="unknown setting"):
        kind(teir="nvme")


def test_a_lightning_module_whose_model_is_replaced_goes_on(tmp_path: Path) -> None:
    class Replacing(Module):
        """Trains with another model from the second batch on, beside the one that its optimizer has."""

        def on_train_batch_start(self, batch: torch.Tensor, index: int) -> None:
            if index == 1:
                self.model = llama()

    offload = with_lightning.OffloadCallback(**SMALL)
    module = Replacing()
    weights = {id(parameter) for parameter in module.parameters()}
    fit(tmp_path, module, offload)
    assert not weights & {id(parameter) for parameter in module.parameters()}
    stats = ended(offload)
    assert stats.last_step is not None
    assert stats.last_step.offloaded_bytes > 0
    assert stats.last_step.weight_bytes == stats.weight_bytes // stats.micro_batches


def test_accelerate_wants_a_prepared_model() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"accelerator\.prepare\(model\)"):
        with_accelerate.attach(accelerator, llama(), **SMALL)
    with pytest.raises(ConfigError, match=r"accelerate\.Accelerator first"):
        with_accelerate.attach(llama(), accelerator, **SMALL)


DEEPSPEED = """
import sys, torch
from tba.integrations.deepspeed import initialize
from tba import ConfigError
model = torch.nn.Linear(2, 2)
for config, words in (
    ({"tba": {"tier": "nvme"}, "activation_checkpointing": {"cpu_checkpointing": True}}, 'delete "cpu_checkpointing"'),
    ({"tba": {"teir": "nvme"}}, "did you mean tier"),
    ({"tba": "nvme"}, "must hold settings"),
    (None, "neither a dictionary nor the path"),
):
    try:
        initialize(model=model, config=config)
    except ConfigError as error:
        assert words in str(error), str(error)
    else:
        raise SystemExit(f"no error: {words}")
"""


def test_a_wrong_deepspeed_configuration_is_told_before_it_begins(tmp_path: Path) -> None:
    status, printed = launch(["-c", DEEPSPEED], tmp_path, LIMIT_S)
    assert status == 0, printed[-4000:]
