"""Trial: one case under one peer in its own process, which may hang or die.

Processes are forked from one that has only imported PyTorch, so that each starts in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.utils.checkpoint"])


class Outcome(NamedTuple):
    """Outcome of a case: "right", "error", "wrong", "leak", "hang", "crash", "not tried" or "-", and why."""

    kind: str
    words: str = ""


def run_case(
    peer: str,
    case: str,
    *,
    timeout_s: float,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> Outcome:
    """Run a case with additional environment variables; its files go below `directory`, which ends as it began."""
    inlet, outlet = _FORKS.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=directory.resolve()) as scratch, inlet:
        variables = {"TMPDIR": scratch, **(environment or {})}
        process = _FORKS.Process(target=_work, args=(outlet, peer, case, scratch, variables, device))
        process.start()
        outlet.close()
        try:
            return Outcome(*inlet.recv()) if inlet.poll(timeout_s) else Outcome("hang", f"no answer in {timeout_s:g} s")
        except EOFError:
            process.join()
            return Outcome("crash", f"exit status {process.exitcode}")
        finally:
            process.kill()
            process.join()


def _work(outlet: Connection, peer: str, case: str, scratch: str, environment: Mapping[str, str], device: str) -> None:
    os.environ |= environment
    with open(os.devnull, "w") as silence:
        for descriptor in (1, 2):
            os.dup2(silence.fileno(), descriptor)
    outlet.send(tuple(judge(peer, case, Path(scratch), device)))
    outlet.close()


def judge(peer: str, case: str, scratch: Path, device: str) -> Outcome:
    """Run a case plain and under a peer in this process, and compare."""
    import torch

    from .._workload.accelerator import open_device
    from .cases import CASES, OF_FILES, NotTried, as_it_is, edited, leaf_on, unedited
    from .registry import PEERS

    torch.set_num_threads(1)
    chosen, leaf = PEERS[peer], leaf_on(open_device(device))
    if case in OF_FILES and not chosen.files:
        return Outcome("-", "keeps nothing in files")
    # If plain raises an error, the gradients without the edit are right too.
    truth = unedited if CASES[case] is edited else CASES[case]
    expected = truth(as_it_is, scratch, leaf)
    try:
        wrap = chosen.make(None, scratch)
    except Exception as error:  # the peer's, not the case's
        return Outcome("crash", f"cannot be set up: {_words(error)}")
    try:
        found = CASES[case](wrap, scratch, leaf)
    except NotTried as error:
        return Outcome("not tried", str(error))
    except MemoryError as error:
        return Outcome("leak", str(error))
    except Exception as error:
        return Outcome("error", _words(error))
    equal = all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return Outcome("right") if equal else Outcome("wrong", "other gradients, without an error")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
