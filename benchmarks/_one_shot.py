"""One-shot arms: a piece of a benchmark in a process of its own, under its own allocator, that answers once and ends.

For what needs no turns within a process: memory that must begin from nothing, runs that only losses are asked of, and
measurements whose arms take their turns inside of the one process.

`python -m benchmarks._one_shot` reads one JSON object, {"role": ..., "options": {...}}, and writes one a line:
    {"note": "..."}      how far it is, as often as it likes
    {"answer": {...}}    last
Whatever goes wrong ends the process with its traceback on standard error, which the other side shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from ._processes import Spec, arm_environment, failed

Tell = Callable[[str], None]
Role = Callable[[Mapping[str, Any], Tell], dict[str, Any]]
# Only ends what would otherwise hang; the longest arm is a quarter of an hour of training.
TIMEOUT_S = 7200.0


class Answer(NamedTuple):
    """What an arm's process said, and the allocator it ran under."""

    spec: Spec
    body: dict[str, Any]
    allocator: str


def ask(spec: Spec, *, tell: Tell = lambda note: None, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run one arm to its end. `tell` gets its notes as they come.

    Raises:
        ArmError: the allocator is not here, or the process ended or was ended (after `timeout_s`) without an answer.
    """
    environment, allocator, _ = arm_environment(spec, os.environ)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks._one_shot"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        late = threading.Timer(timeout_s, process.kill)
        late.daemon = True
        try:
            late.start()
            body = _converse(process, spec, tell)
        finally:
            in_time = late.is_alive()
            late.cancel()
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        if body is None:
            how = f"ended (exit status {process.returncode})" if in_time else f"gave no answer within {timeout_s:g} s"
            raise failed(spec, how, errors)
    return Answer(spec, body, allocator)


def ask_all(specs: Sequence[Spec], *, jobs: int, tell: Callable[[Spec, str], None]) -> list[Answer]:
    """Run all arms, `jobs` at a time; their answers in the order of `specs`. `tell` is called by any thread.

    Raises:
        ArmError: of the first arm that fails; those not begun are not begun any more, those under way end first.
    """

    def run(spec: Spec) -> Answer:
        return ask(spec, tell=lambda note: tell(spec, note))

    with ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[Answer]] = [pool.submit(run, spec) for spec in specs]
        _, left = wait(futures, return_when=FIRST_EXCEPTION)
        for future in left:
            future.cancel()
        failed = [f for f in futures if f.done() and not f.cancelled() and f.exception() is not None]
        return [future.result() for future in failed or futures]


def find_role(name: str) -> Role:
    """The function of this role: options and where to write notes in, the answer out."""
    if name == "codec":
        from ._codec_speed import measure_codecs

        return measure_codecs
    if name == "linear":
        from ._codec_speed import measure_linear

        return measure_linear
    if name == "block":
        from ._stored import measure_block

        return measure_block
    if name == "fidelity":
        from ._fidelity_arm import train_arm

        return train_arm
    if name == "bert":
        from ._bert_arm import fine_tune

        return fine_tune
    raise ValueError(f"unknown role {name!r}; known are codec, linear, block, fidelity, bert")


def _converse(process: subprocess.Popen[bytes], spec: Spec, tell: Tell) -> dict[str, Any] | None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({"role": spec.role, "options": dict(spec.options)}).encode())
        process.stdin.close()
    except BrokenPipeError:
        return None
    for message in _messages(process):
        if "answer" in message:
            answer: dict[str, Any] = message["answer"]
            process.wait()
            return answer
        tell(message["note"])
    process.wait()
    return None


def _messages(process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        # The last line of a process that died in the middle of it is none.
        if line.endswith(b"\n"):
            yield json.loads(line)


def main() -> None:
    """Do what standard input says."""
    # Messages get a descriptor of their own: whatever a library prints on standard output lands on standard error.
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)

        def say(kind: str, body: Any) -> None:
            channel.write(json.dumps({kind: body}) + "\n")
            channel.flush()

        asked = json.load(sys.stdin)
        say("answer", find_role(asked["role"])(asked["options"], lambda note: say("note", note)))


if __name__ == "__main__":
    main()
