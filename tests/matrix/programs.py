"""Programs that do not know tba: each trains the tiny Llama, and prints losses and a digest of the weights.

python -m matrix.programs NAME
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrix.models import llama, text, tokenizer


def batches(count: int = 3) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))
    for _ in range(count):
        yield torch.randint(0, 90, (3, 70), generator=generator)


def show(model: nn.Module, losses: list[float]) -> None:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().numpy().tobytes())
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"\nRESULT {rank} {losses} {digest.hexdigest()}", flush=True)


def train(model: nn.Module) -> None:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for tokens in batches():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    show(model, losses)


def loop() -> None:
    train(llama())


def ddp() -> None:
    dist.init_process_group("gloo")
    train(nn.parallel.DistributedDataParallel(llama()))


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = llama()
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model)


def deepspeed() -> None:
    import deepspeed as library

    library.init_distributed(dist_backend="gloo")
    model, losses = llama(), []
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for tokens in batches():
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    show(model, losses)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, losses = llama(), []
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for tokens in batches():
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    show(model, losses)


COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 3,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "disable_tqdm": True,
    "bf16": False,
}


def _fit(trainer: Any) -> None:
    trainer.train()
    show(trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def trainer() -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for batch in batches() for row in batch.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        _fit(Trainer(model=llama(), args=TrainingArguments(folder, **COMMON), train_dataset=rows))


def sft() -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"text": text(seed, 70)} for seed in range(9)])
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(folder, **COMMON, max_length=70, gradient_checkpointing=False)
        _fit(SFTTrainer(model=llama(), args=args, train_dataset=data, processing_class=tokenizer()))


def fit() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = llama(), []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder:
        made = lightning.Trainer(accelerator="cpu", max_steps=3, default_root_dir=folder, **quiet)
        made.fit(module, torch.utils.data.DataLoader(torch.cat(list(batches())), batch_size=3))
    show(module, module.losses)


def ray() -> None:
    import ray as library
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_model

    library.init(include_dashboard=False, num_cpus=3)
    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig(storage_path=folder)
        TorchTrainer(
            lambda: train(prepare_model(llama())), scaling_config=ScalingConfig(num_workers=2), run_config=run
        ).fit()


if __name__ == "__main__":
    torch.manual_seed(5)
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.barrier()
        atexit._run_exitfuncs()
        os._exit(0)  # past the end of torch's own threads, which aborts now and then
