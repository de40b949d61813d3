"""The waves benchmark: the gradient of a 3-D wave equation, written in PyTorch under tba, and by deepwave."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ._processes.arms import Arm, Spec, ask
from ._report.environment import environment_block
from ._report.options import Folder, Quick, Threads
from ._report.progress import progress
from ._report.results import Grid, Result, mib
from ._workload.tools import scratch_directory

_OURS = {
    "PyTorch, plain": ["--plain"],
    "PyTorch, tba nvme": ["--tier", "nvme"],
    "PyTorch, tba 256MiB": ["--memory-budget", "256MiB"],
}
_DEEPWAVE: dict[str, dict[str, Any]] = {
    "deepwave, device": {"storage_mode": "device"},
    "deepwave, cpu": {"storage_mode": "cpu"},
    "deepwave, disk": {"storage_mode": "disk"},
    "deepwave, device, 8 bits": {"storage_mode": "device", "storage_compression": True},
    "deepwave, disk, 8 bits": {"storage_mode": "disk", "storage_compression": True},
    "deepwave, 8 checkpoints": {"storage_mode": "device", "checkpoint_segments": 8},
}


def waves(
    path: Folder = None,
    size: Annotated[int, typer.Option(min=32, help="Points along each side.")] = 128,
    steps: Annotated[int, typer.Option(min=16, help="Time steps of a shot.")] = 200,
    threads: Threads = 2,
    quick: Quick = False,
) -> Result:
    """Gradients through the time steps of a wave: seconds, peak and error, in PyTorch and by deepwave (10 minutes)."""
    size, steps = (64, 90) if quick else (size, steps)
    with tempfile.TemporaryDirectory(dir=scratch_directory((path,) if path is not None else None)) as folder:
        arms = _run(Path(folder), size, steps, threads)
        errors = {name: _error(Path(folder), name) for name in arms}
    table = _table(arms, errors, size, steps)
    data = {
        "size": size,
        "steps": steps,
        "arms": {name: {**arm.about, "gradient_error": errors[name]} for name, arm in arms.items()},
    }
    return Result(theme="waves", tables=[table], data=data, environment=environment_block(arms, threads=threads))


def _run(folder: Path, size: int, steps: int, threads: int) -> dict[str, Arm]:
    """Run each arm alone; its gradient is saved under its name."""
    works: dict[str, tuple[str, dict[str, Any]]] = {
        name: ("waves:example", {"arguments": arguments, "iterations": 3}) for name, arguments in _OURS.items()
    }
    if find_spec("deepwave") is not None:
        for name, settings in _DEEPWAVE.items():
            on_disk = {"storage_path": str(folder)} if settings["storage_mode"] == "disk" else {}
            works[name] = ("waves:deepwave", {"settings": settings | on_disk, "iterations": 2})
    arms = {}
    with progress("waves", len(works)) as bar:
        for name, (role, options) in works.items():
            options |= {"size": size, "steps": steps, "gradient": str(folder / name)}
            environment = {"TBA_STORAGE_PATHS": str(folder)}
            spec = Spec(
                name=name, role=role, options=options, allocator="auto", threads=threads, environment=environment
            )
            arms[name] = ask(spec)
            bar.advance(name)
    return arms


def _error(folder: Path, name: str) -> float:
    """How far the gradient of an arm is from that of the first arm of its kind, relative to it."""
    first = next(other for other in (*_OURS, *_DEEPWAVE) if other.partition(",")[0] == name.partition(",")[0])
    gradient, right = torch.load(folder / name), torch.load(folder / first)
    return 0.0 if torch.equal(gradient, right) else float((gradient - right).norm() / right.norm())


def _table(arms: dict[str, Arm], errors: dict[str, float], size: int, steps: int) -> Grid:
    rows = [
        (
            name,
            f"{arm.about['seconds']:.1f}",
            mib(arm.about["peak_bytes"]),
            mib(arm.about["written_bytes"]) if "written_bytes" in arm.about else "-",
            "none" if errors[name] == 0 else f"{errors[name]:.1e}",
        )
        for name, arm in arms.items()
    ]
    note = (
        f"{size}^3 points, {steps} time steps of 4-byte floats, of which {mib(4 * size**3 * steps)} MiB are needed by "
        "backward. Each arm ran alone. Seconds: of its last forward and backward, tba's third and deepwave's second. "
        "Peak: the most resident memory of its process over what it had before. Error: of the gradient, relative to "
        "that of the first arm of its kind, which keeps everything in memory; the kinds differ in how they damp the "
        "sides and in the order of sums. deepwave's steps are compiled code for this equation, PyTorch's are slices."
    )
    if find_spec("deepwave") is None:
        note += " deepwave is not installed."
    return Grid(
        "A wave in three dimensions, and the gradient of its speed",
        ("arm", "s", "peak MiB", "written MiB", "error"),
        rows,
        note,
    )
