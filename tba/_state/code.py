"""Code: the names by which a function's code can reach what is not its own."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType


@lru_cache(4096)  # each entry keeps a function's code alive
def names_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that a function's code names, including inner functions', and all names in it."""
    found: set[str] = set()
    names = {*code.co_names, *(each for each in code.co_consts if type(each) is str)}
    raw, more = code.co_code, 0
    for at in range(0, len(raw), 2):
        number, more = raw[at + 1] | more, 0
        operation = dis.opname[raw[at]]
        if operation == "EXTENDED_ARG":
            more = number << 8
        elif operation == "LOAD_GLOBAL":  # the lowest bit of its argument is a flag
            found.add(code.co_names[number >> 1])
        elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            found.add(code.co_names[number])
    for inner in code.co_consts:
        if type(inner) is CodeType:
            inner_globals, inner_names = names_of(inner)
            found |= inner_globals
            names |= inner_names
    return frozenset(found), frozenset(names)
