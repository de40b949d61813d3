"""Inductor: what this package needs of PyTorch's compiler, in one place, with what a torch without it lacks.

Nothing of it is documented, and importing it takes a second: it is imported when a graph is first compiled.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

# Modules, what is taken of them, and names of parameters that it must have.
_NEEDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "compile_fx": ("torch._inductor.compile_fx", ("inner_compile", "config_patches")),
    "compile_fx_inner": ("torch._inductor.compile_fx", ("gm", "example_inputs")),
    "min_cut_rematerialization_partition": ("torch._functorch.partitioners", ("joint_module", "num_fwd_outputs")),
    "CustomPartitionerFn": ("torch._inductor.custom_graph_pass", ()),
    "CustomSchedulerPass": ("torch._inductor.custom_graph_pass", ()),
    "FallbackKernel": ("torch._inductor.ir", ()),
    "MultiOutput": ("torch._inductor.ir", ()),
    "V": ("torch._inductor.virtualized", ()),
    "reorder_for_peak_memory": (
        "torch._inductor.memory",
        ("nodes", "name_to_buf", "name_to_fused_node", "graph_inputs", "graph_outputs"),
    ),
    "OrderedSet": ("torch.utils._ordered_set", ()),
}
_SETTINGS = {
    "torch._inductor.config": (
        *("custom_partitioner_fn", "_post_fusion_custom_pass", "reorder_for_peak_memory"),
        *("fx_graph_cache", "fx_graph_remote_cache"),
    ),
    "torch._functorch.config": ("activation_memory_budget", "enable_autograd_cache"),
}


@functools.cache
def missing() -> list[str]:
    """List what this torch lacks, or has in another form."""
    found = []
    for name, (module, parameters) in _NEEDED.items():
        try:
            taken = getattr(importlib.import_module(module), name)
            if parameters and not {*parameters} <= inspect.signature(taken).parameters.keys():
                found.append(f"{module}.{name}")
        except (ImportError, AttributeError, ValueError):
            found.append(f"{module}.{name}")
    for module, settings in _SETTINGS.items():
        try:
            config = importlib.import_module(module)
            found += [f"{module}.{name}" for name in settings if not hasattr(config, name)]
        except ImportError:
            found.append(module)
    return found


def take(name: str) -> Any:
    """Return one of the names above."""
    return getattr(importlib.import_module(_NEEDED[name][0]), name)


def config(package: str = "_inductor") -> Any:
    """Return the compiler's settings; those of its partitions are `_functorch`'s."""
    return importlib.import_module(f"torch.{package}.config")
