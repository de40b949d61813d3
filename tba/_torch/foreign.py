"""Foreign hooks: another pair of saved-tensor hooks that acts inside of the context, where ours then gets nothing.

PyTorch asks the innermost pair alone. So once nothing has come from a forward, each module of the model looks in the
next one, as it begins, at who is innermost. Afterwards the modules are as they were. Not sooner: hooks that come and go
have compiled modules compiled again.
"""

from __future__ import annotations

from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from .hook_stack import Pack, owner_of_innermost
from .module_hooks import ModelHook


class Foreign:
    """Looks out for foreign hooks in one forward, from `watch` to `end`, once something makes it `suspect` them."""

    def __init__(self, pack: Pack) -> None:
        self._name: str | None = None
        self._pack = pack
        self._suspects: bool | None = None  # None: not asked yet
        self._handles: list[RemovableHandle] = []

    def suspect(self, nothing_came: bool) -> None:
        """The first forward has ended, and perhaps nothing came from it."""
        if self._suspects is None:
            self._suspects = nothing_came

    def watch(self, model: nn.Module | None) -> None:
        """A forward begins: have the modules of `model` look if foreign hooks are suspected, once."""
        if self._suspects and model is not None:
            self._suspects = False
            hook = ModelHook(self._look)
            self._handles = [module.register_forward_pre_hook(hook) for module in model.modules() if _takes_one(module)]

    def end(self) -> str | None:
        """Take the hooks off the modules again. Who has pushed the pair that was seen, once; None if there was none."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        name, self._name = self._name, None
        return name

    def _look(self, *_: object) -> None:
        if self._name is None:
            self._name = owner_of_innermost(self._pack)


def _takes_one(module: nn.Module) -> bool:
    return not isinstance(module, ScriptModule)
