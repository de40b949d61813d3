"""The command line of tba, and the allocator a CPU training should run under, for programs that start others.

tba doctor --tier nvme --path /scratch
tba run -- python train.py

allocator = allocator_environment()
subprocess.run(["python", "train.py"], env=os.environ | allocator.environment)
"""

from ._allocators import Allocator, allocator_environment
from ._app import app

__all__ = ["Allocator", "allocator_environment", "app"]
