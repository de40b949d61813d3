"""The codec benchmark: speed, size and error of every codec, of `compact_linear`, and of presets on a Llama block.

Also how much weight gradients vary if linear layers save projections, or samples of rows, of their inputs.

Speeds are GB (10^9 bytes) of input per second on one core, medians over rounds in which all codecs take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Annotated, Any

import typer

from ._processes.arms import Arm, Spec, ask
from ._report.bar import Bar, bar_table
from ._report.environment import environment_block
from ._report.options import Quick
from ._report.progress import progress
from ._report.ratios import median_ratio, spread
from ._report.results import MIB, Column, Grid, Result

METHODS = ("gaussian", "orthonormal", "wta-crs")
PRESETS = ("exact", "safe8", "balanced", "max")
# The codec that encodes nearly all bytes of the presets, and what it has to reach: (encode, decode) in GB/s.
_SPEED_OF, _SPEED_BARS = "int8/64", {"float32": (3.5, 4.0), "bfloat16": (1.5, 2.0)}
_STORED_BARS = {"exact": 0.55, "safe8": 0.30, "balanced": 0.24}
_LINEAR_BAR = 1.0
# [tokens, width] of the tensor: 64 MiB of fp32, more than caches hold.
_TENSOR = {"tokens": 16_384, "width": 1024}
_LAYER = {"tokens": 4096, "width": 1024, "out": 4096, "rank": 256}
_BLOCK = {"width": 512, "heads": 8, "batch": 4, "sequence": 128}
_GPT = {"layers": 4, "width": 256, "heads": 8, "sequence": 128, "batch": 16, "steps": 300, "share": 0.25, "draws": 50}
_TINY_TENSOR = {"tokens": 128, "width": 64}
_TINY_LAYER = {"tokens": 64, "width": 64, "out": 128, "rank": 16}
_TINY_BLOCK = {"width": 128, "heads": 4, "batch": 2, "sequence": 64}
_TINY_GPT = {**_GPT, "layers": 2, "width": 64, "heads": 2, "sequence": 64, "batch": 4, "steps": 20, "draws": 20}


def codec(
    rounds: Annotated[int, typer.Option(min=1, help="Timed turns of each codec and layer.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="For the layer and the block; codecs get one.")] = 2,
    quick: Quick = False,
) -> Result:
    """Speed, size and error of every codec; compact_linear; presets on a Llama block; weight gradients."""
    rounds = 2 if quick else rounds
    tensor, layer, block = (_TINY_TENSOR, _TINY_LAYER, _TINY_BLOCK) if quick else (_TENSOR, _LAYER, _BLOCK)
    gpt = _TINY_GPT if quick else _GPT
    specs = [
        _spec("codec", "codec_speed:measure_codecs", 1, {**tensor, "rounds": rounds}),
        _spec("linear", "codec_speed:measure_linear", threads, {**layer, "rounds": rounds, "threads": threads}),
        _spec("block", "stored_bytes:measure_block", threads, {**block, "presets": PRESETS, "threads": threads}),
        _spec(
            "gradients",
            "weight_gradients:measure_weight_gradients",
            threads,
            {**gpt, "methods": METHODS, "threads": threads},
        ),
    ]
    arms: dict[str, Arm] = {}

    def told(name: str, note: str) -> None:
        bar.advance(f"{name}: {note}")

    with progress("codec", 2 * (1 + rounds) + len(PRESETS) + 1 + len(METHODS)) as bar:
        for spec in specs:
            arms[spec.name] = ask(spec, tell=partial(told, spec.name))
    codecs, seconds, stored = arms["codec"].about["codecs"], arms["linear"].about["seconds"], arms["block"].about
    methods = arms["gradients"].about["methods"]
    bars = make_bars(codecs, seconds, stored)
    tables = [
        _speed_table(codecs, tensor, rounds),
        _block_table(stored, block),
        _gradient_table(methods, gpt),
        bar_table(bars),
    ]
    data = {
        "codecs": codecs,
        "tensor": tensor,
        "linear": {**layer, "seconds": seconds},
        "block": {**block, **stored},
        "gradients": {**gpt, "methods": methods},
        "bars": [bar.data() for bar in bars],
        "rounds": rounds,
    }
    environment = environment_block(arms, threads=threads)
    return Result(theme="codec", tables=tables, data=data, environment=environment)


def make_bars(
    codecs: Sequence[Mapping[str, Any]], seconds: Mapping[str, Sequence[float]], stored: Mapping[str, Any]
) -> list[Bar]:
    """Compare speeds, the layer's time, stored bytes and the exact preset's gradients with their limits."""
    bars: list[Bar] = []
    for facts in codecs:
        if facts["codec"] != _SPEED_OF:
            continue
        for direction, limit in zip(("encode", "decode"), _SPEED_BARS[facts["dtype"]], strict=True):
            speeds = [speed / 1e9 for speed in facts[f"{direction}_bytes_per_s"]]
            what = f"{facts['codec']} {direction}, {facts['dtype']}, one core"
            bars.append(
                Bar(what=what, measured=median(speeds), limit=limit, sign=">=", unit=" GB/s", spread=spread(speeds))
            )
    ratio = median_ratio(seconds["compact_linear"], seconds["nn.Linear"])
    bars.append(Bar(what="compact_linear at n/4 / nn.Linear, forward and backward", measured=ratio, limit=_LINEAR_BAR))
    for name, found in stored["presets"].items():
        share, what = found["stored_bytes"] / stored["plain_bytes"], "stored bytes of a Llama block in bf16"
        bars.append(Bar(what=f"{what}, {name} / plain", measured=share, limit=_STORED_BARS.get(name)))
    differ = float(not stored["presets"]["exact"]["gradients_bit_equal"])
    return [*bars, Bar(what="exact: gradients that differ in a bit", measured=differ, limit=0, unit="")]


def _spec(name: str, role: str, threads: int, options: Mapping[str, Any]) -> Spec:
    return Spec(name=name, role=role, options=options, allocator="auto", threads=threads)


def _speed_table(codecs: Sequence[Mapping[str, Any]], tensor: Mapping[str, int], rounds: int) -> Grid:
    def error(facts: Mapping[str, Any]) -> str:
        found = facts["error"]
        return f"{found:.2e} ({-20 * math.log10(found):.1f} dB)" if found else "none"

    columns: list[Column] = [
        ("codec", lambda facts: str(facts["codec"])),
        ("of", lambda facts: str(facts["dtype"])),
        ("encode GB/s", lambda facts: _speed(facts["encode_bytes_per_s"])),
        ("decode GB/s", lambda facts: _speed(facts["decode_bytes_per_s"])),
        ("size", lambda facts: f"{facts['packed_bytes'] / facts['input_bytes']:.4f}"),
        ("error", error),
    ]
    note = (
        f"A tensor of [{tensor['tokens']}, {tensor['width']}], one core, medians over {rounds} rounds ± half the "
        "interquartile range. Size: packed / input. Error: relative error (signal to noise) of one draw of normal "
        "values; for a projection, of what it decodes, which its weight gradient does not use."
    )
    return Grid.of("Codecs", codecs, columns, note)


def _speed(bytes_per_s: Sequence[float]) -> str:
    return f"{median(bytes_per_s) / 1e9:.2f} ± {spread(bytes_per_s) / 1e9:.2f}"


def _block_table(stored: Mapping[str, Any], block: Mapping[str, int]) -> Grid:
    plain, presets = stored["plain_bytes"], stored["presets"]
    columns: list[Column] = [
        ("preset", str),
        ("MiB", lambda name: f"{presets[name]['stored_bytes'] / MIB:.2f}"),
        ("/ plain", lambda name: f"{presets[name]['stored_bytes'] / plain:.3f}"),
        ("gradients bit-equal", lambda name: "yes" if presets[name]["gradients_bit_equal"] else "no"),
        ("gradient's error", lambda name: f"{presets[name]['relative_error']:.2e}"),
        ("cosine", lambda name: f"{presets[name]['cosine']:.6f}"),
    ]
    title = f"A Llama block in bf16, width {block['width']}, {block['batch']} x {block['sequence']} tokens"
    note = (
        f"Counted by tba.audit. Plain PyTorch keeps {plain / MIB:.2f} MiB: the storages that autograd saves, "
        "each once, without weights. Error and cosine: of the gradient of all weights, against plain PyTorch's."
    )
    return Grid.of(title, presets, columns, note)


def _gradient_table(methods: Mapping[str, Any], gpt: Mapping[str, Any]) -> Grid:
    def column(method: str, number: str, form: str) -> Callable[[str], str]:
        return lambda role: f"{mean(layer[number] for layer in methods[method][role]):{form}}"

    columns: list[Column] = [
        ("layer", str),
        *((method, column(method, "variance", ".2f")) for method in methods),
        *((f"{method}, bytes", column(method, "bytes", ",.0f")) for method in methods),
    ]
    title = f"Variance of weight gradients at n*{gpt['share']:g}: a GPT of {gpt['layers']} x {gpt['width']}"
    note = (
        f"E |G' - G|^2 / |G|^2 over {gpt['draws']} draws, mean over blocks, after {gpt['steps']} steps on text, for a "
        f"batch of {gpt['batch']} x {gpt['sequence']} tokens. Bytes: what a layer saves of its input, indices included."
    )
    return Grid.of(title, methods["gaussian"], columns, note)
