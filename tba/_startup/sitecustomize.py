"""Sitecustomize: Python runs this file as it starts, in every process under `tba run` with settings.

It waits for `import torch`, and then for the first forward that trains something; only that imports tba. It imports
nothing that Python has not loaded already, says in one line what fails, and runs the `sitecustomize` that it shadows.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0" and sys.stderr is not None:
        print(f"tba: {text}", file=sys.stderr)


class _WaitForTorch:
    """A finder of modules that finds torch as the others do, and calls `_watch` once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find torch; leave all other modules to the other finders."""
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            del loader.exec_module
            sys.meta_path.remove(self)
            _watch(module)

        loader.exec_module = exec_module


def _watch(torch: Any) -> None:
    """Hand over to tba at the first forward with gradients of a module that has parameters to train."""
    import warnings

    process, missing = os.getpid(), ""

    def begin(module: Any, args: Any) -> None:
        nonlocal missing
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return
        if not torch.is_grad_enabled():
            missing = missing or (
                "no forward with gradients was seen; of a model that is compiled whole none is: compile each block"
            )
        elif not any(parameter.requires_grad for parameter in module.parameters()):
            missing = "no module whose forward ran with gradients has a parameter that requires grad"
        else:
            hook.remove()
            try:
                from torch.utils._python_dispatch import _disable_current_modes

                with _disable_current_modes():  # tba tries what it needs of torch as it is imported
                    from tba._attaching import start
            except Exception as error:
                missing = f"cannot import tba in {sys.executable}: {' '.join(str(error).split())}"
            else:
                missing = ""
                start(module, args)

    def tell() -> None:
        if missing and os.getpid() == process:
            _say(f"attached to nothing: {missing}")

    # torch.compile warns of any global hook: theirs would act twice, ours does nothing the second time.
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
    hook = torch.nn.modules.module.register_module_forward_pre_hook(begin)
    atexit.register(tell)


def _run_shadowed() -> None:
    """Run the `sitecustomize` that Python would have found without ours."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    if os.environ.get("TBA_ATTACH") == "1":
        try:
            if "torch" in sys.modules:  # a .pth file of the environment has imported it
                _watch(sys.modules["torch"])
            else:
                sys.meta_path.insert(0, _WaitForTorch())
        except Exception as problem:
            _say(f"attached to nothing: {problem}")
    _run_shadowed()
