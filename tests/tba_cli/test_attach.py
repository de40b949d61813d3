"""`tba run` with settings: programs that do not know tba are attached, train to the same bits, and say so in a line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tba._attaching import _keywords
from tba.cli._run import _attaching

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"TBA_MIN_TENSOR_BYTES": "4KiB", "TBA_PREFETCH_BYTES": "8KiB"}
BEGIN = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
torch.manual_seed(0)

def mlp(name):
    return type(name, (nn.Module,), {"__init__": make, "forward": lambda self, x: self.layers(x)})()

def make(self):
    nn.Module.__init__(self)
    self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32))

def train(models, loss, steps=4):
    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters() if p.requires_grad])
    for _ in range(steps):
        loss(torch.randn(64, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print([(p.detach().double() ** 2).sum().item() for m in models for p in m.parameters()])
"""
LOOP = """
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(50, 32), nn.ModuleList(mlp("Block") for _ in range(3)), \\
            nn.Linear(32, 50)

    def forward(self, tokens, targets=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def main():
    model = GPT()
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long), targets=torch.zeros(1, 2, dtype=torch.long))
    def loss(_):
        tokens = torch.randint(0, 50, (4, 64))
        return model(tokens, targets=tokens)
    train([model], loss)
main()  # the model dies before the program ends
"""
GAN = """
maker, judge = mlp("Maker"), mlp("Judge")
train([maker, judge], lambda x: judge(maker(x).detach()).mean() + judge(x).mean() - judge(maker(x)).mean())
"""
TEACHER = """
teacher, frozen, student, loss = mlp("Teacher"), mlp("Frozen").requires_grad_(False), mlp("Student"), nn.MSELoss()

def distill(x):
    with torch.no_grad():
        target = teacher(x)
    return loss(student(x), target + frozen(x))

train([student], distill)
"""
# Forwards that begin no training: those that checkpointing runs again, and those that tracers run.
NO_MODELS = """
import copy, warnings
from torch.utils.checkpoint import checkpoint
with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
    torch.jit.trace(mlp("Traced"), torch.randn(64, 32))
torch.fx.symbolic_trace(nn.Sequential(mlp("Symbolic")))
torch.export.export(mlp("Exported"), (torch.randn(64, 32),))

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(mlp("Part") for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x

model = Checkpointed()
train([model], lambda x: model(x).sum())
copy.deepcopy(model).requires_grad_(False)(torch.randn(64, 32))
"""
# Ctrl-C ends a forward without its closing hooks; models after it are still outermost.
INTERRUPTED = """
class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self):
        raise KeyboardInterrupt

interrupted = Interrupted()
try:
    interrupted()
except KeyboardInterrupt:
    pass
"""
COMPILED = """
import torch._dynamo
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp("First"), mlp("Second")
        self.first.compile(backend="aot_eager")

    def forward(self, x):
        return self.second(self.first(x))

torch._dynamo.utils.counters.clear()
blocks, whole = Blocks(), torch.compile(mlp("Whole"), backend="aot_eager")
train([blocks], lambda x: blocks(x).sum())
train([whole], lambda x: whole(x).sum(), steps=1)
print({name: dict(torch._dynamo.utils.counters[name]) for name in ("stats", "graph_break", "frames")})
"""


def under(environment: dict[str, str], *command: str) -> tuple[int, str, list[str]]:
    """Run Python in an environment: its status, what it printed, and the lines of ours that it said."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given = clean | SMALL | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=given, cwd="/", check=False)
    lines = done.stderr.splitlines()
    return done.returncode, done.stdout, [line for line in lines if line.startswith("tba: ")] or lines[-3:]


def attaching(*folders: Path, **settings: str) -> dict[str, str]:
    """The variables that `tba run` sets, and more folders on PYTHONPATH."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    return _attaching(settings, None, {"PYTHONPATH": path})


def tba_run(*arguments: str) -> tuple[int, str, list[str]]:
    return under({}, "-m", "tba", "run", "--allocator", "none", *arguments)


