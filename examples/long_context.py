"""Train on a context longer than memory has room for: a budget, and the plan that keeps to it.

The least budget is that of the largest tensor, here a float for each token and word of the vocabulary (4.6 GiB).

pip install . transformers
python examples/long_context.py                # or: python examples/long_context.py MODEL TOKENS BUDGET
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import tba

name, length, budget = [*sys.argv[1:], *("Qwen/Qwen3-0.6B", "8192", "10GiB")[len(sys.argv) - 1 :]]
device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(name).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
with tba.offload_context(model, tier="auto", memory_budget=budget) as offload:
    for step in range(4):
        tokens = torch.randint(0, model.config.vocab_size, (1, int(length)), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
print(offload.plan)
print(offload.stats())
offload.close()
