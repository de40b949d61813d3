"""Armed: holds signals back while the package is imported.

The import system runs Python code in callbacks of weak references, and an error that a signal handler raises in one of
them is printed and lost. So the package imports this module first and calls `end` last.
"""

from . import interrupts

_is_armed = interrupts.arm()


def end() -> None:
    """Let signals through again."""
    if _is_armed:
        interrupts.disarm()
