"""Assemble: lays out the tree that Sphinx reads: the repository's pages as they are, and one made of filed results.

    python docs/site/assemble.py out/site-source

Pages keep their paths, so a link that works on GitHub works on the site too, and the other way round.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from results import page

ROOT = Path(__file__).resolve().parents[2]
_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "CITATION.cff", "docs/*.md",
          "docs/*.png", "docs/guide/*", "docs/frameworks/*.md", "benchmarks/README.md", "benchmarks/results/*.md",
          "benchmarks/results/*.png")  # fmt: skip


def assemble(target: Path) -> None:
    """Fill `target` anew. What exists is taken: a page that another change brings appears by itself."""
    shutil.rmtree(target, ignore_errors=True)
    for pattern in _PAGES:
        for source in sorted(ROOT.glob(pattern)):
            place = target / source.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)
    lines = (ROOT / "docs" / "site" / "index.md").read_text().splitlines(keepends=True)
    (target / "index.md").write_text("".join(line for line in lines if "*" not in line or _matches(line, target)))
    shutil.copytree(ROOT / "docs" / "site" / "api", target / "api")
    # The site has no .md: what language models read there leads to its pages.
    (target / "llms.txt").write_text((ROOT / "llms.txt").read_text().replace(".md)", ".html)"))
    (target / "benchmarks" / "results.md").write_text(page(ROOT / "benchmarks" / "results"))


def _matches(line: str, target: Path) -> bool:
    """Tell whether a line of the front page is text or a pattern with pages: Sphinx complains of one without."""
    return not line.startswith("docs/") or any(target.glob(line.strip() + ".md"))


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
