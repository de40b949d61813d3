"""Private functions of torch that the engine needs, in one place: each belongs to a feature and is checked at import.

Each is here because no public function tells as much. Without those that exactness depends on, the package refuses to
be imported and names them. Any other that a torch lacks, or has in another form, switches its feature off: `missing`
lists them, and the package says so once, at import.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from inspect import signature
from types import BuiltinMethodType, CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from .user_frames import warn
from .versions import TESTED, lacking, newer

F = TypeVar("F", bound=Callable[..., Any])


class Feature(enum.Enum):
    """What a private function is for; the value says what a torch without it means for training."""

    EXACT = "tba cannot guarantee exact gradients"
    STEP_ASIDE = "hooks cannot step aside when torch refuses them, so torch.func transforms in a forward raise"
    COMPILED = "compiled graphs are not recognized: their tensors move one by one, even if that gains nothing"
    CODE = "custom code is not distinguished from PyTorch's operators: both get copies of saved tensors"
    DERIVE = "no saved tensor is derived from others"
    RECOMPUTE = "plans do not recompute blocks"
    LOSSY = "lossy presets of compress= leave every tensor exact"
    CHECKPOINT = "tba.integrations.checkpoint is torch's own: what its policies save stays in memory"
    SCRIPT = "torch.jit.script refuses attached models: close() them first"
    GRAPHS = "what torch.compile saves in the memory of its CUDA graphs moves, and they are recorded again and again"
    TRACE = "torch.compile does not trace forwards with our hooks: graphs break there"


# The private functions that this torch lacks, or has in another form, by the feature that is off.
missing: dict[Feature, list[str]] = {}


def has(feature: Feature) -> bool:
    return feature not in missing


def _find(
    path: str,
    features: Feature | tuple[Feature, ...],
    works: Callable[[Any], bool] = callable,
    otherwise: Any = None,
) -> Any:
    """Find a private function of torch.

    Args:
        path: its dotted name.
        features: what needs it.
        works: whether the found object has the expected form. It may call it.
        otherwise: what to use without it.
    """
    try:
        found = _at(path)
        if works(found):
            return found
        problem = "has in another form"
    except (AttributeError, ImportError):
        problem = "does not have"
    except Exception:
        problem = "has in another form"
    if features is Feature.EXACT:
        raise ImportError(
            f"tba needs {path}, which torch {torch.__version__} {problem}: without it {Feature.EXACT.value}. "
            f"tba was tested with torch {TESTED[0]} to {TESTED[-1]}: install one of these"
        )
    for feature in features if isinstance(features, tuple) else (features,):
        missing.setdefault(feature, []).append(path)
    return otherwise


def _at(path: str) -> Any:
    first, *rest = path.split(".")
    found: Any = sys.modules[first]
    name = first
    for part in rest:
        name += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = import_module(name)  # a module that is not imported yet
    return found


def _gives(*kinds: type, to: tuple[Any, ...] = ()) -> Callable[[Any], bool]:
    return lambda found: isinstance(found(*to), kinds)


def _is_exact(path: str, works: Callable[[Any], bool] = callable) -> Any:
    return _find(path, Feature.EXACT, works)


def _is_context(*arguments: Callable[[], Any]) -> Callable[[Any], bool]:
    """Check that a function returns a context; `arguments` are made when it is called."""

    def works(found: Any) -> bool:
        with found(*(argument() for argument in arguments)):
            return True

    return works


def _answers(found: Any) -> bool:
    """Whether a function about the running backward can be called; outside a backward it may refuse."""
    with suppress(RuntimeError):
        found()
    return True


def _zero() -> Tensor:
    return torch.zeros(1, device="cpu")


def _takes_pair(push: Any) -> bool:
    """Whether hooks can be pushed and seen; True if hooks are refused here, as during an import."""
    if hooks_are_enabled():
        push(_hook, _hook)
        return top_hooks(True) == (_hook, _hook)
    return True


def _gives_back(pop: Any) -> bool:
    if hooks_are_enabled():
        pop()
        return top_hooks(True) != (_hook, _hook)
    return True


def _hook(packed: Any) -> Any:
    return packed


def _refuses_hooks(disable: Any) -> bool:
    if not hooks_are_enabled() or enable_hooks is None:
        return True
    disable("tba looks whether hooks can be refused", False)
    try:
        return not hooks_are_enabled()
    finally:
        enable_hooks()


def _shows_modes(get: Any) -> bool:
    with BaseTorchFunctionMode() as mode:
        return get(function_mode_count() - 1) is mode


def _pops_modes(pop: Any) -> bool:
    with BaseTorchFunctionMode() as mode:
        popped = pop()
        mode.__enter__()
    return popped is mode


def _pushes_modes(push: Any) -> bool:
    if _pop_function_mode is None:
        return True
    mode = BaseTorchFunctionMode()
    push(mode)
    return _pop_function_mode() is mode


def _counts(use_count: Any) -> bool:
    storage = torch.empty(1, device="cpu").untyped_storage()
    return isinstance(use_count(storage._cdata), int)


def _shows_packed(kind: Any) -> bool:
    return all(hasattr(kind, name) for name in ("data", "unpack_hook"))


# -- exactness --------------------------------------------------------------------------------------------------------

# -1 outside backward, else a number unique to the running call of it.
current_graph_task_id: Callable[[], int] = _is_exact("torch._C._current_graph_task_id", _gives(int))
# Whether the running backward keeps its graph (retain_graph or create_graph). Raises outside one.
graph_is_kept: Callable[[], bool] = _is_exact("torch._C._autograd._get_current_graph_task_keep_graph", _answers)
# The number of the next node made on this thread: once it has advanced, the last operator's kernel has returned.
sequence_nr: Callable[[], int] = _is_exact("torch._C._autograd._get_sequence_nr", _gives(int))
# The node whose backward runs on this thread.
current_node: Callable[[], Any] = _is_exact("torch._C._current_autograd_node", _answers)
# How many tensors and wrappers share a storage, by `storage._cdata`.
storage_use_count: Callable[[int], int] = _is_exact("torch._C._storage_Use_Count", _counts)
hooks_are_enabled: Callable[[], bool] = _is_exact("torch._C._autograd._saved_tensors_hooks_is_enabled", _gives(bool))
# The innermost pair of hooks on this thread, or None; the argument returns it even while compiling.
top_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = _is_exact(
    "torch._C._autograd._top_saved_tensors_default_hooks", _gives(tuple, type(None), to=(True,))
)
push_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = _is_exact(
    "torch._C._autograd._push_saved_tensors_default_hooks", _takes_pair
)
pop_hooks: Callable[[], None] = _is_exact("torch._C._autograd._pop_saved_tensors_default_hooks", _gives_back)
dispatch_mode_count: Callable[[], int] = _is_exact("torch._C._len_torch_dispatch_stack", _gives(int))
function_mode_count: Callable[[], int] = _is_exact("torch._C._len_torch_function_stack", _gives(int))
DisableTorchFunction: Callable[[], Any] = _is_exact("torch._C.DisableTorchFunction", _is_context())
# A context without the dispatch modes of this thread.
without_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _is_exact(
    "torch.utils._python_dispatch._disable_current_modes", _is_context()
)
# Whether a tensor's class keeps its elements in other tensors, and can be taken apart and rebuilt.
is_wrapper: Callable[[Any], bool] = _is_exact(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", _gives(bool, to=(None,))
)
tree_leaves: Callable[[Any], list[Any]] = _is_exact("torch.utils._pytree.tree_leaves", _gives(list, to=((),)))
# A view whose elements are negated when read.
negative_view: Callable[[Tensor], Tensor] = _is_exact("torch._neg_view", lambda found: found(_zero()).is_neg())

# -- features ---------------------------------------------------------------------------------------------------------

# Refuse hooks on this thread, by default only if there are none, and allow them again. Torch's own code looks up both,
# and `pop_hooks`, by these names at each call.
enable_hooks: Callable[[], None] | None = _find(
    "torch._C._autograd._saved_tensors_hooks_enable",
    Feature.STEP_ASIDE,
    lambda found: not hooks_are_enabled() or found() is None,
)
disable_hooks: Callable[..., None] | None = _find(
    "torch._C._autograd._saved_tensors_hooks_disable", Feature.STEP_ASIDE, _refuses_hooks
)
why_disabled: Callable[[], str | None] | None = _find(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    Feature.STEP_ASIDE,
    _gives(str, type(None)),
)
# Whether a pair can step aside when torch refuses hooks, and come back.
hooks_step_aside = has(Feature.STEP_ASIDE)
_MODES = (Feature.LOSSY, Feature.RECOMPUTE)
_function_mode_at: Callable[[int], Any] = _find("torch._C._get_function_stack_at", _MODES, _shows_modes)
_pop_function_mode: Callable[[], Any] = _find("torch._C._pop_torch_function_stack", _MODES, _pops_modes)
push_function_mode: Callable[[Any], None] = _find("torch._C._push_on_torch_function_stack", _MODES, _pushes_modes)
# Whether `torch.func` transforms are running: they need Functions of another form, and run their own graphs.
transforming: Callable[[], bool] = _find(
    "torch._C._are_functorch_transforms_active", _MODES, _gives(bool), lambda: True
)
# Whether the process uses oneDNN's kernels (`torch.backends.mkldnn.flags` is the public way, a context).
mkldnn_enabled: Callable[[], bool] = _find("torch._C._get_mkldnn_enabled", Feature.DERIVE, _gives(bool))
enable_mkldnn: Callable[[bool], None] = _find(
    "torch._C._set_mkldnn_enabled", Feature.DERIVE, lambda found: found(mkldnn_enabled()) is None
)
# Shows what a pack hook returned without calling the unpack hook.
_find("torch._C._autograd.SavedTensor", Feature.DERIVE, _shows_packed)
# A context in which edits of a tensor do not bump its version.
keeping_version: Callable[[Tensor], AbstractContextManager[None]] = _find(
    "torch.autograd._unsafe_preserve_version_counter", Feature.RECOMPUTE, _is_context(_zero), nullcontext
)
_DispatchKey: Any = _find("torch._C.DispatchKey", Feature.CHECKPOINT, lambda found: bool(found.ADInplaceOrView))
_exclude_key: Callable[..., Any] = _find(
    "torch._C._SetExcludeDispatchKeyGuard",
    Feature.CHECKPOINT,
    _is_context(lambda: _DispatchKey.ADInplaceOrView, lambda: False),
)
_ModeKey: Any = _find("torch._C._TorchDispatchModeKey", Feature.CHECKPOINT, lambda found: bool(found.PROXY))
_dispatch_mode: Callable[[Any], Any] = _find(
    "torch._C._get_dispatch_mode", Feature.CHECKPOINT, lambda found: found(_ModeKey.PROXY) is None or True
)
# Compiles a module and its submodules to TorchScript, with their hooks.
create_script_module: Callable[..., Any] | None = _find(
    "torch.jit._recursive.create_script_module",
    Feature.SCRIPT,
    lambda found: "nn_module" in signature(found).parameters,
)
# Decorates functions that torch.compile must not trace. The public way imports the compiler.
untraced: Callable[[Callable[..., None]], Callable[..., None]] = _find(
    "torch._compile._disable_dynamo", Feature.TRACE, lambda found: callable(found(_zero)), torch.compiler.disable
)
_frames: Any = _find("torch._C._dynamo.eval_frame", Feature.TRACE, lambda found: callable(found.set_code_exec_strategy))
# The code that calls autograd's engine: the innermost Python frame for an operator.
_calls_engine: Any = _find(
    "torch.autograd.graph._engine_run_backward", Feature.CODE, lambda found: "t_outputs" in signature(found).parameters
)
run_backward: CodeType | None = getattr(_calls_engine, "__code__", None)
# The mode of a default device.
DeviceContext: Any = _find(
    "torch.utils._device.DeviceContext",
    Feature.RECOMPUTE,
    lambda found: issubclass(found, TorchFunctionMode),
    otherwise=(),
)
# Whether a storage is one that CUDA's allocator frees, by `storage._cdata`. Builds without CUDA do not have it.
_is_allocators: Callable[[int], bool] | None = getattr(torch._C, "_has_Standard_Deleter", None)
if _is_allocators is None and getattr(torch._C, "_has_cuda", False):
    missing[Feature.GRAPHS] = ["torch._C._has_Standard_Deleter"]
# Read for each saved tensor and block, so plain values: hashing an Enum calls Python code.
derives, recomputes = has(Feature.DERIVE), has(Feature.RECOMPUTE)
# The Python code that calls a Function, up to torch 2.13; from 2.14 on that is built in.
_APPLY: Any = getattr(getattr(Function.apply, "__func__", None), "__code__", None)
# The inner tensor that holds the elements of a jagged nested tensor. If it has another name, such tensors stay.
JAGGED_VALUES = "_values"
# The modules in which AOTAutograd calls the Function of a compiled graph.
_AOT = "torch._functorch._aot_autograd"


def tell(silenced_by: str) -> None:
    """Warn of what is off with this torch, and if it is newer than any tested.

    Args:
        silenced_by: the environment variable whose value `allow` silences the latter.
    """
    off = {feature.value: names for feature, names in missing.items()}
    for told in (*lacking(torch.__version__, off), *newer(torch.__version__, silenced_by)):
        warn(told)


def stand_in(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Make torch's own Python code call `by` instead of one of the hook functions above."""
    name = function.__name__
    if getattr(torch._C._autograd, name, None) is function:
        setattr(torch._C._autograd, name, functools.update_wrapper(by, function))


