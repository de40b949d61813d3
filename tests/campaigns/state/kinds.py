"""Kinds: what a block's hidden state can be, where it can be, and when it changes, as pieces of source code.

In these pieces `@` is the number of the state, `LV` the place that holds it and `INIT` what it begins as.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class What:
    """A state: how it begins, how a call changes it, and the number `v` or tensor that the block reads from it.

    Attributes:
        init, update, read: code; an update may set `v` itself.
        header: definitions of the module.
    """

    init: str
    update: str
    read: str = "v"
    header: str = ""


@dataclass(frozen=True)
class Where:
    """A place of a state.

    Attributes:
        lv: names the place.
        dump: the states of all places, given `net` and its `layers` that have state.
        header, cells, body, init, net_init: code of the module, around the class, in it, of a block's and of the
            network's constructor.
        declare: the statement that makes `lv` assignable in forward.
        wrap: a function that the code goes to, at `CODE`, instead of forward; `call` calls it.
        other: code of another module, `other`.
    """

    lv: str
    dump: str
    header: str = ""
    cells: str = ""
    body: str = ""
    init: str = ""
    net_init: str = ""
    declare: str = ""
    wrap: str = ""
    call: str = ""
    other: str = ""


WHATS = {
    "a number that falls": What("1.0", "LV *= 0.9", "LV"),
    "a count": What("0", "LV += 1", "math.sin(LV)"),
    "a text": What('""', 'LV += "x"', "math.sin(len(LV))"),
    "a tuple": What("()", "LV = (*LV, len(LV))[-9:]", "math.sin(sum(LV))"),
    "a list": What("[]", "LV.append(0.5 * len(LV))", "math.sin(sum(LV))"),
    "a list of lists": What("[[0.0]]", "LV[-1].append(1.0)\nLV[0][0] += 0.5", "math.sin(LV[0][0])"),
    "a list of constant length": What("[0.0, 1.0]", "LV.append(LV.pop(0) + 0.5)", "math.sin(LV[0])"),
    "a list of features": What("[]", "LV.append(h.detach().mean())\ndel LV[:-3]", "sum(LV)"),
    "a deque": What("collections.deque(maxlen=3)", "LV.append(float(h.detach().mean()))", "sum(LV)"),
    "a deque that turns": What("collections.deque([0.1, 0.5, 0.9, 0.3, 0.7, 0.2, 0.6])", "LV.rotate(1)", "LV[0]"),
    "a dict": What("{}", "LV[len(LV)] = 0.5", "math.sin(len(LV))"),
    "a dict whose value changes": What('{"s": 0.0}', 'LV["s"] += 0.5', 'math.sin(LV["s"])'),
    "an OrderedDict": What(
        "collections.OrderedDict(a=0.1, b=0.5, c=0.9)", "LV.move_to_end(next(iter(LV)))", "LV[next(iter(LV))]"
    ),
    "a defaultdict": What("collections.defaultdict(float)", 'LV["calls"] += 1', 'math.sin(LV["calls"])'),
    "a Counter": What("collections.Counter()", 'LV["calls"] += 1', 'math.sin(LV["calls"])'),
    "a ChainMap": What("collections.ChainMap({})", "LV[len(LV)] = 1", "math.sin(len(LV))"),
    "a set": What("set()", "LV.add(len(LV))", "math.sin(len(LV))"),
    "a heap": What("[3, 5]", "heapq.heappush(LV, -len(LV))", "math.sin(LV[0])"),
    "a tensor replaced": What("torch.zeros(())", "LV = 0.9 * LV + h.detach().mean()", "LV"),
    "a tensor edited": What("torch.zeros(3)", "LV.mul_(0.9).add_(h.detach().mean())", "LV.mean()"),
    "a tensor edited past its version": What("torch.zeros(3)", "LV.data.add_(0.3)", "LV.mean()"),
    "a tensor edited through NumPy": What("torch.zeros(3)", "LV.numpy()[0] += 0.5", "LV.sum()"),
    "a queue of features": What(
        "torch.zeros(4, 16)", "LV = torch.cat([h.detach().mean(0, keepdim=True), LV])[:4]", "LV.mean()"
    ),
    "a NumPy array edited": What("numpy.zeros(3)", "LV[0] += 0.5", "math.sin(LV[0])"),
    "an array.array": What('array.array("d", [0.0])', "LV[0] += 0.5", "math.sin(LV[0])"),
    "a bytearray": What("bytearray(2)", "LV[0] = (LV[0] + 1) % 256", "math.sin(LV[0])"),
    "a memoryview": What("memoryview(bytearray(2))", "LV[0] = (LV[0] + 1) % 256", "math.sin(LV[0])"),
    "a number of C": What("ctypes.c_double(0.0)", "LV.value += 0.5", "math.sin(LV.value)"),
    "random.Random": What("random.Random(3)", "v = LV.random()"),
    "NumPy's Generator": What("numpy.random.default_rng(3)", "v = float(LV.random())"),
    "torch.Generator": What("torch.Generator().manual_seed(3)", "v = float(torch.rand((), generator=LV))"),
    "itertools.count": What("itertools.count()", "v = math.sin(next(LV))"),
    "itertools.cycle": What("itertools.cycle([0.1, 0.5, 0.9, 0.3, 0.7, 0.2, 0.6])", "v = next(LV)"),
    "a generator": What(
        "numbers@()",
        "v = next(LV)",
        header="def numbers@():\n    for number in range(10**6):\n        yield 0.1 * number",
    ),
    "an iterator": What("iter(range(10**6))", "v = math.sin(next(LV))"),
    "an iterator of a list": What("iter([0.01 * each for each in range(999)])", "v = next(LV)"),
    "enumerate and map": What("enumerate(map(math.sin, range(10**6)))", "v = next(LV)[1]"),
    "a queue.SimpleQueue": What(
        "filled@(queue.SimpleQueue())",
        "v = LV.get_nowait()\nLV.put(v + 0.5)\nv = math.sin(v)",
        header="def filled@(made):\n    made.put(0.0)\n    made.put(1.0)\n    return made",
    ),
    "a queue.Queue": What(
        "filled@(queue.Queue())",
        "v = LV.get_nowait()\nLV.put(v + 0.5)\nv = math.sin(v)",
        header="def filled@(made):\n    made.put(0.0)\n    made.put(1.0)\n    return made",
    ),
    "a StringIO": What("io.StringIO()", 'LV.write("x")', "math.sin(LV.tell())"),
    "a file": What("tempfile.TemporaryFile()", 'LV.write(b"x")', "math.sin(LV.tell())"),
    "a hash": What("hashlib.md5()", 'LV.update(b"x")', "LV.digest()[0] / 256"),
    "a cached function": What(
        "functools.lru_cache(math.sqrt)", "LV(LV.cache_info().misses)", "math.sin(LV.cache_info().misses)"
    ),
    "an object that counts its calls": What(
        "Calls@()",
        "LV()",
        "math.sin(LV.count)",
        "class Calls@:\n    count = 0\n    def __call__(self):\n        self.count += 1",
    ),
    "a list of a class of its own": What(
        "Longer@()", "LV.append(0.5)", "math.sin(len(LV))", "class Longer@(list):\n    pass"
    ),
    "an object that compares equal": What(
        "Same@()",
        "LV.count += 1",
        "math.sin(LV.count)",
        "class Same@:\n    count = 0\n    def __eq__(self, other):\n        return True\n    __hash__ = None",
    ),
    "a module without weights": What(
        "Module@()", "LV.count += 1", "math.sin(LV.count)", "class Module@(nn.Module):\n    count = 0"
    ),
    "a weak dictionary": What(
        "weakref.WeakValueDictionary()",
        "LV[len(LV)] = layers_alive[0]",
        "math.sin(len(LV))",
        "layers_alive = [nn.Identity()]",
    ),
}

_USE = "def use@(h, self, box):\n    CODE\n    return h"

WHERES = {
    "an attribute": Where("self.s@", "[layer.s@ for layer in layers]", init="self.s@ = INIT"),
    "an attribute of a part": Where("self.norm.s@", "[layer.norm.s@ for layer in layers]", init="self.norm.s@ = INIT"),
    "an attribute of a weight": Where(
        "self.up.weight.s@", "[layer.up.weight.s@ for layer in layers]", init="self.up.weight.s@ = INIT"
    ),
    "a dict of the block": Where(
        'self.memory@["s"]', "[layer.memory@ for layer in layers]", init='self.memory@ = {"s": INIT}'
    ),
    "a list of the block": Where("self.box@[0]", "[layer.box@ for layer in layers]", init="self.box@ = [INIT]"),
    "an object": Where(
        "self.holder@.s",
        "[layer.holder@.s for layer in layers]",
        "class Holder@:\n    def __init__(self):\n        self.s = INIT",
        init="self.holder@ = Holder@()",
    ),
    "an object with slots": Where(
        "self.holder@.s",
        "[layer.holder@.s for layer in layers]",
        'class Holder@:\n    __slots__ = ("s",)\n    def __init__(self):\n        self.s = INIT',
        init="self.holder@ = Holder@()",
    ),
    "a dataclass in a dataclass": Where(
        "self.config@.inner.s",
        "[layer.config@.inner.s for layer in layers]",
        "@dataclasses.dataclass\nclass Inner@:\n    s: object\n"
        "@dataclasses.dataclass\nclass Outer@:\n    inner: Inner@",
        init="self.config@ = Outer@(Inner@(INIT))",
    ),
    "a namespace in a tuple": Where(
        "self.pair@[1].s",
        "[layer.pair@[1].s for layer in layers]",
        init="self.pair@ = (0, types.SimpleNamespace(s=INIT))",
    ),
    "a deep object": Where(
        'self.deep@["a"][0].b["c"].s',
        '[layer.deep@["a"][0].b["c"].s for layer in layers]',
        init='self.deep@ = {"a": [types.SimpleNamespace(b={"c": types.SimpleNamespace(s=INIT)})]}',
    ),
    "a shared object": Where(
        "self.shared@.s",
        "SHARED@.s",
        "SHARED@ = types.SimpleNamespace(s=INIT)",
        init="self.shared@ = SHARED@",
    ),
    "the parent, weakly": Where(
        "self.parent@().s@", "net.s@", net_init="self.s@ = INIT", init="self.parent@ = weakref.ref(parent)"
    ),
    "the parent": Where(
        "self.parent@.s@", "net.s@", net_init="self.s@ = INIT", init='self.__dict__["parent@"] = parent'
    ),
    "a sibling": Where(
        "self.sibling@[0].s@", "net.first.s@", net_init="self.first.s@ = INIT", init="self.sibling@ = [parent.first]"
    ),
    "a class attribute": Where("Block.s@", "type(layers[0]).s@", body="s@ = INIT"),
    "a class that it uses": Where("Tool@.s", "Tool@.s", "class Tool@:\n    s = INIT"),
    "a global": Where("S@", "S@", "S@ = INIT", declare="global S@"),
    "a global dict": Where('TABLE@["s"]', "TABLE@", 'TABLE@ = {"s": INIT}'),
    "another module": Where("other.s@", "other.s@", other="s@ = INIT"),
    "a function of another module": Where(
        "other.place@()[0]", "other.place@()", other="_box@ = [INIT]\ndef place@():\n    return _box@"
    ),
    "a cell of the class": Where(
        "cell@",
        "type(layers[0]).read@()",
        cells="cell@ = INIT",
        declare="nonlocal cell@",
        body="@staticmethod\ndef read@():\n    return cell@",
    ),
    "a cell of a function": Where(
        "cell",
        "[layer.read@() for layer in layers]",
        init="self.use@, self.read@ = make@()",
        declare="nonlocal cell",
        wrap=(
            "def make@():\n    cell = INIT\n    def use(h, self):\n        CODE\n        return h\n"
            "    def read():\n        return cell\n    return use, read"
        ),
        call="h = self.use@(h, self)",
    ),
    "a default argument": Where(
        "box[0]",
        "use@.__defaults__",
        wrap="def use@(h, self, box=[INIT]):\n    CODE\n    return h",
        call="h = use@(h, self)",
    ),
    "a partial": Where(
        "box[0]",
        "[layer.use@.keywords for layer in layers]",
        wrap=_USE,
        init="self.use@ = functools.partial(use@, box=[INIT])",
        call="h = self.use@(h, self)",
    ),
    "a method of an object": Where(
        "this.s",
        "[layer.use@.__self__.s for layer in layers]",
        wrap=(
            "class Tool@:\n    def __init__(self):\n        self.s = INIT\n    def use(this, h, self):\n"
            "        CODE\n        return h"
        ),
        init="self.use@ = Tool@().use",
        call="h = self.use@(h, self)",
    ),
    "an attribute of a function": Where("tick@.s", "tick@.s", "def tick@():\n    pass\ntick@.s = INIT"),
    "a cached call": Where(
        "place@(self.number)[0]",
        "[place@(layer.number) for layer in layers]",
        "@functools.lru_cache(maxsize=None)\ndef place@(number):\n    return [INIT]",
    ),
    "a ContextVar": Where(
        "CONTEXT@.get()[0]", "CONTEXT@.get()", 'CONTEXT@ = contextvars.ContextVar("s", default=[INIT])'
    ),
    "threading.local": Where("LOCAL@.s", "LOCAL@.s", "LOCAL@ = threading.local()\nLOCAL@.s = INIT"),
    "a table by id": Where(
        "BY_ID@[id(self)]", "[BY_ID@[id(layer)] for layer in layers]", "BY_ID@ = {}", init="BY_ID@[id(self)] = INIT"
    ),
    "a weak table": Where(
        "WEAK@[self]",
        "[WEAK@[layer] for layer in layers]",
        "WEAK@ = weakref.WeakKeyDictionary()",
        init="WEAK@[self] = INIT",
    ),
    "a property": Where(
        "self.p@",
        "[layer.p@ for layer in layers]",
        body=(
            "@property\ndef p@(self):\n    return HIDDEN@[self.number]\n"
            "@p@.setter\ndef p@(self, value):\n    HIDDEN@[self.number] = value"
        ),
        header="HIDDEN@ = {}",
        init="HIDDEN@[number] = INIT",
    ),
    "the builtins": Where("builtins.tba_test_s@", "builtins.tba_test_s@", "builtins.tba_test_s@ = INIT"),
}

# When a call changes its state; STEP counts the steps of the program, which sets it.
WHENS = {
    "in each call": "True",
    "in each third step": "STEP % 3 == 2",
    "from step 4 on": "STEP >= 3",
    "from step 6 on": "STEP >= 5",
    "in the first step": "STEP == 0",
    "in training": "self.training",
    "where gradients are on": "torch.is_grad_enabled()",
    "by the values": "float(h.detach().sum()) > 0",
    "in each second call of its own": "self.second()",
}
