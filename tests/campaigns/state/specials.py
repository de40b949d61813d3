"""Specials: hidden state that is no place with a value: graphs that are handed on, hooks, modes, what programs change.

`@` is the number of the state. In forward `h` is what the block has come to half-way, and `v` a number that `mix(h, v)`
takes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Source code of one state, by where it goes.

    Attributes:
        header, cells, body, init, net_init: see `Where`.
        forward: of the block, where it has state.
        stateless: of the block, where it has none.
        before, after: of the network's forward, before its blocks and after them, where there is a `loss`.
        between: of the program, between forward and backward; it has `net`.
        step: of the program, after each step.
        around_forward, around_step: a context.
        dump: a list of what to compare, given `net` and its `layers` that have state.
        other: code of another module, `other`.
    """

    header: str = ""
    cells: str = ""
    body: str = ""
    init: str = ""
    net_init: str = ""
    forward: str = ""
    stateless: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    step: str = ""
    around_forward: str = ""
    around_step: str = ""
    dump: str = "[]"
    other: str = ""


_COUNTING = (
    "class Counting@({base}):\n    count = 0\n    def {method}(self, function, kinds, args=(), kwargs=None):\n"
    "        Counting@.count += 1\n        return function(*args, **(kwargs or {{}}))"
)
_FUNCTIONS = _COUNTING.format(base="TorchFunctionMode", method="__torch_function__")
_DISPATCHES = _COUNTING.format(base="TorchDispatchMode", method="__torch_dispatch__")

