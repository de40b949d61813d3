"""Armed: signals wait while the package is imported. So this is imported first, and `end` is called last."""

import os

from io_backends import interrupts

# No signal tears anything here. It may strike in what runs a program's code: the command line, an audit, integrations.
_RUN_PROGRAMS = ("cli", "_audit", "_forecast", "integrations/megatron", "integrations/transformers")
interrupts.protect(os.path.dirname(__file__), but=_RUN_PROGRAMS)
_is_armed = interrupts.arm()


def end() -> None:
    """Have them wait no more."""
    if _is_armed:
        interrupts.disarm()
