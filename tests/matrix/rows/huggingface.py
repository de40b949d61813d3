"""Hugging Face: Trainer, TRL's trainers and PEFT, with the callback of `tba.integrations.transformers`."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from matrix.arms import STEPS, Arm, batches, zero
from matrix.models import llama, loaded, text, tokenizer
from tba.integrations.transformers import OffloadCallback

COMMON = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 3,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "disable_tqdm": True,
}


class Watch(TrainerCallback):
    """Follows the Offloader of the callback, and takes the losses from the logs."""

    def __init__(self, arm: Arm, callback: OffloadCallback | None) -> None:
        self._arm, self._callback = arm, callback

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._arm.watch(self._callback.offload if self._callback is not None else None, model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self._arm.losses.append(logs["loss"])
            assert self._callback is None or logs["tba/offloaded_bytes"] >= 0


def _train(arm: Arm, kind: type[Trainer], **given: Any) -> None:
    callback = OffloadCallback(**arm.settings) if arm.settings is not None else None
    callbacks = [*([callback] if callback is not None else []), Watch(arm, callback)]
    made = kind(callbacks=callbacks, **given)
    made.train()
    arm.end(made.model)


def trainer_ddp(arm: Arm) -> None:
    """transformers.Trainer, 2 ranks"""
    trainer(arm, ranks=2)


def trainer_compiled(arm: Arm) -> None:
    """transformers.Trainer(torch_compile=True)"""
    torch.compiler.reset()
    arm.only_move()
    trainer(arm, torch_compile=True)


def trainer(arm: Arm, ranks: int = 1, **more: Any) -> None:
    """transformers.Trainer"""
    rows = [{"input_ids": row, "labels": row} for row in next(iter(batches(90, (9 * ranks, 70), count=1))).tolist()]
    with tempfile.TemporaryDirectory() as folder:
        _train(arm, Trainer, model=llama(), args=TrainingArguments(folder, **COMMON, **more), train_dataset=rows)


def sft(arm: Arm, *, bf16: bool = True, rows: int = 9, deepspeed: Any = None, **more: Any) -> None:
    """TRL SFTTrainer"""
    data = Dataset.from_list([{"text": text(seed, 70)} for seed in range(rows)])
    with tempfile.TemporaryDirectory() as folder:
        plain = {"max_length": 70, "gradient_checkpointing": False}
        args = SFTConfig(folder, **COMMON, **plain, bf16=bf16, deepspeed=deepspeed)
        given = {"model": llama(), "args": args, "train_dataset": data, "processing_class": tokenizer()} | more
        _train(arm, SFTTrainer, **given)


def _adapters(dropout: float = 0.0) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)


def lora(arm: Arm) -> None:
    """PEFT LoRA (SFTTrainer, float32)"""
    sft(arm, bf16=False, peft_config=_adapters(0.1))


def lora_bf16(arm: Arm) -> None:
    """PEFT LoRA (SFTTrainer, bfloat16 autocast)"""
    sft(arm, peft_config=_adapters(0.1))


def lora_zero2(arm: Arm) -> None:
    """PEFT LoRA with DeepSpeed ZeRO-2 (SFTTrainer), 2 ranks"""
    sft(arm, bf16=False, rows=18, deepspeed=zero(2, "auto"), peft_config=_adapters(0.1))


def lora_int8(arm: Arm) -> None:
    """PEFT LoRA on a torchao int8 base"""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    sft(arm, bf16=False, model=model, peft_config=_adapters())


def lora_nf4(arm: Arm) -> None:
    """PEFT LoRA on a torchao NF4 base, as in QLoRA"""
    from torchao.quantization import NF4Tensor

    model = llama()
    for layer in (module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)):
        layer.weight = torch.nn.Parameter(NF4Tensor.from_tensor(layer.weight.detach(), 64, 32), requires_grad=False)
    sft(arm, bf16=False, model=model, peft_config=_adapters())


def dpo(arm: Arm) -> None:
    """TRL DPOTrainer"""
    rows = [{"prompt": text(s, 10), "chosen": text(s + 99, 50), "rejected": text(s + 999, 50)} for s in range(9)]
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(folder, **COMMON, max_length=70, gradient_checkpointing=False)
        data = Dataset.from_list(rows)
        _train(arm, DPOTrainer, model=loaded(folder), args=args, train_dataset=data, processing_class=tokenizer())


def grpo(arm: Arm) -> None:
    """TRL GRPOTrainer"""
    data = Dataset.from_list([{"prompt": text(seed, 30)} for seed in range(9)])
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"max_completion_length": 40, "num_generations": 3, "gradient_checkpointing": False}
        args = GRPOConfig(folder, **COMMON, **sizes, beta=0.1)
        given = {"model": loaded(folder), "args": args, "train_dataset": data, "processing_class": tokenizer()}
        _train(arm, GRPOTrainer, reward_funcs=_reward, **given)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
