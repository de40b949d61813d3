"""Bad input: what was asked, what was found and what to do, on one line and in no other library's words."""

from __future__ import annotations

import importlib
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from support.cli import answer
from tba import OffloadConfig, OffloadError, attach, offload_context

FOREIGN = ("Input should", "validation", "pydantic", "typer", "click", "Traceback", "Usage:", "Errno", "valid int")
A_SIZE = "; give a size such as '8GiB' (2^30) or '512MB' (10^6), or a whole number of bytes"
A_RATE = "; give a rate such as '1GiB/s' (2^30) or '512MB/s' (10^6), or a whole number of bytes per second"
NAN = float("nan")
# Settings, and the message.
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"memory_budget": "8"}, "memory_budget='8' has no unit; did you mean '8GiB'?"),
    ({"memory_budget": "8.5"}, "memory_budget='8.5' has no unit; did you mean '8.5GiB'?"),
    ({"memory_budget": "8589934592"}, "memory_budget='8589934592' has no unit; did you mean '8GiB'?"),
    ({"memory_budget": 8}, "memory_budget=8 is 8 bytes; did you mean '8GiB'?"),
    ({"memory_budget": 8.5}, "memory_budget=8.5 is not a whole number of bytes; did you mean '8.5GiB'?"),
    ({"memory_budget": -5}, f"memory_budget=-5 is negative{A_SIZE}"),
    ({"memory_budget": "-5GiB"}, f"memory_budget='-5GiB' is negative{A_SIZE}"),
    ({"memory_budget": "8 gigs"}, "memory_budget='8 gigs' is not a number and a unit; did you mean '8GiB'?"),
    ({"memory_budget": "1,5GiB"}, "memory_budget='1,5GiB' is not a number and a unit; did you mean '1.5GiB'?"),
    ({"memory_budget": "8GB please"}, "memory_budget='8GB please' is not a number and a unit; did you mean '8GB'?"),
    ({"memory_budget": "lots"}, f"memory_budget='lots' is not a number and a unit{A_SIZE}"),
    ({"memory_budget": ""}, f"memory_budget='' is not a number and a unit{A_SIZE}"),
    ({"memory_budget": "1e9"}, f"memory_budget='1e9' is not a number and a unit{A_SIZE}"),
    ({"memory_budget": NAN}, f"memory_budget=nan is not a number of bytes{A_SIZE}"),
    ({"memory_budget": True}, f"memory_budget=True is not a number of bytes{A_SIZE}"),
    ({"memory_budget": "9999999TiB"}, f"memory_budget='9999999TiB' is more than any machine has{A_SIZE}"),
    ({"budget": "8"}, "memory_budget='8' has no unit; did you mean '8GiB'?"),
    (
        {"budget": "1GiB", "memory_budget": "1GiB"},
        "budget is another name for memory_budget, and both were given; ",
    ),
    ({"memory_budget": "1GiB", "tier": "disk"}, "memory_budget=1GiB was given with tier='nvme', which moves or keeps"),
    ({"min_tensor_bytes": "4"}, "min_tensor_bytes='4' has no unit; did you mean '4MiB'?"),
    ({"min_tensor_bytes": None}, f"min_tensor_bytes=None is not a number of bytes{A_SIZE}"),
    ({"nvme_budget": "200"}, "nvme_budget='200' has no unit; did you mean '200GiB'?"),
    ({"max_write_rate": "500"}, "max_write_rate='500' has no unit; did you mean '500MB/s'?"),
    ({"max_write_rate": "1GB/min"}, "max_write_rate='1GB/min' is not a number and a unit; did you mean '1GB/s'?"),
    ({"max_read_rate": 0}, f"max_read_rate=0 is not above 0{A_RATE}"),
    ({"tier": "nvm"}, "tier='nvm' is not one of 'keep', 'cpu', 'nvme', 'auto'; did you mean nvme?"),
    ({"tier": "gpu"}, "tier='gpu' is not one of 'keep', 'cpu', 'nvme', 'auto'"),
    ({"tier": nn.ReLU()}, "tier=ReLU() is not one of 'keep', 'cpu', 'nvme', 'auto'"),
    ({"compress": "exakt"}, "compress='exakt' is not None, a compact.Preset or one of 'exact', 'safe8', 'balanced', "),
    ({"rank": "many", "compress": "compact"}, "rank='many' is not a whole number above 0, or a share of the width"),
    ({"rank": 4}, "rank=4 was given with compress=None, which projects nothing; use compress='compact', or leave"),
    ({"io_threads": 0}, "io_threads=0 is not a whole number from 1 to 256"),
    ({"io_threads": "two"}, "io_threads='two' is not a whole number from 1 to 256"),
    ({"io_timeout": "1h"}, "io_timeout='1h' is not a number of seconds above 0, such as 60 or '60s'"),
    ({"seed": "x"}, "seed='x' is not a whole number"),
    ({"checksum": "xxh3"}, "checksum='xxh3' is not True or False, or text such as on, off, yes, no, 1, 0"),
    ({"io_backend": "gds"}, "io_backend='gds' is not one of 'auto', 'posix', 'kvikio'"),
    ({"storage_paths": 5}, "storage_paths=5 is not a directory, as a str or a Path, or several, joined by ':' or in"),
    ({"memory_buget": "1GiB"}, "unknown setting 'memory_buget'; did you mean memory_budget?"),
    ({"storage_paths": "/proc", "tier": "nvme"}, "storage path '/proc': a file cannot be written there ("),
    (
        {"storage_paths": "/sys", "tier": "ssd"},
        "storage path '/sys': a file cannot be written there (",
    ),
    (
        {"storage_paths": "/etc/hostname", "tier": "nvme"},
        "storage path '/etc/hostname': it is not a directory; ",
    ),
    ({"storage_paths": "/nowhere", "tier": "nvme"}, "storage path '/nowhere': there is no such directory; make it or"),
]
# Variables, and the message.
VARIABLES = {
    "TBA_MEMORY_BUDGET=8": "TBA_MEMORY_BUDGET='8' has no unit; did you mean '8GiB'?",
    "TBA_MEMORY_BUDGET=8589934592": "TBA_MEMORY_BUDGET='8589934592' has no unit; did you mean '8GiB'?",
    "TBA_TIER=dsk": "TBA_TIER='dsk' is not one of 'keep', 'cpu', 'nvme', 'auto'",
    "TBA_BUDGET=8GiB": "unknown environment variable TBA_BUDGET; did you mean TBA_MEMORY_BUDGET?; correct or unset it.",
    "TBA_IO_THREADS=2.5": "TBA_IO_THREADS='2.5' is not a whole number from 1 to 256",
}
# Command lines, and the message.
COMMANDS = {
    "plan": "tba plan: MODEL is missing; tba plan --help shows what it may be",
    "plan gpt2 --devise h100": "tba plan: there is no option --devise; did you mean --device?",
    "plan gpt2 --device h100 --batch two": "tba plan: --batch 'two' is not a whole number; tba plan --help shows",
    "plan gpt2 --device h100 --batch 0": "tba plan: --batch '0' is less than 1; tba plan --help shows",
    "plan gpt2 --device h101": "tba plan: --device 'h101' is not known",
    "plan gpt2 --device h100 --disk floppy": "tba plan: --disk 'floppy' is not known",
    "plan gpt2 --device h100 --dtype int8": "tba plan: --dtype 'int8' is not known: choose of float32, bfloat16,",
    "plan gpt2 --device h100 --memory-budget 8": "tba plan: memory_budget='8' has no unit; did you mean '8GiB'?",
    "plan wrong.json --device h100": "tba plan: transformers cannot read wrong.json: it has the model type 'nope', ",
    "plan text.json --device h100": "tba plan: transformers cannot read text.json: it is no JSON object; give ",
    "plan gpt2 --device h100 --set n_layer=x": "tba plan: transformers refuses {'n_layer': 'x'} in the config of gpt2",
    "plan gpt2 --device 8GB,1GB": "tba plan: --device '8GB,1GB' has other figures than memory, TFLOPS, GB/s to ",
    "plan some/body --device h100": "tba plan: MODEL 'some/body' is no file or directory here, and nothing is ",
    "plann": "tba: there is no command 'plann'; did you mean plan?",
    "audit nothing:here": "tba audit: MODEL 'nothing:here': there is no module 'nothing' in ",
    "audit model.py:make": "tba audit: MODEL 'model.py:make' names a file, but a module is imported by its name: give",
    "doctor --tier tape": "tba doctor: tier='tape' is not one of 'keep', 'cpu', 'nvme', 'auto'",
    "doctor --seconds 99": "tba doctor: --seconds '99' is more than 60; tba doctor --help shows",
    "run": "tba run: COMMAND is missing; tba run --help shows what it may be",
    "run --allocator tcmalloc x": "tba run: ",
}