def script_by(by: Callable[..., Any]) -> None:
    """Make torch's own Python code call `by` instead of `create_script_module`."""
    if create_script_module is not None:
        torch.jit._recursive.create_script_module = functools.wraps(create_script_module)(by)


def function_modes() -> list[Any]:
    """List this thread's torch-function modes, from the outermost; None for each that torch does not show."""
    unknown = [None] * function_mode_count()
    return unknown if _function_mode_at is None else [_function_mode_at(number) for number in range(len(unknown))]


def take_function_modes() -> list[Any]:
    """Take all torch-function modes off this thread's stack; return them from the outermost."""
    count = function_mode_count() if _pop_function_mode is not None else 0
    return [_pop_function_mode() for _ in range(count)][::-1]


def not_compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Make torch.compile leave a function alone, except when code that it compiles or exports calls it.

    If torch has no such switch, it does not enter the function either (`untraced`).
    """
    try:
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):
        return untraced(function)
    return function


def never_compiled(function: F) -> F:
    """Make torch.compile leave a function alone and what it calls, when code that it does not compile calls it.

    That is so of hooks that an operator calls between two graphs. If torch has no such switch, they are compiled.
    """
    with suppress(AttributeError, TypeError):
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
        _frames.set_code_exec_strategy(function.__code__, skip)
    return function


def top_function_mode() -> object:
    count = function_mode_count()
    return _function_mode_at(count - 1) if count else None


def take_function_mode(mode: object, below: object) -> None:
    """Take a torch-function mode off this thread's stack, even from beneath others.

    If it is not there, another mode's end has popped it. Then that mode, which is left over, goes instead, if `below`,
    the innermost one when `mode` was entered, is the innermost now.
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
    """Make detached tensors share their source's version counter even in a dispatch mode, beneath autograd."""
    return _exclude_key(_DispatchKey.ADInplaceOrView, False)  # type: ignore[no-any-return]


