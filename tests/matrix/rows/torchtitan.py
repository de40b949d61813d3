"""Torchtitan: its `Trainer` with its llama3, and the override of `tba.integrations.torchtitan`.

`Trainer.train` asks torch for `distributed.set_timeout`, which came after 2.13; the steps of its loop are made here.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from matrix.arms import STEPS, Arm
from matrix.devices import torchtitan_on_the_cpu

torchtitan_on_the_cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

OVERRIDE = "tba.integrations.torchtitan.offload"


class Tokens(BaseDataLoader):
    """Random tokens, other ones for each rank of data parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._rank, self._shape = dp_rank, (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self._rank)
        while True:
            tokens = torch.randint(0, 2048, self._shape, generator=generator)
            positions = torch.arange(self._shape[1] - 1).repeat(self._shape[0], 1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """None is needed, as the tokens come as numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class Losses(MetricsProcessor):
    """Keeps what is logged."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, **given: Any) -> None:
        super().__init__(config, **given)
        self.shown: list[dict[str, Any]] = []

    def log(self, step: int, global_avg_loss: float, *args: Any, extra_metrics: Any = None, **given: Any) -> None:
        self.shown.append({"loss": global_avg_loss} | (extra_metrics or {}))
        super().log(step, global_avg_loss, *args, extra_metrics=extra_metrics, **given)


def configuration(folder: str, *, imports: Any = (), **parallelism: Any) -> Trainer.Config:
    """A tiny llama3; its attention is the kind that runs backward on a CPU, its collectives those that gloo has."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:3]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelize = spec.parallelize_fn

    def on_gloo(model: nn.Module, **given: Any) -> nn.Module:
        model = parallelize(model, **given)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = on_gloo
    training = {"local_batch_size": 2, "seq_len": 70, "steps": STEPS, "mixed_precision_param": "float32"}
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=default_adamw(lr=1e-2),
        training=TrainingConfig(**training, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **parallelism),
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(),
        metrics=Losses.Config(log_freq=1),
        override=OverrideConfig(imports=list(imports)),
    )


def _train(arm: Arm, **parallelism: Any) -> None:
    logging.disable(logging.WARNING)  # pages of it
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it initialises torch.distributed
    imports = [(OVERRIDE, arm.settings)] if arm.settings is not None else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = configuration(folder, imports=imports, **parallelism).build()
        metrics = trainer.metrics_processor
        (model,) = trainer.model_parts
        arm.watch(metrics.offloads[0] if arm.settings is not None else None, model)
        data = trainer.batch_generator(trainer.dataloader)
        while trainer.should_continue_training():
            trainer.step += 1
            trainer.train_step(data)
        arm.losses = [shown["loss"] for shown in metrics.shown]
        arm.end(model)
        trainer.close()
    if arm.settings is not None:
        assert metrics.shown[-1]["tba/offloaded_bytes"] > 0


def fsdp2(arm: Arm) -> None:
    """torchtitan Trainer (llama3), FSDP2, 2 ranks"""
    _train(arm, data_parallel_shard_degree=2)


def tensor(arm: Arm) -> None:
    """torchtitan Trainer (llama3), tensor and sequence parallel, 2 ranks"""
    _train(arm, tensor_parallel_degree=2)
