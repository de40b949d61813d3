"""Dynamo: has modules that torch.compile compiles ask, as they are called, for another backend than their own.

PyTorch keeps apart what each backend has compiled. So a module that was compiled before is compiled once more for the
other backend, and goes back to its own code when there is none. None of this is documented: where a torch has another
form of it, modules are compiled as ever.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from io_backends import interrupts

_CALLS = ("_wrapped_call_impl", "_call_impl", "__call__")


class Backend(Protocol):
    """Compiles a graph with the options of Inductor's that a module was to be compiled with."""

    def __call__(self, model: Any, inputs: Any, *, options: dict[str, Any]) -> Any: ...


def compile_by(find: Callable[[nn.Module], Backend | None]) -> None:
    """Ask for the backend of each module that is called and was to be compiled by Inductor; None: its own.

    Idempotent. It takes effect once the program has imported the compiler, so call it again.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    own = getattr(frames, "_callback_from_stance", None)
    if own is not None and not isinstance(own, _Asking):
        frames._callback_from_stance = _Asking(frames, own, find)  # type: ignore[union-attr]


class _Asking:
    """Stands in for the function by which dynamo finds what compiles the frames of a call."""

    def __init__(self, frames: Any, own: Callable[[Any], Any], find: Callable[[nn.Module], Backend | None]) -> None:
        self._frames, self._own, self._find = frames, own, find
        self._others: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], Any, int]] = weakref.WeakKeyDictionary()

    def __call__(self, callback: Any) -> Any:
        chosen = self._own(callback)
        if chosen is not callback or not callable(callback):
            return chosen  # the program has set a stance
        try:
            inductor = self._frames.innermost_backend(callback)
            if not isinstance(inductor, torch._TorchCompileInductorWrapper) or _replays(inductor.config):
                return chosen
            module = _called(sys._getframe(1))
            backend = None if module is None else self._find(module)
            return chosen if backend is None else self._other(callback, inductor.config, backend)
        except (AttributeError, TypeError):
            return chosen  # in another form

    def _other(self, callback: Any, options: dict[str, Any], backend: Backend) -> Any:
        reference, other, region = self._others.get(callback, (None, None, -1))
        if reference is None or reference() is not backend:
            reference = weakref.ref(backend)
            convert = callback._torchdynamo_orig_backend._clone_with_backend(_Weak(reference, options))
            other = type(callback)(convert, callback.hooks)
            region = next(self._frames._next_isolate_recompiles_id)
            self._others[callback] = reference, other, region
        # What it compiles does not count against the program's limit of recompilations. The caller puts this back.
        self._frames.set_eval_frame_isolate_recompiles_id(region)
        return other


class _Weak:
    """A backend as dynamo gets it, which keeps it for as long as the code."""

    def __init__(self, backend: weakref.ref[Any], options: dict[str, Any]) -> None:
        self._backend, self._options = backend, options

    @interrupts.lets_through
    def __call__(self, model: Any, inputs: Any) -> Any:
        backend = self._backend()
        if backend is None:
            from torch._inductor.compile_fx import compile_fx

            return compile_fx(model, inputs, config_patches=self._options)
        return backend(model, inputs, options=self._options)


def _called(frame: FrameType) -> nn.Module | None:
    """The module that dynamo's wrapper, whose frame this is, calls. Another method of a module traces its hooks."""
    called = frame.f_locals.get("fn")
    inner = getattr(called, "__wrapped__", None)
    owner = getattr(called, "__self__", None) if getattr(called, "__name__", "") in _CALLS else inner
    return owner if isinstance(owner, nn.Module) else None


def _replays(options: dict[str, Any]) -> bool:
    """Whether CUDA graphs replay what is compiled: nothing can leave their memory."""
    config = sys.modules.get("torch._inductor.config")
    return bool(options.get("triton.cudagraphs", config is not None and config.triton.cudagraphs))
