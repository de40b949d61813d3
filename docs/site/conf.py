"""Sphinx: how the site is made of the pages, the filed results and the docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import tba  # noqa: E402  # after the path above: the site is made from this checkout

project = "tba"
author = "the tba contributors"
project_copyright = "2026, the tba contributors, Apache-2.0"
version = release = tba.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
suppress_warnings = ["myst.header"]  # filed results go from the title to the third level

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "groupwise"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # or a field that is documented twice is an error

html_theme = "furo"
html_title = f"tba {release}"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["tba.css"]
html_show_sphinx = False
html_copy_source = False

_QUOTED = re.compile(r"(``.+?``|`[^`]+`)")


def inline_pictures(app: Any, tree: nodes.document, docname: str) -> None:
    """Put the text of our SVG pictures into the page, where the theme's light and dark colours reach them."""
    if app.builder.format != "html":
        return
    for image in list(tree.findall(nodes.image)):
        file = Path(app.srcdir, image["uri"])
        if file.suffix == ".svg":
            image.replace_self(nodes.raw("", file.read_text(), format="html"))


def plain_docstring(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Make reStructuredText of a plain docstring: names in single backticks, and code that is only indented."""
    made: list[str] = []
    before = ""
    for line in lines:
        code = what == "module" and line.startswith("    ")
        if code and not before.startswith("    ") and not before.strip():
            made += [".. code-block:: python", ""]
        made.append(line if code else "".join(map(_plain, _QUOTED.split(line))))
        before = line if line.strip() or not before.startswith("    ") else before
    lines[:] = made


def _plain(part: str) -> str:
    if part.startswith("`"):
        return f"``{part.strip('`')}``"
    return part.replace("|", r"\|").replace("*", r"\*")


def setup(app: Any) -> None:
    """Register the steps above."""
    app.connect("doctree-resolved", inline_pictures)
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)  # ahead of napoleon
