"""A small GPT in plain PyTorch, which knows nothing of tba: what `tba run` offloads unchanged.

python examples/plain_gpt.py
tba run --memory-budget 300MiB -- python examples/plain_gpt.py     # options of the program: --layers, --batch, ...
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
for name, default in (("layers", 12), ("width", 512), ("length", 512), ("batch", 8), ("steps", 4)):
    parser.add_argument(f"--{name}", type=int, default=default)
given = parser.parse_args()


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, given.width)
        self.positions = nn.Parameter(0.02 * torch.randn(given.length, given.width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(given.width, 8, 4 * given.width, batch_first=True, norm_first=True, dropout=0.0)
            for _ in range(given.layers)
        )
        self.head = nn.Linear(given.width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(given.length)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(given.steps):
    text = torch.randint(0, 256, (given.batch, given.length + 1))
    loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.6f}", flush=True)
