"""Usage: a command line that cannot be read, told in one line: what was asked, what was found and what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup

from ._blame import BAD_USAGE, FAILED

# What typer says of a value, in the words of its releases, and what we say.
_SAID = (
    (r"valid int", "is not a whole number"),
    (r"valid (float|number)", "is not a number"),
    (r"(?:greater than or equal to |range x>=)(\S+)$", r"is less than \1"),
    (r"(?:less than or equal to )(\S+)$", r"is more than \1"),
    (r"range (\S+)<=x<=(\S+)$", r"is not from \1 to \2"),
    (r"", "cannot be used"),
)


class Commands(TyperGroup):
    """The commands of `tba`; a wrong command line ends with status 2 and a line of ours."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its status."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, **extra)
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except Exception as error:
            # Some releases of typer use click, some a copy of it, so its errors are known by their names.
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if "Abort" in kinds:
                sys.exit(FAILED)
            if "ClickException" not in kinds:
                raise
            if "NoArgsIsHelpError" in kinds:
                error.show()  # type: ignore[attr-defined]
            else:
                print(_told(error, kinds, sys.argv[1:] if args is None else args), file=sys.stderr)
            sys.exit(BAD_USAGE)
        sys.exit(status if isinstance(status, int) else 0)


def _told(error: Any, kinds: set[str], args: Sequence[str]) -> str:
    command = "tba" if error.ctx is None or error.ctx.parent is None else f"tba {error.ctx.info_name}"
    said = " ".join(error.message.split()).rstrip(".")
    if "NoSuchOption" in kinds:
        close = sorted(error.possibilities or ())
        nearest = f"did you mean {close[0]}?" if close else f"{command} --help lists its options"
        return f"{command}: there is no option {error.option_name}; {nearest}"
    if (word := re.match(r"No such command '(.*?)'", said)) is not None:
        close = get_close_matches(word[1], error.ctx.command.commands, n=1)
        nearest = f"did you mean {close[0]}?" if close else f"{command} --help lists its commands"
        return f"{command}: there is no command {word[1]!r}; {nearest}"
    if (word := re.match(r"Got unexpected extra arguments?\S* \((.*)\)", said)) is not None:
        return f"{command}: {word[1]!r} is more than it takes; {command} --help shows what it takes"
    if (word := re.match(r"Option '(\S+)' requires an argument", said)) is not None:
        return f"{command}: {word[1]} needs a value; {command} --help shows what it takes"
    parameter = getattr(error, "param", None)
    if parameter is None:
        return f"{command}: {said}; {command} --help shows what it takes"
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name
    if "MissingParameter" in kinds:
        return f"{command}: {name} is missing; {command} --help shows what it may be"
    found = next(match.expand(ours) for theirs, ours in _SAID if (match := re.search(theirs, said)) is not None)
    return f"{command}: {name}{_given(name, args)} {found}; {command} --help shows what it takes"


def _given(name: str, args: Sequence[str]) -> str:
    """Find the value of an option in the command line, as text to put behind its name."""
    for place, word in enumerate(args):
        if word == name and place + 1 < len(args):
            return f" {args[place + 1]!r}"
        if word.startswith(f"{name}="):
            return f" {word.partition('=')[2]!r}"
    return ""
