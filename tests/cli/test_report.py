"""The report of `tba doctor`: facts and settings as lines for people, and as plain data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from support.doctor import DISK, FIT, GIB, GPU
from tba import OffloadConfig, describe
from tba._storage_path import PathFacts
from tba.cli._checks import EnduranceReport
from tba.cli._report import plain, rows, setting_rows, value_text


def test_rows_say_every_fact() -> None:
    endurance = EnduranceReport(limit_bytes=GIB, written_today_bytes=GIB // 2)
    facts = replace(FIT, devices=(GPU,), endurance=endurance, memory=replace(FIT.memory, local_ranks=2))
    text = "\n".join(f"{label}|{text}" for label, text in rows(facts))
    for line in (
        "path|/disk",
        "|ext4 on /dev/vda, 100.0 GiB free",
        "|direct I/O: yes, aligned to 512 bytes",
        "|blocks of 16.0 MiB: write 2.00 GB/s, read 3.00 GB/s",
        "memory|50.0 GiB free of 64.0 GiB (machine and cgroup)",
        "|budgets: 32.0 GiB of memory, 80.0 GiB of disk, the node's divided by 2 ranks",
        "|locked memory (RLIMIT_MEMLOCK): 8.0 MiB",
        "cuda:0|A GPU, 79.0 GiB free of 80.0 GiB",
        "|PCIe 0000:3b:00.0: 16 lanes at 16 GT/s",
        "|pinned copies: 25.00 GB/s in, 26.00 GB/s out",
        "kvikio|kvikio is not installed",
        "allocator|jemalloc (tba run would choose jemalloc)",
        "written|512.0 MiB today of 1.0 GiB",
    ):
        assert line in text.splitlines()
    absent = replace(FIT, paths=(replace(DISK, facts=PathFacts(path="/disk", exists=False), disk=None),))
    assert list(rows(absent))[:2] == [
        ("path", "/disk"),
        ("memory", "50.0 GiB free of 64.0 GiB (machine and cgroup)"),
    ]


def test_settings_are_shown_with_their_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBA_STAGING_BYTES", "1.5GiB")
    config = OffloadConfig(tier="nvme", storage_paths=["/a", "/b"])
    shown = list(setting_rows(replace(FIT, settings=tuple(describe(config)))))
    assert shown[:3] == [
        ("settings", "tier = nvme  (from argument)"),
        ("", "storage_paths = /a:/b  (from argument)"),
        ("", "staging_bytes = 1.5 GiB  (from TBA_STAGING_BYTES)"),
    ]
    assert shown[3][1].startswith(
        "by default: compress = none, rank = none, seed = 0, io_backend = auto, min_tensor_bytes = 1.0 MiB"
    )
    assert [value_text(value) for value in (True, False, 60.0)] == ["on", "off", "60.0"]


def test_a_default_says_what_it_means_on_this_machine() -> None:
    facts = replace(FIT, settings=tuple(describe(OffloadConfig())), io_threads=1)
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


def test_plain_is_what_json_gives_back() -> None:
    data = plain(replace(FIT, devices=(GPU,)))
    assert json.loads(json.dumps(data)) == data
    assert data["paths"][0]["disk"]["speeds"][1] == {
        "block_bytes": 16 << 20,
        "write_bytes_per_s": 2e9,
        "read_bytes_per_s": 3e9,
        "moved_bytes": GIB,
    }
    assert data["devices"][0]["link"]["width"] == 16
