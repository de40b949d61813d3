"""The build: once for all processes, by what it is made of, and skipped with the reason where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support import accelerator
from support.accelerator import build


def test_a_build_is_kept_for_the_next_process(sim: ModuleType) -> None:
    library = build.build()
    written = library.stat().st_mtime_ns
    program = f"import sys; sys.path[:0] = {sys.path!r}; from support.accelerator import build; print(build.build())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [str(library)]
    assert library.stat().st_mtime_ns == written


def test_another_source_is_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if reason := accelerator.why_not():
        pytest.skip(reason)
    before = build.key()
    for file in build.SOURCE.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    assert build.key() == before
    (tmp_path / "streams.h").write_text("// other")
    assert build.key() != before


def test_a_machine_without_a_compiler_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in str(build.why_not())


def test_a_compiler_s_words_come_with_the_error(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "wrong.cpp").write_text("int wrong = nothing_of_the_name;")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("SIM_ACCELERATOR_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="nothing_of_the_name"):
        build.build()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_is_refused(sim: ModuleType) -> None:
    x = torch.ones(4, device="sim")
    sim.synchronize()
    child = os.fork()
    if child == 0:
        try:
            x + 1
        except RuntimeError as error:
            os._exit(0 if "forked child" in str(error) and sim._is_in_bad_fork() else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (x + 1).tolist() == [2.0] * 4