def check(said: str, expected: str) -> None:
    (line,) = said.splitlines()
    assert line.startswith(expected)
    assert not [word for word in FOREIGN if word.lower() in line.lower().replace(expected.lower(), "")]


def offloaded(**settings: Any) -> Any:
    return offload_context(nn.Linear(2, 2), **settings)


def attached(**settings: Any) -> Any:
    return attach(nn.Linear(2, 2), **settings)


@pytest.mark.parametrize(("settings", "expected"), SETTINGS, ids=lambda each: str(each)[:40])
def test_a_wrong_setting_is_one_line_that_says_what_to_do(settings: dict[str, Any], expected: str) -> None:
    for way in (offloaded, attached):
        with pytest.raises(OffloadError) as caught:
            way(**settings)
        check(str(caught.value), expected)


@pytest.mark.parametrize("given", VARIABLES)
def test_a_wrong_variable_is_one_line_that_says_what_to_do(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*given.split("="))
    with pytest.raises(OffloadError) as caught:
        OffloadConfig()
    check(str(caught.value), VARIABLES[given])


@pytest.mark.parametrize("given", COMMANDS)
def test_a_wrong_command_is_one_line_that_says_what_to_do(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.json").write_text('{"model_type": "nope"}')
    Path("text.json").write_text("model")
    result = answer(*given.split())
    assert (result.exit_code, result.stdout) == (2, "")
    check(result.stderr, COMMANDS[given])


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_an_integration_refuses_as_the_context_does(name: str) -> None:
    pytest.importorskip(name)
    callback = importlib.import_module(f"tba.integrations.{name}").OffloadCallback
    for settings, expected in SETTINGS[:6]:
        with pytest.raises(OffloadError) as caught:
            callback(**settings)
        check(str(caught.value), expected)
    assert "memory_budget" in signature(callback).parameters
    assert callback(memory_budget="8GiB", tier=None)._settings == {"memory_budget": "8GiB"}