def test_programs_that_do_not_know_tba_are_offloaded_to_the_same_bits() -> None:
    program = "".join((BEGIN, NO_MODELS, INTERRUPTED, LOOP, GAN, TEACHER, COMPILED))  # in one process, for its imports
    plain, run = (under(environment, "-c", program) for environment in ({}, attaching(tier="nvme")))
    assert plain[0] == run[0] == 0, (plain, run)
    assert len(plain[1].splitlines()) == 7
    assert run[1] == plain[1]
    begun = [re.match(r"tba: attached to (.*) \(.* parameters\), tier=nvme,", line) for line in run[2]]
    models = ["Checkpointed", "Interrupted", "GPT", "Maker", "Judge", "Student", "Blocks", "OptimizedModule(Whole)"]
    assert [line[1] for line in begun if line] == models
    ends = [line for line, match in zip(run[2], begun, strict=True) if not match]
    assert sorted(line.split(": ")[1] for line in ends) == sorted(models)


def test_the_first_forward_is_offloaded_already(tmp_path: Path) -> None:
    """One step alone: a report of what it saved is written only if its own forward was entered."""
    program = tmp_path / "train.py"
    program.write_text(BEGIN + LOOP.replace("train([model], loss)", "train([model], loss, steps=1)"))
    page = tmp_path / "out.html"
    given = ("--memory-budget", "1MiB", "--report", str(page), "--", sys.executable, str(program))
    status, printed, said = tba_run(*given)
    assert (status, len(printed.splitlines())) == (0, 1), said
    assert said[0].startswith("tba: attached to GPT (53.3K parameters), ")
    assert "memory_budget=1MiB" in said[0]
    assert len(said) == 2
    assert "TBA_MEMORY_BUDGET" in page.read_text()


def test_a_global_hook_finds_the_keyword_arguments_of_a_forward() -> None:
    found = []
    hook = nn.modules.module.register_module_forward_pre_hook(lambda *_: found.append(_keywords()))
    try:
        nn.MultiheadAttention(4, 1)(*torch.ones(3, 2, 1, 4), need_weights=False)
    finally:
        hook.remove()
    assert found[0] == {"need_weights": False}


def test_the_programs_own_context_comes_first_also_after_a_forward() -> None:
    own = """
import tba
late = mlp("Late")
late(torch.randn(2, 32)).sum().backward()
with tba.offload_context(late, tier="keep") as offload:
    train([late], lambda x: late(x).sum())
print(offload.stats().kept_bytes > 0)
one, two, part, whole = mlp("One"), mlp("Two"), mlp("Part"), nn.Sequential()
with tba.offload_context(one) as first:
    train([one], lambda x: one(x).sum())
with tba.offload_context() as second:
    train([two], lambda x: two(x).sum())
third = tba.attach(part)
whole.append(part)
train([whole], lambda x: whole(x).sum())
print(all(each.stats().offloaded_bytes for each in (first, second, third)))
"""
    status, printed, said = under(attaching(tier="nvme"), "-c", BEGIN + own)
    assert status == 0, said
    assert [line for line in printed.splitlines() if line[0] != "["] == ["True", "True"]
    why = "the program offloads it by itself"
    assert [line for line in said if " not attached " in line] == [
        f"tba: not attached to {name}: {why}" for name in ("One", "Two", "Sequential")
    ]


ODD = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp("Inner")

    @property
    def module(self):
        raise RuntimeError("not yet")

    def forward(self, x):
        return self.layers(x)

class Hidden(Odd):
    def parameters(self, recurse=True):
        raise NotImplementedError("of no use")

odd, hidden = Odd(), Hidden()
for model in (odd.layers, odd):  # a part that is called by itself first
    train([model], lambda x: model(x).sum())
