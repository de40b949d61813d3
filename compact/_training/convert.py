"""Convert: change linear layers of a model into compact ones in place, and back.

A converted layer stays the same module object with its parameters, buffers, hooks and state-dict names; its class and a
few attributes (`subspace` or `rows`) change. So a model may be converted before or after its weights are loaded, and
state dicts fit both forms.

Eligible modules are exactly `torch.nn.Linear`, or named Conv1D with a two-dimensional weight [in, out] and `nf` outputs
(transformers). Their weight needs a gradient and belongs to no other module. Subclasses are left alone, because their
forward may differ or never be called.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _seeds
from .._errors import ConvertError
from .._projection.projection import KINDS, ProjectionKind, check_rank
from .._projection.rows import Rows
from .._projection.shared_input import SharedInput
from .._projection.subspace import Subspace
from .linear import METHODS, Method, compact_linear, linear_into

# Layers that CompAct leaves alone (sections 3 and 4.1), by their names in common models: the attention output, whose
# input attention saves anyway, and everything outside the blocks.
PAPER_SKIP = (
    *("*.o_proj", "*.out_proj", "*.attention.output.dense", "*.attn.c_proj", "*.attention.dense"),
    *("*.self_attention.dense", "*.SelfAttention.o", "*.EncDecAttention.o", "*.out_lin"),
    *("*lm_head*", "*embed_out", "*predictions*", "*seq_relationship", "*classifier*", "*qa_outputs", "*score"),
    *("*pooler*", "*embed*"),
)

Skip = Sequence[str] | Callable[[str, nn.Module], bool]

_not_compiled: list[Callable[..., Tensor]] = []  # `_sampled`, once it is needed: it imports the compiler, in a second


class _Converted:
    """Base of converted layers. Never constructed: `convert` changes the class of a module."""

    weight: Any
    bias: Any
    shared: SharedInput | None
    original: type[nn.Module]


class _Compact(_Converted):
    """Base of layers that keep a projection."""

    subspace: Subspace

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # a mixin: `nn.Module` has it
        self._link()  # a copied parameter loses its attributes

    def _link(self) -> None:
        if getattr(self.weight, "subspace", None) is not self.subspace:
            self.weight.subspace = self.subspace

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], bit for bit as the original layer; its weight gradient goes to the subspace."""
        self._link()  # loading weights by assignment replaces the parameter
        weight = self.weight.t() if self.subspace.transposed else self.weight
        return linear_into(x, weight, self.bias, self.subspace, self.shared)

    def extra_repr(self) -> str:
        space, shape = self.subspace, self.weight.shape
        out = shape[space.transposed]
        return f"{space.width}, {out}, bias={self.bias is not None}, rank={space.rank}, kind={space.kind}"


class CompactLinear(_Compact, nn.Linear):
    """A converted `torch.nn.Linear`."""


class CompactConv1D(_Compact, nn.Module):
    """A converted Conv1D of transformers: a linear layer whose weight is [in, out]."""


class _Sampled(_Converted):
    """Base of layers that keep a sample of rows."""

    rows: Rows
    transposed: bool

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], bit for bit as the original layer; its weight gradient is unbiased."""
        weight = self.weight.t() if self.transposed else self.weight
        if torch.is_grad_enabled() and weight.requires_grad:
            return _apart()(self, x, weight)
        return nn.functional.linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        out = self.weight.shape[self.transposed]
        return f"{self.rows.width}, {out}, bias={self.bias is not None}, rank={self.rows.rank}, method=wta-crs"


def _sampled(layer: _Sampled, x: Tensor, weight: Tensor) -> Tensor:
    """Compute a sampled layer's output. Not compiled: each step has its own key, and would be compiled anew."""
    if layer.weight.is_inference():  # has no version, and no gradient
        return nn.functional.linear(x, weight, layer.bias)
    # The version changes with every optimizer step, and not before a checkpoint runs forward again.
    key, rows = _seeds.key(layer.rows.key, layer.weight._version), layer.rows
    return compact_linear(x, weight, layer.bias, rank=rows.rank, key=key, method="wta-crs", shared=layer.shared)


def _apart() -> Callable[..., Tensor]:
    if not _not_compiled:
        _not_compiled.append(torch.compiler.disable(_sampled))
    return _not_compiled[0]


