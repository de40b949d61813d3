"""Find: which of a model's modules are its blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

# Containers, which repeat by accident of how a model is put together.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Of what the class that saves most saves: another class with this share of it, of more and smaller modules, is better.
_NEARLY = 0.9


def candidates(model: nn.Module) -> list[nn.Module]:
    """List modules that may be blocks: of classes with at least two of them, which have modules of their own."""
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        if module is not model and not isinstance(module, _CONTAINERS) and any(module.children()):
            by_class.setdefault(type(module), []).append(module)
    return [module for alike in by_class.values() if len(alike) > 1 for module in alike if wrappable(module)]


def wrappable(module: nn.Module) -> bool:
    """Whether its forward may be replaced: it is Python, and no compiled one takes its place."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(module, "_compiled_call_impl", None) is None and "forward" not in vars(module)


def blocks(saved_bytes: Mapping[nn.Module, int]) -> list[nn.Module]:
    """Choose the class of modules that saved most, given what each has saved with all that is inside of it."""
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in saved_bytes:
        by_class.setdefault(type(module), []).append(module)
    total = {kind: sum(saved_bytes[module] for module in alike) for kind, alike in by_class.items()}
    most = max(total.values(), default=0)
    if not most:
        return []
    near = [kind for kind, nbytes in total.items() if nbytes >= _NEARLY * most]
    return by_class[max(near, key=lambda kind: (len(by_class[kind]), total[kind]))]
