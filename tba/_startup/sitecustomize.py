"""Sitecustomize: Python runs this file as it starts, in every process under `tba run` with settings.

It waits for `import torch`, and then for the first forward that trains something; only that imports tba. It imports
nothing that Python has not loaded already, says in one line what fails, and runs the `sitecustomize` that it shadows.
"""

import atexit
import os
import sys
import threading
from typing import Any

_UNSEEN = "no forward with gradients was seen; of a model that is compiled whole none is: compile each block"
_HERE = os.path.dirname(os.path.abspath(__file__))


def _say(text: str) -> None:
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    if rank == "0" and sys.stderr is not None:
        print(f"tba: {text}", file=sys.stderr)


class _WaitForTorch:
    """A finder of modules that finds torch as the others do, and calls `_watch` once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torch; leave all other modules to the other finders."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:  # a folder of that name has none
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        if getattr(loader, "tba_follows", False):  # another finder has asked us too
            return
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    _watch(module)
                except Exception as error:
                    _say(f"attached to nothing: {error}")

        try:
            loader.exec_module = exec_module
            loader.tba_follows = True
        except AttributeError as error:
            _say(f"attached to nothing: {error}")


def _watch(torch: Any) -> None:
    """Hand over to tba at the first forward with gradients of a module that has parameters to train."""
    import warnings

    process, lock = os.getpid(), threading.RLock()
    is_compiling = torch.compiler.is_compiling
    missing, imports = "", False
    attaches: Any = None

    def begin(module: Any, args: Any) -> None:
        if is_compiling() or torch.jit.is_tracing():
            return
        with lock:
            hand_over(module, args)

    def hand_over(module: Any, args: Any) -> None:
        nonlocal missing, imports, attaches
        if attaches is not None:
            attaches(module, args)  # this forward began while another thread imported tba
            return
        if not torch.is_grad_enabled():
            missing = missing or _UNSEEN
            return
        if imports:
            return  # a module of tba's own, as it is imported
        try:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                missing = "no module whose forward ran with gradients has a parameter that requires grad"
                return
            from torch.utils._python_dispatch import _disable_current_modes

            imports = True
            with _disable_current_modes():  # tba tries what it needs of torch as it is imported
                from tba._attaching import start
            missing, attaches = "", start()
        except Exception as error:
            missing = f"cannot import tba in {sys.executable}: {' '.join(str(error).split())}"
        hook.remove()
        if attaches is not None:
            attaches(module, args)

    def tell() -> None:
        why = missing or (_UNSEEN if attaches is None and _has_compiled() else "")
        if why and os.getpid() == process:
            _say(f"attached to nothing: {why}")

    # torch.compile warns of any global hook: theirs would act twice, ours does nothing the second time.
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
    hook = torch.nn.modules.module.register_module_forward_pre_hook(begin)
    atexit.register(tell)


def _has_compiled() -> bool:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"]["ok"])


def _run_shadowed() -> None:
    """Run the `sitecustomize` that Python would have found without ours."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _is_tba() -> bool:
    """Whether this process runs a command of tba's own, which trains nothing."""
    words = [os.path.basename(word) for word in sys.orig_argv[1:3]]
    return words[:1] == ["tba"] or words == ["-m", "tba"]


if __name__ == "sitecustomize":
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    if os.environ.get("TBA_ATTACH") == "1" and not _is_tba():
        try:
            if "torch" in sys.modules:  # a .pth file of the environment has imported it
                _watch(sys.modules["torch"])
            else:
                sys.meta_path.insert(0, _WaitForTorch())
        except Exception as problem:
            _say(f"attached to nothing: {problem}")
    _run_shadowed()
