"""Armed: signals wait while the package is imported.

Imports run Python code in callbacks of weak references (of the import system's locks), and an error that a signal's
handler raises in one of those is printed and lost. So this is imported first, and `end` is called last.
"""

from . import interrupts

_is_armed = interrupts.arm()


def end() -> None:
    """Have them wait no more."""
    if _is_armed:
        interrupts.disarm()
