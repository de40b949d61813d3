"""Foreign: finds what keeps tensors from our hooks: another pair inside the context, or a cache of checkpointing.

PyTorch calls only the innermost pair. If a forward saved nothing through ours, a hook on each module of the model looks
for the owner of the innermost pair during the next forward, and is removed afterwards. The first forward goes without,
because adding and removing hooks recompiles compiled modules.
"""

from __future__ import annotations

import inspect
import weakref
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd import function
from torch.jit import ScriptModule
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from .hook_stack import Pack, owner_of_innermost
from .module_hooks import ModelHook
from .private import tree_leaves
from .user_frames import Notices

# Files of the functions through which checkpointing saves a region's input (the second: torch 2.11).
SAVES_INPUTS = frozenset(map(str, (checkpoint.__file__, function.__file__)))
_CACHE: Any = getattr(checkpoint, "_CachedTorchDispatchMode", ())  # of torch's selective checkpointing
# From 2.14 on it passes what it caches to hooks if this argument of `checkpoint` is set: an attribute of the mode that
# fills the cache.
_SWITCH = "respect_saved_tensors_hooks"
_HAS_SWITCH = _SWITCH in inspect.signature(checkpoint.checkpoint).parameters
_HANDS_OVER = "wrap"  # the name of its function that does so

# What to delete, for well-known offloaders by the prefix of the module with their hooks.
_LINES = {
    "torch.autograd.graph.save_on_cpu": "delete `with torch.autograd.graph.save_on_cpu(...)`, or `offload=True` of the "
    "framework that enters it",
    "trl.": "delete activation_offloading=True",
    "torchtune.": "delete enable_activation_offloading: True",
    "tba.": "keep one `offload_context` or `attach` on this model, and delete the other",
}


def line_to_delete(owner: str) -> str:
    """How to switch off the hooks of an owner (`module.Class`)."""
    known = (line for start, line in _LINES.items() if owner.startswith(start))
    return next(known, "switch that offloading off")


class Foreign:
    """Looks for foreign hooks during one forward, from `watch` to `end`, if an earlier one makes it `suspect` them."""

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
        """If foreign hooks are suspected, put hooks on the modules of `model` when a forward begins, once."""
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


class Caches:
    """Makes torch's selective checkpointing pass its results to our hooks, or counts what its cache keeps of them.

    Torch can pass them from 2.14 on; unless asked to, it only warns that it will later. If a program may edit them,
    which the engine would refuse, the cache is left alone.
    """

    def __init__(self, tier: str) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._tells = tier != "keep"
        self._notices = Notices()

    def look(self, frame: FrameType | None) -> bool:
        """While a region's input is being saved, look for the cache that its forward will fill.

        Args:
            frame: the frame that calls the pack hook, of a file in `SAVES_INPUTS`.

        Returns:
            Whether the cache itself calls, with a result of its policy's.
        """
        if frame is not None and frame.f_code.co_name == _HANDS_OVER:
            return True
        while frame is not None and frame.f_code.co_filename in SAVES_INPUTS:
            mode = frame.f_locals.get("recompute_context")
            if isinstance(mode, _CACHE):
                if not _shows(frame.f_locals.get("forward_context"), mode):
                    if not self._found or self._found[-1]() is not mode:
                        self._found.append(weakref.ref(mode))
                    if self._tells:
                        self._tell()
                return False
            frame = frame.f_back
        return False

    def count(self) -> int:
        """Count the bytes in caches filled since the last call; backward empties them."""
        modes = [mode for reference in self._found if (mode := reference()) is not None]
        self._found = [weakref.ref(mode) for mode in modes if not mode.storage]
        # A dict of results per operator; a list up to torch 2.12.
        kept = [each for mode in modes for each in mode.storage.values()]
        entries = tree_leaves([list(each.values()) if isinstance(each, dict) else each for each in kept])
        tensors = [value for entry in entries if isinstance(value := getattr(entry, "val", None), Tensor)]
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())

    def _tell(self) -> None:
        how = f"leave out {_SWITCH}=False and allow_cache_entry_mutation=True, or " if _HAS_SWITCH else ""
        self._notices.say(
            "cache",
            "torch's selective checkpointing keeps what its policy saves in a cache of its own, which no hook sees, so "
            f"it stays in memory. To store it like any other saved tensor, {how}write `from "
            "tba.integrations.checkpoint import create_selective_checkpoint_contexts` and pass that to context_fn",
        )


def _shows(filling: Any, cache: Any) -> bool:
    """Whether hooks get what a cache gets; switches that on if the program leaves it open."""
    if not _HAS_SWITCH or not hasattr(filling, _SWITCH):
        return False
    if getattr(filling, _SWITCH) is None and getattr(cache, "allow_cache_entry_mutation", None) is False:
        setattr(filling, _SWITCH, True)
    return bool(getattr(filling, _SWITCH))
