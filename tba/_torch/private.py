"""Private functions of torch that the engine needs, in one place and checked at import.

Each is used because no public function tells as much. A torch that lacks one is refused by its name, instead of failing
somewhere inside a hook.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction, Function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def _find(path: str) -> Any:
    found = _optional(path)
    if found is None:
        raise ImportError(
            f"tba needs torch._C.{path}, which torch {torch.__version__} does not have; "
            "tba is developed on torch 2.13 and needs 2.11 or later"
        )
    return found


def _optional(path: str) -> Any:
    """Find what the engine can do without; None if this torch lacks it."""
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# -1 outside backward, else a number unique to the running call of backward.
current_graph_task_id: Callable[[], int] = _find("_current_graph_task_id")
# Whether the running backward keeps its graph (retain_graph or create_graph).
graph_is_kept: Callable[[], bool] = _find("_autograd._get_current_graph_task_keep_graph")
# The number the next node made on this thread will get: once it has moved on, the last operator's kernel has returned.
sequence_nr: Callable[[], int] = _find("_autograd._get_sequence_nr")
# The node whose backward runs on this thread.
current_node: Callable[[], Any] = _find("_current_autograd_node")
# How many tensors and wrappers share a storage, by `storage._cdata`.
storage_use_count: Callable[[int], int] = _find("_storage_Use_Count")
push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = _find(
    "_autograd._push_saved_tensors_default_hooks"
)
pop_hooks: Callable[[], None] = _find("_autograd._pop_saved_tensors_default_hooks")
# The innermost pair of hooks on this thread, or None; the argument asks for it even while compiling.
top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = _find(
    "_autograd._top_saved_tensors_default_hooks"
)
hooks_are_enabled: Callable[[], bool] = _find("_autograd._saved_tensors_hooks_is_enabled")
# Refuse hooks on this thread, by default only if there are none, and allow them again. Torch's own code finds both, and
# `pop_hooks`, by these names each time.
disable_hooks: Callable[..., None] | None = _optional("_autograd._saved_tensors_hooks_disable")
enable_hooks: Callable[[], None] | None = _optional("_autograd._saved_tensors_hooks_enable")
why_disabled: Callable[[], str | None] | None = _optional("_autograd._saved_tensors_hooks_get_disabled_error_message")
# Whether a pair can step aside where torch refuses hooks, and come back.
hooks_step_aside = None not in (disable_hooks, enable_hooks, why_disabled)
dispatch_mode_count: Callable[[], int] = _find("_len_torch_dispatch_stack")
function_mode_count: Callable[[], int] = _find("_len_torch_function_stack")
_function_mode_at: Callable[[int], Any] = _find("_get_function_stack_at")
push_function_mode: Callable[[Any], None] = _find("_push_on_torch_function_stack")
_pop_function_mode: Callable[[], Any] = _find("_pop_torch_function_stack")
DisableTorchFunction: Callable[[], Any] = _find("DisableTorchFunction")
# Whether `torch.func` transforms are under way: they want Functions of another form, and run graphs of their own.
transforming: Callable[[], bool] = _find("_are_functorch_transforms_active")
# Whether kernels of oneDNN are used, for the process (`torch.backends.mkldnn.flags` is the public way, a context).
mkldnn_enabled: Callable[[], bool] = _find("_get_mkldnn_enabled")
enable_mkldnn: Callable[[bool], None] = _find("_set_mkldnn_enabled")
_exclude_key: Callable[..., Any] = _find("_SetExcludeDispatchKeyGuard")
_DispatchKey: Any = _find("DispatchKey")
_dispatch_mode: Callable[[Any], Any] = _find("_get_dispatch_mode")
_ModeKey: Any = _find("_TorchDispatchModeKey")
# Whether a node shows what a pack hook returned without calling the unpack hook. Derivations need it.
shows_packed: bool = all(
    hasattr(getattr(torch._C._autograd, "SavedTensor", None), name) for name in ("data", "unpack_hook")
)
# A context in which edits of a tensor do not count as new versions of it.
keeping_version: Callable[[Tensor], AbstractContextManager[None]] = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
# Decorates functions that torch.compile must not trace. `torch.compiler.disable` would import the compiler to do so.
untraced: Callable[[Callable[..., None]], Callable[..., None]] = _disable_dynamo
_frames: Any = _optional("_dynamo.eval_frame")
# Whether a tensor is of a class that keeps its elements in other tensors, and can be taken apart and rebuilt.
is_wrapper: Callable[[Any], bool] = is_traceable_wrapper_subclass
# From 2.14 on it has no code: then no compiled graph is recognised, and what one saves moves as anything else.
_APPLY = getattr(getattr(Function.apply, "__func__", None), "__code__", None)


def stand_in(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Have torch's own Python code call `by` instead of one of the functions about hooks above."""
    name = function.__name__
    if getattr(torch._C._autograd, name, None) is function:
        setattr(torch._C._autograd, name, functools.update_wrapper(by, function))


