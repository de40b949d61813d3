"""Operators: a table of those that can be run again, and where each saves its operands and its result.

The names are those of autograd's nodes. A node's `_saved_NAME` has a partner `_raw_saved_NAME`, which shows what a pack
hook returned for the tensor without calling the unpack hook. Observed on torch 2.13 and tested in `tests/tba_derive/`:

* a product or quotient saves an operand only if the *other* one requires grad (a quotient always saves its divisor);
* sums, casts, copies and views save no operand;
* activations whose derivative needs the input save `self`; relu, tanh, sigmoid, exp, sqrt, rsqrt and softmax save their
  own `result`, attention its `output`: such a tensor is in the graph already and is never recomputed, but other tensors
  are computed from it;
* a Python number is saved as a 0-dimensional tensor that no hook sees;
* layer norm saves everything but `eps` (see `_SearchedNorm`); group norm and batch norm save everything but their bias,
  a parameter, which autograd knows where to add the gradient of. torch 2.15 does not save a group norm's `eps` either.

Elementwise kernels give equal bits for equal operands with equal strides and an equal number of threads: chunks and
vector tails depend on nothing else, and not on the address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# In use: BERT 1e-12, GPT and Llama 1e-5, T5, ViT and ConvNeXt 1e-6, EfficientNet 1e-3, and others.
EPSILONS: Final = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-4, 1e-9, 1e-10, 0.0)

Scalars = tuple[Any, ...]


class Output(NamedTuple):
    """What autograd records about a node's output `number`."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Operator(NamedTuple):
    """An operator that can be run again.

    Attributes:
        operands: in the order of the node's `next_functions`, the name each is saved under; None if it never is.
        run: (operands, scalars, output) -> the result, by the kernel that made it.
        scalars: names of saved values that are not tensors.
        extras: names of further saved tensors, only for `find`.
        find: (operands and extras, scalars) -> all scalars that `run` needs, and the result. For operators that do not
            save all scalars: the others are found from the extras. Raises RuntimeError if none fit.
        holds: (operands and extras, scalars) -> whether scalars found before still give what the operator saved, at far
            less than the cost of `find`; False if that does not tell. Operands that are not at hand are None.
        optional: operands that may be absent (a norm's weight); present ones are saved.
        bias: the place of an operand that is a parameter no node saves; it is absent where the one before it is.
        moves: computes nothing: a view, or a copy into another order.
        amplifies: a small error of an operand may become a large error of the result, by cancellation or division.
    """

    operands: tuple[str | None, ...]
    run: Callable[[list[Any], Scalars, Output], Tensor]
    scalars: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    find: Callable[[list[Any], Scalars], tuple[Scalars, Tensor]] | None = None
    holds: Callable[[list[Any], Scalars], bool] | None = None
    optional: tuple[str, ...] = ()
    bias: int | None = None
    moves: bool = False
    amplifies: bool = False


def _simple(
    run: Callable[..., Tensor], *operands: str | None, scalars: tuple[str, ...] = (), amplifies: bool = False
) -> Operator:
    return Operator(operands, lambda tensors, values, _: run(*tensors, *values), scalars, amplifies=amplifies)


def _view(run: Callable[[Tensor, Scalars, Output], Tensor], *scalars: str) -> Operator:
    return Operator((None,), lambda tensors, values, output: run(tensors[0], values, output), scalars, moves=True)


# A norm of `input` with a weight that its node saves and a bias that it does not, both absent or neither.
_AFFINE: Final[dict[str, Any]] = {"operands": ("input", "weight", None), "optional": ("weight",), "bias": 2}


def _norm(run: Callable[[list[Any], Scalars], Tensor], *scalars: str) -> Operator:
    return Operator(run=lambda t, s, _: run(t, s), scalars=scalars, **_AFFINE)


def _batch_norm(tensors: list[Any], scalars: Scalars) -> Tensor:
    """Run batch norm with the statistics of the batch, and leave the running ones as they are.

    Raises:
        RuntimeError: it ran with the running statistics, as in evaluation, which have changed since.
    """
    trains, eps = scalars
    if not trains:
        raise RuntimeError("batch norm in evaluation: keep its result, as the running statistics may change")
    x, weight, bias = tensors
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


_last_eps: dict[Any, float] = {}  # by a norm's kind, scalars and precision, the one to try first


