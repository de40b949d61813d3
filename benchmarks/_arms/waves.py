"""The waves arms: seconds, peak and gradient of a shot through `examples/wave_inversion.py` or through deepwave."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._processes.resident_memory import peak_bytes, reset_peak, resident_bytes
from .._processes.serve import Tell

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "wave_inversion.py"
_SIDE = 12  # points that damp the wave at each side, in both


def example(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Run the example.

    Options: `size`, `steps` and `iterations`; `arguments` for the example; the file `gradient` to save.

    Returns:
        The seconds of the last iteration, `peak_bytes` over what the process had before, and what went to a file.
    """
    sys.argv = [_EXAMPLE.name, *options["arguments"]]
    for name in ("size", "steps", "iterations"):
        sys.argv += [f"--{name}", str(options[name])]
    idle = _idle()
    found = runpy.run_path(str(_EXAMPLE))
    torch.save(found["speed"].grad, options["gradient"])
    stats = None if found["offload"] is None else found["offload"].stats()
    return {
        "seconds": found["seconds"],
        "peak_bytes": peak_bytes() - idle,
        "written_bytes": 0 if stats is None else stats.last_step.written_bytes,
    }


def deepwave(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Run deepwave's scalar propagator in three dimensions, of second order, over as many points and time steps.

    Options: as for `example`, with the propagator's own `settings` in place of `arguments`.
    """
    import deepwave as peer

    steps, inner = options["steps"], options["size"] - 2 * _SIDE  # it adds the sides itself
    places = torch.cartesian_prod(torch.arange(0, inner, 4), torch.arange(0, inner, 4))
    receivers = torch.cat([torch.full((len(places), 1), 2), places], dim=1)[None]
    source = torch.tensor([[[2, inner // 2, inner // 2]]])
    pulse = peer.wavelets.ricker(25.0, steps, 0.002, 0.04).reshape(1, 1, -1)
    idle = _idle()
    speed = torch.full((inner,) * 3, 2500.0, requires_grad=True)

    def record(speed: Tensor) -> Tensor:
        found: Tensor = peer.scalar(
            speed,
            10.0,
            0.002,
            source_amplitudes=pulse,
            source_locations=source,
            receiver_locations=receivers,
            accuracy=2,
            pml_width=_SIDE,
            max_vel=2750.0,
            **options["settings"],
        ).receiver_amplitudes
        return found

    true = torch.full((inner,) * 3, 2500.0)
    true[inner // 4 : inner // 2, inner // 3 : 2 * inner // 3, inner // 3 : 2 * inner // 3] = 2750.0
    with torch.no_grad():
        observed = record(true)
    seconds = 0.0
    for _ in range(options["iterations"]):
        speed.grad = None
        begun_s = time.perf_counter()
        (record(speed) - observed).square().sum().backward()
        seconds = time.perf_counter() - begun_s
    torch.save(speed.grad, options["gradient"])
    return {"seconds": seconds, "peak_bytes": peak_bytes() - idle, "version": version("deepwave")}


def _idle() -> int:
    reset_peak()
    return resident_bytes()
