"""Report: facts and findings as one screen for people, or as plain data for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tba._config import Setting
from tba._memory.limits import default_window_bytes
from tba._sizes import size

from ._checks import Facts, Finding, Level, PathReport

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "bold red"}

Row = tuple[str, str]  # a label, empty where a line continues, and a text


def show(facts: Facts, findings: Sequence[Finding], *, works: bool) -> None:
    """Print what was found, the settings in force, the findings and the verdict."""
    console = Console(highlight=False)
    for block in (rows(facts), setting_rows(facts)):
        console.print(_grid((Text(label, "bold"), Text(text)) for label, text in block))
        console.print()
    console.print(_grid(_finding_lines(findings)))
    verdict = Level.OK if works else Level.FAILURE
    console.print(Text(f"tier {facts.tier} {'can work' if works else 'cannot work'} here", _STYLES[verdict]))


def plain(value: Any) -> Any:
    """The same in what JSON knows: objects, lists, texts, numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(entry) for name, entry in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def rows(facts: Facts) -> Iterator[Row]:
    """What was found."""
    for path in facts.paths:
        yield from _path_rows(path)
    memory = facts.memory
    yield "memory", f"{_size(memory.free_bytes)} free of {_size(memory.total_bytes)} (machine and cgroup)"
    shared = f", the node's divided by {memory.local_ranks} ranks" if memory.local_ranks > 1 else ""
    disk = f", {_size(memory.nvme_budget_bytes)} of disk" if facts.paths else ""
    yield "", f"budgets: {_size(memory.cpu_budget_bytes)} of memory{disk}{shared}"
    yield "", f"locked memory (RLIMIT_MEMLOCK): {_size(memory.locked_limit_bytes)}"
    if not facts.devices:
        yield "GPU", "no CUDA device"
    for device in facts.devices:
        yield f"cuda:{device.index}", f"{device.name}, {_size(device.free_bytes)} free of {_size(device.total_bytes)}"
        link = device.link
        told = f"{link.width} lanes at {link.speed_gt_s:g} GT/s" if link else "link not shown by the system"
        yield "", f"PCIe {device.bus_id}: {told}"
        yield "", f"pinned copies: {_rate(device.to_device_bytes_per_s)} in, {_rate(device.to_host_bytes_per_s)} out"
    yield "kvikio", facts.kvikio.error or f"{facts.kvikio.version}, mode {facts.kvikio.mode or 'not asked'}"
    yield "allocator", f"{facts.allocator.in_force} (tba run would choose {facts.allocator.best})"
    if facts.endurance.limit_bytes is not None:
        yield "written", f"{_size(facts.endurance.written_today_bytes)} today of {_size(facts.endurance.limit_bytes)}"


def setting_rows(facts: Facts) -> Iterator[Row]:
    """The settings in force: a line for each that somebody gave, with where it came from, and the defaults together."""
    label = "settings"
    for setting in facts.settings:
        if setting.origin != "default":
            yield label, f"{setting.name} = {value_text(setting.value)}  (from {setting.origin})"
            label = ""
    defaults = [f"{s.name} = {default_text(s, facts)}" for s in facts.settings if s.origin == "default"]
    yield label, f"by default: {', '.join(defaults)}"


def default_text(setting: Setting, facts: Facts) -> str:
    """What a default means on this machine: None stands for something in every setting."""
    memory = facts.memory
    if setting.value is not None:
        return value_text(setting.value)
    disk = "" if memory.nvme_budget_bytes is None else f" = {size(memory.nvme_budget_bytes)}"
    window_bytes = default_window_bytes(memory.total_bytes, min((d.total_bytes for d in facts.devices), default=None))
    ranks = f", divided by {memory.local_ranks} ranks," if memory.local_ranks > 1 else ""
    means = {
        "storage_paths": ":".join(path.path for path in facts.paths) or "below the user's cache",
        "memory_budget": "what is free, less a margin",
        "cpu_budget": f"half of the memory{ranks} = {size(memory.cpu_budget_bytes)}",
        "nvme_budget": f"80% of the free disk{ranks}{disk}",
        "staging_bytes": size(window_bytes),
        "prefetch_bytes": f"by the largest tensor, at most {size(window_bytes)}",
        "io_threads": f"{facts.io_threads} a path",
        "max_write_rate": "no limit",
        "max_read_rate": "no limit",
        "max_write_bytes_per_day": "no limit",
    }
    return means.get(setting.name, "none")


def value_text(value: Any) -> str:
    """A setting's value for people."""
    if hasattr(value, "human_readable"):  # a size, which knows no spaces
        return _size(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ":".join(str(path) for path in value)
    return str(value)


def _path_rows(path: PathReport) -> Iterator[Row]:
    yield "path", path.path
    if not path.facts.exists:
        return
    mount, disk = path.facts.mount, path.disk
    yield "", f"{mount.kind or 'file system'} on {mount.source or 'an unknown device'}, {_size(path.free_bytes)} free"
    if disk is None:
        return
    yield "", f"direct I/O: {f'yes, aligned to {disk.alignment} bytes' if disk.direct else 'no'}"
    for speed in disk.speeds:
        rates = f"write {_rate(speed.write_bytes_per_s)}, read {_rate(speed.read_bytes_per_s)}"
        yield "", f"blocks of {_size(speed.block_bytes)}: {rates}"


def _finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[Text, Text]]:
    for finding in findings:
        line = Text.assemble((finding.subject, "bold"), f": {finding.text}")
        if finding.do:
            line.append(f"\n-> {finding.do}")
        yield Text(finding.level, _STYLES[finding.level]), line


def _grid(lines: Iterator[tuple[Text, Text]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    return table


def _size(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else size(nbytes)


def _rate(bytes_per_s: float | None) -> str:
    return "not measured" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
