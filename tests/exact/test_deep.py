"""Graphs as deep as plain PyTorch trains them: the engine leaves nothing at a node that makes freeing it recursive.

PyTorch frees a chain of nodes in a loop, but recursively where Python has looked at them. On a thread with a small
stack a few thousand such nodes are too many, on the main one some 100,000.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_STACK_BYTES = 256 << 10


def _run_deep(scratch: Path, body: str) -> None:
    """Run `body` on a thread with a small stack, in a process of its own: a stack overflow ends the process."""
    program = f"""
import gc, os, threading, torch
from tba import offload_context

def main():
{textwrap.indent(textwrap.dedent(body), "    ")}
    print("freed", flush=True)

threading.stack_size({_STACK_BYTES})
thread = threading.Thread(target=main)
thread.start()
thread.join()
os._exit(0)  # plain torch 2.12 aborts as it exits after a backward on such a thread
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TBA_STORAGE_PATHS": str(scratch)},
        check=False,
    )
    assert (run.returncode, run.stdout.split()) == (0, ["freed"]), run.stderr[-2000:]


@pytest.mark.exhaustive
def test_deep_recurrence_that_moves_nothing_is_freed(scratch: Path) -> None:
    _run_deep(
        scratch,
        """
        cell = torch.nn.LSTMCell(8, 8)
        x, h, c = torch.randn(2, 8), torch.zeros(2, 8), torch.zeros(2, 8)
        with offload_context(cell):
            for _ in range(6000):
                h, c = cell(x, (h, c))
            h.sum().backward()
        del h, c
        """,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compress", [None, "exact", "safe8"])
@pytest.mark.parametrize("tier", ["keep", "nvme"])
def test_deep_chain_of_saved_tensors_is_freed(scratch: Path, tier: str, compress: str | None) -> None:
    _run_deep(
        scratch,
        f"""
        leaf = torch.full((8,), 0.5, requires_grad=True)
        h = leaf * 1
        with offload_context(tier={tier!r}, compress={compress!r}, min_tensor_bytes=0) as offload:
            for _ in range(3000):
                h = -(torch.sin(h) * h)
            h.sum().backward(retain_graph=True)
            offload.flush()
        del h
        gc.collect()
        assert offload.stats().live_records == 0
        assert offload.stats().derived_bytes >= (1000 * 8 * 4 if {compress!r} else 0), offload.stats()
        offload.close()
        """,
    )