class _SearchedNorm(NamedTuple):
    """A norm whose node does not save `eps`, which is found from the statistics that it does save.

    Attributes:
        run: (operands, scalars, eps) -> the result, and the mean and the reciprocal deviation of each row.
        row: (operands, scalars, number) -> operands and scalars of the norm of one row alone; None if another kernel
            would compute it.
    """

    run: Callable[[list[Any], Scalars, float], tuple[Tensor, ...]]
    row: Callable[[list[Any], Scalars, int], tuple[list[Any], Scalars] | None]

    def operator(self, *scalars: str, **known: Any) -> Operator:
        """Return the operator whose node saves the `scalars`; `known` is what else is known of it."""
        return Operator(
            run=lambda t, s, _: self.run(t, s[:-1], s[-1])[0],
            scalars=scalars,
            extras=("result1", "result2"),
            find=self.find_eps,
            holds=self.eps_holds,
            **known,
        )

    def find_eps(self, tensors: list[Any], scalars: Scalars) -> tuple[Scalars, Tensor]:
        """Run it with the one of `EPSILONS` that gives the saved statistics.

        Statistics may not distinguish two eps (large values swallow them), so the caller compares the result with
        forward's. Comparing statistics waits for a device, so there the last eps of these scalars is used unchecked.

        Raises:
            RuntimeError: none of them does.
        """
        *operands, mean, scale = tensors
        key = self.run, scalars, scale.dtype
        last, x = _last_eps.get(key), operands[0]
        for eps in EPSILONS if last is None else (last, *EPSILONS):
            result, *statistics = self.run(operands, scalars, eps)
            unseen = eps == last and not x.is_cpu
            if unseen or all(map(same_bits, statistics, (mean, scale))):
                _last_eps[key] = eps
                return (*scalars, eps), result
        raise RuntimeError(
            f"a norm of {x.dtype} {list(x.shape)}, with {scalars}: no common eps gives the statistics that forward "
            "saved; keep the tensor instead of recomputing it"
        )

    def eps_holds(self, tensors: list[Any], scalars: Scalars) -> bool:
        """Whether this eps, the last of the scalars, gives the saved statistics of the row where eps counts most.

        Equal statistics give equal results only where they are saved in the precision that the kernel computes with.
        """
        *operands, mean, scale = tensors
        if not isinstance(operands[0], Tensor) or mean is None or scale is None:
            return False
        if scale.dtype not in (torch.float32, torch.float64):
            return False
        row = int(scale.argmax())
        one = self.row(operands, scalars[:-1], row)
        if one is None:
            return False
        found = self.run(*one, scalars[-1])[1:]
        return all(a.item() == b.view(-1)[row].item() for a, b in zip(found, (mean, scale), strict=True))


def _layer_row(operands: list[Any], scalars: Scalars, number: int) -> tuple[list[Any], Scalars]:
    """Take a row of `input` [..., *normalized_shape]."""
    x, *affine = operands
    return [x.reshape(-1, *scalars[0]).narrow(0, number, 1), *affine], scalars


