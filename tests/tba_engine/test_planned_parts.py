"""Plans see the parts of blocks by themselves: what is cheap to run again does, while attention is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from support.clock import Counted
from support.planned import LAYERS, ROWS, WIDTH, Training, assert_equal, departures, follow, train
from tba import Offloader
from tba._auto.execution import Execution
from tba._blocks.trial import Trial
from tba._plan import clock
from tba._plan.plan import Plan
from tba._record.record import Record

HEADS = 4


class Attention(nn.Module):
    """Many operators, which save little."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(8, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        for _ in range(8):
            mixed = mixed * 1.0
        return self.out(mixed.transpose(1, 2).reshape(ROWS, WIDTH))  # type: ignore[no-any-return]


class Feed(nn.Module):
    """Few operators, which save much."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        fed: Tensor = self.drop(self.down(nn.functional.gelu(self.up(hidden))))
        return fed


class Layer(nn.Module):
    """A layer of a GPT, which passes what it feeds by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.feed = Attention(), Feed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(hidden=self.norms[1](x))  # type: ignore[no-any-return]


class Turned(Layer):
    """A layer that saves other tensors after the part which is cheap to run again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.feed(hidden=self.norms[0](x))
        return x + self.attention(self.norms[1](x))  # type: ignore[no-any-return]


class Sigmoid(Feed):
    """Its last operator saves its result."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).sigmoid()


class Squared(Layer):
    """A layer that saves again what its part has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.attention(self.norms[0](x))).square()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _so_slow_a_link_that_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "current", Counted(rate=1 << 10))


def held_bytes(auto: Callable[..., Offloader], layer: type[nn.Module] = Layer) -> int:
    """Bytes that a step holds where there is room for all."""
    training = Training(layer)
    kept = auto(training.model, memory_budget="1GiB")
    train(kept, training, steps=1)
    return kept.stats().held_bytes


@pytest.mark.parametrize(
    ("share", "recomputed"),
    [(0.75, {"Feed": 4}), (0.5, {"Feed": 6, "Attention": 2}), (0.4, {"": 3, "Feed": 3})],
    ids=["MLPs", "both parts", "blocks and MLPs"],
)
def test_parts_recompute_where_that_is_enough(
    auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch, share: float, recomputed: dict[str, int]
) -> None:
    training, tried = Training(Layer), list[int]()
    run_again = Trial._run_again
    monkeypatch.setattr(Trial, "_run_again", lambda trial, first: tried.append(1) or run_again(trial, first))
    offload = auto(training.model, memory_budget=int(share * held_bytes(auto)), derive=False)
    plans = follow(offload, training, 6)
    assert_equal(training.state(), train(None, Training(Layer), steps=6))
    assert not departures(plans)
    plan = plans[-1]
    assert plan
    assert plan.measured is not None
    alike = plan.facts.kinds
    assert {kind: len(each) for kind, each in alike.items()} == {"": LAYERS, "Attention": LAYERS, "Feed": LAYERS}
    counts = {kind: len(plan.recomputed.intersection(each)) for kind, each in alike.items()}
    assert {kind: count for kind, count in counts.items() if count} == recomputed
    assert plan.predicted.moved_bytes == 0
    assert plan.measured.peak_bytes == plan.predicted.held_bytes
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert len(tried) == 3 * LAYERS  # once each, in the step that is watched
    for kind, count in recomputed.items():
        assert f"recomputed, {count} of {LAYERS} {kind or 'blocks'} " in str(plan)


def test_steps_by_a_plan_stand_around_no_part_that_is_kept(auto: Callable[..., Offloader]) -> None:
    training, around = Training(Layer), set[str]()
    offload = auto(training.model, memory_budget=int(0.75 * held_bytes(auto)), derive=False)
    follow(offload, training, 4)
    for path, module in training.model.named_modules():
        module.register_forward_pre_hook(
            lambda each, _, path=path: around.add(path) if "forward" in vars(each) else None
        )
    follow(offload, training, 1, first=4)
    plan = offload.plan
    assert plan
    blocks = [plan.facts.blocks[number] for number in plan.recomputed]
    assert {block.kind for block in blocks} == {"Feed"}
    whole = {f"layers.{number}" for number in range(LAYERS)}
    assert around == whole | {f"layers.{block.within}.feed" for block in blocks}


def test_a_part_whose_tensors_its_block_saves_again_does_not_recompute(auto: Callable[..., Offloader]) -> None:
    training = Training(Squared)
    offload = auto(training.model, memory_budget=int(0.6 * held_bytes(auto, Squared)), derive=False)
    plans = follow(offload, training, 6)
    assert_equal(training.state(), train(None, Training(Squared), steps=6))
    assert not departures(plans)
    plan = plans[-1]
    assert plan
    refused = [block.why_not for block in plan.facts.blocks if block.kind == "Sigmoid"]
    assert refused == ["what it saves is saved again outside of it"] * LAYERS
    assert plan.recomputed


def test_what_moves_beside_parts_that_recompute_is_found_in_its_place(
    auto: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "current", Counted(rate=1 << 28))
    training, sent, saved = Training(Turned), list[int](), Execution.saved

    def noted(execution: Execution, record: Record) -> bool:
        goes = saved(execution, record)
        sent.extend([record.plain_bytes] * goes)
        return goes

    monkeypatch.setattr(Execution, "saved", noted)
    offload = auto(training.model, memory_budget=int(0.4 * held_bytes(auto, Turned)), derive=False)
    plans, moved = [offload.plan], []
    for number in range(6):
        sent.clear()
        plans += follow(offload, training, 1, first=number)
        moved.append(sum(sent))
    assert_equal(training.state(), train(None, Training(Turned), steps=6))
    assert not departures(plans)
    assert moved == [sum(plan.sends.values()) if plan else 0 for plan in plans[:-1]]
    assert moved[-1]
    assert isinstance(plans[-1], Plan)
    assert {plans[-1].facts.blocks[number].kind for number in plans[-1].recomputed} == {"Feed"}
