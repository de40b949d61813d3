"""The surface: imports run one way, public names are what they say, and every file keeps to the house's form."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("benchmarks", "compact", "io_backends", "tba", "tests")
PUBLIC_PACKAGES = [
    name for name in ("compact", "io_backends", "tba", "tba.cli") if (ROOT / name.replace(".", "/")).is_dir()
]
# What each package may import beside the standard library and itself.
MAY_IMPORT = {
    "io_backends": {"numpy", "xxhash"},
    "compact": {"torch", "numpy", "numba", "triton"},
    "tba": {"torch", "numpy", "xxhash", "psutil", "pydantic", "matplotlib", "io_backends", "compact"},
    "tba.cli": {"typer", "rich", "torch", "tba", "io_backends"},
}

Import = tuple[str, str]  # the module imported from and the name taken from it, "" for the module itself


@cache
def python_files(top: str = "") -> tuple[Path, ...]:
    tops = [top] if top else OURS
    return tuple(sorted(path for name in tops for path in (ROOT / name).rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def imports(path: Path, nodes: Iterator[ast.AST] | None = None) -> Iterator[Import]:
    """Every import in a file, relative ones resolved."""
    for node in ast.walk(tree(path)) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_of(path).split(".")
            start = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def private_modules_of_ours(path: Path) -> Iterator[str]:
    """Modules named `_x` of our packages that a file imports, whole or by a name."""
    for module, name in imports(path):
        dotted = f"{module}.{name}" if (ROOT / module.replace(".", "/") / f"{name}.py").is_file() else module
        top, *rest = dotted.split(".")
        if top in OURS and any(part.startswith("_") and not part.startswith("__") for part in rest):
            yield dotted


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def library_files() -> list[Path]:
    return [path for top in ("io_backends", "compact", "tba") for path in python_files(top)]


def test_the_files_are_found() -> None:
    assert len(library_files()) > 20
    assert ("tba._errors", "ConfigError") in set(imports(ROOT / "tba" / "_config.py"))
    assert "tba._memory.free_memory" in set(
        private_modules_of_ours(ROOT / "tests" / "tba_memory" / "test_free_memory.py")
    )


@pytest.mark.parametrize("path", library_files(), ids=relative)
def test_imports_run_one_way(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    key = "tba.cli" if module_name(path).startswith("tba.cli") else own
    allowed = MAY_IMPORT[key] | {own} | sys.stdlib_module_names
    if module_name(path) == "tba.__main__":
        allowed |= MAY_IMPORT["tba.cli"]
    found = {module.partition(".")[0] for module, _ in imports(path)}
    assert found <= allowed


# Selective checkpointing stands on torch's own seam, as the engine does, and on no framework.
INTEGRATIONS = [path for path in sorted((ROOT / "tba" / "integrations").glob("*.py")) if path.stem != "checkpoint"]


@pytest.mark.parametrize("path", INTEGRATIONS, ids=relative)
def test_an_integration_uses_public_names_and_its_own_framework(path: Path) -> None:
    found = {module for module, _ in imports(path)}
    assert {name for name in found if name.startswith("tba.") and not name.startswith("tba.integrations")} == set()
    calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    asked = [ast.literal_eval(call.args[0]) for call in calls if call.func.id == "framework"]
    assert {name.partition(".")[0] for name in asked} <= {path.stem}


@pytest.mark.parametrize("path", library_files(), ids=relative)
def test_a_package_reaches_others_by_public_names(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    assert [name for name in private_modules_of_ours(path) if name.partition(".")[0] != own] == []


# The rooms of each package, floor by floor from the ground: its files, and its folders as one room each.
# A room imports from the floors beneath its own alone, at any time: within functions and for type checkers too.
FLOORS = {
    "io_backends": [
        ("_buffer", "_errors", "_extents", "interrupts"),
        ("_armed", "_memory", "_ticket"),
        ("_file", "_store", "_workers"),
        ("_stores", "_testing"),
        ("testing", ""),
    ],
    "compact": [
        ("_errors", "_measures", "_seeds"),
        ("_kernels", "_projection"),
        ("_codecs", "_training"),
        ("_presets", "testing"),
        ("",),
    ],
    "tba": [
        ("_armed", "_errors"),
        ("_device", "_text"),
        ("_config", "_stats", "_torch"),
        ("_memory",),
        ("_plan",),
        ("_group", "_record", "_state"),
        ("_blocks",),
        ("_compress", "_derive", "_transfer"),
        ("_auto", "_compiled"),
        ("_engine",),
        ("_audit", "_report"),
        ("_offloader",),
        ("_context", "_forecast"),
        ("_attaching",),
        ("",),
        ("cli", "integrations", "_startup"),
        ("__main__",),
    ],
    "benchmarks": [
        ("_report", "_workload", ""),
        ("_io", "_peers", "_pictures", "_processes"),
        ("_arms", "card", "codec", "curve", "demo", "forecast", "io", "overlap", "peers", "ranks", "step", "waves"),
        ("hooks", "links"),
        ("__main__",),
    ],
}


def room_of(module: str) -> str:
    """The file or folder of a package that a module is in; "" for the package itself."""
    return [*module.split("."), ""][1]


def arrows(top: str) -> dict[tuple[str, str], str]:
    """From which room to which a package imports, and one file that does."""
    found = {}
    for path in python_files(top):
        here = room_of(module_name(path))
        for target in modules_of(path, top):
            if room_of(target) != here:
                found[here, room_of(target)] = relative(path)
    return found


def modules_of(path: Path, top: str) -> Iterator[str]:
    """The modules of a package that a file imports, at any time."""
    for module, name in imports(path):
        if module.partition(".")[0] == top:
            base = ROOT / module.replace(".", "/")
            yield f"{module}.{name}" if (base / f"{name}.py").is_file() or (base / name).is_dir() else module


@pytest.mark.parametrize("top", FLOORS)
def test_rooms_import_from_lower_floors_alone(top: str) -> None:
    floors = {room: number for number, rooms in enumerate(FLOORS[top]) for room in rooms}
    rooms = {room_of(module_name(path)) for path in python_files(top)}
    assert rooms == set(floors)
    upward = [f"{file}: {a} -> {b}" for (a, b), file in arrows(top).items() if floors[b] >= floors[a]]
    assert upward == []


def room_within(module: str) -> str:
    """The file or folder of a room that a module is in; "" for the room itself."""
    return [*module.split("."), "", ""][2]


@pytest.mark.parametrize("top", FLOORS)
def test_folders_within_a_room_are_imported_one_way(top: str) -> None:
    ways = {
        (room_of(target), room_within(module_name(path)), room_within(target))
        for path in python_files(top)
        for target in modules_of(path, top)
        if room_of(target) == room_of(module_name(path)) and room_within(target) != room_within(module_name(path))
    }
    assert [way for way in sorted(ways) if (way[0], way[2], way[1]) in ways] == []


@pytest.mark.parametrize("top", FLOORS)
def test_no_module_imports_itself_by_a_detour(top: str) -> None:
    files = {module_name(path): path for path in python_files(top)}
    edges = {name: {*modules_of(path, top)} & files.keys() - {top, name} for name, path in files.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in sorted(files):
        visit(name, ())


@pytest.mark.parametrize(
    "path",
    [
        *python_files("benchmarks"),
        *(ROOT / "tests").glob("exact/*.py"),
        *(ROOT / "tests").glob("gpu/*.py"),
        *(ROOT / "tests").glob("*/*contract*.py"),
        Path(__file__),
    ],
    ids=relative,
)
def test_benchmarks_and_engine_tests_use_public_names_only(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    assert [name for name in private_modules_of_ours(path) if name.partition(".")[0] != own] == []


def test_device_modules_are_asked_in_one_place() -> None:
    """What is written for CUDA alone runs nowhere else, and no accelerator made of a CPU would show what is wrong."""
    names = {"cuda", "is_cuda"}
    for path in python_files():
        top, _, rest = path.relative_to(ROOT).as_posix().partition("/")
        if top in ("benchmarks", "tests") or rest.startswith("_device/"):
            continue
        found = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)} & names
        assert not found, f"{path.relative_to(ROOT)} asks for .{', .'.join(found)}: go by tba/_device"


@pytest.mark.parametrize("name", PUBLIC_PACKAGES)
def test_all_is_what_is_visible(name: str) -> None:
    package = importlib.import_module(name)
    visible = {
        entry
        for entry in dir(package)
        if not entry.startswith("_") and entry != "annotations" and not isinstance(getattr(package, entry), ModuleType)
    }
    assert set(package.__all__) == visible
    assert len(package.__all__) == len(visible)


@pytest.mark.parametrize("name", PUBLIC_PACKAGES)
def test_public_names_are_documented(name: str) -> None:
    package = importlib.import_module(name)
    for entry in package.__all__:
        value = getattr(package, entry)
        # An instance has its class's docstring, which tells of another thing.
        assert not callable(value) or value.__doc__, entry


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_a_file_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(tree(path))
    assert docstring is not None
    assert docstring.splitlines()[0].strip()


@pytest.mark.parametrize("top", [name for name in PUBLIC_PACKAGES if "." not in name])
def test_packages_are_typed(top: str) -> None:
    assert (ROOT / top / "py.typed").is_file()
