"""The command line in tests: what a command answers, and a module of the user's in the working directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tba.cli import app


def answer(command: str, *arguments: object) -> Any:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def refused(command: str, *arguments: object) -> str:
    """Run a command that ends with status 2, and return its message."""
    result = answer(command, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"tba {command}: ")
    return str(result.stderr)


def users_module(name: str, text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module and go where it is; it is gone from the interpreter afterwards."""
    (directory / f"{name}.py").write_text(text)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name
