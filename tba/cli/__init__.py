"""Command line of tba, and the choice of an allocator for programs that start a training on a CPU.

tba doctor --tier nvme --path /scratch
tba run -- python train.py

allocator = allocator_environment()
subprocess.run(["python", "train.py"], env=os.environ | allocator.environment)
"""

from ._allocators import Allocator, allocator_environment
from ._app import app

__all__ = ["Allocator", "allocator_environment", "app"]