SPECIALS = {
    "auxiliary losses in a list": Piece(
        net_init="self.losses@ = []",
        init="self.losses@ = parent.losses@",
        forward="self.losses@.append(h.square().mean())",
        after="loss = loss + 0.1 * sum(self.losses@)\nself.losses@.clear()",
        dump="[len(net.losses@)]",
    ),
    "auxiliary losses that stay until backward": Piece(
        header="LOSSES@ = []",
        forward="LOSSES@.append(h.square().mean())",
        after="loss = loss + 0.1 * sum(LOSSES@)",
        step="LOSSES@.clear()",
        dump="[len(LOSSES@)]",
    ),
    "an auxiliary loss as an attribute": Piece(
        init="self.auxiliary@ = None",
        forward="self.auxiliary@ = h.square().mean()",
        after="loss = loss + sum(layer.auxiliary@ for layer in self.layers if layer.stateful)",
        dump="[layer.auxiliary@.detach() for layer in layers]",
    ),
    "an auxiliary loss that adds up": Piece(
        net_init="self.total@ = [0.0]",
        init="self.total@ = parent.total@",
        forward="self.total@[0] = self.total@[0] + h.square().mean()",
        after="loss = loss + 0.1 * self.total@[0]\nself.total@[0] = 0.0",
        dump="net.total@",
    ),
    "a bank that others pop": Piece(
        header="BANK@ = collections.deque()",
        forward="BANK@.append(h)",
        stateless="h = mix(h, BANK@.popleft().mean()) if BANK@ else h",
        step="BANK@.clear()",
        dump="[len(BANK@)]",
    ),
    "features for the head": Piece(
        net_init="self.features@ = {}",
        init="self.features@ = parent.features@",
        forward="self.features@[self.number] = h",
        after="loss = loss + 0.1 * sum(each.square().mean() for each in self.features@.values())",
        dump="sorted(net.features@)",
    ),
    "features of the next block": Piece(
        header="LAST@ = [None]",
        forward="h = h if LAST@[0] is None else mix(h, LAST@[0].mean())\nLAST@[0] = h",
        before="LAST@[0] = None",
        dump="[]",
    ),
    "a memory of the last step": Piece(
        init="self.memory@ = None",
        forward=(
            "now = h.detach().mean(0)\nh = h if self.memory@ is None else h + 0.1 * torch.tanh(self.memory@)\n"
            "self.memory@ = now"
        ),
        dump="[layer.memory@ for layer in layers]",
    ),
    "a hook that collects": Piece(
        net_init="self.seen@ = []",
        init=(
            "seen = parent.seen@\n"
            "self.up.register_forward_hook(lambda module, args, out: seen.append(out.detach().mean()))"
        ),
        after="loss = mix(loss, sum(self.seen@[-9:]))\ndel self.seen@[:-50]",
        dump="net.seen@",
    ),
    "a hook that collects graphs": Piece(
        net_init="self.seen@ = []",
        init="seen = parent.seen@\nself.up.register_forward_hook(lambda module, args, out: seen.append(out))",
        after="loss = loss + 0.1 * sum(each.square().mean() for each in self.seen@)\nself.seen@.clear()",
        dump="[len(net.seen@)]",
    ),
    "a hook before a part": Piece(
        header=(
            "TICKS@ = [0]\ndef tick@(module, args):\n    TICKS@[0] += 1\n"
            "    return (mix(args[0], math.sin(TICKS@[0])),)"
        ),
        init="self.up.register_forward_pre_hook(tick@)",
        dump="TICKS@",
    ),
    "a hook of the block itself": Piece(
        net_init="self.seen@ = []",
        init=(
            "seen = parent.seen@\n"
            "self.register_forward_hook(lambda module, args, out: seen.append(out.detach().mean()))"
        ),
        after="loss = mix(loss, sum(self.seen@))\nself.seen@.clear()",
        dump="[len(net.seen@)]",
    ),
    "a buffer": Piece(
        init='self.register_buffer("mean@", torch.zeros(W))',
        forward="self.mean@.mul_(0.9).add_(h.detach().mean(0))\nh = h + 0.1 * torch.tanh(self.mean@)",
    ),
    "a buffer replaced": Piece(
        init='self.register_buffer("mean@", torch.zeros(W))',
        forward="self.mean@ = 0.9 * self.mean@ + h.detach().mean(0)\nh = h + 0.1 * torch.tanh(self.mean@)",
    ),
    "a buffer from step 4 on": Piece(
        init='self.register_buffer("mean@", torch.zeros(W))',
        forward=(
            "if STEP >= 3:\n    self.mean@.mul_(0.9).add_(h.detach().mean(0))\nh = h + 0.1 * torch.tanh(self.mean@)"
        ),
    ),
    "batch norm": Piece(init="self.batch@ = nn.BatchNorm1d(W)", forward="h = self.batch@(h)"),
    "batch norm from step 4 on": Piece(
        init="self.batch@ = nn.BatchNorm1d(W)", forward="h = self.batch@(h) if STEP >= 3 else h"
    ),
    "a weight edited": Piece(forward="with torch.no_grad():\n    self.down.weight.mul_(0.999)"),
    "a weight edited from step 4 on": Piece(
        forward="if STEP >= 3:\n    with torch.no_grad():\n        self.down.weight.mul_(0.999)"
    ),
    "a weight edited past its version": Piece(forward="self.down.weight.data.mul_(0.999)"),
    "a hook of a tensor reads it": Piece(
        init="self.s@ = 0",
        forward=(
            "self.s@ += 1\nif h.requires_grad:\n    h.register_hook(lambda gradient: mix(gradient, math.sin(self.s@)))"
        ),
        dump="[layer.s@ for layer in layers]",
    ),
    "a hook of a tensor changes it": Piece(
        init="self.s@ = 0",
        forward=(
            "def count(gradient):\n    self.s@ += 1\nif h.requires_grad:\n    h.register_hook(count)\n"
            "h = mix(h, math.sin(self.s@))"
        ),
        dump="[layer.s@ for layer in layers]",
    ),
    "a custom function reads it": Piece(
        header=(
            "TURNS@ = [0]\nclass Turn@(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
            "        TURNS@[0] += 1\n        ctx.save_for_backward(x)\n        return x * 1.5\n    @staticmethod\n"
            "    def backward(ctx, gradient):\n        (x,) = ctx.saved_tensors\n"
            "        return gradient * (1.5 + 0.1 * math.sin(TURNS@[0]) * torch.tanh(x))"
        ),
        forward="h = Turn@.apply(h)",
        dump="TURNS@",
    ),
    "the program changes it before backward": Piece(
        init="self.s@ = 1.0",
        forward="h = mix(h, self.s@)",
        between="for layer in net.layers:\n    if layer.stateful:\n        layer.s@ *= 0.9",
        dump="[layer.s@ for layer in layers]",
    ),
    "the program changes it before backward from step 4 on": Piece(
        init="self.s@ = 1.0",
        forward="h = mix(h, self.s@)",
        between="for layer in net.layers:\n    if layer.stateful:\n        layer.s@ *= 0.9 if STEP >= 3 else 1.0",
        dump="[layer.s@ for layer in layers]",
    ),
    "the program clears it before backward": Piece(
        header="TABLE@ = {}",
        before='TABLE@["bias"] = 0.1 * x.detach().mean()',
        forward='h = mix(h, TABLE@["bias"])',
        between="TABLE@.clear()",
    ),
    "the program changes a tensor before backward": Piece(
        init="self.s@ = torch.ones(3)",
        forward="h = mix(h, self.s@.mean())",
        between="for layer in net.layers:\n    if layer.stateful:\n        layer.s@ = layer.s@ * 0.9",
        dump="[layer.s@ for layer in layers]",
    ),
    "the program switches dropout before backward": Piece(
        init="self.drop@ = nn.Dropout(0.2)",
        forward="h = self.drop@(h)",
        between="for layer in net.layers:\n    if layer.stateful:\n        layer.drop@.p = 0.5",
        step="for layer in net.layers:\n    if layer.stateful:\n        layer.drop@.p = 0.2",
    ),
    "the program evaluates before backward": Piece(
        init="self.drop@ = nn.Dropout(0.2)",
        forward="h = self.drop@(h)",
        between="net.eval()",
        step="net.train()",
    ),
    "the program changes it between steps": Piece(
        init="self.s@ = 1.0",
        forward="h = mix(h, self.s@)",
        step="for layer in net.layers:\n    if layer.stateful:\n        layer.s@ *= 0.9",
        dump="[layer.s@ for layer in layers]",
    ),
    "a schedule that reads the step": Piece(forward="h = mix(h, math.sin(STEP))"),
    "a cache by shape": Piece(
        init="self.cache@ = {}",
        forward=(
            "if h.shape not in self.cache@:\n    self.cache@[h.shape] = torch.linspace(0, 1, h.shape[0]).unsqueeze(1)\n"
            "h = h + 0.1 * self.cache@[h.shape]"
        ),
        dump="[sorted(layer.cache@) for layer in layers]",
    ),
    "a cache by id of its input": Piece(
        header="CACHE@ = {}",
        forward=("if id(x) not in CACHE@:\n    CACHE@[id(x)] = (x, 0.01 * len(CACHE@))\nh = mix(h, CACHE@[id(x)][1])"),
        dump="[len(CACHE@)]",
    ),
    "a cache by id of a weight": Piece(
        header="CACHE@ = {}",
        forward=(
            "if id(self.up.weight) not in CACHE@:\n    CACHE@[id(self.up.weight)] = self.up.weight.detach().mean()\n"
            "h = mix(h, CACHE@[id(self.up.weight)])"
        ),
        dump="[len(CACHE@)]",
    ),
    "a cache by the gradient mode": Piece(
        init="self.cache@ = {}",
        forward=(
            "key = (torch.is_grad_enabled(), len(self.cache@) // 3)\n"
            "h = mix(h, self.cache@.setdefault(key, 0.1 * len(self.cache@)))"
        ),
        dump="[len(layer.cache@) for layer in layers]",
    ),
    "a table made in the first call": Piece(
        init="self.table@ = None",
        forward=("if self.table@ is None:\n    self.table@ = torch.linspace(0, 1, W)\nh = h + 0.1 * self.table@"),
        dump="[layer.table@ for layer in layers]",
    ),
    "random of Python": Piece(forward="h = mix(h, random.random())"),
    "random of Python from step 4 on": Piece(forward="h = mix(h, random.random() if STEP >= 3 else 0.5)"),
    "random of NumPy": Piece(forward="h = mix(h, numpy.random.rand())"),
    "random of torch": Piece(forward="h = mix(h, torch.rand(()))"),
    "a variable of the environment": Piece(
        header='os.environ["TEST_STATE@"] = "0"',
        forward=(
            'os.environ["TEST_STATE@"] = str(int(os.environ["TEST_STATE@"]) + 1)\n'
            'h = mix(h, math.sin(int(os.environ["TEST_STATE@"])))'
        ),
        dump='[os.environ["TEST_STATE@"]]',
    ),
    "a log": Piece(
        header=(
            "class Lines@(logging.Handler):\n    def __init__(self):\n        super().__init__()\n"
            "        self.count = 0\n"
            "    def emit(self, record):\n        self.count += 1\nLINES@ = Lines@()\nLOG@ = logging.Logger('state')\n"
            "LOG@.addHandler(LINES@)"
        ),
        forward='LOG@.warning("called")\nh = mix(h, math.sin(LINES@.count))',
        dump="[LINES@.count]",
    ),
    "a mode that counts functions around forward": Piece(
        header=_FUNCTIONS,
        around_forward="Counting@()",
        forward="h = mix(h, math.sin(Counting@.count))",
        dump="[Counting@.count]",
    ),
    "a mode that counts operators around forward": Piece(
        header=_DISPATCHES,
        around_forward="Counting@()",
        forward="h = mix(h, math.sin(Counting@.count))",
        dump="[Counting@.count]",
    ),
    "a mode that counts operators around steps": Piece(
        header=_DISPATCHES,
        around_step="Counting@()",
        forward="h = mix(h, math.sin(Counting@.count))",
        dump="[Counting@.count]",
    ),
    "a mode of its own that counts": Piece(
        header=_FUNCTIONS,
        forward="with Counting@():\n    h = torch.tanh(h) + h\nh = mix(h, math.sin(Counting@.count))",
        dump="[Counting@.count]",
    ),
    "FlopCounterMode around steps": Piece(
        header="FLOPS@ = FlopCounterMode(display=False)", around_step="FLOPS@", dump="[FLOPS@.get_total_flops()]"
    ),
    "gradients of the head": Piece(
        init="self.head@ = [parent.head]",
        forward=(
            "gradient = self.head@[0].weight.grad\nh = h if gradient is None else mix(h, gradient.mean().sign() + 2)"
        ),
    ),
    "a tensor given to the next step": Piece(
        net_init="self.given@ = {}",
        init="self.given@ = parent.given@",
        forward=("h = mix(h, self.given@.get(self.number, 0.5))\nself.given@[self.number] = float(h.detach().mean())"),
        dump="[net.given@]",
    ),
    "a switch of the block": Piece(
        init="self.odd@ = False",
        forward="self.odd@ = not self.odd@\nh = torch.tanh(h) if self.odd@ else torch.sigmoid(h)",
        dump="[layer.odd@ for layer in layers]",
    ),
    "a path that changes its graph": Piece(
        header="TURN@ = itertools.cycle([0, 1, 2, 1, 0])",
        forward="for _ in range(next(TURN@)):\n    h = torch.tanh(h) + h",
        dump="[next(TURN@)]",
    ),
    "a part replaced": Piece(
        forward="if STEP >= 3 and not hasattr(self, 'new@'):\n    self.new@ = True\n    self.act = nn.Tanh()",
        dump="[type(layer.act).__name__ for layer in layers]",
    ),
}