def function_modes() -> list[Any]:
    """List the torch-function modes of this thread, from the outermost."""
    return [_function_mode_at(number) for number in range(function_mode_count())]


def take_function_modes() -> list[Any]:
    """Take all torch-function modes off this thread's stack; lists them from the outermost."""
    return [_pop_function_mode() for _ in range(function_mode_count())][::-1]


def not_compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Have torch.compile leave a function alone, but for going into it from code that it compiles or exports.

    Where torch has no such switch it does not go into it either (`untraced`).
    """
    try:
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):
        return untraced(function)
    return function


def top_function_mode() -> object:
    """Return the innermost torch-function mode of this thread; None without any."""
    count = function_mode_count()
    return _function_mode_at(count - 1) if count else None


def take_function_mode(mode: object, below: object) -> None:
    """Take a torch-function mode off this thread's stack, from beneath others too.

    If it is not there, another mode's end has popped it: what that has left goes instead, if `below`, the innermost one
    when `mode` was entered, is the innermost now.
    """
    above = []
    while function_mode_count():
        if (top := _pop_function_mode()) is mode:
            break
        above.append(top)
    else:
        if above and above[0] is below:
            del above[0]
    for each in reversed(above):
        push_function_mode(each)


def in_place_is_seen() -> AbstractContextManager[None]:
    """Have detached tensors share a version counter with their source in a dispatch mode too, beneath autograd."""
    return _exclude_key(_DispatchKey.ADInplaceOrView, False)  # type: ignore[no-any-return]


def compiles() -> bool:
    """Whether torch.compile traces what is called."""
    return torch.compiler.is_compiling() or _dispatch_mode(_ModeKey.PROXY) is not None


def compiled_graph(frame: FrameType | None) -> int | None:
    """Return the number of the compiled graph whose node calls the pack hook that runs in `frame`; None for others.

    Each compiled graph is a Function of its own, which torch numbers.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("tba."):
        frame = frame.f_back
    if frame is None or _APPLY is None or frame.f_code is not _APPLY:
        return None
    return getattr(frame.f_locals["cls"], "_aot_id", None)


def is_operator(kind: type) -> bool:
    """Whether this type of node is PyTorch's own, made for one operator, and lives as long as the process.

    Each custom Function has a type of its own, which dies with it, so that nothing may be remembered by it; custom
    Functions written in C++ share one type.
    """
    return not issubclass(kind, BackwardCFunction) and kind.__name__ != "CppFunction"


def taken_apart(tensor: Tensor) -> tuple[dict[str, Any], Any] | None:
    """Take a wrapper subclass apart: its attributes, inner tensors among them, and a context; None for other tensors.

    `type(tensor).__tensor_unflatten__` makes an equal one of them. Inner tensors may be wrappers too. A result that a
    collective is still computing is waited for, as the operator that saves it is about to do.
    """
    if not is_wrapper(tensor):
        return None
    if (wait := getattr(tensor, "trigger_wait", None)) is not None:  # AsyncCollectiveTensor
        wait()
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}, context


def innermost(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the elements of a wrapper subclass; of any other tensor, the tensor itself."""
    apart = taken_apart(tensor)
    if apart is None:
        return [tensor]
    return [found for inner in apart[0].values() if isinstance(inner, Tensor) for found in innermost(inner)]


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor whose local tensor has elements of it, rather than terms of a sum."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: then there is none
    if module is None or not isinstance(tensor, module.DTensor):
        return False
    return not any(placement.is_partial() for placement in tensor.placements)


def process_groups() -> list[Any]:
    """Return the groups of `torch.distributed` that this process is in."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if module is None else list(module._world.pg_map)
