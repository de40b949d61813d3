"""The gradients arm: variance of the weight gradients of a small GPT's linear layers, of projections and of samples.

The GPT trains on text for some steps. The input and the output gradient of each linear layer in its blocks are then
those of one more batch, and each method draws its weight gradients from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import compact

from .._processes.serve import Tell
from .._workload.gpt import GPT, GPTConfig
from .._workload.text import standard_library


def measure_weight_gradients(options: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Draw weight gradients at equal bytes and compare them with the exact ones.

    Options: `methods`, kinds of projection and "wta-crs"; `layers`, `width`, `heads`, `sequence`, `batch`; `steps` of
    training; `share` of the width as the rank; `draws` of each gradient; `threads`.

    Returns:
        For each method and each role of a layer in its block, a list over blocks: the `variance` of the gradient as a
        share of its square, `compact.Bias.ratio`, and the `bytes` saved, indices and factors included.
    """
    torch.set_num_threads(options["threads"])
    layers = _trained_layers(options, tell)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for method in options["methods"]:
        settings = {"method": method} if method == "wta-crs" else {"kind": method}
        roles = found[method] = {}
        for role, x, weight, grad in layers:
            rank = max(int(x.shape[1] * options["share"]), 1)
            draws = (_draw(x, weight, grad, rank, draw, settings) for draw in range(options["draws"]))
            measured = compact.bias(draws, grad.t() @ x)
            roles.setdefault(role, []).append(
                {
                    "variance": measured.error**2,
                    "bias_ratio": measured.ratio,
                    "bytes": _saved_bytes(x, weight, rank, settings),
                }
            )
        tell(method)
    return {"methods": found}


def _draw(x: Tensor, weight: Tensor, grad: Tensor, rank: int, key: int, settings: Mapping[str, Any]) -> Tensor:
    out = compact.compact_linear(x, weight, rank=rank, key=key, **settings)
    return torch.autograd.grad(out, weight, grad)[0]


def _saved_bytes(x: Tensor, weight: Tensor, rank: int, settings: Mapping[str, Any]) -> int:
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compact.compact_linear(x, weight, rank=rank, key=0, **settings)
    return sum(sizes)


def _trained_layers(options: Mapping[str, Any], tell: Tell) -> list[tuple[str, Tensor, Tensor, Tensor]]:
    """Train; return each layer's role, input [tokens, n], weight [out, n] and output gradient [tokens, out]."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{name: options[name] for name in ("layers", "width", "heads", "sequence")}))
    text, optimizer = standard_library(), torch.optim.AdamW(model.parameters(), lr=1e-3)

    def backward(index: int) -> None:
        optimizer.zero_grad()
        tokens, targets = text.batch(size=options["batch"], sequence=options["sequence"], seed=0, index=index)
        functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()

    for index in range(options["steps"]):
        backward(index)
        optimizer.step()
    tell("trained")
    found: list[tuple[str, Tensor, Tensor, Tensor]] = []

    def watch(role: str, layer: nn.Linear) -> None:
        def forward(layer: nn.Linear, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2)
            out.register_hook(lambda grad: found.append((role, x, layer.weight, grad.flatten(0, -2).clone())))

        layer.register_forward_hook(forward)

    for name, module in model.blocks.named_modules():
        if isinstance(module, nn.Linear):
            watch(name.rpartition(".")[2], module)
    backward(options["steps"])
    return found[::-1]
