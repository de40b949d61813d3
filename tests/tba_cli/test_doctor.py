"""`tba doctor`: what each fact means for a tier, what is shown, and the exit status."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cli import answer, refused
from support.daily_allowance import counts
from support.doctor import DISK, FAST, FIT, GIB, GPU
from support.kvikio_double.fake import Kvikio
from tba import OffloadConfig, describe
from tba._text import value_text
from tba._transfer import scratch_paths
from tba._transfer.measured import Setup, measured_file, read
from tba._transfer.scratch_paths import Mount, PathFacts
from tba.cli._allocators import allocator_in_force
from tba.cli._doctor import disk_probe, way_probe
from tba.cli._doctor import examine as examination
from tba.cli._doctor.checks import Facts, Finding, Level, judge, verdict
from tba.cli._doctor.device_probe import KvikioFacts
from tba.cli._doctor.disk_probe import DiskFacts
from tba.cli._doctor.examine import examine, huge_pages
from tba.cli._doctor.report import as_json, setting_rows


def told(facts: Facts, level: Level, subject: str) -> Finding:
    """The one finding of this level about the subject, which says what to do unless all is well."""
    (finding,) = [finding for finding in judge(facts) if (finding.level, finding.subject) == (level, subject)]
    assert finding.text
    assert bool(finding.do) is (level in (Level.WARNING, Level.FAILURE))
    return finding


doctor = partial(answer, "doctor")


def path_with(facts_: Facts = FIT, **changes: Any) -> Facts:
    return replace(facts_, paths=(replace(DISK, **changes),))


def test_a_fit_machine_has_nothing_to_be_done() -> None:
    findings = judge(FIT)
    assert [finding.level for finding in findings] == ["ok", "ok", "ok", "unused", "ok"]
    assert [finding.subject for finding in findings] == ["/disk", "memory", "GPU", "kvikio", "allocator"]
    assert not any(finding.do for finding in findings)
    assert findings[0].text.startswith("ext4 on /dev/vda, 100.0 GiB free; writes 2.00 GB/s and reads 3.00 GB/s")
    assert findings[1].text.startswith("50.0 GiB of 64.0 GiB are free")


@pytest.mark.parametrize(("tier", "level"), [("nvme", "failure"), ("auto", "failure"), ("cpu", "warning")])
def test_a_path_that_cannot_serve_fails_the_tiers_that_need_it(tier: str, level: str) -> None:
    fit = replace(FIT, tier=tier, devices=(GPU,))
    refused = path_with(fit, refusal="it is not a directory; name one", disk=None)
    finding = told(refused, Level(level), "/disk")
    assert (finding.text, finding.do) == ("it is not a directory", "name one")
    nowhere = replace(fit, paths=(), no_path="no default directory can hold the scratch file")
    assert told(nowhere, Level(level), "storage paths").text.startswith("no default directory")
    failed = path_with(fit, disk=DiskFacts(error="Input/output error"))
    assert "the probe failed: Input/output error" in told(failed, Level(level), "/disk").text


def test_one_bad_path_of_several_fails() -> None:
    bad = replace(DISK, path="/bad", facts=PathFacts(path="/bad", device=2), refusal="full; free some space")
    findings = judge(replace(FIT, paths=(DISK, bad)))
    assert [(finding.subject, finding.level) for finding in findings[:2]] == [("/disk", "ok"), ("/bad", "failure")]


ON_GPU, ON_CPU_TIER = replace(FIT, devices=(GPU,)), replace(FIT, tier="cpu", devices=(GPU,))
SHARED = replace(FIT.memory, local_ranks=8, cpu_budget_bytes=8 * GIB)
NFS = replace(DISK.facts, mount=Mount(point="/n", kind="nfs4", source="server:/x"))
LITTLE = replace(DISK.facts, free_bytes=3 * GIB)
BROKEN = replace(GPU, error="out of memory")
KVIKIO = replace(FIT, io_backend="kvikio", kvikio=KvikioFacts(version="1", mode="compat"))
SPENT = ("endurance allowance: 100 of 100 bytes; raise it",)
# What is warned of: the facts, whom it concerns, words of the text and of what to do.
WARNED: dict[str, tuple[Facts, str, str, str]] = {
    "network": (path_with(facts=NFS), "/disk", "network file system (nfs4)", "a local disk"),
    "little room": (path_with(facts=LITTLE), "/disk", "3.0 GiB are free, less than a few steps", "free some space"),
    "no direct I/O": (path_with(disk=replace(FAST, direct=False)), "/disk", "O_DIRECT) does not work", "ext4 or xfs"),
    "slow writes": (path_with(disk=replace(FAST, write_bytes_per_s=4e8)), "/disk", "1 GB moves it in 2.5 s", "NVMe"),
    "slow reads": (path_with(disk=replace(FAST, read_bytes_per_s=4e8)), "/disk", "1 GB moves it in 2.5 s", "NVMe"),
    "cpu without a GPU": (replace(FIT, tier="cpu", paths=()), "GPU", "nothing will move", "--tier nvme"),
    "budget": (replace(ON_CPU_TIER, memory=SHARED), "memory", "8.0 GiB for each process (8 ranks", "TBA_CPU_BUDGET"),
    "broken GPU": (replace(FIT, devices=(BROKEN,)), "cuda:0", "cannot be used: out of memory", "CUDA_VISIBLE_DEVICES"),
    "old kvikio": (KVIKIO, "kvikio", "compatibility mode", "nvidia-fs"),
    "glibc": (
        replace(FIT, allocator="glibc"),
        "allocator",
        "runs on glibc,",
        "which would choose jem",
    ),
    "tuned": (replace(FIT, allocator="glibc tuned"), "allocator", "runs on glibc tuned,", "tba run -- ...`"),
    "huge pages": (replace(FIT, huge_pages="never"), "huge pages", "no transparent huge pages", "hugepage/enabled"),
    "as a training": (replace(FIT, warnings=SPENT), "endurance allowance", "100 of 100 bytes", "raise it"),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_is_amiss_is_warned_of_with_what_to_do(name: str) -> None:
    facts, subject, text, do = WARNED[name]
    finding = told(facts, Level.WARNING, subject)
    assert text in finding.text
    assert do in finding.do


FINE: dict[str, Facts] = {
    "not measured": path_with(disk=DiskFacts(direct=True)),
    "tier cpu with a GPU": replace(ON_CPU_TIER, paths=()),
    "a budget of another tier": replace(ON_CPU_TIER, tier="nvme", memory=SHARED),
    "glibc beside a GPU": replace(ON_GPU, allocator="glibc"),
    "huge pages where asked for": replace(FIT, huge_pages="madvise"),
    "no huge pages beside a GPU": replace(ON_GPU, huge_pages="never"),
    "no huge pages where nothing moves": replace(FIT, tier="keep", huge_pages="never"),
}


@pytest.mark.parametrize("name", FINE)
def test_nobody_is_warned_of_what_does_not_matter(name: str) -> None:
    findings = judge(FINE[name])
    assert {finding.level for finding in findings} == {Level.OK, Level.UNUSED}
    assert "huge pages" not in [finding.subject for finding in findings]
    if name == "not measured":
        assert "not measured" in findings[0].text


def test_a_device_is_told_with_its_memory() -> None:
    assert told(ON_GPU, Level.OK, "cuda:0").text == "A GPU, 79.0 GiB of 80.0 GiB are free"


@pytest.mark.parametrize(
    ("kvikio", "asked", "tier", "level"),
    [
        (KvikioFacts(error="not installed"), "auto", "nvme", "unused"),
        (KvikioFacts(error="not installed"), "kvikio", "nvme", "failure"),
        (KvikioFacts(error="not installed"), "kvikio", "cpu", "warning"),
        (KvikioFacts(version="26", mode="gds"), "kvikio", "nvme", "ok"),
        (KvikioFacts(version="26"), "kvikio", "cpu", "ok"),
        (KvikioFacts(version="26", mode="compat"), "auto", "nvme", "ok"),
    ],
)
def test_kvikio_matters_where_it_is_asked_for(kvikio: KvikioFacts, asked: str, tier: str, level: str) -> None:
    facts = replace(FIT, kvikio=kvikio, io_backend=asked, tier=tier, devices=(GPU,))
    finding = told(facts, Level(level), "kvikio")
    assert bool(finding.do) == (level in ("warning", "failure"))


@pytest.mark.parametrize(
    ("enabled", "status", "found"),
    [
        ("always [madvise] never\n", "Name:\tx\nTHP_enabled:\t1\n", "madvise"),
        ("[always] madvise never\n", "", "always"),
        ("always madvise [never]\n", "THP_enabled:\t1\n", "never"),
        ("[always] madvise never\n", "Name:\tx\nTHP_enabled:\t0\n", "never"),
        ("", "", ""),
    ],
)
def test_huge_pages_of_a_process(enabled: str, status: str, found: str) -> None:
    assert huge_pages(enabled, status) == found


@pytest.mark.parametrize(
    ("library", "environ", "name"),
    [
        ("", {}, "glibc"),
        ("", {"MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_TRIM_THRESHOLD_": "2"}, "glibc tuned"),
        ("/lib/libjemalloc.so.2", {}, "jemalloc"),
        ("/v/libmimalloc.so.3.1", {"MALLOC_MMAP_THRESHOLD_": "1"}, "mimalloc"),
        ("/lib/libtcmalloc_minimal.so.4", {}, "tcmalloc_minimal"),
        ("/home/malloc/libc.so.6", {}, "glibc"),
    ],
)
def test_the_allocator_in_force(library: str, environ: dict[str, str], name: str) -> None:
    maps = f"7f0-7f1 r-xp 00000000 fe:00 12 {library}\n7f1-7f2 rw-p 00000000 00:00 0 [heap]\n"
    assert allocator_in_force(maps, environ) == name


# -- the report ------------------------------------------------------------------------------------------------------


def described(config: OffloadConfig) -> tuple[dict[str, Any], ...]:
    return tuple(setting._asdict() for setting in describe(config))


def test_settings_are_shown_with_their_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_STAGING_BYTES", "1.5GiB")
    config = OffloadConfig(tier="nvme", storage_paths=["/a", "/b"])
    shown = list(setting_rows(replace(FIT, settings=described(config))))
    assert shown[:3] == [
        ("settings", "tier = nvme  (from argument)"),
        ("", "storage_paths = /a:/b  (from argument)"),
        ("", "staging_bytes = 1.5GiB  (from TBA_STAGING_BYTES)"),
    ]
    assert shown[3][1].startswith(
        "by default: compress = none, rank = none, seed = 0, derive = on, verify = checksum, "
        "io_backend = auto, min_tensor_bytes = 1MiB"
    )
    assert [value_text(value) for value in (True, False, 60.0)] == ["on", "off", "60.0"]


def test_a_default_says_what_it_means_on_this_machine() -> None:
    facts = replace(FIT, settings=described(OffloadConfig()), io_threads=1)
    text = next(iter(setting_rows(facts)))[1]
    for words in (
        "storage_paths = /disk,",
        "memory_budget = what is free, less a margin,",
        "cpu_budget = half of the memory = 32.0 GiB,",
        "nvme_budget = 80% of the free disk = 80.0 GiB,",
        "staging_bytes = 40.0 MiB,",
        "prefetch_bytes = by the largest tensor, at most 40.0 MiB,",
        "io_threads = 1 a path,",
        "checksum = off,",
        "max_write_rate = no limit,",
    ):
        assert words in text
    assert "None" not in text
    shared = replace(facts, memory=replace(FIT.memory, local_ranks=2), devices=(GPU,), paths=())
    text = next(iter(setting_rows(shared)))[1]
    assert "cpu_budget = half of the memory, divided by 2 ranks, = 32.0 GiB" in text
    assert "staging_bytes = 1.0 GiB" in text
    assert "storage_paths = below the user's cache" in text


def test_json_has_every_fact() -> None:
    facts = replace(FIT, devices=(GPU,), settings=described(OffloadConfig(storage_paths="/a")))
    data = json.loads(as_json(facts, judge(facts), works=True))
    assert data["works"] is True
    assert data["findings"][0] == {"level": "ok", "subject": "/disk", "text": judge(facts)[0].text, "do": ""}
    assert data["paths"][0]["facts"]["mount"]["kind"] == "ext4"
    assert data["paths"][0]["disk"] == {
        "direct": True,
        "write_bytes_per_s": 2e9,
        "read_bytes_per_s": 3e9,
        "moved_bytes": GIB,
        "error": None,
    }
    assert {"name": "storage_paths", "value": ["/a"], "origin": "argument"} in data["settings"]


# -- for real ----------------------------------------------------------------------------------------------------------


def test_a_real_directory_is_measured(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "BLOCK_BYTES", 1 << 16)
    result = doctor("--tier", "nvme", "--path", scratch, "--seconds", "0.01", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["works"], data["tier"]) == (0, True, "nvme")
    (path,) = data["paths"]
    assert path["disk"]["moved_bytes"] > 0
    assert min(path["disk"]["write_bytes_per_s"], path["disk"]["read_bytes_per_s"]) > 0
    assert path["facts"]["mount"]["kind"]
    assert data["memory"]["total_bytes"] > 0
    origins = {setting["name"]: setting["origin"] for setting in data["settings"]}
    assert (origins["tier"], origins["storage_paths"], origins["io_threads"]) == ("argument", "argument", "default")
    assert os.listdir(scratch) == []


def test_the_screen_begins_and_ends_with_the_verdict(scratch: Path) -> None:
    result = doctor("--tier", "nvme", "--path", scratch, "--seconds", "0")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == lines[-1]
    assert lines[0].startswith("tier nvme can work here")
    assert verdict(FIT, judge(FIT)) == "tier nvme can work here"
    glibc = replace(FIT, allocator="glibc")
    assert verdict(glibc, judge(glibc)) == "tier nvme can work here; could be better: allocator"
    assert len(result.stdout.splitlines()) < 50  # one screen


def test_status_1_where_the_tier_cannot_work(scratch: Path) -> None:
    missing = scratch / "none"
    result = doctor("--tier", "nvme", "--path", missing, "--seconds", "0")
    assert result.exit_code == 1
    said = f"tier nvme cannot work here: {missing}: there is no such directory"
    assert [result.stdout.splitlines()[line] for line in (0, -1)] == [said, said]
    result = doctor("--tier", "keep", "--path", missing, "--seconds", "0", "--json")
    assert (result.exit_code, json.loads(result.stdout)["works"]) == (0, True)


def test_status_1_where_no_default_directory_serves(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_paths, "default_directories", lambda *_: ())
    result = doctor("--tier", "auto", "--seconds", "0", "--json")
    assert result.exit_code == 1
    assert "no default directory" in json.loads(result.stdout)["no_path"]


def test_status_2_where_a_setting_is_wrong() -> None:
    assert refused("doctor", "--tier", "tape").startswith("tba doctor: tier='tape' is not one of")


def test_a_tier_without_files_looks_at_no_directory(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(scratch / "cache"))
    found = examine(OffloadConfig(tier="cpu"), seconds=0)
    assert (found.paths, found.memory.nvme_budget_bytes) == ((), None)
    assert not (scratch / "cache").exists()


def test_what_it_writes_counts_against_the_allowance(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(scratch / "state"))
    monkeypatch.setattr(disk_probe, "BLOCK_BYTES", 1 << 20)
    found = examine(OffloadConfig(storage_paths=scratch, max_write_bytes_per_day="100MiB"), seconds=0.001)
    disk = found.paths[0].disk
    assert disk is not None
    assert 0 < disk.moved_bytes <= 5 << 20
    assert found.warnings == ()
    assert sum(counts(scratch / "state" / "tba").values()) == disk.moved_bytes
    spent = examine(OffloadConfig(storage_paths=scratch, max_write_bytes_per_day=1 << 20), seconds=0.001)
    assert spent.paths[0].disk == DiskFacts(direct=disk.direct)  # nothing was written
    finding = told(spent, Level.WARNING, "endurance allowance")
    assert "of the 1,048,576 bytes that may be written" in finding.text
    assert finding.do.startswith("raise max_write_bytes_per_day")


def test_shares_of_a_rank(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = OffloadConfig(storage_paths=scratch, cpu_budget="8GiB", nvme_budget="1GiB")
    facts = examine(config, seconds=0)
    assert (facts.memory.local_ranks, facts.memory.cpu_budget_bytes) == (4, 2 * GIB)
    assert facts.memory.nvme_budget_bytes == GIB // 4


def test_it_is_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["-m", "doctor", "--tier", "keep", "--json"])
    with pytest.raises(SystemExit) as ended:  # as `python -m tba` does
        runpy.run_module("tba", run_name="__main__")
    assert (ended.value.code, json.loads(capsys.readouterr().out)["works"]) == (0, True)


@pytest.mark.parametrize(
    ("gds", "seconds", "text"),
    [
        (True, 0.01, r"auto takes (posix|kvikio) in .*: measured: kvikio [\d.]+ GB/s .*, pinned memory [\d.]+ GB/s"),
        (True, 0.0, "auto takes posix in .*: `tba doctor` has not measured kvikio there"),
        (False, 0.01, "auto takes posix in .*: `tba doctor` has not measured kvikio there"),
    ],
)
def test_ways_from_a_device_are_compared_and_remembered(
    gds: bool, seconds: float, text: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kvikio in Python, and with memory of the host in place of the device's."""
    Kvikio(gds=gds).install(monkeypatch)
    setup = Setup("here", "A GPU", "26.10", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(scratch / "cache"))
    monkeypatch.setattr(examination, "probe_devices", lambda: (GPU,))
    monkeypatch.setattr(examination, "setup_of", lambda directory: setup)
    monkeypatch.setattr(examination, "active_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(way_probe, "BLOCK_BYTES", 1 << 16)
    config = OffloadConfig(tier="nvme", storage_paths=scratch)
    found = told(examine(config, seconds=seconds), Level.OK, "io_backend").text
    assert re.match(text, found), found
    assert bool(read(measured_file())) == (gds and seconds > 0)
    assert found == told(examine(config, seconds=0), Level.OK, "io_backend").text, "a later look says the same"
    assert set(os.listdir(scratch)) <= {"cache"}
