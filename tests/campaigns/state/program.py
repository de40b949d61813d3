"""Program: the source code of a random model whose blocks keep hidden state, drawn by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from .kinds import WHATS, WHENS, WHERES
from .specials import SPECIALS, Piece

STATELESS = "none"
# PyTorch refuses them where a second forward comes before the first one's backward.
_ONCE = ("a weight edited", "auxiliary losses that stay")
_BANK = "a bank that others pop"  # the blocks without state read it
_HEADER = """import array, builtins, collections, contextlib, contextvars, ctypes, dataclasses, functools, hashlib
import heapq, io, itertools, logging, math, os, queue, random, tempfile, threading, types, weakref
import numpy, torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
import other

STEP, W = 0, 16

def mix(h, v):
    return h * (1 + 0.1 * (torch.tanh(v) if isinstance(v, torch.Tensor) else math.tanh(v)))
"""


@dataclass(frozen=True)
class State:
    """One hidden state.

    Attributes:
        what, where, when: names of kinds; of a special one, its name, "" and "".
    """

    what: str
    where: str = ""
    when: str = ""

    def __str__(self) -> str:
        return f"{self.what} in {self.where}, {self.when}" if self.where else self.what

    def names(self) -> tuple[str, ...]:
        """The kinds that it is counted by."""
        return tuple(filter(None, (self.what, self.where, self.when)))


@dataclass(frozen=True)
class Program:
    """A model and its training.

    Attributes:
        states: that its blocks keep.
        blocks: how many there are; those in `stateful` have the states.
        dropout: whether blocks have it.
        steps, rows: of the training; `rows` of each step in turn.
        forwards: how many of a step come before its backwards.
        twice: whether each block is called twice in a forward.
        evaluated: whether the model is called without gradients after some steps.
        outside: whether backward runs outside of the context.
        none: whether gradients are set to None between steps, or to zero.
        share: of what a plain step saves, the budget.
        slow: whether the link is.
    """

    seed: int
    states: tuple[State, ...]
    blocks: int = 6
    stateful: tuple[int, ...] = ()
    dropout: bool = False
    steps: int = 7
    rows: tuple[int, ...] = (16,)
    forwards: int = 1
    twice: bool = False
    evaluated: bool = False
    outside: bool = False
    none: bool = True
    share: float = 0.5
    slow: bool = True

    def __str__(self) -> str:
        states = "; ".join(map(str, self.states)) or STATELESS
        odd = [name for name in ("twice", "evaluated", "outside", "dropout") if getattr(self, name)]
        many = [f"{self.forwards} forwards"] if self.forwards > 1 else []
        of = f"{len(self.stateful)} of {self.blocks} blocks"
        link = "slow" if self.slow else "fast"
        return ", ".join([f"{states} ({of})", *odd, *many, f"rows {self.rows}", f"budget {self.share:.0%}, {link}"])


def draw(seed: int, kind: str | None = None) -> Program:
    """The program of a seed; with a state of this kind, and no other, if one is named."""
    numbers = random.Random(seed)
    blocks = numbers.randint(4, 7)
    program = Program(
        seed=seed,
        states=(),
        blocks=blocks,
        dropout=numbers.random() < 0.3,
        steps=numbers.choice((7, 7, 8)),
        rows=numbers.choice(((16,), (16,), (16,), (16, 24), (24, 16, 16))),
        forwards=numbers.choice((1, 1, 1, 1, 2)),
        twice=numbers.random() < 0.1,
        evaluated=numbers.random() < 0.2,
        outside=numbers.random() < 0.15,
        none=numbers.random() < 0.8,
        share=round(numbers.uniform(0.3, 0.7), 2),
        slow=numbers.random() < 0.75,
    )
    count = 1 if kind is not None else numbers.choice((0, 1, 1, 1, 1, 1, 1, 2, 2))
    states = tuple(_draw_state(numbers, kind) for _ in range(count))
    some = numbers.choice((blocks, blocks, (blocks + 1) // 2, 1))
    stateful = tuple(sorted(numbers.sample(range(blocks), some))) if states else ()
    if any(state.what == _BANK for state in states):
        stateful = tuple(range(blocks // 2))
    if any(state.what.startswith(_ONCE) for state in states):
        program = replace(program, forwards=1, twice=False)
    return replace(program, states=states, stateful=stateful)


def simple(state: State) -> Program:
    """The plainest program with a state, as long as it takes to show."""
    late = state.when not in ("", "in each call") or "from step 4 on" in state.what
    stateful = (0, 1) if state.what == _BANK else (0, 1, 2, 3) if late else (0, 1, 2)
    return Program(
        seed=0,
        states=(state,),
        blocks=4 if late or state.what == _BANK else 3,
        stateful=stateful,
        steps=7 if late else 5,
    )


def each_kind() -> list[State]:
    """Every kind at least once."""
    whats, wheres = list(WHATS), list(WHERES)
    pairs = [State(what, wheres[number % len(wheres)], "in each call") for number, what in enumerate(whats)]
    whens = [State("a count", "an attribute", when) for when in WHENS]
    return [*pairs, *whens, *map(State, SPECIALS)]


def kinds() -> list[str]:
    """Every kind by its name."""
    return [*WHATS, *WHERES, *WHENS, *SPECIALS]


def _draw_state(numbers: random.Random, kind: str | None) -> State:
    if kind in SPECIALS or (kind is None and numbers.random() < 0.35):
        return State(kind or numbers.choice(list(SPECIALS)))
    what, where = numbers.choice(list(WHATS)), numbers.choice(list(WHERES))
    when = numbers.choice(["in each call", numbers.choice(list(WHENS))])
    return State(
        kind if kind in WHATS else what,
        kind if kind in WHERES else where,
        kind if kind in WHENS else when,
    )


def sources(program: Program) -> tuple[str, str]:
    """The source code of a program, and that of the other module that it imports."""
    pieces = [_piece(state, number) for number, state in enumerate(program.states)]

    def all_of(name: str, margin: int = 0, empty: str = "") -> str:
        text = "\n".join(filter(None, (getattr(piece, name) for piece in pieces))) or empty
        return _indented(text, margin)

    contexts = {name: [getattr(piece, name) for piece in pieces if getattr(piece, name)] for name in _AROUND}
    body = _BLOCK.format(
        body=all_of("body", 4),
        drop=0.1 if program.dropout else 0.0,
        stateful=set(program.stateful) or "()",
        init=all_of("init", 12, "pass"),
        forward=all_of("forward", 12, "pass"),
        stateless=all_of("stateless", 12, "pass"),
        declare=_indented("\n".join(_declared(program)), 8),
    )
    text = [
        _HEADER,
        all_of("header"),
        f"def make_block():\n{all_of('cells', 4, 'pass')}\n{_indented(body, 4)}\n    return Block\n",
        "Block = make_block()\n",
        _NET.format(
            blocks=program.blocks,
            twice="2" if program.twice else "1",
            net_init=all_of("net_init", 8),
            before=all_of("before", 8),
            after=all_of("after", 8),
        ),
        f"def between(net):\n{all_of('between', 4, 'pass')}\n",
        f"def after_step(net):\n{all_of('step', 4, 'pass')}\n",
        *(_CONTEXT.format(name=name, entered=_entered(each)) for name, each in contexts.items()),
        "def dump(net):\n    layers = [layer for layer in net.layers if layer.stateful]",
        f"    return [{', '.join(piece.dump for piece in pieces)}] if layers else []\n",
    ]
    return "\n".join(text), "\n".join(piece.other for piece in pieces)


def describe(program: Program) -> str:
    """All about a program: its training, its source code and that of the other module."""
    code, other = sources(program)
    settings = ", ".join(f"{name}={value}" for name, value in vars(program).items() if name != "states")
    parts = [f"# {program}", f"# {settings}", code, *([f"# the module `other`\n{other}"] if other else [])]
    return "\n".join(parts)


_AROUND = ("around_forward", "around_step")
_CONTEXT = (
    "@contextlib.contextmanager\ndef {name}():\n    with contextlib.ExitStack() as stack:\n{entered}\n        yield\n"
)
_BLOCK = """class Block(nn.Module):
{body}
    def __init__(self, number, parent):
        super().__init__()
        self.number, self.stateful, self.calls = number, number in {stateful}, None
        self.norm, self.up, self.down = nn.LayerNorm(W), nn.Linear(W, W), nn.Linear(W, W)
        self.act, self.drop = nn.GELU(), nn.Dropout({drop})
        if self.stateful:
{init}
    def second(self):
        self.calls = not self.calls
        return self.calls
    def forward(self, x):
{declare}
        h, v = self.drop(self.act(self.up(self.norm(x)))), 0.5
        if self.stateful:
{forward}
        else:
{stateless}
        return x + self.down(torch.sigmoid(h) * h)
