"""Train with FSDP2: `attach` after `fully_shard`, on every rank. Ranks of a node share its disk and write allowance.

pip install . transformers
torchrun --nproc-per-node 2 examples/fsdp2_torchrun.py            # or: ... fsdp2_torchrun.py MODEL
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import tba

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

model = AutoModelForCausalLM.from_pretrained(name).to(device)
mesh = init_device_mesh(device, (dist.get_world_size(),))
for block in (*model.model.layers, model):
    fully_shard(block, mesh=mesh)
offload = tba.attach(model, tier="nvme")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(3):
    tokens = torch.randint(0, model.config.vocab_size, (4, 128), device=device)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(offload.stats())
offload.close()
dist.barrier()
dist.destroy_process_group()
