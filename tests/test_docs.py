"""The pages for users: tests they name exist, links lead somewhere, and the Python they show compiles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tba
from benchmarks.__main__ import app
from support import samples

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "llms.txt",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs").glob("[!s]*/*.md")),  # without docs/site, whose links Sphinx follows
]
GUIDE = ROOT / "docs" / "guide"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TRAP = re.compile(r"^\| (\d+) \|.*$", re.MULTILINE)
_MESSAGE = re.compile(r"`([^`]+)`")
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


def test_each_test_that_a_guarantee_names_has_a_case_in_make_test(request: pytest.FixtureRequest) -> None:
    named = {f"{file}::{test}": file for file, test in named_tests(ROOT / "docs" / "guarantees.md")}
    cases = request.config.stash[samples.CASES]
    files = {name.partition("::")[0] for name in cases}
    if len(files) == 1:  # nothing else was collected, so nothing is known of it: once more, beside what is named
        command = [sys.executable, "-m", "pytest", "-q", __file__, *set(named.values()), "-k", request.node.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    assert [name for name, file in named.items() if file in files and not cases[name]] == []  # others cannot run here
    assert f'-m "{samples.MAKE_TEST}"' in (ROOT / "Makefile").read_text()


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


def test_every_known_trap_names_a_test_or_is_called_a_limit() -> None:
    rows = {int(row[1]): row[0] for row in _TRAP.finditer((GUIDE / "traps.md").read_text())}
    assert sorted(rows) == list(range(1, 56))
    assert [number for number, row in rows.items() if not _TEST.search(row) and "**limit**" not in row.lower()] == []


def test_every_story_names_a_test() -> None:
    rows = [row[0] for row in _TRAP.finditer((ROOT / "docs" / "stories.md").read_text())]
    assert len(rows) == 20
    assert [row for row in rows if not _TEST.search(row)] == []


def test_every_benchmark_that_a_page_names_is_a_command() -> None:
    pages = [*PAGES, ROOT / "Makefile"]
    named = {name for page in pages for name in re.findall(r"-m\s+benchmarks\s+(\w+)", page.read_text())}
    assert named - {command.name for command in app.registered_commands} == set()
    assert {"curve", "hooks", "peers", "step"} <= named


def messages() -> list[str]:
    """Each text in the packages' source, with "..." where a value is put in."""
    found = []
    for path in (path for package in ("tba", "io_backends") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_that_the_page_of_errors_explains_is_one_of_ours() -> None:
    ours = messages()
    ends_at = "## PyTorch's own errors"
    page = (GUIDE / "errors.md").read_text().partition(ends_at)[0]
    quoted = [text for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for text in _MESSAGE.findall(row)]
    assert len(quoted) > 30
    for text in quoted:
        parts = map(re.escape, text.replace("'...'", "...").split("..."))  # {value!r} brings its own quotes
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(message) for message in ours), text


def test_the_page_of_errors_has_every_error_and_the_api_every_name() -> None:
    page, api = (GUIDE / "errors.md").read_text(), (ROOT / "docs" / "site" / "api" / "tba.md").read_text()
    errors = [name for name in tba.__all__ if name.endswith(("Error", "Warning"))]
    assert [name for name in errors if f"## {name}" not in page and f"and {name}" not in page] == []
    assert [name for name in tba.__all__ if f":: {name}\n" not in api] == []


def test_the_page_of_versions_has_the_releases_that_the_matrix_installs() -> None:
    table = (ROOT / "docs" / "versions.md").read_text().partition("## Frameworks")[2]
    named = dict(re.findall(r"^\| ([a-z-]+) \| ([\d.]+) \|", table, re.MULTILINE))
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-matrix.txt").read_text(), re.MULTILINE))
    assert len(named) == 10
    assert named == {name: pins[name] for name in named}


def test_the_readme_shows_python() -> None:
    assert _PYTHON.search((ROOT / "README.md").read_text())
