"""Tests of the benchmark fidelity: end to end at a tiny size, what a run is, and what comes of many."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch

from benchmarks._fidelity import arms as arms_module
from benchmarks._fidelity.arms import KEPT, best_rate, train_arm
from benchmarks._fidelity.digits import PIXELS, Digits, split_digits
from benchmarks._fidelity.run_store import RunStore
from benchmarks._fidelity.summary import interval, make_bars, paper_tables, spread, summarise
from benchmarks._fidelity.training import FidelityOptions, definition, scheduled_rate, train, validate
from benchmarks._pictures.pareto import frontier, labelled_below
from benchmarks._report.results import CannotMeasure
from benchmarks._report.steps import Measured
from benchmarks._workload.gpt import GPT
from benchmarks._workload.text import Text, is_held_out, sources, split_library
from benchmarks.fidelity import DIGIT_ARMS, PLAN, TEXT_ARMS, TINY_PLAN, run_fidelity
from support.benchmarks import arms_in_this_process

TINY = FidelityOptions(
    layers=1, width=16, heads=2, sequence=16, batch=4, steps=6, learning_rate=1e-2, validation_batches=2
)
SCRAWLS = Digits(torch.arange(30 * PIXELS).view(30, PIXELS) % 17, torch.arange(30) % 10)
LETTERS = Text(torch.randint(97, 123, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))


# -- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_every_arm_is_trained_on_every_seed_and_measured_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with arms_in_this_process(tmp_path):
        result = run_fidelity(TINY_PLAN, seeds=2, jobs=1, out=out)
    found = json.loads(json.dumps(result.data, default=dict))
    for task, study in TINY_PLAN.studies.items():
        body = found["tasks"][task]
        plain = body["arms"]["plain"]
        assert list(body["arms"]) == list(study.arms)
        assert body["trained_bytes"] == study.base.steps * 4 * 64
        assert body["seed_spread"] == abs(plain["losses"]["0"] - plain["losses"]["1"])
        for name, arm in body["arms"].items():
            assert list(arm["losses"]) == (["0"] if name == "exact" else ["0", "1"])
            for run in body["runs"][name]:
                assert len(run["losses"]) == study.base.steps
                assert 0 <= run["accuracy"] <= 1
            for seed, loss in arm["losses"].items():
                assert arm["gaps"][seed] == loss - plain["losses"][seed]
            assert 0 < arm["stored_share"] <= 1
            assert arm["peak_bytes"] >= 0
            assert min(arm["step_ratios"]) > 0
    text = found["tasks"]["text"]["arms"]
    losses = {arm["losses"]["0"] for name, arm in text.items() if name != "exact"}
    assert len(losses) == len(text) - 1  # each arm trains its own way
    assert text["exact"]["differs"] is False
    assert text["exact"]["gaps"] == {"0": 0.0}
    assert text["plain"]["stored_share"] == 1
    # Of 32 bits an element, four and a scale; what is not coded is more than that.
    assert text["GACT-like, 4 bits"]["stored_share"] < text["PRAC-like"]["stored_share"] < 1
    assert [table.title for table in result.tables if "CompAct" in table.title] == [
        "CompAct beside its table of pre-training",
        "CompAct beside its table of fine-tuning",
    ]
    assert (out / "fidelity.png").stat().st_size > 1000
    assert not (out / "fidelity_runs").exists()


def test_finished_runs_are_not_overwritten_unasked(tmp_path: Path) -> None:
    RunStore(tmp_path / "fidelity_runs").put({"run": 1}, {})
    with pytest.raises(CannotMeasure, match=r"holds 1 finished runs: go on with them by --resume, or remove"):
        run_fidelity(PLAN, out=tmp_path)


def test_the_plan_is_as_large_as_it_says() -> None:
    text, digits = (PLAN.studies[task].base for task in ("text", "digits"))
    assert (text.layers, text.width, text.steps, text.trained_bytes) == (4, 256, 2000, 1_024_000)
    assert digits.start == asdict(replace(text, learning_rate=1e-3))
    assert set(TINY_PLAN.studies["text"].arms) <= set(TEXT_ARMS)
    changed = PLAN.changed(steps=100, rates=[0.5], tasks=["digits"])
    assert list(changed.studies) == ["digits"]
    base = changed.studies["digits"].base
    assert (base.steps, changed.studies["digits"].rates) == (30, [0.5])
    assert base.start is not None
    assert base.start["steps"] == 100


# -- runs that are finished ------------------------------------------------------------------------------------------


@pytest.fixture
def small_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(arms_module.TASKS["text"], read=lambda: (LETTERS, LETTERS))
    other = replace(arms_module.TASKS["digits"], read=lambda: (SCRAWLS, SCRAWLS))
    monkeypatch.setattr(arms_module, "TASKS", {"text": task, "digits": other})


def _arm(folder: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    options = {"run": asdict(TINY), "rates": [1e-3, 1e-2], "seeds": [0, 1], "folder": str(folder), **changes}
    return train_arm(options, notes.append), notes


def _timeless(answer: Mapping[str, Any]) -> dict[str, Any]:
    runs = [{name: value for name, value in run.items() if name != "wall_s"} for run in answer["runs"]]
    return {**answer, "runs": runs}


@pytest.mark.usefixtures("small_texts")
def test_a_resumed_arm_trains_what_is_missing_and_ends_as_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = _arm(tmp_path / "whole")
    trained = []

    def interrupted(options: FidelityOptions, *others: Any) -> Any:
        trained.append((options.learning_rate, options.seed))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(options, *others)

    monkeypatch.setattr(arms_module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _arm(tmp_path / "parts")
    assert len(RunStore(tmp_path / "parts")) == 1
    found, notes = _arm(tmp_path / "parts")
    assert trained == [(1e-3, 0), (1e-2, 0), (1e-2, 0), (whole["best_rate"], 1)]
    assert [note.startswith(KEPT) for note in notes] == [True, False, False]
    assert _timeless(found) == _timeless(whole)
    again, notes = _arm(tmp_path / "parts")
    assert len(trained) == 4
    assert again == found
    assert all(note.startswith(KEPT) for note in notes)
    assert sorted(path.suffix for path in (tmp_path / "parts").iterdir()) == [".json"] * 3 + [".pt"] * 3


@pytest.mark.usefixtures("small_texts")
def test_a_run_is_known_by_all_that_it_depends_on(tmp_path: Path) -> None:
    _, notes = _arm(tmp_path, rates=[1e-2], seeds=[0])
    for changes in (
        {"run": {**asdict(TINY), "steps": 7}},
        {"run": {**asdict(TINY), "settings": {"compress": "safe8"}}},
        {"run": {**asdict(TINY), **TEXT_ARMS["PRAC-like"]}},
        {"rates": [2e-2]},
        {"seeds": [1]},
    ):
        _, notes = _arm(tmp_path, **{"rates": [1e-2], "seeds": [0], **changes})
        assert [note.startswith(KEPT) for note in notes] == [False]
    data = (LETTERS, LETTERS)
    other = Text(LETTERS.data.flip(0))
    assert definition(TINY, data) != definition(TINY, (LETTERS, other))


@pytest.mark.usefixtures("small_texts")
def test_fine_tuning_begins_with_the_weights_of_a_plain_run(tmp_path: Path) -> None:
    start = asdict(replace(TINY, sequence=2 * PIXELS, steps=1))
    _arm(tmp_path, run=start, rates=[1e-2], seeds=[0])
    run = asdict(replace(TINY, task="digits", sequence=PIXELS, start=start, steps=1))
    store = RunStore(tmp_path)
    before = len(store)
    started, _ = _arm(tmp_path, run=run, rates=[1e-9], seeds=[0])
    assert len(store) == before + 1  # the start was there
    alone, _ = _arm(tmp_path / "alone", run=run, rates=[1e-9], seeds=[0])
    assert len(RunStore(tmp_path / "alone")) == 2  # and here was made
    assert _timeless(alone) == _timeless(started)
    scratch, _ = _arm(tmp_path, run={**run, "start": None}, rates=[1e-9], seeds=[0])
    assert scratch["runs"][0]["validation_loss"] != started["runs"][0]["validation_loss"]


def test_a_stored_run_under_the_name_of_another_is_an_error(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.put({"run": 1}, {"loss": 2.0})
    assert store.get({"run": 1}) == {"loss": 2.0}
    assert store.get({"run": 2}) is None
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"run": 1', '"run": 3'))
    with pytest.raises(RuntimeError, match="holds another run than its name says"):
        store.get({"run": 1})


def test_a_file_cut_short_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "abc.json.12.part").write_text('{"defin')
    assert len(RunStore(tmp_path)) == 0


# -- data ------------------------------------------------------------------------------------------------------------


def test_no_package_is_trained_on_and_validated_on(tmp_path: Path) -> None:
    names = [f"package{number}" for number in range(120)]
    for name in names:
        (tmp_path / name).mkdir()
        for part in "ab":
            (tmp_path / name / f"{part}.py").write_text(f"{name}.{part};")
    training, validation = ({*bytes(text.data.tolist()).decode().split(";")} - {""} for text in split_library(tmp_path))
    held_out = {name for name in names if is_held_out(name)}
    assert 0 < len(held_out) < 24
    assert validation == {f"{name}.{part}" for name in held_out for part in "ab"}
    assert training == {f"{name}.{part}" for name in set(names) - held_out for part in "ab"}


def test_this_pythons_library_has_a_part_to_validate_on() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    training, validation = split_library()
    assert len(training.data) + len(validation.data) == sum(p.stat().st_size for p in sources(library))
    assert 0.01 < len(validation.data) / len(training.data) < 0.2


def test_a_library_with_nothing_to_validate_on_is_an_error(tmp_path: Path) -> None:
    name = next(name for name in "abcdefgh" if not is_held_out(f"{name}.py"))
    (tmp_path / f"{name}.py").write_text("x")
    with pytest.raises(FileNotFoundError, match="no Python source to read below"):
        split_library(tmp_path)


def test_no_image_is_trained_on_and_validated_on() -> None:
    training, validation = split_digits()
    assert (len(training.labels), len(validation.labels)) == (1437, 360)
    seen, unseen = ({tuple(image) for image in each.images.tolist()} for each in (training, validation))
    assert seen & unseen == set()
    assert training.sha256 != validation.sha256
    assert validation.labels.bincount(minlength=10).min() > 25
    assert 0 <= training.images.min() < training.images.max() == 16


def test_each_image_comes_once_in_an_epoch_with_its_label() -> None:
    drawn = [SCRAWLS.batch(size=4, sequence=PIXELS, seed=1, index=index) for index in range(15)]
    for epoch in (torch.cat([tokens for tokens, _ in drawn])[:30], torch.cat([tokens for tokens, _ in drawn])[30:]):
        assert {tuple(image) for image in epoch.tolist()} == {tuple(image) for image in SCRAWLS.images.tolist()}
    for tokens, labels in drawn:
        for image, label in zip(tokens, labels, strict=True):
            assert label in SCRAWLS.labels[(SCRAWLS.images == image).all(1)]
    again, _ = SCRAWLS.batch(size=4, sequence=PIXELS, seed=1, index=14)
    assert torch.equal(again, drawn[14][0])
    other, _ = SCRAWLS.batch(size=4, sequence=PIXELS, seed=2, index=14)
    assert not torch.equal(other, again)
    with pytest.raises(ValueError, match="an image is a sequence of 64 pixels, not of 128"):
        SCRAWLS.batch(size=4, sequence=128, seed=1, index=0)


# -- training --------------------------------------------------------------------------------------------------------


def test_every_seed_is_validated_on_the_same_batches() -> None:
    model = GPT(TINY)
    found = {validate(model, LETTERS, replace(TINY, seed=seed)) for seed in range(3)}
    assert len(found) == 1
    loss, accuracy = found.pop()
    assert 5 < loss < 6
    assert 0 <= accuracy < 0.2


def test_exact_trains_to_the_very_weights_of_plain_and_lossy_arms_do_not() -> None:
    def weights(**how: Any) -> str:
        found: str = train(replace(TINY, **how), (LETTERS, LETTERS))[1]["weights_sha256"]
        return found

    plain = weights()
    assert weights(settings={"compress": "exact"}) == plain
    assert plain == weights()
    others = [weights(**TEXT_ARMS[name]) for name in TEXT_ARMS if name not in ("plain", "exact")]
    others += [weights(**DIGIT_ARMS[name]) for name in ("CompAct r=4", "CompAct r=8")]
    assert len({plain, *others}) == 1 + len(others)
    assert weights(seed=1) != plain


def test_a_loss_that_is_no_number_counts_as_infinite() -> None:
    options = replace(TINY, steps=3, learning_rate=1e36)
    assert train(options, (LETTERS, LETTERS))[1]["validation_loss"] == float("inf")


def test_the_rate_rises_and_falls() -> None:
    rates = [scheduled_rate(1.0, step, 100) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[5] == 1.0
    assert 0.1 < rates[-1] < 0.102


def test_the_best_rate() -> None:
    runs = [{"learning_rate": rate, "validation_loss": loss} for rate, loss in ((1, float("inf")), (2, 3.0), (3, 4.0))]
    assert best_rate(runs) == 2


# -- arithmetic ------------------------------------------------------------------------------------------------------


def _body(losses: Mapping[tuple[float, int], float], best: float, stored: int) -> dict[str, Any]:
    runs = [
        {
            "learning_rate": rate,
            "seed": seed,
            "validation_loss": loss,
            "accuracy": loss / 4,
            "weights_sha256": str(loss),
        }
        for (rate, seed), loss in losses.items()
    ]
    return {"runs": runs, "best_rate": best, "stored_bytes": stored, "plain_bytes": 100}


def _cost(peak: int, wall_s: float, **moved: float) -> Measured:
    return Measured(name="", allocator="", peak_bytes=peak, wall_s=[wall_s, 2 * wall_s], moved=moved)


def test_gaps_are_within_a_seed_and_at_the_arms_own_rate() -> None:
    raw = {
        "plain": _body({(0.1, 0): 2.0, (0.2, 0): 1.0, (0.2, 1): 1.5}, 0.2, 100),
        "exact": _body({(0.1, 0): 2.0}, 0.1, 90),
        "safe8": _body({(0.1, 0): 1.25, (0.2, 0): 1.5, (0.1, 1): 1.5}, 0.1, 30),
        "CompAct n/2": _body({(0.1, 0): 2.0, (0.1, 1): 2.0}, 0.1, 80),
        "CompAct n/4": _body({(0.1, 0): 1.75, (0.1, 1): 2.0}, 0.1, 70),
    }
    costs = {name: _cost(100, 1.0) for name in raw} | {"safe8": _cost(25, 2.0, learn_s=0.5)}
    found = summarise(raw, costs)
    safe8 = found["safe8"]
    assert safe8.gaps == {0: 0.25, 1: 0.0}
    assert safe8.accuracy_gaps == {0: 0.0625, 1: 0.0}
    assert (safe8.stored_share, safe8.peak_share) == (0.3, 0.25)
    # What is learned now and then is part of each step.
    assert (safe8.step_s, safe8.step_ratios) == (3.5, [2.5, 2.25])
    assert (found["exact"].differs, safe8.differs) == (False, True)
    assert spread(found) == 0.5
    met = {bar.what: bar.met for bar in make_bars("text", found)}
    assert met["text: exact, a whole training, differs from plain in a bit"] is True
    assert met["text: safe8: gap to plain"] is False
    assert met["text: safe8: gap, within the spread of seeds"] is True
    assert met["text: loss of CompAct n/2 less that of CompAct n/4"] is False
    assert met["text: CompAct n/4: gap to plain"] is None
    (beside,) = paper_tables("text", found)
    # ln(19.26 / 18.80), and 37.94 GB of 39.97.
    assert beside.rows[0][0] == "CompAct n/2"
    assert (beside.rows[0][3], beside.rows[0][5]) == ("+0.024", "0.95")
    assert paper_tables("digits", found) == []


def test_the_interval_is_students() -> None:
    values = {0: 1.0, 1: 2.0, 2: 4.0}
    assert interval(values) == pytest.approx(4.303 * stdev(values.values()) / 3**0.5)
    assert interval({0: 1.0}) is None
    assert interval({0: 1.0, 1: float("inf")}) is None


def test_the_frontier_and_labels() -> None:
    points = {"a": (0.2, 0.5), "b": (0.3, 0.5), "c": (0.4, 0.1), "d": (0.4, 0.0), "e": (1.0, 0.0)}
    assert frontier(points) == ["a", "d"]
    assert labelled_below({"a": (0.2, 0.0), "b": (0.21, 0.0), "c": (1.0, 0.0)}) == {"a"}
    assert labelled_below({"a": (0.2, 0.0), "b": (0.21, 0.1), "c": (1.0, 0.0)}) == set()
    assert labelled_below({"a": (0.2, 0.001), "b": (0.21, 0.0), "c": (0.22, 0.0)}) == {"b"}