hidden(torch.randn(2, 32)).sum().backward()
"""


@pytest.mark.exhaustive
def test_nothing_that_goes_wrong_in_attaching_ends_the_program(tmp_path: Path) -> None:
    (page := tmp_path / "out.html").mkdir()  # a folder is no page
    odd = attaching(tier="nvme") | {"RANK": "node0", "TBA_REPORT": str(page)}
    status, printed, said = under(odd, "-c", BEGIN + ODD)
    plain = under({}, "-c", BEGIN + ODD)
    assert (status, printed) == plain[:2] == (0, plain[1]), said
    assert [line.split("(")[0] for line in said[:2]] == ["tba: attached to Inner ", "tba: attached to Odd "]
    assert said[2] == "tba: not attached to Hidden: of no use"
    assert any("Is a directory" in line for line in said[3:])


def test_an_empty_entry_of_pythonpath_stays_the_working_directory() -> None:
    paths = _attaching({}, None, {"PYTHONPATH": ":/foo"})["PYTHONPATH"].split(os.pathsep)
    assert paths[1:] == ["", "/foo"]
    assert len(_attaching({}, None, {})["PYTHONPATH"].split(os.pathsep)) == 1


def test_a_program_that_trains_nothing_is_told_why() -> None:
    frozen = "mlp('Frozen').requires_grad_(False)(torch.randn(2, 32))"
    programs = (f"with torch.no_grad():\n    {frozen}", frozen)
    (off, silent, [why]), (_, _, [other]) = (under(attaching(), "-c", BEGIN + program) for program in programs)
    assert (off, silent) == (0, "")
    assert why.startswith("tba: attached to nothing: no forward with gradients was seen")
    assert other.startswith("tba: attached to nothing: no module whose forward ran with gradients has a parameter that")
    compiled = "model = mlp('C')\nmodel.compile(backend='aot_eager')\nmodel(torch.randn(2, 32)).sum().backward()"
    assert "compiled whole" in under(attaching(), "-c", BEGIN + compiled)[2][0]


def test_a_program_without_torch_keeps_its_sitecustomize_and_imports_no_tba(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)")
    program = """
import subprocess, sys
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "tba")], "_startup" in str(sys.path))
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", open(__file__).read() if "__file__" in globals() else sys.orig_argv[2], "x"])
"""
    status, printed, said = under(attaching(tmp_path, tier="nvme"), "-c", program)
    assert (status, said) == (0, [])
    assert printed.splitlines() == [f"mine {tmp_path}/sitecustomize.py", "[] False"] * 2


def test_a_programs_exit_status_stays_and_a_broken_tba_leaves_it_alone(tmp_path: Path) -> None:
    ends = "model = mlp('M')\ntrain([model], lambda x: model(x).sum())\nraise SystemExit(7)"
    status, printed, said = under(attaching(tier="nvme"), "-c", BEGIN + ends)
    assert (status, len(said)) == (7, 2)
    (tmp_path / "tba").mkdir()
    (tmp_path / "tba" / "__init__.py").write_text("raise ImportError('of another torch')")
    broken = under(attaching(tmp_path, tier="nvme"), "-c", BEGIN + ends)
    assert broken[:2] == (7, printed)
    (line,) = broken[2]
    assert line == f"tba: attached to nothing: cannot import tba in {sys.executable}: of another torch"


@pytest.mark.exhaustive
def test_settings_that_a_model_refuses_leave_it_alone() -> None:
    convolution = "model = nn.Conv1d(32, 32, 1)\ntrain([model], lambda x: model(x.T[None]).sum())"
    status, printed, [line] = under(attaching(compress="compact"), "-c", BEGIN + convolution)
    assert (status, len(printed.splitlines())) == (0, 1)
    assert line.startswith("tba: not attached to Conv1d: ")


@pytest.mark.exhaustive
def test_ranks_of_torchrun_are_attached_and_the_first_one_tells(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        BEGIN
        + """
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(mlp("Net"))
torch.manual_seed(dist.get_rank())
if dist.get_rank():
    print = lambda *_: None
train([model], lambda x: model(x).sum())
dist.destroy_process_group()
import atexit, os, sys
sys.stdout.flush()
atexit._run_exitfuncs()
os._exit(0)  # past the end of torch's own threads, which aborts now and then
"""
    )
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program))
    page = tmp_path / "out.html"
    status, printed, said = tba_run("--tier", "nvme", "--report", str(page), "--", sys.executable, *command)
    assert (status, len(printed.splitlines())) == (0, 1), said
    begun, end = said
    assert begun.startswith("tba: attached to DistributedDataParallel(Net) (16.7K parameters), tier=nvme")
    assert end.startswith("tba: DistributedDataParallel(Net): ")
    assert page.exists()
    assert (tmp_path / "out-rank1.html").exists()
