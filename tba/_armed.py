"""Armed: delays signals while the package is imported; imported first, with `end` called last."""

import os

from io_backends import interrupts

# No signal interrupts code of this package, except parts that run a program's code: command line, audit, integrations.
_RUN_PROGRAMS = ("cli", "_audit", "_forecast", "integrations/megatron", "integrations/transformers")
interrupts.protect(os.path.dirname(__file__), but=_RUN_PROGRAMS)
_is_armed = interrupts.arm()


def end() -> None:
    """Deliver signals again."""
    if _is_armed:
        interrupts.disarm()
