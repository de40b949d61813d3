"""`tba run`: which allocator is chosen and why, what the program gets, and that it takes this one's place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

import tba
from tba import ConfigError
from tba.cli import allocator_environment, app
from tba.cli._allocators import ALLOCATORS, Libraries, choose, complaint, find_libraries, preload_environment

JEMALLOC, MIMALLOC = "/lib/libjemalloc.so.2", "/venv/libmimalloc.so.3"
BOTH = Libraries({"jemalloc": JEMALLOC, "mimalloc": MIMALLOC})
ONLY_MIMALLOC = Libraries({"mimalloc": MIMALLOC}, {"jemalloc": "is not installed"})
NEITHER = Libraries({}, {"jemalloc": "is not installed", "mimalloc": "/x.so cannot be used (wrong ELF class)"})
CONF = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1,thp:always,narenas:1,lg_extent_max_active_fit:48"


def test_auto_takes_the_first_that_is_here() -> None:
    chosen = [choose("auto", facts, {}) for facts in (BOTH, ONLY_MIMALLOC, NEITHER)]
    assert [(allocator.name, allocator.library) for allocator in chosen] == [
        ("jemalloc", JEMALLOC),
        ("mimalloc", MIMALLOC),
        ("glibc", None),
    ]
    assert "jemalloc: is not installed" in chosen[1].reason
    assert "jemalloc: is not installed; mimalloc: /x.so cannot be used (wrong ELF class)" in chosen[2].reason


def test_what_each_sets() -> None:
    assert choose("jemalloc", BOTH, {}).environment == {"LD_PRELOAD": JEMALLOC, "MALLOC_CONF": CONF}
    assert choose("mimalloc", BOTH, {}).environment == {"LD_PRELOAD": MIMALLOC, "MIMALLOC_PURGE_DELAY": "-1"}
    glibc = choose("glibc", BOTH, {}).environment
    assert glibc == {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "67108864"}
    assert choose("none", BOTH, {"LD_PRELOAD": "x"}).environment == {}


def test_without_glibc_nothing_is_tuned() -> None:
    elsewhere = Libraries({}, NEITHER.missing, glibc=False)
    assert choose("auto", elsewhere, {}).environment == {}
    assert choose("auto", elsewhere, {}).name == "none"
    with pytest.raises(ConfigError, match="does not run on glibc"):
        choose("glibc", elsewhere, {})


@pytest.mark.parametrize("name", ["jemalloc", "mimalloc"])
def test_an_allocator_asked_for_and_not_here_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"allocator '{name}' was asked for, but .*; install it \(.*choose another"):
        choose(name, NEITHER, {})


def test_an_unknown_allocator_names_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown allocator 'tcmalloc'; choose one of auto, jemalloc, mimalloc"):
        allocator_environment("tcmalloc")


def test_what_was_preloaded_stays() -> None:
    environ = {"LD_PRELOAD": "/a.so:/b.so /c.so"}
    assert choose("auto", BOTH, environ).environment["LD_PRELOAD"] == f"{JEMALLOC}:/a.so:/b.so:/c.so"


@pytest.mark.parametrize(
    ("library", "name"),
    [("/mine/libjemalloc.so.1", "jemalloc"), ("libmimalloc.so", "mimalloc"), ("libtcmalloc.so.4", "none")],
)
def test_an_allocator_the_user_preloads_is_left_alone(library: str, name: str) -> None:
    chosen = choose("auto", BOTH, {"LD_PRELOAD": f"/a.so:{library}"})
    assert (chosen.name, chosen.library) == (name, library)
    assert JEMALLOC not in chosen.environment.get("LD_PRELOAD", "")
    with pytest.raises(ConfigError, match=f"LD_PRELOAD brings {library}"):
        choose("glibc", BOTH, {"LD_PRELOAD": library})


def test_the_users_own_settings_win() -> None:
    conf = preload_environment("jemalloc", JEMALLOC, {"MALLOC_CONF": "dirty_decay_ms:100"})["MALLOC_CONF"]
    assert conf == f"{CONF},dirty_decay_ms:100"  # jemalloc takes the later of two
    assert "MIMALLOC_PURGE_DELAY" not in preload_environment("mimalloc", MIMALLOC, {"MIMALLOC_PURGE_DELAY": "5"})
    assert "MALLOC_MMAP_THRESHOLD_" not in choose("glibc", NEITHER, {"MALLOC_MMAP_THRESHOLD_": "7"}).environment


@pytest.mark.parametrize(("kind", "library"), [("jemalloc", JEMALLOC), ("mimalloc", MIMALLOC)])
def test_run_inside_run_changes_nothing(kind: str, library: str) -> None:
    once = preload_environment(kind, library, {"LD_PRELOAD": "/a.so"})
    assert once | preload_environment(kind, library, once) == once


def test_a_library_that_does_not_load_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "libjemalloc.so.9"
    broken.write_text("not a library")
    assert "preload" in str(complaint("jemalloc", str(broken), os.environ))  # the loader's own words


def test_a_path_that_ld_preload_cannot_hold_is_passed_over(tmp_path: Path) -> None:
    why = complaint("mimalloc", str(tmp_path / "with space.so"), os.environ)
    assert "cannot hold a path with a space" in str(why)


def test_a_file_that_does_not_load_is_named_where_nothing_else_is_found(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    broken = tmp_path / "lib" / "libjemalloc.so.9"
    broken.write_text("not a library")
    found = find_libraries("jemalloc", os.environ | {"CONDA_PREFIX": str(tmp_path)})
    if not found.libraries:
        assert found.missing["jemalloc"].startswith(f"{broken} cannot be used (")


# -- the command -----------------------------------------------------------------------------------------------------


def tba_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m tba run`, in a child that has everything imported already."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of any fork beside threads
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.stdout, sys.stderr = out, err
            status: Any = 255
            try:
                app(["run", *arguments])
            except SystemExit as ended:
                status = ended.code
            finally:
                out.flush()
                err.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


@pytest.fixture(params=["jemalloc", "mimalloc"])
def library(request: pytest.FixtureRequest) -> str:
    """A preloadable allocator that is on this machine."""
    try:
        found = allocator_environment(request.param, {"PATH": os.environ["PATH"]}).library
    except ConfigError as error:
        pytest.skip(str(error))
    assert found is not None
    return str(found)


def test_the_program_runs_on_the_allocator(library: str) -> None:
    name = "jemalloc" if "jemalloc" in library else "mimalloc"
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "LD_PRELOAD"}
    code = "print(open('/proc/self/maps').read())"
    command = [sys.executable, "-m", "tba", "run", "--allocator", name, "--", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    assert result.returncode == 0, result.stderr
    assert f"/{os.path.basename(library)}" in result.stdout  # the loader's own name for it, or a file
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"tba run: {name} ({library}): ")


def test_memory_that_is_freed_is_reused_by_far_smaller_blocks(library: str) -> None:
    # 1,600 blocks of 128 KiB become a few of up to 200 MiB when they are freed: each round must be cut from them.
    program = """
