"""An accelerator made of a CPU: PyTorch's PrivateUse1 device named "sim", asynchronous and unforgiving as a GPU is.

What it promises and assumes is told at the top of each header in `source`: streams, memory, kernels, device, copies.
`load` builds and registers it, once a process, and returns its module, which is `torch.sim` from then on and has the
names of `torch.cuda`. `configure` sets what a test needs of it.

A process that has loaded it has threads of autograd for it, and PyTorch takes it for the process's accelerator: pinned
memory is its own, and after a fork autograd refuses to run in the child, as with CUDA. A test process that forks and
trains afterwards does not load it.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from . import build

NAME = "sim"
LIMIT_BYTES = 4 << 30


def why_not() -> str | None:
    """Why the accelerator cannot be had in this process; None where it can."""
    if torch._C._get_privateuse1_backend_name() not in ("privateuseone", NAME):
        return f"this process has another backend already: {torch._C._get_privateuse1_backend_name()}"
    return build.why_not()


@cache
def load() -> ModuleType:
    """Build the accelerator unless it has been, register it with PyTorch, and return its device module."""
    extension = build.load()
    torch.utils.rename_privateuse1_backend(NAME)
    from . import module

    module.open_with(extension)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    return module


def configure(
    *,
    limit_bytes: int = LIMIT_BYTES,
    in_bytes_per_s: float = 0.0,
    out_bytes_per_s: float = 0.0,
    in_latency_s: float = 0.0,
    out_latency_s: float = 0.0,
    delay_s: float = 0.0,
    seed: int = 0,
    poison: bool = True,
) -> None:
    """Set what the devices are like, all of them; whatever is not given goes back to its default.

    Args:
        limit_bytes: memory of each device.
        in_bytes_per_s: bandwidth from the host to a device; 0 for no limit.
        out_bytes_per_s: bandwidth from a device to the host; 0 for no limit.
        in_latency_s: seconds that each copy to a device takes beside.
        out_latency_s: seconds that each copy from a device takes beside.
        delay_s: before a kernel or copy its stream pauses, in half of all cases, for up to so long.
        seed: of those delays: each stream has chances of its own.
        poison: fresh and freed memory is filled with 0xFF.
    """
    module = load()
    for device in range(module.device_count()):
        module.extension().set_limit(device, limit_bytes)
        module.extension().set_fraction(device, 1.0)
        module.extension().set_link_in(device, in_bytes_per_s, in_latency_s)
        module.extension().set_link_out(device, out_bytes_per_s, out_latency_s)
    module.extension().set_delays(seed, delay_s)
    module.extension().set_poison(poison)
