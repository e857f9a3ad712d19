"""Rooms import only downwards, and importing them only defines names."""

import ast
import collections
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TOP_LEVEL = {
    *("pallas_kernels", "models", "fdjax", "benchmarks", "tests", "notebooks", "docs"),
    *("README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"),
    *(".ci", ".gitignore", ".python-version"),
}
# Other rooms that each room may import.
BELOW = {
    "pallas_kernels": {"fdjax.pallas_kernels"},
    "models": {"fdjax.pallas_kernels", "fdjax.models"},
    "fdjax": {"fdjax"},
    "benchmarks": {"fdjax", "benchmarks"},
}


def _declared() -> set[str]:
    """Import names of the packages that fdjax requires, and of those in its `bench` extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    return {re.match(r"[\w\-]+", r)[0].replace("-", "_").lower() for r in requirements}


# Packages that each room may import, beside the standard library. Benchmarks compare with peers, so
# they may import anything.
THIRD_PARTY = {
    "pallas_kernels": {"jax", "jaxlib", "numpy"},
    "models": {"jax", "jaxlib", "numpy", "flax"},
    "fdjax": _declared() | {"jaxlib"},
    "benchmarks": None,
}
# The embedded model is trained in its folder, with its own tokenizer. optax comes with flax.
TRAINING = Path("models/tiny")
TRAINING_PARTY = _declared() | {"jaxlib", "optax"}


def _sources(folder: str) -> list[Path]:
    """Python files of a top-level folder, relative to the root, without those behind links."""
    return sorted(
        Path(directory, name).relative_to(ROOT)
        for directory, _, names in os.walk(ROOT / folder, followlinks=False)
        for name in names
        if name.endswith(".py")
    )


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from fdjax import models` imports fdjax.models.
            yield from (f"{module}.{a.name}" if module == "fdjax" else module for a in node.names)


def _wrong_imports(source: str, path: Path) -> list[str]:
    room = path.parts[0]
    third_party = TRAINING_PARTY if path.is_relative_to(TRAINING) else THIRD_PARTY[room]
    wrong = []
    for name in _imported(ast.parse(source)):
        top = name.split(".")[0]
        if top == "":
            ok = False  # a relative import
        elif top in BELOW:
            ok = any(f"{name}.".startswith(f"{package}.") for package in BELOW[room])
        else:
            ok = third_party is None or top in third_party or top in sys.stdlib_module_names
        if not ok:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("room", BELOW)
def test_rooms_import_only_downwards(room):
    wrong = {
        str(path): names
        for path in _sources(room)
        if (names := _wrong_imports((ROOT / path).read_text(), path))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("pallas_kernels", "import flax"),
        ("pallas_kernels", "from fdjax.models import llama"),
        ("pallas_kernels", "from fdjax import plan"),
        ("pallas_kernels", "def f():\n  import fdjax.engine.engine"),
        ("models", "import fdjax"),
        ("models", "from fdjax import engine"),
        ("models", "from . import config"),
        ("models", "import models"),
        ("fdjax", "from pallas_kernels.gemm import matmul"),
        ("fdjax", "import benchmarks.peers"),
        ("fdjax", "import torch"),
        ("benchmarks", "import models.llama"),
    ],
)
def test_the_import_rule_finds(room, source):
    assert _wrong_imports(source, Path(room, "some.py"))


@pytest.mark.parametrize(
    ("room", "source"),
    [
        (
            "pallas_kernels",
            "import math\nimport jax.numpy as jnp\nfrom fdjax.pallas_kernels import x",
        ),
        ("models", "from fdjax import pallas_kernels\nfrom fdjax.models.config import Config"),
        ("fdjax", "from fdjax import models, engine\nimport tokenizers"),
        ("benchmarks", "import torch, fdjax\nfrom benchmarks import peers"),
    ],
)
def test_the_import_rule_allows(room, source):
    assert not _wrong_imports(source, Path(room, "some.py"))


def _named_twice(sources: Mapping[Path, str]) -> dict[str, list[str]]:
    """Names of classes that several places define."""
    places = collections.defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_classes_have_one_name():
    rooms = ("fdjax", "models", "pallas_kernels")
    files = [path for room in rooms for path in _sources(room)]
    assert not _named_twice({path: (ROOT / path).read_text() for path in files})
    assert _named_twice({Path("a.py"): "class A: ...", Path("b.py"): "def f():\n  class A: ..."})


# The rooms of `fdjax`, from bottom to top. Each may import those below it. `lm` is a file.
FLOORS = ("system", "sampling", "weights", "text", "engine", "bench", "tools", "lm", "cli")


def _modules() -> dict[str, Path]:
    """Files of the package by module name. Each file behind a link occurs only once."""
    modules = {}
    for folder in ("pallas_kernels", "models", "fdjax"):
        for path in _sources(folder):
            parts = (() if folder == "fdjax" else ("fdjax",)) + path.with_suffix("").parts
            modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def _imports_of(source: str, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, also in functions and for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found & modules.keys()


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Each cycle of imports, found once."""
    circles, done = [], set()

    def visit(module, way):
        if module in way:
            circles.append([*way[way.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*way, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return circles


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    # Names that the package imports lazily are imports of the package itself.
    return {
        name: _imports_of((ROOT / path).read_text(), modules) - {"fdjax"}
        for name, path in modules.items()
        if name != "fdjax"
    }


def test_no_files_import_each_other():
    assert not _circles(_graph())


def test_the_search_for_circles_finds():
    modules = {"fdjax.a": Path("a"), "fdjax.b": Path("b"), "fdjax.c": Path("c")}
    sources = {
        "fdjax.a": "def f():\n  from fdjax import b",
        "fdjax.b": "if TYPE_CHECKING:\n  from fdjax.c import x",
        "fdjax.c": "import fdjax.a",
    }
    graph = {name: _imports_of(source, modules) for name, source in sources.items()}
    assert _circles(graph) == [["fdjax.a", "fdjax.b", "fdjax.c", "fdjax.a"]]
    assert not _circles(graph | {"fdjax.b": set()})


def _floor(module: str) -> int | None:
    room = module.split(".")[1]
    return FLOORS.index(room) if room in FLOORS else None


def test_rooms_of_fdjax_import_only_downwards():
    upwards = {
        (module, other)
        for module, others in _graph().items()
        for other in others
        if None not in (here := _floor(module), there := _floor(other)) and here < there
    }
    assert not upwards
    rooms = {path.name for path in (ROOT / "fdjax").iterdir() if not path.name.startswith("__")}
    assert {room.removesuffix(".py") for room in rooms} == {*FLOORS, "models", "pallas_kernels"}


def _private_access(source: str) -> list[str]:
    """Private attributes of imported objects, or of parts of them, that a file reads.

    Private attributes of `self`, `cls` and objects of the file's own classes do not count.
    """
    tree = ast.parse(source)
    own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _is_self(n.value)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    found = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[a-z]", node.attr)
        and node.attr not in own | PUBLIC_UNDERSCORES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("fdjax", "bench")):
            found += [alias.name for alias in node.names if re.match(r"_[a-z]", alias.name)]
    return found


# Methods of named tuples, names that ctypes requires of a structure, and `os._exit`.
PUBLIC_UNDERSCORES = {"_asdict", "_exit", "_fields", "_make", "_replace", "_fields_", "_src"}


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_private_attribute_of_another_file_is_read():
    found = {
        str(path): names
        for room in BELOW
        for path in _sources(room)
        if (names := _private_access((ROOT / path).read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    ["lm._engine.run()", "from fdjax.engine.step import _attend", "x = engine.a._b", "mod._f(1)"],
)
def test_the_search_for_private_attributes_finds(source):
    assert _private_access(source)


def test_tests_import_rooms_by_their_package():
    for path in _sources("tests"):
        names = {name.split(".")[0] for name in _imported(ast.parse((ROOT / path).read_text()))}
        assert not names & {"models", "pallas_kernels"}, path


@pytest.mark.parametrize("room", ["pallas_kernels", "models"])
def test_no_environment_variables(room):
    """The behaviour of an op depends only on its arguments."""
    knobs = re.compile(r"\b(environ|getenv|putenv)\b")
    found = [path for path in _sources(room) if knobs.search((ROOT / path).read_text())]
    assert not found


@pytest.mark.parametrize("room", ["pallas_kernels", "models"])
def test_links_are_relative(room):
    link = ROOT / "fdjax" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..", room)
    assert (link / "__init__.py").is_file()


def test_top_level_entries():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so what is ignored is unknown")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    assert {path.split("/")[0] for path in listed if path} <= TOP_LEVEL


def _modules_after(code: str) -> set[str]:
    """Names in `sys.modules` after running code in a new interpreter."""
    printed = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('modules:', *sys.modules)"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return set(printed.rpartition("modules:")[2].split())


def _loaded_packages(modules: set[str]) -> set[str]:
    return {".".join(m.split(".")[:2]) for m in modules if m.split(".")[0] == "fdjax"}


def test_importing_fdjax_is_lazy():
    modules = _modules_after("import fdjax")
    assert not modules & {"jax", "numpy", "flax", "fdjax.models", "fdjax.pallas_kernels"}


def test_importing_kernels_leaves_the_rest_alone():
    modules = _modules_after("import fdjax.pallas_kernels")
    assert _loaded_packages(modules) <= {"fdjax", "fdjax.pallas_kernels"}
    assert "flax" not in modules


@pytest.mark.slow
def test_importing_models_leaves_the_engine_alone():
    modules = _modules_after("import fdjax.models")
    assert _loaded_packages(modules) <= {"fdjax", "fdjax.pallas_kernels", "fdjax.models"}


IMPORT_ALL = """
import importlib, pkgutil, fdjax
for module in pkgutil.walk_packages(fdjax.__path__, "fdjax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from jax._src import xla_bridge
assert not xla_bridge._backends, "an import initialised a JAX backend"
"""


@pytest.mark.slow
def test_no_import_initialises_a_backend():
    modules = _modules_after(IMPORT_ALL)
    for room in ("pallas_kernels", "models"):  # the walk followed the links
        for path in _sources(room):
            name = ".".join(("fdjax", *path.with_suffix("").parts))
            assert name.removesuffix(".__init__") in modules


@pytest.mark.slow
def test_the_backend_check_can_fail():
    with pytest.raises(subprocess.CalledProcessError):
        _modules_after(f"import jax\njax.devices('cpu')\n{IMPORT_ALL}")
