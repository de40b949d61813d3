"""Launch: a program of the matrix in processes of its own, ended at a limit with all that they have started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE.parent)]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions")),  # DeepSpeed builds one, once
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # its workers import torch on a busy machine
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


def by_torchrun(ranks: int) -> list[str]:
    """Arguments for Python that start what follows on this many ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def launch(arguments: list[str], folder: Path, limit_s: float, **environment: str) -> tuple[int | None, str]:
    """Run Python with these arguments, in a folder; return its status, None past the limit, and what it has printed."""
    printed = folder / "printed.txt"  # no pipe: what outlives the program would hold it open
    with printed.open("w") as out:
        command = [sys.executable, *arguments]
        program = subprocess.Popen(
            command, cwd=folder, env=os.environ | ENVIRONMENT | environment, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            status: int | None = program.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(program)
    return status, printed.read_text(errors="replace")


def _end(program: subprocess.Popen[bytes]) -> None:
    """End a program, if it has not, and all that it has started: torchrun gives each rank a session of its own."""
    if program.poll() is not None:
        return
    started = psutil.Process(program.pid).children(recursive=True)
    for process in (program, *started):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    program.wait()
    psutil.wait_procs(started, timeout=10)
