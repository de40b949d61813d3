"""Device: where arms train, and what differs with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._workload.accelerator import SIMULATED, module_of
from .._workload.sizes import Model
from .arms import Spec


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where arms train.

    Attributes:
        name: PyTorch's name of it.
        size: of the models trained, a key of `BY_SIZE`.
        dtype: of weights and activations.
        allocator: of host memory, as in `Spec`.
        environment: variables of every arm.
        tiers: those that move everything, in the order of tables.
        apart: whether the arms run one after the other, each alone on the machine. A GPU has no memory for several at
            once, and does not drift as a shared processor does.
    """

    name: str = "cpu"
    size: str = "small"
    dtype: str = "float32"
    allocator: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[str, ...] = ("nvme",)
    apart: bool = False

    def spec(
        self, name: str, options: Mapping[str, Any], *, threads: int, environment: Mapping[str, str] | None = None
    ) -> Spec:
        """Describe an arm that trains a family here; `options` are those of `FamilyArm`."""
        here = {"device": self.name, "size": self.size, "dtype": self.dtype}
        return Spec(
            name=name,
            role="family:FamilyArm",
            options={**here, **options},
            allocator=self.allocator,
            threads=threads,
            environment={**self.environment, **(environment or {})},
        )

    def gpt(
        self, name: str, model: Model, *, threads: int, allocator: str, role: str = "train:TrainArm", **options: Any
    ) -> Spec:
        """Describe an arm that trains a GPT on the text here; `options` are those of `TrainArm`."""
        return Spec(
            name=name,
            role=role,
            options={**model.options(), "device": self.name, "dtype": self.dtype, **options},
            allocator=allocator,
            threads=threads,
            environment=self.environment,
        )

    @property
    def card(self) -> str:
        """The name of the device itself; "" for a CPU."""
        return "" if self.name == "cpu" else str(module_of(self.name).get_device_name())

    @property
    def memory(self) -> str:
        """The kind of memory that the peak of an arm counts."""
        return "resident" if self.name == "cpu" else "allocated on the device"

    def theme(self, name: str) -> str:
        """Name a result; those of a device have names of their own."""
        return name if self.name == "cpu" else f"{name}-{self.name}"


CPU = Device()
CUDA = Device(
    name="cuda",
    size="large",
    dtype="bfloat16",
    allocator="as-is",  # torch has its own allocator for the GPU
    environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},  # without a fixed workspace, results differ from run to run
    tiers=("nvme", "cpu"),
    apart=True,
)
# An accelerator made of a CPU: runs what a GPU would run, at the sizes of a CPU, and measures nothing of a GPU. It
# computes in float32: a CPU without AVX-512 takes ten times as long for bfloat16. It is built once for all arms,
# whatever their TMPDIR.
_BUILT = "SIM_ACCELERATOR_CACHE"
_BUILT_AT = os.environ.get(_BUILT, f"{tempfile.gettempdir()}/tba-accelerator-{os.getuid()}")
SIM = replace(CUDA, name=SIMULATED, size="small", dtype="float32", environment={_BUILT: _BUILT_AT})
DEVICES = {"cpu": CPU, "cuda": CUDA, "simulated": SIM}
