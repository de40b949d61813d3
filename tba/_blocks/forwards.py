"""Forwards: stands around the forward of chosen modules while the model's own forward runs, and leaves no trace.

The attribute `forward` of each module is set where the model's forward begins and removed where it ends: between steps
a model is what it was, for copies, pickles and compilers. Hooks of the modules stay outside, so that they do not run
again where a block does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from io_backends import interrupts

from .find import wrappable

# Gets the module, its own forward, and the arguments of the call; returns what the call returns.
Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Forwards:
    """The forwards that are stood around now."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def put(self, modules: Iterable[nn.Module], around: Around) -> None:
        """Have `around` called instead of each module's forward. Modules that have been changed otherwise are left."""
        self.remove()
        for module in modules:
            if wrappable(module):
                vars(module)["forward"] = _stand(around, module, module.forward)
                self._modules.append(module)

    def remove(self) -> None:
        """Give each module its own forward again."""
        modules, self._modules = self._modules, []  # at once: another thread may put or remove
        for module in modules:
            vars(module).pop("forward", None)


def _stand(around: Around, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @interrupts.lets_through
    def stands(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # code around the module, which must be what it is without us
            return forward(*args, **kwargs)
        return around(module, forward, args, kwargs)

    return stands
