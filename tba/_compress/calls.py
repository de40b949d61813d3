"""Calls: records which torch function is running on a thread, so that a pack hook can classify the tensor it is given.

Pack hooks run while an operator is dispatched, and nothing tells them which. With lossy codecs a torch-function mode
(`SavedBy`) records the outermost call and its arguments; `kind_of` applies the rules of `classes` to it.

Guarantees:

1. A call is recorded exactly while it runs, even if it raises; then the one before it is current again. Arguments are
   held no longer.
2. Calls are recorded per thread. A tensor saved while none runs on its thread is UNKNOWN, unless it holds integers:
   tensors saved by nodes of a backward, custom Functions, compiled code, FlashAttention's own package.
3. A function without a rule hides the calls around it, so nothing is attributed to those. torch shows functions written
   in Python as one call, from `multi_head_attention_forward` to `Tensor.backward`, and hides the calls inside. So
   checkpointed code that a backward reruns is UNKNOWN.
4. The mode calls the function and returns its result unchanged, unless `linear` is given and replaces it.
5. Nothing is recorded while torch.compile traces, and compiled code has no trace of the mode.

A norm written in Python is a series of small operators that reveal nothing by themselves, so `norms` records modules.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from compact import Saved
from io_backends import interrupts

from .._torch.module_hooks import ModelHook
from .._torch.private import is_shard
from .._torch.weights import is_weight
from .classes import INTEGERS, RULES, Call, argument, kind_in, other

# Replaces `linear(x, weight, bias)`; returns None to leave a call alone. The weight is a parameter or its transpose.
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]

# RMSNorm, T5LayerNorm, LayerNormalization; not LogNormal, Normalize.
_NORM_NAME = re.compile(r"norm(?!al(?!i[sz]ation))", re.IGNORECASE)


class _Now(threading.local):
    """A thread's running call, and its running norm module as (id, elements of the input)."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.norm: tuple[int, int] | None = None


_now = _Now()


def forget() -> None:
    """Forget this thread's norm, whose forward nothing saw end: a KeyboardInterrupt calls no hook after it."""
    _now.norm = None


class SavedBy(TorchFunctionMode):
    """Torch-function mode that records the calls of the thread that enters it, for `kind_of`.

    Modes may be nested, even in themselves, and share one record. Only the innermost one's `linear` is called.

    Args:
        linear: called for every `torch.nn.functional.linear`, and every `torch.addmm` that is one (transformers'
            Conv1D), with x [..., n], weight [out, n] and bias [out] or None, while gradients are recorded. It returns
            the result [..., out], or None to leave the call alone. Tensors saved within it are UNKNOWN.

    Attributes:
        remove: removes the hooks that this mode put on a model.
    """

    def __init__(self, linear: Linear | None = None) -> None:
        super().__init__()
        self._linear = linear
        self.remove: Callable[[], None] = lambda: None

    if TYPE_CHECKING:  # torch's are untyped, and torch.compile refuses a mode that overrides them

        def __enter__(self) -> SavedBy: ...

        def __exit__(self, *_: object) -> None: ...

    @interrupts.lets_through
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record and call `func`. Runs with this mode off and those around it on."""
        kwargs = {} if kwargs is None else kwargs
        if is_compiling():
            return func(*args, **kwargs)
        rule = RULES.get(func)
        before = _now.call
        if rule is None:
            if before is None and _now.norm is None:
                return func(*args, **kwargs)
            _now.call = None if _now.norm is None else (other, (), {})
        else:
            if self._linear is not None and before is None and func in _LINEAR and torch.is_grad_enabled():
                taken = _taken(self._linear, func, args, kwargs)
                if taken is not None:
                    return taken
            _now.call = rule, args, kwargs
        try:
            return func(*args, **kwargs)
        finally:
            _now.call = before

    def norms(self, model: nn.Module) -> Callable[[], None]:
        """Record the norms of `model` that are written in Python (LlamaRMSNorm, T5LayerNorm) while their forward runs.

        A norm is a module without children, of a class that is not torch's own and has "norm" in its name. Within it,
        squares, products and quotients are attributed to the norm, functions with another rule follow that rule, and
        what others save is exact.

        Returns:
            A function that removes the hooks. Copies and pickles of the model do not have them.
        """
        hooks = ExitStack()
        for module in model.modules():
            if _is_norm(module):
                hooks.callback(module.register_forward_pre_hook(_NormHook(), prepend=True).remove)
                hooks.callback(module.register_forward_hook(_NormHook(), always_call=True).remove)
        return hooks.close


_LINEAR = frozenset({functional.linear, torch.addmm})
_NAMES = ("input", "weight", "bias")


def _taken(linear: Linear, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    x: Any
    if func is functional.linear:
        if not kwargs.keys() <= set(_NAMES):
            return None
        x, weight, bias = (argument(args, kwargs, place, name) for place, name in enumerate(_NAMES))
    else:
        if len(args) != 3 or kwargs or not all(isinstance(operand, Tensor) for operand in args):
            return None  # with factors alpha and beta, or `out`
        bias, x, weight = args[0], args[1], args[2].t() if args[2].dim() == 2 else args[2]
        if (bias.dim(), x.dim(), weight.dim()) != (1, 2, 2):
            return None
    _now.call = other, (), {}  # so that modes around this one do not replace the calls inside
    try:
        return linear(x, weight, bias)
    finally:
        _now.call = None


@contextmanager
def unclassed() -> Iterator[None]:
    """Make tensors saved in a region count as saved outside any call."""
    call, norm = _now.call, _now.norm
    _now.call, _now.norm = None, None
    try:
        yield
    finally:
        _now.call, _now.norm = call, norm


def kind_of(tensor: Tensor) -> Saved:
    """The class of the tensor that autograd is saving on this thread, inside a pack hook.

    UNKNOWN for floats outside any recorded call; for weights, their views and casts; and for subclasses of Tensor,
    except shards and jagged ones: rules count the elements of the whole, as the arguments do.
    """
    call, norm = _now.call, _now.norm
    if not (type(tensor) is Tensor or tensor.is_nested or is_shard(tensor)) or (
        call is None and norm is None and tensor.dtype not in INTEGERS
    ):
        return Saved.UNKNOWN
    kind = kind_in(tensor, call, None if norm is None else norm[1])
    return Saved.UNKNOWN if kind is not Saved.UNKNOWN and is_weight(tensor) else kind


def _is_norm(module: nn.Module) -> bool:
    kind = type(module)
    return (
        _NORM_NAME.search(kind.__name__) is not None
        and not kind.__module__.startswith("torch.nn.")  # these call one function, which has a rule
        and next(module.children(), None) is None  # PreNorm and the like contain a whole layer
    )


class _NormHook(ModelHook):
    """Records a norm while its forward runs: the hook before it and the one after it, which runs even if it raises.

    A norm may have hooks of several modes, and lose some while it runs, if the garbage collector ends a mode. So each
    hook before it sets the record, and the first one after it clears it.

    It overrides `ModelHook.__call__`, which torch.compile does not trace and which would break a graph around the norm.
    """

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *result: Any) -> None:
        if is_compiling():
            return
        if result:  # after the forward; (None,) if it has raised
            if _now.norm is not None and _now.norm[0] == id(module):
                _now.norm = None
        elif args and (type(args[0]) is Tensor or is_shard(args[0])) and not is_weight(args[0]):
            # Not the norm of a parametrization, which is of weights.
            _now.norm = id(module), args[0].numel()
