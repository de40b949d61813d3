"""Figures on the pages: each number that a page takes from a filed result is in that result, under its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guide").glob("*.md"))]
# A table whose rows are arms stands below a comment that names its results: <!-- figures of peers_vm2_202611 -->
_TABLE = re.compile(r"<!-- figures of ([^>]+?) -->\n+((?:\|.*\n)+)")
_LINK = re.compile(r"results/([\w.-]+\.md)")
_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w]*\d)")
_MEASURED = re.compile(r"(?<![\w.,/-])(\d+\.\d+|\d+(?=%| times))(?![\w.]*\d)")
_EMPHASIS = re.compile(r"[*`]")
# How the pages name what a result names otherwise.
NAMES = {
    "every block checkpointed": "checkpoint",
    "every other block checkpointed": "checkpoint, every other block",
    "selective checkpointing": "selective checkpoint",
    "full checkpointing, jemalloc": "checkpoint",
    "plain, jemalloc": "plain",
    'tier="nvme", jemalloc': "offload nvme",
    'tier="nvme"': "nvme",
    'tier="nvme", compress="exact"': "nvme, exact",
    'tier="keep", compress="exact"': "keep, exact",
    "torch_remat, keeping attention": "torch_remat",
    "PyTorch's tutorial hooks that write files": "tutorial's files",
    "DeepSpeed's partitioned checkpoints": "DeepSpeed",
    "save_on_cpu (moves nothing on a CPU)": "save_on_cpu",
    "SSDTrain's rule, in our engine": "SSDTrain's rule",
    "no budget: the run fits": "auto, nothing set",
    "memory_budget 5% of what plain saves": "auto 0.05",
    "memory_budget 15%": "auto 0.15",
    "memory_budget 25% of what plain saves": "auto 0.25",
    "memory_budget 25%": "auto 0.25",
    "memory_budget 40%": "auto 0.40",
    "memory_budget 50%": "auto 0.50",
    "memory_budget 55%": "auto 0.55",
    "memory_budget 70%": "auto 0.70",
    "memory_budget 75%": "auto 0.75",
    "memory_budget 85%": "auto 0.85",
    "memory_budget 110%: all fits": "auto 1.10",
    'tier="nvme", not compiled': "nvme, not compiled",
    "plain, compiled": "plain",
    "memory_budget of 40%": "tba auto 0.40",
    "memory_budget of 40% of what a plain step saves": "tba auto 0.40",
    'tier="nvme": everything moves': "nvme",
    "all in the file": "nvme",
    "all in host memory": "cpu",
    "a weight": "weight",
    "a tensor below the minimum size": "below minimum size",
    "another view of a known storage": "further view",
    "a new record, including its transfers": "new record",
    "a new record of 1 MiB, including its transfers": "new record",
    "a tensor that is only counted, because everything fits the budget": "counted: all fits the budget",
    "a tensor that stays under a plan while others move": "let pass: stays by plan",
}


def rows(text: str) -> Iterator[list[str]]:
    """The rows of all tables, as cells without emphasis."""
    for line in text.splitlines():
        if line.startswith("|") and not set(line) <= set("|-: "):
            yield [_EMPHASIS.sub("", cell).strip() for cell in line.strip("|").split("|")]


def result(name: str) -> str:
    return (RESULTS / f"{name.removesuffix('.md')}.md").read_text()


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def is_there(shown: str, found: Iterable[float]) -> bool:
    """Whether a number rounds to what is shown: as it is, as a percentage, or as the percentage that is left."""
    digits = len(shown.partition(".")[2])
    step, value = 10.0**-digits, float(shown.replace(",", ""))
    return any(
        abs(value - each) <= 0.5001 * step
        for number in found
        for each in (number, 100 * number, 100 * (1 - number), 100 * (number - 1), number / 1e6, number / 1e3)
    )


TABLES = [(page, match) for page in PAGES for match in _TABLE.finditer(page.read_text())]
PARAGRAPHS = [
    (page, paragraph)
    for page in PAGES
    for paragraph in re.split(r"\n\n|\n(?=- )", page.read_text())
    if _LINK.search(paragraph) and not paragraph.lstrip().startswith("|")
]


@pytest.mark.parametrize(("page", "table"), TABLES, ids=lambda each: getattr(each, "name", ""))
def test_each_figure_of_a_table_is_filed_under_its_name(page: Path, table: re.Match[str]) -> None:
    filed = [row for name in table[1].split(", ") for row in rows(result(name))]
    _head, *shown = rows(table[2])
    for row in shown:
        label = next(cell for cell in row if cell)
        name = NAMES.get(label, label)
        if not any(row[1:]):
            continue  # a heading
        found = [
            number
            for each in filed
            if {name, f"tba {name}"} & set(each[:2])
            for cell in each
            for number in numbers(cell)
        ]
        assert found, f"{page.name}: no row {name!r} in {table[1]}"
        for cell in row[row.index(label) + 1 :]:
            for number in _NUMBER.findall(cell):
                assert is_there(number, found), f"{page.name}, {label}: {number} is not in {table[1]}"


@pytest.mark.parametrize(("page", "paragraph"), PARAGRAPHS, ids=lambda each: getattr(each, "name", ""))
def test_each_measured_number_beside_a_link_to_a_result_is_in_it(page: Path, paragraph: str) -> None:
    found = [number for name in _LINK.findall(paragraph) for number in numbers(result(name))]
    missing = [number for number in _MEASURED.findall(_EMPHASIS.sub("", paragraph)) if not is_there(number, found)]
    assert missing == [], f"{page.name}: {paragraph[:80]}..."


def test_pages_show_figures() -> None:
    assert len(TABLES) >= 3
    assert len(PARAGRAPHS) >= 10


def test_a_page_says_so_where_a_result_is_of_a_commit_with_changes() -> None:
    for page in PAGES:
        text = page.read_text()
        unclean = [name for name in _LINK.findall(text) if re.search(r"commit: \w+ with changes", result(name))]
        assert not unclean or "uncommitted changes" in text, f"{page.name}: {unclean}"
