"""Find the speed of sound in a solid from traces recorded on its surface: gradients through the time steps of a wave.

systemd-run --user --scope -p MemoryMax=1G tba run -- python examples/wave_inversion.py       # saves 1.6 GiB; or:
tba run -- python examples/wave_inversion.py --memory-budget 256MiB                           # or: --tier nvme
tba run -- python examples/wave_inversion.py --plain                                          # all in memory
"""

import argparse
import hashlib
import resource
import time
from contextlib import nullcontext

import torch

import tba

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, default=128, help="points along each side")
parser.add_argument("--steps", type=int, default=200, help="time steps of a shot")
parser.add_argument("--iterations", type=int, default=2, help="updates of the speed")
parser.add_argument("--plain", action="store_true", help="without tba")
parser.add_argument("--tier", default="auto")
parser.add_argument("--memory-budget", help="what the states may hold in memory, such as 256MiB")
arguments = parser.parse_args()
n = arguments.size
HZ, METERS, SECONDS = 25.0, 10.0, 0.002  # the source's frequency, the distance of two points, a time step


def laplacian(u):
    """Each point's six neighbors less itself; zero outside."""
    out = -6 * u
    out[1:] += u[:-1]
    out[:-1] += u[1:]
    out[:, 1:] += u[:, :-1]
    out[:, :-1] += u[:, 1:]
    out[:, :, 1:] += u[:, :, :-1]
    out[:, :, :-1] += u[:, :, 1:]
    return out


def record(speed):
    """Shoot once, and return the traces that the receivers on the surface record."""
    factor = (speed * SECONDS / METERS) ** 2
    u = before = torch.zeros_like(speed)
    traces = torch.zeros(len(wavelet), n // 4, n // 4)
    for step, pulse in enumerate(wavelet):
        after = 2 * u - before + factor * laplacian(u)
        after[2, n // 2, n // 2] += pulse
        after *= sponge
        u, before = after, u
        traces[step] = u[2, ::4, ::4]
    return traces


phase = (torch.pi * HZ * (torch.arange(arguments.steps) * SECONDS - 1 / HZ)) ** 2
wavelet = (1 - 2 * phase) * torch.exp(-phase)
edge = torch.minimum(torch.arange(n), torch.arange(n).flip(0)).clamp(max=12)
ramp = torch.exp(-((0.015 * (12 - edge)) ** 2))
sponge = ramp[:, None, None] * ramp[:, None] * ramp  # damps the wave at the sides

true = torch.full((n, n, n), 2500.0)
true[n // 4 : n // 2, n // 3 : 2 * n // 3, n // 3 : 2 * n // 3] = 2750.0  # the body to be found
with torch.no_grad():
    observed = record(true)

speed = torch.full((n, n, n), 2500.0, requires_grad=True)
optimizer = torch.optim.Adam([speed], lr=10.0)
settings = {"tier": arguments.tier, "memory_budget": arguments.memory_budget}
offload = None if arguments.plain else tba.offload_context(**settings)
for iteration in range(arguments.iterations):
    begun = time.perf_counter()
    optimizer.zero_grad()
    with offload or nullcontext():
        loss = (record(speed) - observed).square().sum()
    loss.backward()
    digest = hashlib.sha256(speed.grad.numpy()).hexdigest()[:16]
    optimizer.step()
    seconds = time.perf_counter() - begun
    print(f"iteration {iteration}: loss {loss.item():.6e}, gradient {digest}, {seconds:.1f} s")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"most memory of the process: {peak:,.0f} MiB")
if offload is not None:
    print(offload.stats())
    offload.close()
