"""Host pools: pinned memory next to each device, within one budget."""

from __future__ import annotations

import pytest
import torch

from io_backends import StoreFull
from io_backends._memory import numa
from tba._device import pinning
from tba._memory import host_pools
from tba._memory.host_pools import HostMemory

SEGMENT_BYTES = 64 << 20  # mapped, and never touched
NODES = (0, 1, 0, None)  # next to each device


def test_memory_of_each_device_is_on_its_node_within_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(numa, "bind", lambda address, nbytes, node: bound.append(node))
    monkeypatch.setattr(pinning, "_pin", lambda address, nbytes: None)
    monkeypatch.setattr(pinning, "_unpin", lambda address: None)
    monkeypatch.setattr(host_pools, "node_of", lambda device: None if device.index is None else NODES[device.index])
    memory = HostMemory(3 * SEGMENT_BYTES)
    first, second, third, fourth = (memory.of(torch.device("cuda", index)) for index in range(4))
    host = memory.of(torch.device("cpu"))
    assert first is third
    assert len({first, second, fourth, host}) == 4
    kept = [pool.lease(SEGMENT_BYTES) for pool in (host, second, first, fourth)]
    assert bound == [1, 0]
    with pytest.raises(StoreFull, match=f"budget is {3 * SEGMENT_BYTES} bytes, {3 * SEGMENT_BYTES} of them"):
        third.lease(1)
    del kept[1]  # of another pool, which keeps it for later unless somebody else asks
    kept.append(third.lease(SEGMENT_BYTES))
    assert bound == [1, 0, 0]
    second.retain(kept.pop(), lambda: False)
    assert fourth.retains, "the end of another pool's copies makes room too"
    memory.resize(2.0)
    more = [third.lease(SEGMENT_BYTES) for _ in range(3)]
    memory.resize(0.5)
    with pytest.raises(StoreFull):
        third.lease(SEGMENT_BYTES)
    del more
    memory.close()
