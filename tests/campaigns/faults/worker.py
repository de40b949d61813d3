"""Worker: runs the cases it is asked for by seed and kind, in a process of its own.

`python -m tests.campaigns.faults.worker DEVICE DIRECTORY [DISK]` serves the command `faults`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks._processes.serve import serve

from ..device import open_device
from .cases import draw
from .trial import run_trial

if __name__ == "__main__":
    torch.set_num_threads(1)
    device = open_device(sys.argv[1])
    places = [Path(each) for each in sys.argv[2:]]  # where the files go, and a disk that runs full
    serve(lambda question, tell: asdict(run_trial(draw(*question), *places, device=device)))
