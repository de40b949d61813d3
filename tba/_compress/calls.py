"""SavedBy: which function of torch is under way on this thread, so that a pack hook can tell what it is given.

Pack hooks run while an operator is dispatched and are told nothing of it. A torch-function mode, active where lossy
codecs are, notes the outermost function and its arguments; `kind_of` puts them to the rules of `classes`.

Guarantees:

1. A note lasts exactly as long as its call, also when that raises; then the note before it holds again. Arguments are
   held no longer.
2. All notes are of one thread. What a thread saves while none of its functions is under way is UNKNOWN: nodes of a
   backward, custom Functions, compiled code, FlashAttention's own package.
3. A function without a rule clears the note, so nothing is put down to a function around it. torch shows a function
   written in Python as one call and hides those within it, from `multi_head_attention_forward` to `Tensor.backward`:
   checkpointed code that is run again by a backward is UNKNOWN.
4. Results are those without the mode: it calls the function and returns what that returns. The one exception is
   `linear`, if given.
5. While torch.compile traces, nothing is noted: the mode leaves no trace in compiled code.

Norms written in Python are a series of small operators that say nothing by themselves; `norms` notes the modules.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from compact import Saved
from io_backends import interrupts

from .._torch.module_hooks import ModelHook
from .._torch.weights import is_weight
from .classes import RULES, Call, argument, kind_in, other

# Takes over `linear(x, weight, bias)`; None leaves it alone. The weight is a parameter or the transpose of one.
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]

# RMSNorm, T5LayerNorm, LayerNormalization; not LogNormal, Normalize.
_NORM_NAME = re.compile(r"norm(?!al(?!i[sz]ation))", re.IGNORECASE)


class _Now(threading.local):
    """Per thread: the function under way, and the norm modules under way, by identity, with the size of their input."""

    def __init__(self) -> None:
        self.call: Call | None = None
        self.norms: list[tuple[int, int]] = []


_now = _Now()


class SavedBy(TorchFunctionMode):
    """Notes which function is under way on the thread that enters it, for `kind_of`. May be entered within itself.

    Nested ones note the same. Only the innermost one's `linear` is asked.

    Args:
        linear: asked at every `torch.nn.functional.linear`, and every `torch.addmm` of the same meaning (transformers'
            Conv1D), with x [..., n], weight [out, n] and bias [out] or None, while gradients are recorded. It returns
            the result [..., out], or None to have the call made as it is. What is saved within it is UNKNOWN.
    """

    def __init__(self, linear: Linear | None = None) -> None:
        super().__init__()
        self._linear = linear

    if TYPE_CHECKING:  # torch's own, which have no types; torch.compile knows the mode by their being torch's own

        def __enter__(self) -> SavedBy: ...

        def __exit__(self, *_: object) -> None: ...

    @interrupts.lets_through
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with a note of it. Runs with this mode off, the ones around it on."""
        kwargs = {} if kwargs is None else kwargs
        if is_compiling():
            return func(*args, **kwargs)
        rule = RULES.get(func)
        before = _now.call
        if rule is None:
            if before is None and not _now.norms:
                return func(*args, **kwargs)
            _now.call = (other, (), {}) if _now.norms else None
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
        """Note norms of `model` that are written in Python (LlamaRMSNorm, T5LayerNorm), while their forward runs.

        Taken for one is a module without children whose class is not torch's own and has "norm" in its name. Within it
        squares, products and quotients are the norm's; functions of known kind are known by their own rules, and what
        others save is exact.

        Returns:
            What takes the notes' hooks off again. Copies and pickles of the model do not have them.
        """
        handles: list[Any] = []
        for module in model.modules():
            if _is_norm(module):
                handles.append(module.register_forward_pre_hook(_NormHook(), prepend=True))
                handles.append(module.register_forward_hook(_NormHook(), always_call=True))

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove


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
            return None  # with factors alpha and beta, or into a given tensor
        bias, x, weight = args[0], args[1], args[2].t() if args[2].dim() == 2 else args[2]
        if (bias.dim(), x.dim(), weight.dim()) != (1, 2, 2):
            return None
    _now.call = other, (), {}  # nor do modes around this one take over what is called within
    try:
        return linear(x, weight, bias)
    finally:
        _now.call = None


def kind_of(tensor: Tensor) -> Saved:
    """The class of the tensor that autograd is saving on this thread; for use inside a pack hook.

    UNKNOWN outside of any function that is known, for weights in every guise, and for subclasses of Tensor.
    """
    call, norms = _now.call, _now.norms
    if type(tensor) is not Tensor or (call is None and not norms):
        return Saved.UNKNOWN
    kind = kind_in(tensor, call, norms[-1][1] if norms else None)
    return Saved.UNKNOWN if kind is not Saved.UNKNOWN and is_weight(tensor) else kind


def _is_norm(module: nn.Module) -> bool:
    kind = type(module)
    return (
        _NORM_NAME.search(kind.__name__) is not None
        and not kind.__module__.startswith("torch.nn.")  # these call one function, which is known by itself
        and next(module.children(), None) is None  # PreNorm and its like hold a whole layer
    )


class _NormHook(ModelHook):
    """Notes a norm while its forward runs: a hook for before it and for after it, also when that or a hook raises.

    Not an action of `ModelHook`, whose calls torch.compile does not trace: within a compiled graph they would break it.
    """

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *result: Any) -> None:
        if is_compiling():
            return
        norms = _now.norms
        if result:  # after the forward; (None,) when it has raised
            if norms and norms[-1][0] == id(module):
                norms.pop()
        elif args and type(args[0]) is Tensor and not is_weight(args[0]):  # a parametrization's norm is of weights
            norms.append((id(module), args[0].numel()))
