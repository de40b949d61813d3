"""The first hour on a card: parts that calls of under ten minutes do, one after the other, each with a log.

The parts are data. A call does the next ones that are not done, in order, as long as the limit of each fits into the
call. A part that failed or ran out of time is not done; it comes after those that were never tried.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ._peers.registry import CHECKPOINT, SELECTIVE
from ._report.options import OUT, Device, Machine, Quick
from ._report.results import RESULTS

ROOT = Path(__file__).resolve().parents[1]
CALL_S = 500.0  # a call may take ten minutes, with what comes before and after
_ENDING_S = 10.0  # for a part that is out of time, to remove its files
_WORDS = 25  # lines of a log that are shown of a part that failed


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is run as one command.

    Attributes:
        name: of its log.
        benchmark: arguments of `python -m benchmarks`; empty for the tests.
        limit_s: the most seconds that it may take.
        draws: whether it takes `--out`, a folder for pictures.
    """

    name: str
    benchmark: tuple[str, ...] = ()
    limit_s: float
    draws: bool = False

    def command(self, folder: Path, *, device: str, machine: str, quick: bool) -> list[str]:
        """Return the command line. Results of a card are filed, those of `quick` and of a simulated one are not."""
        if not self.benchmark:
            few = ["GPU_TESTS=tests/gpu/test_compress.py"] if quick else []
            return ["make", "gpu-tests", f"PYTHON={sys.executable}", f"DEVICE={device}", *few]
        pictures = ["--out", str(folder / self.name)] if self.draws else []
        filed = ["--save", "--machine", machine] if device == "cuda" and not quick else []
        small = ["--quick"] if quick else []
        return [sys.executable, "-m", "benchmarks", *self.benchmark, "--device", device, *pictures, *small, *filed]


def _peers(tokens: str, batch: int, limit_s: float) -> Part:
    others = [word for name in (CHECKPOINT, SELECTIVE, "save_on_cpu", "torchtune", "TRL") for word in ("--peer", name)]
    sizes = ("--family", "llama", "--batch", str(batch), "--rounds", "3", "--no-cases")
    return Part(name=f"peers-{tokens}", benchmark=("peers", *sizes, *others), limit_s=limit_s, draws=True)


# Each line is at most one call.
PARTS = (
    *(Part(name="tests", limit_s=400),),
    *(
        Part(name="step", benchmark=("step", "--rounds", "12"), limit_s=110),
        Part(name="links", benchmark=("links",), limit_s=90),
        Part(name="hooks", benchmark=("hooks",), limit_s=80),
        _peers("2k", 1, 215),
    ),
    *(_peers("8k", 4, 320),),
    *(Part(name="curve", benchmark=("curve", "--arms", "card"), limit_s=420, draws=True),),
)


def card(
    machine: Machine,
    device: Device = "cuda",
    out: Annotated[Path, typer.Option(help="Logs and results go to card/MACHINE below this folder.")] = OUT,
    quick: Quick = False,
) -> None:
    """The next parts of the first hour on a card: tests, step, hooks, peers, curve, links (ten minutes a call)."""
    folder = out / "card" / machine
    commands = {part.name: part.command(folder, device=device, machine=machine, quick=quick) for part in PARTS}
    sys.exit(0 if do_next(PARTS, commands, folder) else 1)


def do_next(parts: Sequence[Part], commands: dict[str, list[str]], folder: Path, call_s: float = CALL_S) -> bool:
    """Do the next parts that are not done; return whether all that were done here succeeded."""
    folder.mkdir(parents=True, exist_ok=True)
    until_s, good, first = time.monotonic() + call_s, True, True
    for part in sorted(parts, key=lambda part: (folder / f"{part.name}.log").is_file()):
        command, record = commands[part.name], folder / f"{part.name}.json"
        if is_done(record, command):
            _say(f"{part.name}: done before")
            continue
        if not first and part.limit_s > until_s - time.monotonic():
            _say(f"{part.name}: left to the next call, as it may take {part.limit_s:.0f} s")
            continue
        first = False
        good &= _do(part, command, folder, record)
    left = [part.name for part in parts if not is_done(folder / f"{part.name}.json", commands[part.name])]
    _say(f"not done: {', '.join(left)}; the next call does them again" if left else "all is done")
    return good


def is_done(record: Path, command: Sequence[str]) -> bool:
    """Whether a part has succeeded, by the same command."""
    return record.is_file() and json.loads(record.read_text())["command"] == list(command)


def _do(part: Part, command: Sequence[str], folder: Path, record: Path) -> bool:
    log = folder / f"{part.name}.log"
    _say(f"{part.name}: {shlex.join(command)}, at most {part.limit_s:.0f} s")
    begun_s = time.monotonic()
    status = _run(command, log, part.limit_s)
    took_s, words = time.monotonic() - begun_s, log.read_text(errors="replace")
    if status != 0:
        how = "ran out of time" if status is None else f"failed with exit status {status}"
        _say(f"{part.name}: {how} after {took_s:.0f} s; the end of {log}:")
        _say("\n".join(words.splitlines()[-_WORDS:]))
        return False
    filed = re.findall(r"^filed (\S+)$", words, re.MULTILINE)
    for name in filed:
        shutil.copy(RESULTS / name, folder)
    record.write_text(json.dumps({"command": list(command), "seconds": round(took_s), "filed": filed}, indent=1) + "\n")
    _say(f"{part.name}: done in {took_s:.0f} s; {log}")
    return True


def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command; return its exit status, or None if it ran out of time. Nothing of it is left in any case."""
    with log.open("w") as lines:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    if process.poll() is None:
        process.terminate()  # a benchmark then removes its files
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _say(text: str) -> None:
    print(text, flush=True)
