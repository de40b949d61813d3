"""Fine-tune on a CPU under a cap on memory: tier "auto" reads the cap and moves only what would not fit.

pip install . transformers
systemd-run --user --scope -p MemoryMax=6G tba run -- python examples/cpu_memory_cap.py     # or: ... MODEL BUDGET
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import tba

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
budget = sys.argv[2] if len(sys.argv) > 2 else None  # None: what the cgroup has left, less a margin
model = AutoModelForCausalLM.from_pretrained(name)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
with tba.offload_context(model, tier="auto", memory_budget=budget) as offload:
    for step in range(3):
        tokens = torch.randint(0, model.config.vocab_size, (4, 256))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
print(offload.stats())
offload.close()
