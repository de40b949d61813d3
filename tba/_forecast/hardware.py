"""Hardware: public figures of cards and SSDs, each with its source.

Memory is in the decimal gigabytes of the data sheet. What a card has beyond that (an H100 of 80 GB, which are 74.5 GiB,
shows 79.6 GiB) is for the CUDA context and the allocator's rounding. Rates of PCIe and NVLink-C2C are for one
direction; transfers reach `_LINK_SHARE` of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from .._errors import ConfigError

# Shares of the data sheets' peaks that operators of a training reach: chosen once, so that forecasts of published runs
# (MosaicML llm-foundry, see docs/forecast.md) are neither too short nor too long in the median. A100 reaches more
# of its peak than H100; for all other cards H100's share is taken.
_MATMUL_SHARE, _AMPERE_SHARE, _MEMORY_SHARE = 0.50, 0.68, 0.80
_LINK_SHARE = 0.8  # of PCIe's and C2C's raw rate: packets have headers
_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """What computes.

    Attributes:
        flops_per_s: what matrix products reach, by dtype; `None` is for all other dtypes.
        memory_bytes_per_s: what operators reach that only read and write memory.
        memory_bytes: its memory.
        link_bytes_per_s: to host memory, and as many back.
        op_s: minimum time of an operator.
        like_cuda: whether its operators save what CUDA's save.
        source: of the figures.
    """

    name: str
    flops_per_s: Mapping[torch.dtype | None, float]
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    source: str
    op_s: float = 0.0
    like_cuda: bool = True

    def seconds(self, flops: float, nbytes: int, dtype: torch.dtype | None) -> float:
        """Time of an operator: that of its computation or of its memory traffic, whichever is longer."""
        rate = self.flops_per_s.get(dtype, self.flops_per_s[None])
        return max(flops / rate, nbytes / self.memory_bytes_per_s, self.op_s)

    def shared(self, ranks: int) -> Device:
        """Return what each of so many ranks of a node has: a card of its own, or its part of the CPU's memory."""
        return self if self.like_cuda else replace(self, memory_bytes=self.memory_bytes // ranks)


@dataclass(frozen=True)
class Disk:
    """One SSD, or several equal ones, striped.

    Attributes:
        write_bytes_per_s, read_bytes_per_s: sustained rates of all together, for each rank.
        endurance_bytes: that all together may be written, by the vendor's warranty; None: unknown.
        source: of the figures.
        ranks: that share them, and move as much at the same time.
    """

    name: str
    write_bytes_per_s: float
    read_bytes_per_s: float
    endurance_bytes: float | None
    source: str
    count: int = 1
    ranks: int = 1

    def shared(self, ranks: int) -> Disk:
        """Return what each of so many ranks of a node has of them."""
        write, read = self.write_bytes_per_s / ranks, self.read_bytes_per_s / ranks
        return replace(self, write_bytes_per_s=write, read_bytes_per_s=read, ranks=ranks)

    def years(self, bytes_per_day: float) -> float | None:
        """Years until the endurance is used up; None if nothing is written, or it is unknown."""
        if self.endurance_bytes is None or bytes_per_day <= 0:
            return None
        return self.endurance_bytes / bytes_per_day / 365


def _card(name: str, half: float, single: float, memory: float, rate: float, link: float, source: str) -> Device:
    """Make a card from its data sheet: TFLOP/s (dense bf16 and fp16; fp32), GB, GB/s of memory, GB/s each way."""
    share = _AMPERE_SHARE if name.startswith("a100") else _MATMUL_SHARE
    flops = {torch.bfloat16: half, torch.float16: half, None: single}
    return Device(
        name,
        {dtype: share * each * _T for dtype, each in flops.items()},
        memory_bytes_per_s=_MEMORY_SHARE * rate * _G,
        memory_bytes=round(memory * _G),
        link_bytes_per_s=_LINK_SHARE * link * _G,
        source=source,
    )


# PyTorch computes float32 products in fp32 unless TF32 is allowed. GeForce: fp16 and bf16 with fp32 sums.
_DEVICES = (
    _card("a100", 312, 19.5, 80, 2039, 32, "NVIDIA A100 80GB SXM data sheet; PCIe gen 4 x16"),
    _card("a100-40", 312, 19.5, 40, 1555, 32, "NVIDIA A100 40GB SXM data sheet; PCIe gen 4 x16"),
    _card("h100", 989.4, 66.9, 80, 3350, 64, "NVIDIA H100 SXM data sheet, without sparsity; PCIe gen 5 x16"),
    _card("h100-pcie", 756, 51, 80, 2000, 64, "NVIDIA H100 PCIe data sheet, without sparsity; PCIe gen 5 x16"),
    _card("h200", 989.4, 66.9, 141, 4800, 64, "NVIDIA H200 SXM data sheet, without sparsity; PCIe gen 5 x16"),
    _card("gh200", 989.4, 66.9, 96, 4000, 450, "NVIDIA GH200 data sheet (96 GB HBM3); NVLink-C2C 900 GB/s both ways"),
    _card(
        "gh200-144",
        989.4,
        66.9,
        144,
        4900,
        450,
        "NVIDIA GH200 data sheet (144 GB HBM3e); NVLink-C2C 900 GB/s both ways",
    ),
    _card(
        "gb200", 2500, 80, 186, 8000, 225, "NVIDIA GB200 NVL72 data sheet, a 72nd, without sparsity; half of NVLink-C2C"
    ),
    _card("b200", 2250, 75, 180, 8000, 64, "NVIDIA DGX B200 data sheet, an eighth, without sparsity; PCIe gen 5 x16"),
    _card("b300", 2250, 75, 270, 7700, 128, "NVIDIA HGX B300 data sheet, an eighth, without sparsity; PCIe gen 6 x16"),
    _card("l40s", 362, 91.6, 48, 864, 32, "NVIDIA L40S data sheet, without sparsity; PCIe gen 4 x16"),
    _card("rtx3090", 71, 35.6, 24, 936, 32, "NVIDIA GA102 whitepaper, without sparsity; PCIe gen 4 x16"),
    _card("rtx4090", 165.2, 82.6, 24, 1008, 32, "NVIDIA Ada whitepaper, without sparsity; PCIe gen 4 x16"),
    _card("rtx4060-laptop", 29.1, 14.6, 8, 256, 16, "NVIDIA Ada whitepaper, 24 SMs at 2.37 GHz (115 W); PCIe gen 4 x8"),
    _card("rtx5090", 209.5, 104.8, 32, 1792, 64, "NVIDIA RTX Blackwell whitepaper, without sparsity; PCIe gen 5 x16"),
)
DEVICES = {device.name: device for device in _DEVICES}

# Drives without a cache that a long write would fill: the data sheet's rates hold for hours.
_DISKS = (
    Disk("gen3", 2.7 * _G, 3.5 * _G, 1200 * _T, "Samsung 970 PRO 1 TB data sheet (MLC, no SLC cache): 1,200 TBW"),
    Disk("gen4", 5.6 * _G, 6.8 * _G, 14016 * _T, "Micron 7450 PRO 7.68 TB data sheet: 1 drive write a day, 5 years"),
    Disk("gen5", 10 * _G, 14 * _G, 35040 * _T, "Micron 9550 MAX 6.4 TB data sheet: 35,040 TBW, random writes"),
    Disk("gen6", 14 * _G, 28 * _G, 35040 * _T, "Micron 9650 MAX 6.4 TB product brief: 3 drive writes a day, 5 years"),
)
DISKS = {disk.name: disk for disk in _DISKS}


def device_named(name: str) -> Device:
    """Look up a card, or make one of figures: "48GiB,165TFLOPS,25GB/s". Raises ConfigError, which lists what is known.

    The figures, in any order: memory; TFLOP/s of bf16, and of fp32; GB/s to the host, and of its memory, which is the
    larger. What is not given is as in the known card of the nearest TFLOP/s.
    """
    if "," in name:
        return _own_card(name)
    found = DEVICES.get(name.lower())
    if found is None:
        raise _unknown("--device", name, (*DEVICES, "here", f"your own, such as {_OWN_CARD}"))
    return found


def _own_card(text: str) -> Device:
    sizes, flops, rates = _figures("--device", text, _OWN_CARD)
    if len(sizes) != 1 or not 1 <= len(flops) <= 2 or not 1 <= len(rates) <= 2:
        raise _not_figures("--device", text, _OWN_CARD)
    half = max(flops)
    like = min(_DEVICES, key=lambda card: abs(math.log(_half(card) / half)))
    single = min(flops) if len(flops) == 2 else half * like.flops_per_s[None] / like.flops_per_s[torch.bfloat16]
    rate = max(rates) if len(rates) == 2 else like.memory_bytes_per_s / _MEMORY_SHARE
    assumed = [what for what, given in (("fp32", flops), ("memory rate", rates)) if len(given) == 1]
    of_like = f"; {' and '.join(assumed)} as {like.name}'s" if assumed else ""
    source = f"your figures, {text}{of_like}"
    return _card("your card", half / _T, single / _T, sizes[0] / _G, rate / _G, min(rates) / _G, source)


def _half(card: Device) -> float:
    """FLOP/s of a known card's data sheet, in bf16."""
    return card.flops_per_s[torch.bfloat16] / (_AMPERE_SHARE if card.name.startswith("a100") else _MATMUL_SHARE)


def disk_named(name: str) -> Disk | None:
    """Look up an SSD, or several by "gen5x4", or make one of figures: "5GB/s,6GB/s,600TB" for writing, reading and
    endurance. None for "none". Raises ConfigError, which lists what is known.
    """
    if name.lower() == "none":
        return None
    if "/s" in name.lower():
        endurance, flops, rates = _figures("--disk", name, _OWN_DISK)
        if flops or len(endurance) > 1 or not 1 <= len(rates) <= 2:
            raise _not_figures("--disk", name, _OWN_DISK)
        return Disk("your disk", rates[0], rates[-1], endurance[0] if endurance else None, f"your figures, {name}")
    match = re.fullmatch(r"(gen\d)(?:x([1-9]\d?))?", name.lower())
    if match is None or match[1] not in DISKS:
        known = (*(f"{each}xN (N of them)" for each in DISKS), "none", f"your own, such as {_OWN_DISK}")
        raise _unknown("--disk", name, known)
    one, count = DISKS[match[1]], int(match[2] or 1)
    endurance_bytes = None if one.endurance_bytes is None else count * one.endurance_bytes
    write, read = count * one.write_bytes_per_s, count * one.read_bytes_per_s
    return Disk(f"{one.name}x{count}", write, read, endurance_bytes, one.source, count)


def _figures(option: str, text: str, example: str) -> tuple[list[float], list[float], list[float]]:
    """Read figures: bytes, FLOP/s, and bytes per second, each in the order given."""
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*(TFLOPS|(?:([KMGT])(i?)B)(/s)?)\s*", part, re.IGNORECASE)
        if match is None or float(match[1]) == 0:
            raise _not_figures(option, text, example)
        number = float(match[1])
        if match[3] is None:
            found[1].append(number * _T)
        else:
            factor = (1024 if match[4] else 1000) ** ("KMGT".index(match[3].upper()) + 1)
            found[2 if match[5] else 0].append(number * factor)
    return found


_OWN_CARD, _OWN_DISK = "48GiB,165TFLOPS,25GB/s", "5GB/s,6GB/s"


def _not_figures(option: str, text: str, example: str) -> ConfigError:
    what = "memory, TFLOPS, GB/s to the host" if option == "--device" else "GB/s to write, GB/s to read"
    return ConfigError(f"{option} {text!r} has other figures than {what}; write them as {example}")


def _unknown(option: str, name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"{option} {name!r} is not known; known are {', '.join(known)}")
