"""Snippets: the Python that pages and module docstrings show, and what it takes to run each."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    ROOT / "docs" / "site" / "index.md",
]
PACKAGES = ("tba", "io_backends", "compact")
# A snippet, and what is shown below it as its output, if anything.
_SHOWN = re.compile(r"^```python\n(.*?)^```(?:\n+```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
# Names that only a framework has: these snippets run in `make matrix`.
FRAMEWORKS = {
    "Trainer",
    "SFTTrainer",
    "lightning",
    "accelerator",
    "initialize",
    "OffloadedForwardStep",
    "forward_step",
    "config",
    "ray",
}


class Snippet(NamedTuple):
    """One snippet; `output` is what the page shows below it."""

    where: str
    code: str
    output: str

    @property
    def names(self) -> set[str]:
        """The names that it reads."""
        nodes = ast.walk(ast.parse(self.code))
        return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}

    @property
    def of_framework(self) -> bool:
        return bool(self.names & FRAMEWORKS)


def all_snippets() -> Iterator[Snippet]:
    for page in PAGES:
        for number, (code, output) in enumerate(_SHOWN.findall(page.read_text())):
            yield Snippet(f"{page.name}-{number}", code, output)
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        if code := _of_docstring(ast.get_docstring(ast.parse(path.read_text())) or ""):
            yield Snippet(str(path.relative_to(ROOT)), code, "")


def _of_docstring(text: str) -> str:
    """The paragraphs of code in a module's docstring: from its first import on, as far as it is Python."""
    code = ""
    for paragraph in map(textwrap.dedent, text.split("\n\n")):
        if not code and not re.match(r"(from|import) \w", paragraph):
            continue
        try:
            ast.parse(paragraph)
        except SyntaxError:
            break
        code += paragraph + "\n\n"
    return code
