"""Cut: the layers of a model as one rank of tensor parallelism has them.

A model says by its `tp_plan` how its layers are cut, as those of transformers do: a mapping of their names, in which *
stands for a number, to styles. Its layers are replaced by their parts on the first rank, which are not smaller than any
other's. Instead of exchanging data, they make tensors of the shapes that the exchange would. So what operators save on
that rank is exact, in bytes and in order; its values mean nothing.

What a style saves is that of `torch.distributed.tensor.parallel`, which transformers uses too:

    colwise                the layer's input is whole, its output a part
    rowwise                its input is a part, its output whole: a sum over ranks
    colwise_gather_output  its input is whole, and its output, a part, is gathered
    rowwise_split_input    its input is whole, and a part of it is taken
    embedding_rowwise      each rank has a part of the rows; its output is whole: a sum over ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import ConfigError

_INPUT_WHOLE = {"colwise", "colwise_gather_output", "colwise_rep"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_INPUT_SPLIT = {"rowwise_split_input", "rowwise_rep"}
# Of a weight, the dimension that is cut.
_LINEAR = dict.fromkeys(_INPUT_WHOLE, 0) | dict.fromkeys(("rowwise", *_INPUT_SPLIT), 1)
_EMBEDDING = {"embedding_rowwise": 0}
_WHOLE = {"replicated_with_grad_allreduce", "replicate"}  # what changes no shape


def cut(model: nn.Module, ways: int) -> None:
    """Replace a model's layers by their parts on the first of so many ranks.

    Raises:
        ConfigError: the model does not say how it is cut, or cannot be cut so.
    """
    if ways == 1:
        return
    asked = f"--tp {ways}: {type(model).__name__}"
    styles = dict(_styles(model))
    if not styles:
        raise ConfigError(
            f"{asked} has no plan of tensor parallelism that names a layer of it (`tp_plan`, as transformers' Llama "
            "has). Give the model with a tp_plan, or, without --tp, the model of one rank, as `module:callable`"
        )
    _check_heads(model, styles, ways, asked)
    parts: dict[nn.Parameter, tuple[int, nn.Parameter]] = {}
    for name, style in styles.items():
        if style in _WHOLE:
            continue
        module = model.get_submodule(name)
        dimension = _dimension(module, style)
        if dimension is None:
            raise ConfigError(
                f"{asked} has {name}, a {type(module).__name__}, as {style!r} in its tp_plan, which is not forecast. "
                f"Forecast are nn.Linear as {', '.join(_LINEAR)}, and nn.Embedding as {', '.join(_EMBEDDING)}. Without "
                "--tp, give the model of one rank, as `module:callable`"
            )
        for which in ("weight", "bias"):
            whole = getattr(module, which, None)
            if whole is None or dimension >= whole.dim():
                continue  # a sum over ranks has one bias
            if whole not in parts:
                parts[whole] = dimension, _part(whole, dimension, ways, f"{asked} has {name}")
            if parts[whole][0] != dimension:
                raise ConfigError(_shared(asked, name, "cut another way"))
            setattr(module, which, parts[whole][1])
        _exchange(module, style, ways)
    for name, parameter in model.named_parameters():
        if parameter in parts:
            raise ConfigError(_shared(asked, name.rpartition(".")[0], "not cut"))


def _styles(model: nn.Module) -> Iterator[tuple[str, str]]:
    """List the layers that plans name, with their styles. A plan of a model has those of the models within it."""
    planned: list[str] = []
    for path, owner in model.named_modules():
        plan = getattr(owner, "tp_plan", None)
        inner = any(not each or path.startswith(f"{each}.") for each in planned)
        if inner or not isinstance(plan, Mapping) or not plan:
            continue
        planned.append(path)
        for name, _ in owner.named_modules():
            general = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            if (style := plan.get(name, plan.get(general))) is not None:
                yield f"{path}.{name}".strip("."), style


def _dimension(module: nn.Module, style: str) -> int | None:
    """Return which dimension of a layer's weight is cut; None if this style is not known for such a layer."""
    if isinstance(module, nn.Linear):
        return _LINEAR.get(style)
    return _EMBEDDING.get(style) if isinstance(module, nn.Embedding) else None


def _check_heads(model: nn.Module, styles: Mapping[str, str], ways: int, asked: str) -> None:
    """Raise ConfigError if ranks would have parts of heads of attention."""
    if not any(style == "colwise" and "att" in name for name, style in styles.items()):
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        for what in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, what, None)
            if isinstance(heads, int) and heads % ways:
                raise ConfigError(
                    f"{asked} has {what}={heads}, which {ways} ranks cannot share: each has whole heads of attention. "
                    "Give --tp a number that divides it"
                )


def _part(whole: nn.Parameter, dimension: int, ways: int, what: str) -> nn.Parameter:
    length = whole.shape[dimension]
    if length < ways:
        raise ConfigError(f"{what} of shape {list(whole.shape)}, of which {ways} ranks cannot each have a part")
    part = whole.detach().narrow(dimension, 0, _share(length, ways))
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)


def _share(length: int, ways: int) -> int:
    return -(-length // ways)


def _shared(asked: str, name: str, how: str) -> str:
    return (
        f"{asked} has parameters of {name} in common with another layer, which its tp_plan cuts, and here they are "
        f"{how}. Untie them (for a config, --set tie_word_embeddings=false), or change its tp_plan"
    )


def _exchange(module: nn.Module, style: str, ways: int) -> None:
    """Have a layer make the tensors that an exchange between ranks makes."""
    if style in _INPUT_WHOLE:
        module.register_forward_pre_hook(lambda _, args: (_SummedGradient.apply(args[0]), *args[1:]))  # type: ignore[no-untyped-call]
    elif style in _INPUT_SPLIT:
        module.register_forward_pre_hook(
            lambda _, args: (args[0].narrow(-1, 0, _share(args[0].shape[-1], ways)).contiguous(), *args[1:])
        )
    elif style in _EMBEDDING:
        module.register_forward_pre_hook(lambda owner, args: (args[0] % owner.weight.shape[0], *args[1:]))
    if style in _GATHERED:
        whole = module.out_features
        module.register_forward_hook(lambda _, __, out: _Gathered.apply(out, whole, ways))  # type: ignore[no-untyped-call]
    elif style not in _INPUT_WHOLE:
        module.register_forward_hook(lambda _, __, out: _Summed.apply(out))  # type: ignore[no-untyped-call]


class _SummedGradient(torch.autograd.Function):
    """What all ranks have: the gradient is a sum over them."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class _Summed(torch.autograd.Function):
    """A sum over ranks, which all have: so is the gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)


class _Gathered(torch.autograd.Function):
    """Parts that are gathered, one after another, and then laid side by side."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: int, ways: int) -> Tensor:
        ctx.part = part.shape[-1]
        gathered = part.new_empty((ways, *part.shape))
        return torch.cat(gathered.unbind(), -1).narrow(-1, 0, whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, 0, ctx.part).contiguous(), None, None
