"""The links benchmark: bandwidth between a device, pinned host memory and a file."""

from __future__ import annotations

from statistics import median
from typing import Annotated, Any

import typer

from ._processes.arms import Spec, ask
from ._processes.device import DEVICES
from ._report.environment import environment_block
from ._report.options import Device, Folder, Quick
from ._report.results import MIB, Grid, Result
from ._workload.tools import scratch_directory

_THREADS = 1  # nothing is computed


def links(
    device: Device = "cuda",
    path: Folder = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each link.")] = 5,
    quick: Quick = False,
) -> Result:
    """Bandwidth of a device's links: to pinned host memory, and to a file through it and by kvikio (2 minutes)."""
    here = DEVICES[device]
    if not here.apart:
        raise typer.BadParameter("a CPU has no link to its own memory: name a device with --device")
    sizes = {"pieces": 2, "piece_bytes": MIB} if quick else {"pieces": 16, "piece_bytes": 64 * MIB}
    rounds = 1 if quick else rounds
    directory = str(scratch_directory((path,) if path is not None else None).absolute())
    options = {"device": here.name, "directory": directory, "rounds": rounds, **sizes}
    arm = ask(Spec(name="links", role="links:measure_links", options=options, threads=_THREADS))
    environment = environment_block({"links": arm}, threads=_THREADS, card=here.card)
    data = {"links": arm.about, "rounds": rounds, **sizes}
    return Result(theme=here.theme("links"), tables=[_table(arm.about, sizes)], data=data, environment=environment)


def _table(found: dict[str, dict[str, Any]], sizes: dict[str, int]) -> Grid:
    def rate(link: dict[str, Any], way: str) -> str:
        return f"{median(link[way]) / 1e9:.2f}" if way in link else "-"

    rows = [(name, rate(link, "out"), rate(link, "back"), link.get("mode", "")) for name, link in found.items()]
    note = (
        f"{sizes['pieces']} pieces of {sizes['piece_bytes'] // MIB} MiB; medians. Host memory: by events on the stream "
        "of the copies. Files: from the first copy to the end of the last transfer, with direct I/O if there is any. "
        "kvikio is given the device's memory; gds: it makes no copy in host memory, compat: it does."
    )
    return Grid("GB/s between the device and", ("link", "out", "back", "mode"), rows, note)