def compiles() -> bool:
    traced = has(Feature.CHECKPOINT) and _dispatch_mode(_ModeKey.PROXY) is not None
    return torch.compiler.is_compiling() or traced


def compiled_graph(frame: FrameType | None) -> int | None:
    """The number of the compiled graph whose node calls the pack hook running in `frame`; None for other callers.

    Each compiled graph is a Function of its own, numbered by torch. The frame around the hook's is that of the
    Function's `apply`, or calls it.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("tba."):
        frame = frame.f_back
    if frame is None:
        return None
    if frame.f_code is _APPLY:
        return getattr(frame.f_locals["cls"], "_aot_id", None)
    if not str(frame.f_globals.get("__name__")).startswith(_AOT):
        return None
    called = (each.__self__ for each in frame.f_locals.values() if isinstance(each, BuiltinMethodType))
    number: int | None = next((each._aot_id for each in called if hasattr(each, "_aot_id")), None)
    if number is None and _APPLY is None and has(Feature.COMPILED):
        missing[Feature.COMPILED] = [f"{_AOT} that calls Function.apply"]
        for told in lacking(torch.__version__, {Feature.COMPILED.value: missing[Feature.COMPILED]}):
            warn(told)
    return number


def in_graph_pool(tensor: Tensor) -> bool:
    """Whether somebody else than PyTorch's allocator decides about the memory of a CUDA tensor.

    That is the pool of `torch.compile`'s CUDA graphs, or another library. What a graph makes when it is replayed has no
    deleter of the allocator's. What it makes while it is run for the first times has one, and only it tells.
    """
    if _is_allocators is None or tensor.device.type != "cuda":
        return False
    if not _is_allocators(tensor.untyped_storage()._cdata):
        return True
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # if it is not imported, there are no such graphs
    if trees is None or not has(Feature.GRAPHS):
        return False
    try:
        manager = trees.get_manager(tensor.device.index, create_if_none_exists=False)
        if manager is None or manager.current_node is None or manager.path_state.name == "EXECUTION":
            return False
        return bool(manager.current_node._is_cuda_graph_recorded_tensor(tensor))
    except (AttributeError, TypeError):
        missing[Feature.GRAPHS] = ["a form of torch._inductor.cudagraph_trees that is known"]
        for told in lacking(torch.__version__, {Feature.GRAPHS.value: missing[Feature.GRAPHS]}):
            warn(told)
        return False


def is_operator(kind: type) -> bool:
    """Whether this type of node is PyTorch's own, made for one operator, and lives as long as the process.

    Each custom Function has its own type, which dies with it, so nothing may be keyed by it; custom Functions written
    in C++ share one type.
    """
    return not issubclass(kind, BackwardCFunction) and kind.__name__ != "CppFunction"


def taken_apart(tensor: Tensor) -> tuple[dict[str, Any], Any] | None:
    """Take a wrapper subclass apart: its attributes, inner tensors among them, and a context. None for other tensors.

    `type(tensor).__tensor_unflatten__` makes an equal one of these. Inner tensors may be wrappers too. If a collective
    is still computing the result, this waits for it, as the operator that saves it is about to do.
    """
    if not is_wrapper(tensor):
        return None
    if (wait := getattr(tensor, "trigger_wait", None)) is not None:  # AsyncCollectiveTensor
        wait()
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names}, context


def innermost(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the elements of a wrapper subclass; for any other tensor, the tensor itself."""
    apart = taken_apart(tensor)
    if apart is None:
        return [tensor]
    return [found for inner in apart[0].values() if isinstance(inner, Tensor) for found in innermost(inner)]


