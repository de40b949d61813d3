"""Train with DeepSpeed ZeRO: a section "tba" in its configuration, and `initialize` from here.

pip install '.[deepspeed]' transformers
torchrun --nproc-per-node 2 examples/deepspeed_zero.py            # or: deepspeed examples/deepspeed_zero.py MODEL
"""

import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM

from tba.integrations.deepspeed import initialize

name = next((argument for argument in sys.argv[1:] if not argument.startswith("--")), "Qwen/Qwen3-0.6B")
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "tba": {"tier": "nvme"},  # leave "cpu_checkpointing" off: both would want the same tensors
}
deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
model = AutoModelForCausalLM.from_pretrained(name)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
for _ in range(3):
    tokens = torch.randint(0, model.config.vocab_size, (4, 128), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
if torch.distributed.get_rank() == 0:
    print(engine.offload.stats())
engine.offload.close()
torch.distributed.barrier()
torch.distributed.destroy_process_group()
