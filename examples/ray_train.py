"""Train with Ray's TorchTrainer: `attach` in the function that each worker runs.

pip install . 'ray[train]' transformers
python examples/ray_train.py                   # or: python examples/ray_train.py MODEL
"""

import os
import sys

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from transformers import AutoModelForCausalLM

import tba

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"


def train(config):
    """Train on one worker."""
    model = prepare_model(AutoModelForCausalLM.from_pretrained(config["name"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    offload = tba.attach(model, tier="nvme")
    for _ in range(3):
        tokens = torch.randint(0, config["vocabulary"], (4, 128), device=get_device())
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = offload.stats()
    offload.close()
    if ray.train.get_context().get_world_rank() == 0:
        print(stats)


ray.init(include_dashboard=False)
vocabulary = AutoModelForCausalLM.from_pretrained(name).config.vocab_size
TorchTrainer(
    train,
    train_loop_config={"name": name, "vocabulary": vocabulary},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
    run_config=RunConfig(storage_path=os.path.abspath("out/ray")),
).fit()
