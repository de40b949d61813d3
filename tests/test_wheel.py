"""The wheel: every file of the packages is in it, and it works without the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("compact", "io_backends", "tba")

# Only the standard library, the unpacked wheel and what is installed: without `site`, no editable install is found.
_IMPORTS = """
import importlib, runpy, sys
unpacked, *installed, names, smoke = sys.argv[1:]
sys.path[:] = [unpacked, *sys.path, *installed]
for name in names.split(","):
    module = importlib.import_module(name)
    assert module.__file__.startswith(unpacked), (name, module.__file__)
runpy.run_path(smoke, run_name="__main__")
"""


def shipped() -> list[Path]:
    """The files of the packages, relative to the root."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*")]
    return sorted(path.relative_to(ROOT) for path in files if path.suffix == ".py" or path.name == "py.typed")


def modules() -> list[str]:
    """Each package and sub-package, and the first module of it."""
    found = []
    for init in (path for path in shipped() if path.name == "__init__.py"):
        beside = sorted(path.stem for path in (ROOT / init.parent).glob("*.py") if not path.name.startswith("__"))
        name = ".".join(init.parent.parts)
        found += [name, *(f"{name}.{stem}" for stem in beside[:1])]
    return found


def build(place: Path) -> Path:
    """The wheel of this checkout, unpacked; made from a copy, as setuptools leaves files in its source."""
    try:
        if int(version("setuptools").partition(".")[0]) < 77:
            pytest.skip("setuptools is older than pyproject.toml asks for")
    except PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    source = place / "source"
    for name in (*PACKAGES, "benchmarks", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('..')"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "unpacked")
    return place / "unpacked"


@pytest.mark.exhaustive
def test_a_wheel_has_every_file_of_the_packages_and_works_without_the_checkout(tmp_path: Path) -> None:
    unpacked = build(tmp_path)
    found = [path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()]
    assert sorted(path for path in found if not path.parts[0].endswith(".dist-info")) == shipped()
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    smoke = ROOT / "tests" / "support" / "smoke.py"
    command = [sys.executable, "-I", "-S", "-c", _IMPORTS, str(unpacked), *installed, ",".join(modules()), str(smoke)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bit-equal" in done.stdout
