"""The pages for users: tests they name exist, links lead somewhere, and the Python they show compiles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = _HEADING.findall(_CODE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_tests(page: Path) -> list[tuple[str, str]]:
    return _TEST.findall(page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if named_tests(page)], ids=name_of)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, test in named_tests(page):
        tree = ast.parse((ROOT / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_each_guarantee_names_a_test_that_holds_it() -> None:
    _, *sections = (ROOT / "docs" / "guarantees.md").read_text().split("\n## ")
    assert len(sections) >= 14
    assert [section.partition("\n")[0] for section in sections if not _TEST.search(section)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_compile(page: Path) -> None:
    for code in _PYTHON.findall(page.read_text()):
        compile(code, str(page), "exec")


def test_the_readme_shows_python() -> None:
    assert _PYTHON.search((ROOT / "README.md").read_text())