class SampledLinear(_Sampled, nn.Linear):
    """A converted `torch.nn.Linear`."""

    transposed = False


class SampledConv1D(_Sampled, nn.Module):
    """A converted Conv1D of transformers: a linear layer whose weight is [in, out]."""

    transposed = True


def convert(
    model: nn.Module,
    *,
    rank: int | float,
    method: Method = "projection",
    kind: ProjectionKind = "gaussian",
    refresh: int | None = 50,
    alpha: float = 0.25,
    skip: Skip = PAPER_SKIP,
    share: bool = False,
    seed: int = 0,
) -> list[str]:
    """Make linear layers compact, in place. Train with `CompActAdamW`: no other optimizer sees their gradients.

    With `method="wta-crs"` (arXiv 2305.15265) a layer keeps some rows (tokens) of its input instead of a projection, as
    many bytes as a projection of the rank takes. Weight gradients are then full-size and unbiased, in `weight.grad`, so
    any optimizer, gradient clipping and DistributedDataParallel work as before. `kind`, `refresh` and `alpha` are not
    used. A step's samples depend on the seed, the layer, the inputs, and how often the weight has changed since it was
    made, so a run that resumes draws others than one that was not interrupted.

    The defaults are the paper's for pretraining (CompAct, arXiv 2410.15352, section 4.1); for fine-tuning it uses rank
    4 or 8, refresh 500 and alpha 4 or 2. It also scales the step of the attention output, which stays plain, by
    alpha / 2: to do so, give those weights a parameter group with that share of the learning rate.

    Under DistributedDataParallel, convert before wrapping, on every rank, from equal weights: converted weights are in
    neither its buckets nor its initial broadcast. Then call `CompActAdamW.reduce_gradients` before each step.

    Args:
        model: any module; if it is itself a linear layer, its own class changes.
        rank: r, 1 to the width of every converted layer; or a share of the width, a float in (0, 1]. With "wta-crs",
            the share rank / width of the rows is kept.
        method: "projection" (CompAct) or "wta-crs".
        kind: kind of projection: "gaussian" (the paper), "rademacher", "orthonormal", "sparse".
        refresh: T, steps between refreshes of the projection; None for never.
        alpha: factor of the update.
        skip: names of layers to leave alone, with wildcards as in `fnmatch`; or a function of name and module.
        share: one projection or sample, made once, for layers of one parent that read the same tensor (q, k and v; gate
            and up). The papers draw one for each.
        seed: seed of the run. Equal seeds and names give equal projections and samples.

    Returns:
        The names of the converted layers.

    Raises:
        RankError: a rank above a layer's width, naming the layer.
        ConvertError: no layer to convert, a layer that is compact already, a pattern of yours that matches no layer,
            or a number out of range. The model is unchanged.
    """
    _check(method, kind, refresh, alpha, rank)
    layers = _eligible(model, skip)
    ranks = [_rank_of(rank, name, _width(module)) for name, module in layers]  # all checked before any layer changes
    groups: dict[str, SharedInput] = {}
    for (name, module), number in zip(layers, ranks, strict=True):
        parent = name.rpartition(".")[0]
        key = _seeds.key(seed, parent if share else name, "parent" if share else "layer")
        shared = groups.setdefault(parent, SharedInput()) if share else None
        if method == "wta-crs":
            _sample(module, Rows(_width(module), number, key), shared)
        else:
            subspace = Subspace(name, kind, _width(module), number, alpha, refresh, key, _is_conv1d(module))
            _change(module, subspace, shared)
    if method == "wta-crs":
        _apart()  # now, rather than within a compiled forward
    if method == "projection":
        _ignored_by_ddp(model).extend(f"{name}.weight" if name else "weight" for name, _ in layers)
    return [name for name, _ in layers]


def _change(module: Any, subspace: Subspace, shared: SharedInput | None) -> None:
    module.original, module.subspace, module.shared = type(module), subspace, shared
    module.__class__ = CompactConv1D if subspace.transposed else CompactLinear
    module.weight.subspace = subspace


def _sample(module: Any, rows: Rows, shared: SharedInput | None) -> None:
    conv1d = _is_conv1d(module)
    module.original, module.rows, module.shared = type(module), rows, shared
    module.__class__ = SampledConv1D if conv1d else SampledLinear


