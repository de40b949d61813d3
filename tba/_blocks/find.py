"""Find: which of a model's modules are its blocks, and which of their modules are parts that may run again alone."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

import torch
from torch import nn

from .._errors import ConfigError

# Containers, which repeat by accident of how a model is put together.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Wrappers whose forward gathers weights, by name, as they need not be imported: what they wrap may be a block.
_GATHERS = "FullyShardedDataParallel"
# Those that have no forward, so that naming one can only mean its children.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
_MOST_NAMED = 5  # names that an error lists
# Of what the class that saves most saves: another class with this share of it, of more and smaller modules, is better.
_NEARLY = 0.9
_SHARE = 0.1  # of what a block saves: a part of it that saves less is not worth trying


def candidates(model: nn.Module) -> list[nn.Module]:
    """List modules that may be blocks: of classes with at least two of them, which have modules of their own."""
    if _is_replicated(model):
        return []
    traced = _in_compiled(model)
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, _CONTAINERS) or type(module).__name__ == _GATHERS:
            continue
        if module is not model and any(module.children()):
            by_class.setdefault(type(module), []).append(module)
    alike = (module for same in by_class.values() if len(same) > 1 for module in same)
    return [module for module in alike if module not in traced and wrappable(module)]


def named(model: nn.Module | None, names: tuple[str, ...]) -> list[nn.Module]:
    """List the modules that settings name as blocks, by path or class, in the model's order.

    Raises:
        ConfigError: no module has such a name, or those that do cannot recompute.
    """
    if model is None:
        raise ConfigError(f"blocks={names!r} was given without a model to find them in: offload_context(model, ...)")
    if _is_replicated(model):
        raise ConfigError(f"blocks={names!r} was given with nn.DataParallel, under which nothing recomputes; use DDP")
    inside = {path: module for path, module in model.named_modules() if path}
    traced = _in_compiled(model)
    chosen: set[nn.Module] = set()
    for name in names:
        found = inside.get(name)
        if found is None:
            alike = [module for module in inside.values() if name in _names_of(type(module))]
        elif isinstance(found, _NEVER_CALLED) or (isinstance(found, nn.Sequential) and len(names) == 1):
            alike = list(found.children())
        else:
            alike = [found]
        if not alike:
            raise ConfigError(_nothing_named(name, model, inside))
        free = [module for module in alike if module not in traced and wrappable(module)]
        if not free:
            raise ConfigError(
                f"blocks={name!r} names {len(alike)} modules of {type(model).__name__}, none of which can recompute: "
                "they are compiled, part of a compiled module, or something has replaced their forward; name others, "
                "or attach before that is done"
            )
        chosen.update(free)
    return [module for module in inside.values() if module in chosen]


def _names_of(kind: type[nn.Module]) -> set[str]:
    """Give the names by which a class may be asked for, those of the classes it is made from included."""
    return {name for each in kind.__mro__ for name in (each.__name__, f"{each.__module__}.{each.__qualname__}")}


def _nothing_named(name: str, model: nn.Module, inside: Mapping[str, nn.Module]) -> str:
    have = {type(module).__name__ for module in candidates(model)}
    have |= {path for path, module in inside.items() if isinstance(module, _CONTAINERS)}
    asked = name.rpartition(".")[2] if name not in inside and ".<locals>." in name else name
    near = difflib.get_close_matches(asked, sorted(have | inside.keys()), n=_MOST_NAMED, cutoff=0.5)
    found = near or sorted(have)[:_MOST_NAMED]
    text = f"blocks={name!r} names no class of modules in {type(model).__name__}, and no path to one"
    if name in inside:
        text = f"blocks={name!r} is a {type(inside[name]).__name__} without children"
    return f"{text}; the nearest it has: {', '.join(map(repr, found))}" if found else f"{text}: it has none inside"


def wrappable(module: nn.Module) -> bool:
    """Whether its forward may be replaced: it is Python, and no compiled one takes its place."""
    return not isinstance(module, torch.jit.ScriptModule) and not _is_compiled(module) and "forward" not in vars(module)


def _is_replicated(model: nn.Module) -> bool:
    """Whether DataParallel copies modules with their attributes: a copy would call the original's forward."""
    return any(isinstance(module, nn.DataParallel) and len(module.device_ids) > 1 for module in model.modules())


def _in_compiled(model: nn.Module) -> set[nn.Module]:
    """Collect the compiled modules of a model and all that they contain.

    The forward of an inner one is traced into the code around it. With another in its place that is compiled again, and
    differently: the graph breaks there, and kernels that are fused in other ways round in other ways.
    """
    return {inner for module in model.modules() if _is_compiled(module) for inner in module.modules()}


def _is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, or `torch.compile` with the module or its forward."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    # All that torch.compile returns has this method.
    return any(hasattr(each, "get_compiler_config") for each in (module, getattr(module, "forward", None)))


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


def parts(blocks: Collection[nn.Module], saved_bytes: Mapping[nn.Module, int]) -> list[nn.Module]:
    """Choose modules inside of blocks that are worth running again without the rest: the outermost, by their bytes."""
    found: dict[nn.Module, None] = {}
    for block in blocks:
        most = saved_bytes[block]
        chosen = set(blocks)  # and with what is found, all that is inside of that
        for module in block.modules():
            if module not in chosen and _SHARE * most <= saved_bytes.get(module, -1) < _NEARLY * most:
                found[module] = None
                chosen.update(module.modules())
    return list(found)
