"""Staged: collectives of a device that has none, over gloo through copies in host memory.

`register` makes the backend "staged", whose groups are then those of a device. Each collective has ended when its call
returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def register(device: torch.device) -> None:
    """Have "staged" serve the tensors of a device, and those of the CPU."""
    dist.Backend.register_backend("staged", Staged, devices=[device.type])


class Staged(dist.ProcessGroup):
    """A process group. A collective's first argument is what it writes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "staged"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _staged(self, name: str, written: Any, *others: Any) -> dist._Work:
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def host(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [host(each) for each in value]
            if not isinstance(value, Tensor):
                return value
            return copies.setdefault(id(value), (value, value.detach().cpu()))[1]

        first = host(written)
        outputs = list(copies.values())
        getattr(self._gloo, name)(first, *map(host, others)).wait()
        with torch.no_grad():
            for tensor, copy in outputs:
                if tensor is not copy:
                    tensor.copy_(copy)
        return _Done(written)


def _collective(name: str) -> Callable[..., dist._Work]:
    return lambda group, *arguments, **options: group._staged(name, *arguments, *options.values())


# By the names that a group has for them, those that gloo has.
_NAMES = {name: name for name in ("allgather", "allreduce", "barrier", "broadcast", "reduce_scatter")} | {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
for _name, _of_gloo in _NAMES.items():
    setattr(Staged, _name, _collective(_of_gloo))


class _Done(dist._Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        on = {tensor.device for tensor in torch.utils._pytree.tree_leaves(result) if isinstance(tensor, Tensor)}
        self._future: Any = torch.futures.Future(devices=[each for each in on if each.type != "cpu"])
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future
