"""Foreign hooks: another pair of saved-tensor hooks that acts inside of the context, where ours then gets nothing.

PyTorch asks the innermost pair alone. So in the first forward each module of the model looks, as it begins, at who is
innermost. Afterwards the modules are as they were.
"""

from __future__ import annotations

from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from ._hooks import ModelHook, Pack, owner_of_innermost


class Foreign:
    """Looks out for foreign hooks once, from `watch` to `end`."""

    def __init__(self, pack: Pack) -> None:
        self._name: str | None = None
        self._pack = pack
        self._watched = False
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module | None) -> None:
        """Have the modules of `model` look, the first time this is called."""
        if not self._watched and model is not None:
            hook = ModelHook(self._look)
            self._handles = [module.register_forward_pre_hook(hook) for module in model.modules()]
        self._watched = True

    def end(self) -> str | None:
        """Take the hooks off the modules again. Who has pushed the pair that was seen, once; None if there was none."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        name, self._name = self._name, None
        return name

    def _look(self, *_: object) -> None:
        if self._name is None and not is_compiling():
            self._name = owner_of_innermost(self._pack)