def _group_row(operands: list[Any], scalars: Scalars, number: int) -> tuple[list[Any], Scalars] | None:
    """Take one group's channels of one sample of `input` [N, C, ...]."""
    _, channels, size, groups = scalars
    each = channels // groups
    first = number % groups * each
    x, *affine = operands
    if not x.is_contiguous():  # channels last: which kernel computes depends on how many there are
        return None
    one = x.narrow(0, number // groups, 1).narrow(1, first, each)
    return [one, *(None if t is None else t.narrow(0, first, each) for t in affine)], (1, each, size, 1)


_LAYER_NORM: Final = _SearchedNorm(lambda t, s, eps: torch.native_layer_norm(t[0], s[0], t[1], t[2], eps), _layer_row)
_GROUP_NORM: Final = _SearchedNorm(lambda t, s, eps: torch.ops.aten.native_group_norm.default(*t, *s, eps), _group_row)


_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two real tensors have the same shape, dtype and bits: NaNs by payload, zeros by sign."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    word = _WORDS[one.itemsize]
    return torch.equal(one.detach().view(word), other.detach().view(word))


def bits_differ(one: Tensor, other: Tensor) -> Tensor | bool:
    """Negation of `same_bits`; on a device a tensor, so that nothing waits."""
    if one.is_cpu or one.shape != other.shape or one.dtype != other.dtype:
        return not same_bits(one, other)
    word = _WORDS[one.itemsize]
    return torch.ne(one.detach().view(word), other.detach().view(word)).any()


def signed(value: Any) -> Any:
    """Convert a saved scalar: dimensions are saved as size_t, so -1 reads as 2^64 - 1."""
    if type(value) is int and value >= 1 << 63:
        return value - (1 << 64)
    if isinstance(value, (tuple, list)):
        return tuple(signed(each) for each in value)
    return value


_RESHAPES: Final = (
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
)

OPERATORS: Final[Mapping[str, Operator]] = {
    "MulBackward0": _simple(torch.mul, "self", "other"),
    "DivBackward0": _simple(torch.div, "self", "other", amplifies=True),
    "AddBackward0": _simple(lambda x, y, a: torch.add(x, y, alpha=a), None, None, scalars=("alpha",), amplifies=True),
    "SubBackward0": _simple(lambda x, y, a: torch.sub(x, y, alpha=a), None, None, scalars=("alpha",), amplifies=True),
    "NegBackward0": _simple(torch.neg, None),
    "PowBackward0": _simple(torch.pow, "self", scalars=("exponent",), amplifies=True),
    "AbsBackward0": _simple(torch.abs, "self"),
    "SiluBackward0": _simple(functional.silu, "self"),
    "GeluBackward0": _simple(lambda x, how: functional.gelu(x, approximate=how), "self", scalars=("approximate",)),
    "SoftplusBackward0": _simple(functional.softplus, "self", scalars=("beta", "threshold")),
    "LeakyReluBackward0": _simple(functional.leaky_relu, "self", scalars=("negative_slope",)),
    "HardswishBackward0": _simple(functional.hardswish, "self"),
    "MishBackward0": _simple(functional.mish, "self"),
    "NativeLayerNormBackward0": _LAYER_NORM.operator(
        "normalized_shape", operands=("input", "weight", "bias"), optional=("weight", "bias")
    ),
    "NativeGroupNormBackward0": _norm(lambda t, s: torch.native_group_norm(*t, *s)[0], "N", "C", "HxW", "group", "eps"),
    "NativeBatchNormBackward0": _norm(_batch_norm, "training", "eps"),
    "ToCopyBackward0": Operator((None,), lambda t, _, output: t[0].to(output.dtype, copy=True)),
    "CloneBackward0": _view(lambda x, _s, _o: x.clone()),
    **dict.fromkeys(_RESHAPES, _view(lambda x, _, output: x.reshape(output.shape))),
    "ExpandBackward0": _view(lambda x, _, output: x.expand(output.shape)),
    "TBackward0": _view(lambda x, _s, _o: x.t()),
    "TransposeBackward0": _view(lambda x, s, _: x.transpose(*s), "dim0", "dim1"),
    "PermuteBackward0": _view(lambda x, s, _: x.permute(s[0]), "dims"),
    "SelectBackward0": _view(lambda x, s, _: x.select(*s), "dim", "index"),
    "SliceBackward0": _view(
        lambda x, s, _: torch.ops.aten.slice.Tensor(x, *s),  # `x[...]` takes no dimension
        *("dim", "start", "end", "step"),
    ),
    "SplitBackward0": _view(lambda x, s, output: x.split(*s)[output.number], "split_size", "dim"),
    "SplitWithSizesBackward0": _view(lambda x, s, output: x.split(*s)[output.number], "split_sizes", "dim"),
    "UnbindBackward0": _view(lambda x, s, output: x.unbind(s[0])[output.number], "dim"),
}

# Operators of nodes that do not save `eps`, where other releases of torch do.
WITHOUT_EPS: Final[Mapping[str, Operator]] = {
    "NativeGroupNormBackward0": _GROUP_NORM.operator(*("N", "C", "HxW", "group"), **_AFFINE),
}

# The outputs that a node saves itself: the name of each, by number.
RESULTS: Final[Mapping[str, Mapping[int, str]]] = {
    **{
        f"{name}Backward0": {0: "result"}
        for name in (
            *("Relu", "Tanh", "Sigmoid", "Exp", "Sqrt", "Rsqrt", "Reciprocal"),
            *("Softmax", "SafeSoftmax", "LogSoftmax"),
        )
    },
    **{
        f"ScaledDotProduct{name}Backward0": {0: "output"}
        for name in ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
    },
}
