"""Train a U-Net on fields, as weather and PDE models do: early feature maps take most of the memory, for longest.

python examples/convolutional.py               # or: python examples/convolutional.py PIXELS
"""

import sys

import torch
from torch import nn

import tba

pixels = int(sys.argv[1]) if len(sys.argv) > 1 else 512


def block(channels_in, channels_out):
    """Two convolutions."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(8, channels_out),
        nn.GELU(),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, padding_mode="circular"),
        nn.GELU(),
    )


class UNet(nn.Module):
    """Three resolutions, with a shortcut at each."""

    def __init__(self, fields=4, width=16):
        super().__init__()
        self.down = nn.ModuleList([block(fields, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.last = nn.Conv2d(width, fields, 1)

    def forward(self, x):
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = kept.pop()
        for stage in self.up:
            x = stage(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], dim=1))
        return self.last(x)


model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with tba.offload_context(model, tier="nvme", compress="exact") as offload:
    for step in range(3):
        now = torch.randn(2, 4, pixels, pixels)
        loss = nn.functional.mse_loss(model(now), now.roll(1, dims=-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
print(offload.stats())
offload.close()
