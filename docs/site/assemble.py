"""Assemble: lays out the tree that Sphinx reads: the repository's pages as they are, and one made of filed results.

    python docs/site/assemble.py out/site-source

Pages keep their paths, so a link that works on GitHub works on the site too, and the other way round.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from results import page

ROOT = Path(__file__).resolve().parents[2]
_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "CITATION.cff", "docs/*.md",
          "docs/*.png", "docs/guide/*", "docs/frameworks/*.md", "examples/*", "benchmarks/README.md",
          "benchmarks/results/*.md", "benchmarks/results/*.png")  # fmt: skip


def assemble(target: Path) -> None:
    """Fill `target` anew. What exists is taken: a page that another change brings appears by itself."""
    shutil.rmtree(target, ignore_errors=True)
    for pattern in _PAGES:
        for source in sorted(ROOT.glob(pattern)):
            place = target / source.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    front = (ROOT / "docs" / "site" / "index.md").read_text()
    (target / "index.md").write_text("".join(expanded(front.splitlines(keepends=True), target)))
    shutil.copytree(ROOT / "docs" / "site" / "api", target / "api")
    # The site has no .md: what language models read there leads to its pages.
    (target / "llms.txt").write_text((ROOT / "llms.txt").read_text().replace(".md)", ".html)"))
    (target / "benchmarks" / "results.md").write_text(page(ROOT / "benchmarks" / "results"))


def expanded(lines: list[str], target: Path) -> Iterator[str]:
    """Yield the front page with each pattern of its contents replaced by the pages that no other line names.

    So a page that another change brings is in the contents, and a pattern without a page is no error.
    """
    named = {line.strip() for line in lines}
    for line in lines:
        if not line.startswith("docs/") or "*" not in line:
            yield line
            continue
        found = {str(page.relative_to(target).with_suffix("")) for page in target.glob(line.strip() + ".md")} - named
        named |= found
        yield from (f"{page}\n" for page in sorted(found))


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
