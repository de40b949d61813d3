"""Command line of tba, and the choice of an allocator for programs that start a training on a CPU.

tba doctor --tier nvme --path /scratch
tba run -- python train.py
tba plan llama --batch 8 --sequence 2048 --dtype bfloat16 --device h100 --disk gen5x4

allocator = allocator_environment()
subprocess.run(["python", "train.py"], env=os.environ | allocator.environment)
"""

from ._allocators import Allocator, allocator_environment
from ._app import app

__all__ = ["Allocator", "allocator_environment", "app"]