"""
_NET = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(W, W), nn.Linear(W, W)
{net_init}
        self.layers = nn.ModuleList(Block(number, self) for number in range({blocks}))
    def forward(self, x):
{before}
        x = self.first(x)
        for layer in self.layers:
            for _ in range({twice}):
                x = layer(x)
        loss = self.head(x).square().mean()
{after}
        return loss
"""


def _declared(program: Program) -> list[str]:
    found = []
    for number, state in enumerate(program.states):
        place = WHERES.get(state.where)
        if place is not None and place.declare and not place.wrap:
            found.append(place.declare.replace("@", str(number)))
    return found


def _piece(state: State, number: int) -> Piece:
    """The code of a state, under its number."""
    if not state.where:
        piece = SPECIALS[state.what]
        return Piece(
            **{name: _decorators(_kept(text).replace("@", str(number))) for name, text in _fields(piece).items()}
        )
    what, place = WHATS[state.what], WHERES[state.where]
    update = _indented(what.update, 4)
    code = f"if {WHENS[state.when]}:\n{update}\nh = mix(h, {what.read})"
    header = [what.header, place.header]
    if place.wrap:
        margin = next(line for line in place.wrap.splitlines() if line.strip() == "CODE").index("CODE")
        inner = "\n".join(filter(None, ["v = 0.5", place.declare, code]))
        header.append(place.wrap.replace(" " * margin + "CODE", _indented(inner, margin)))
        code = place.call
    piece = Piece(
        header="\n".join(filter(None, header)),
        cells=place.cells,
        body=place.body,
        init=place.init,
        net_init=place.net_init,
        forward=code,
        dump=place.dump,
        other="\n".join(filter(None, [_OTHER + what.header, place.other])) if place.other else "",
    )

    def filled(text: str) -> str:
        return text.replace("LV", place.lv).replace("INIT", what.init).replace("@", str(number))

    return Piece(**{name: _decorators(filled(_kept(text))) for name, text in _fields(piece).items()})


_OTHER = """import array, collections, ctypes, functools, hashlib, io, itertools, math, queue, random, tempfile, weakref
import numpy, torch
from torch import nn
"""
_DECORATOR = "\0"


def _kept(text: str) -> str:
    """Hide the signs of decorators, which are no numbers of a state."""
    lines = text.splitlines()
    return "\n".join(line.replace("@", _DECORATOR, 1) if line.lstrip().startswith("@") else line for line in lines)


def _decorators(text: str) -> str:
    return text.replace(_DECORATOR, "@")


def _fields(piece: Piece) -> dict[str, Any]:
    return dict(vars(piece))


def _entered(contexts: list[str]) -> str:
    return "\n".join(f"        stack.enter_context({each})" for each in contexts) or "        pass"


def _indented(text: str, margin: int) -> str:
    return "\n".join(" " * margin + line if line else line for line in text.splitlines())
