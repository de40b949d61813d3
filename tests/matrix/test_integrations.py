"""Integrations in trouble: training that raises, another offloader beside ours, models that change, settings amiss."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from matrix.arms import alive, batches, equal
from matrix.models import llama, text, tokenizer
from matrix.rows.huggingface import COMMON
from matrix.rows.lightning import Module
from tba import ConfigError
from tba.integrations import accelerate as with_accelerate
from tba.integrations import lightning as with_lightning
from tba.integrations.transformers import OffloadCallback

SMALL = {"tier": "nvme", "min_tensor_bytes": "8KiB", "prefetch_bytes": "32KiB"}
ROOT = Path(__file__).resolve().parent.parent.parent


def trainer(tmp_path: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **arguments: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for row in next(iter(batches(90, (9, 70), count=1))).tolist()]
    args = TrainingArguments(str(tmp_path), **COMMON | arguments)
    return kind(model=llama(), args=args, train_dataset=rows, callbacks=list(callbacks))


class Failing(TrainerCallback):
    """Raises in the second step, where it is asked to."""

    def __init__(self, event: str, error: BaseException) -> None:
        def fail(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                raise error

        setattr(self, event, fail)


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_log"])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_training_that_raises_leaves_nothing_alive(tmp_path: Path, event: str, error: BaseException) -> None:
    offload = OffloadCallback(**SMALL)
    made = trainer(tmp_path, Failing(event, error))
    made.add_callback(offload)
    with pytest.raises(type(error)):
        made.train()
    assert offload.offload is not None
    assert offload.offload.closed
    assert alive() == []
    assert "_run_epoch" not in vars(made)


def test_a_forward_that_raises_leaves_nothing_alive(tmp_path: Path) -> None:
    class Broken(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            super().compute_loss(*args, **kwargs)
            raise ValueError("mine")

    offload = OffloadCallback(**SMALL)
    with pytest.raises(ValueError, match="mine"):
        trainer(tmp_path, offload, kind=Broken).train()
    assert offload.offload is not None
    assert offload.offload.closed
    assert alive() == []


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
    assert offload.offload is not None
    assert offload.offload.stats().offloaded_bytes > 0
    assert alive() == []


def test_a_training_that_is_resumed_offloads_to_the_same_weights(tmp_path: Path) -> None:
    whole = trainer(tmp_path, save_strategy="steps", save_steps=1)
    whole.train()
    offload = OffloadCallback(**SMALL)
    resumed = trainer(tmp_path, offload)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert offload.offload is not None
    assert offload.offload.stats().steps == 2
    assert offload.offload.stats().offloaded_bytes > 0
    assert equal(resumed.model.state_dict(), whole.model.state_dict())
    assert alive() == []


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
        assert callback.offload is not None
        assert callback.offload.stats().steps == 3
        assert callback.offload.stats().offloaded_bytes > 0
    assert alive() == []


def test_a_model_replaced_while_training_is_an_error(tmp_path: Path) -> None:
    class Replacing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            made.model = llama()

    made = trainer(tmp_path, OffloadCallback(**SMALL), Replacing())
    with pytest.raises(ConfigError, match=r"trainer\.model was replaced after OffloadCallback had attached"):
        made.train()
    assert alive() == []


def test_transformers_own_offload_is_named(tmp_path: Path) -> None:
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    made = trainer(tmp_path, OffloadCallback(**SMALL), **given)
    with pytest.raises(ConfigError, match=r'delete "offload": True from activation_checkpointing_kwargs'):
        made.train()


def test_trls_own_offload_is_named(tmp_path: Path) -> None:
    args = SFTConfig(str(tmp_path), **COMMON)
    data = Dataset.from_list([{"text": text(seed, 40)} for seed in range(9)])
    given = {"train_dataset": data, "processing_class": tokenizer(), "callbacks": [OffloadCallback(**SMALL)]}
    made = SFTTrainer(model=llama(), args=args, **given)
    made.args.activation_offloading = True  # not before: TRL's asks for a device as it is made
    with pytest.raises(ConfigError, match=r"delete activation_offloading=True from SFTConfig"):
        made.train()


def test_two_callbacks_with_different_settings_are_an_error(tmp_path: Path) -> None:
    class Other(OffloadCallback):
        """Transformers takes one callback of a class."""

    made = trainer(tmp_path, OffloadCallback(**SMALL), Other(**SMALL, compress="exact"))
    with pytest.raises(ConfigError, match="attached already"):
        made.train()


def test_moving_nothing_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    made = trainer(tmp_path, OffloadCallback(tier="nvme", min_tensor_bytes="1GiB"))
    with pytest.warns(UserWarning, match=r"moved nothing in its first step.*below min_tensor_bytes"):
        made.train()


@pytest.mark.parametrize("kind", [OffloadCallback, with_lightning.OffloadCallback])
def test_a_wrong_setting_is_told_before_training(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match="did you mean nvme"):
        kind(tier="nvm")
    with pytest.raises(ConfigError, match="unknown setting"):
        kind(teir="nvme")


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_lightning_training_that_raises_leaves_nothing_alive(tmp_path: Path, error: BaseException) -> None:
    class Broken(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            if index == 1:
                raise error
            return loss

    offload = with_lightning.OffloadCallback(**SMALL)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    made = lightning.Trainer(accelerator="cpu", max_steps=3, default_root_dir=tmp_path, callbacks=[offload], **quiet)
    loader = torch.utils.data.DataLoader(torch.cat(list(batches(90, (3, 70)))), batch_size=3)
    with pytest.raises((type(error), SystemExit)):
        made.fit(Broken(), loader)
    assert offload.offload is not None
    assert offload.offload.closed
    assert not offload.offload.entered
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert alive() == []


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


def test_a_wrong_deepspeed_configuration_is_told_before_it_begins() -> None:
    done = subprocess.run([sys.executable, "-c", DEEPSPEED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