def revert(model: nn.Module) -> list[str]:
    """Undo `convert`, keeping the trained weights. Drops gradients in the small space.

    Returns:
        The names of the reverted layers.

    Raises:
        ConvertError: no layer is compact.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, _Converted)]
    if not layers:
        raise ConvertError(f"{type(model).__name__} has no compact layer to revert: call convert first")
    ignored = _ignored_by_ddp(model)
    for name, module in layers:
        if hasattr(module.weight, "subspace"):
            del module.weight.subspace
        original = module.original
        for attribute in ("subspace", "rows", "shared", "original"):
            module.__dict__.pop(attribute, None)
        module.__class__ = original  # type: ignore[assignment]  # known only as a module
        weight = f"{name}.weight" if name else "weight"
        if weight in ignored:
            ignored.remove(weight)
    return [name for name, _ in layers]


def _eligible(model: nn.Module, skip: Skip) -> list[tuple[str, nn.Module]]:
    compact = [name for name, module in model.named_modules() if isinstance(module, _Converted)]
    if compact:
        raise ConvertError(f"layer {compact[0]!r} is compact already ({len(compact)} are): revert the model first")
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    linear = [
        (name, module) for name, module in model.named_modules() if type(module) is nn.Linear or _is_conv1d(module)
    ]
    skipped = _skipped(linear, skip)
    chosen, reasons = [], Counter[str]()
    for name, module in linear:
        weight: Any = module.weight
        if name in skipped:
            reasons["left out by skip"] += 1
        elif not weight.requires_grad:
            reasons["frozen"] += 1
        elif owners[id(weight)] > 1:
            reasons["sharing a weight with another module"] += 1
        else:
            chosen.append((name, module))
    if not chosen:
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise ConvertError(
            f"{type(model).__name__} has no linear layer to convert: {len(linear)} found"
            + (f" ({found}): unfreeze or skip less" if found else "; only exact nn.Linear and Conv1D are converted")
        )
    return chosen


def _skipped(linear: list[tuple[str, nn.Module]], skip: Skip) -> set[str]:
    if callable(skip):
        return {name for name, module in linear if skip(name, module)}
    if isinstance(skip, str):
        raise ConvertError(f"skip is the string {skip!r}: give a list of patterns, [{skip!r}]")
    skipped: set[str] = set()
    for pattern in skip:
        found = fnmatch.filter([name for name, _ in linear], pattern)
        if not found and pattern not in PAPER_SKIP:
            raise ConvertError(
                f"skip pattern {pattern!r} fits none of the {len(linear)} linear layers: compare with "
                f"{[name for name, _ in linear[:3]]}"
            )
        skipped.update(found)
    return skipped


def _is_conv1d(module: nn.Module) -> bool:
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, nn.Parameter)
        and weight.dim() == 2
        and getattr(module, "nf", None) == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[1:])
    )


def _width(module: nn.Module) -> int:
    weight: Any = module.weight
    return int(weight.shape[0 if _is_conv1d(module) else 1])


def _rank_of(rank: int | float, name: str, width: int) -> int:
    if isinstance(rank, float):
        return max(1, round(rank * width))
    check_rank(rank, width, f"layer {name!r}")
    return rank


def _check(method: str, kind: str, refresh: int | None, alpha: float, rank: int | float) -> None:
    if method not in METHODS:
        raise ConvertError(f"method {method!r} is not known: choose one of {', '.join(METHODS)}")
    if kind not in KINDS:
        raise ConvertError(f"kind {kind!r} is not known: choose one of {', '.join(KINDS)}")
    if refresh is not None and refresh < 1:
        raise ConvertError(f"refresh is {refresh} steps: choose 1 or more, or None for never")
    if not alpha > 0:
        raise ConvertError(f"alpha is {alpha}: choose a number above 0")
    if isinstance(rank, float) and not 0 < rank <= 1:
        raise ConvertError(f"rank {rank} is a share of each width, so above 0 and at most 1: give an int for a number")


def _ignored_by_ddp(model: nn.Module) -> list[str]:
    """The list of names that DistributedDataParallel leaves out."""
    holder: Any = model
    if not hasattr(holder, "_ddp_params_and_buffers_to_ignore"):
        holder._ddp_params_and_buffers_to_ignore = []
    ignored: list[str] = holder._ddp_params_and_buffers_to_ignore
    return ignored
