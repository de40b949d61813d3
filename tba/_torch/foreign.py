"""Foreign: finds another pair of saved-tensor hooks inside the context, which keeps tensors from ours.

PyTorch calls the innermost pair only. If a forward has saved nothing through ours, a hook on each module of the model
looks for the owner of the innermost pair during the next forward, and is removed after it. The first forward goes
without, because hooks that come and go have compiled modules compiled again.
"""

from __future__ import annotations

from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from .hook_stack import Pack, owner_of_innermost
from .module_hooks import ModelHook

# Offloaders that people know, by the start of the module that has their hooks: what to delete.
_LINES = {
    "torch.autograd.graph.save_on_cpu": "delete `with torch.autograd.graph.save_on_cpu(...)`, or `offload=True` of the "
    "framework that enters it",
    "trl.": "delete activation_offloading=True",
    "torchtune.": "delete enable_activation_offloading: True",
    "tba.": "keep one `offload_context` or `attach` on this model, and delete the other",
}


def line_to_delete(owner: str) -> str:
    """Say how to switch off the hooks of an owner (`module.Class`)."""
    known = (line for start, line in _LINES.items() if owner.startswith(start))
    return next(known, "switch that offloading off")


class Foreign:
    """Looks for foreign hooks in one forward, from `watch` to `end`, if an earlier one makes it `suspect` them."""

    def __init__(self, pack: Pack) -> None:
        self._name: str | None = None
        self._pack = pack
        self._suspects: bool | None = None  # None before the first forward has ended
        self._handles: list[RemovableHandle] = []

    def suspect(self, nothing_came: bool) -> None:
        """Note that a forward has ended, and whether our hooks got nothing from it. Only the first call counts."""
        if self._suspects is None:
            self._suspects = nothing_came

    def watch(self, model: nn.Module | None) -> None:
        """Put hooks on the modules of `model` at the beginning of a forward, once, if foreign hooks are suspected."""
        if self._suspects and model is not None:
            self._suspects = False
            hook = ModelHook(self._look)
            modules = (module for module in model.modules() if not isinstance(module, ScriptModule))
            self._handles = [module.register_forward_pre_hook(hook) for module in modules]

    def end(self) -> str | None:
        """Remove the hooks from the modules. Return the owner of the foreign pair once; None if none was found."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        name, self._name = self._name, None
        return name

    def _look(self, *_: object) -> None:
        if self._name is None:
            self._name = owner_of_innermost(self._pack)
