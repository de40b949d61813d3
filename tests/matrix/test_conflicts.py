"""Two offloaders on one model: a framework's own beside ours, or two of ours with different settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from matrix.arms import SMALL
from matrix.models import llama, text, tokenizer
from matrix.rows.huggingface import COMMON
from matrix.rows.lightning import Module
from matrix.trainings import ended, fit, trainer
from tba import ConfigError
from tba.integrations import lightning as with_lightning
from tba.integrations.transformers import OffloadCallback


class Other(OffloadCallback):
    """Transformers takes one callback of a class."""


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
    callbacks = OffloadCallback(**SMALL), Other(**SMALL, compress="exact")
    made = trainer(tmp_path, *callbacks)
    with pytest.raises(ConfigError, match=r"two offloaders with.*None instead of 'exact'.*Write compress='exact'"):
        made.train()
    assert [callback.offload is None or callback.offload.closed for callback in callbacks] == [True, True]
    assert not made.model._forward_pre_hooks
    assert not {"_run_epoch", "_finalize_training"} & set(vars(made))


def test_two_callbacks_with_the_same_settings_are_one(tmp_path: Path) -> None:
    callbacks = OffloadCallback(**SMALL), Other(**SMALL)
    made = trainer(tmp_path, *callbacks)
    made.train()
    assert callbacks[0].offload is callbacks[1].offload
    assert callbacks[0].offload is not None
    assert callbacks[0].offload.stats().steps == 3
    assert "_run_epoch" not in vars(made)


def test_two_callbacks_of_lightning_with_different_settings_are_an_error(tmp_path: Path) -> None:
    class Other(with_lightning.OffloadCallback):
        """Another one, of a class of its own."""

    callbacks = with_lightning.OffloadCallback(**SMALL), Other(**SMALL, checksum=True)
    with pytest.raises(ConfigError, match=r"two offloaders with.*checksum=True instead of False.*Write checksum=False"):
        fit(tmp_path, Module(), *callbacks)
    for callback in callbacks:
        ended(callback)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
