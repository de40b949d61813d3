"""Allocator: whether it keeps free pages is asked of the one that is there; what is read back then comes from it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tba._errors import ConfigError
from tba.cli._allocators import allocator_environment

PROGRAM = """
import torch
from torch import nn
from tba import offload_context
from tba._memory import allocator
from io_backends import BufferPool

lease, leased = BufferPool.lease, set()
BufferPool.lease = lambda self, *args: leased.add(type(self).__name__) or lease(self, *args)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)))
inputs = torch.randn(512, 256)


def gradients():
    model.zero_grad()
    model(inputs).sum().backward()
    return [each.grad.clone() for each in model.parameters()]


plain = gradients()
with offload_context(model, tier="nvme", min_tensor_bytes=1 << 16, prefetch_bytes=4 << 20) as offload:
    for _ in range(3):
        assert all(map(torch.equal, plain, gradients()))
print(allocator.keeps_pages(), offload.stats().read_bytes > 0, *sorted(leased))
"""


def ran_under(environ: dict[str, str]) -> str:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "LD_PRELOAD"}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, env=clean | environ, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_glibc_does_not_keep_them() -> None:
    assert ran_under({}) == "False True BufferPool"


def test_jemalloc_keeps_them_as_tba_run_sets_it() -> None:
    try:
        found = allocator_environment("jemalloc", {"PATH": os.environ["PATH"]})
    except ConfigError as error:
        pytest.skip(str(error))
    assert ran_under(found.environment) == "True True HeapPool"
    assert ran_under(found.environment | {"MALLOC_CONF": "dirty_decay_ms:1000"}) == "False True BufferPool"