def only_inner(tensor: Tensor) -> Tensor | None:
    """The one tensor that holds all elements of a wrapper subclass, as of a DTensor; None for any other tensor."""
    apart = taken_apart(tensor)
    inner = [value for value in apart[0].values() if isinstance(value, Tensor)] if apart is not None else []
    if len(inner) != 1:
        return None
    return inner[0] if type(inner[0]) is Tensor else only_inner(inner[0])


def gives_lengths(tensor: Tensor) -> bool:
    """Whether the sizes of jagged tensors belong to this very tensor, their offsets: an equal one gives other sizes."""
    module = sys.modules.get("torch.nested._internal.nested_tensor")  # if it is not imported, there are none
    return tensor in getattr(module, "_tensor_symint_registry", ())


def sizes(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's shape; of a nested tensor of the strided layout, which has none, those of its rows."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return tuple(tuple(row.shape) for row in tensor.detach().unbind())
    return tuple(tensor.shape)


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor whose local tensor has some of its elements, rather than terms of a sum."""
    module = sys.modules.get("torch.distributed.tensor")  # if it is not imported, there is no DTensor
    if module is None or not isinstance(tensor, module.DTensor):
        return False
    return not any(placement.is_partial() for placement in tensor.placements)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of a model's weights: FSDP1, FSDP2, tensor parallelism, ZeRO-3."""
    module = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, there is no FSDP
    if module is not None and any(isinstance(each, module.FullyShardedDataParallel) for each in model.modules()):
        return True
    tensors = sys.modules.get("torch.distributed.tensor")
    return any(
        hasattr(each, "ds_id")  # ZeRO-3
        or getattr(each, "_fsdp_flattened", False)
        or (tensors is not None and isinstance(each, tensors.DTensor))
        for each in model.parameters()
    )


def process_groups() -> list[Any] | None:
    """The groups of `torch.distributed` that this process is in; None if torch does not tell."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return []
    groups = getattr(getattr(module, "_world", None), "pg_map", None)
    return None if groups is None else list(groups)


def job_store(prefix: str) -> tuple[Any, int] | None:
    """A job's own store, for keys with a prefix, and this one's rank; None if it is alone, or torch does not tell."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized() or module.get_world_size() == 1:
        return None
    world = getattr(module, "_world", None)
    found = getattr(world, "pg_map", {}).get(getattr(world, "default_pg", None))
    return None if found is None or found[1] is None else (module.PrefixStore(prefix, found[1]), module.get_rank())


def ranks_of(group: Any) -> list[int]:
    """The ranks of the job that are in a process group."""
    return list(sys.modules["torch.distributed.distributed_c10d"].get_process_group_ranks(group))