import ctypes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
size, resident = 128 << 10, []
for _ in range(8):
    blocks = [libc.malloc(size) for _ in range(1600)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    resident.append(4096 * int(open("/proc/self/statm").read().split()[1]))
print(resident[-1] - resident[0])
"""
    name = "jemalloc" if "jemalloc" in library else "mimalloc"
    done = tba_run("--allocator", name, "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 << 20


def test_exit_status_and_arguments_pass_through() -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    for dashes in ((), ("--",)):
        result = tba_run("--allocator", "none", *dashes, sys.executable, "-c", code, "--allocator", "-x", "")
        assert (result.returncode, result.stdout.strip()) == (7, "['--allocator', '-x', '']")


def test_signals_reach_the_program_itself() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert tba_run("--allocator", "none", "--", sys.executable, "-c", code).returncode == -signal.SIGTERM


def test_a_closed_pipe_ends_the_program_as_without_us() -> None:
    # Python ignores SIGPIPE, and would hand that on: the kernel's list of ignored signals must be empty of it.
    result = tba_run("--allocator", "none", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(result.stdout.split()[1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)


def test_a_program_that_is_not_there() -> None:
    result = tba_run("--allocator", "none", "--", "no-such-program-anywhere")
    assert result.returncode == 127
    assert "cannot start 'no-such-program-anywhere': No such file" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no program")
    result = tba_run("--allocator", "none", "--", str(tmp_path / "data"))
    assert result.returncode == 126
    assert "Permission denied" in result.stderr


def test_usage_errors() -> None:
    assert tba_run().returncode == 2
    result = tba_run("--allocator", "tcmalloc", "--", "true")
    assert (result.returncode, result.stderr) == (
        2,
        f"tba run: unknown allocator 'tcmalloc'; choose one of {', '.join(ALLOCATORS)}\n",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--memory-budget", "much"], "memory_budget='much' is not"),
        (["--tier", "nvme", "--memory-budget", "1GiB"], "memory_budget=.* was given with tier='nvme'"),
        (["--compress", "exakt"], "compress='exakt' is not None.*; did you mean exact?"),
        (["--report", "out.pdf"], "the path of a report, 'out.pdf', must end in .html"),
        (["--attach"], "storage path .*/dev/null/x"),
    ],
)
def test_settings_are_checked_before_the_program_starts(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given == ["--attach"]:
        monkeypatch.setenv("TBA_STORAGE_PATHS", "/dev/null/x")
    result = tba_run("--allocator", "none", *given, "--", "echo", "started")
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert re.match(f"tba run: {said}", line), line


def test_settings_reach_the_program_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = str(Path(tba.__file__).with_name("_startup"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", startup]))
    given = ("--memory-budget", "8GiB", "--report", "out.html", "--allocator", "none")
    variables = tba_run(*given, "--", "env").stdout.splitlines()
    report = f"TBA_REPORT={Path('out.html').absolute()}"
    assert {"TBA_ATTACH=1", "TBA_MEMORY_BUDGET=8GiB", report, f"PYTHONPATH={startup}:/mine"} <= set(variables)
    assert not [name for name in tba_run("--allocator", "none", "--", "env").stdout.splitlines() if "TBA_" in name]
