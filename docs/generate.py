"""Generates the parts of docs/ that describe code: `python docs/generate.py`.

The table of options in options.md comes from `fdjax.sampling.options`, the picture of the rooms in
architecture.md from the imports, the families in models.md from `fdjax.models`.
`python -m benchmarks.table --write` makes the measurements.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.table import markdown, put

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def options_table() -> str:
    """A table of all options of `GenerationConfig`."""
    from fdjax.cli.shared import add_sampling
    from fdjax.sampling.options import OPTIONS, GenerationConfig, Number

    meanings = attributes(inspect.getdoc(GenerationConfig))
    parser = argparse.ArgumentParser()
    add_sampling(parser, "")
    flags = {action.dest: action.option_strings[-1] for action in parser._actions}
    lines = [("Option", "Default", "Takes", "Meaning", "Command line", "generation_config.json")]
    for name, option in OPTIONS.items():
        takes = str(option.check) if isinstance(option.check, Number) else ""
        lines.append(
            (
                f"`{name}`",
                f"`{option.default!r}`",
                takes.removeprefix("a number ").removeprefix("an integer "),
                meanings[name],
                f"`{flags[name]}`" if name in flags else "",
                "yes" if option.in_files else "",
            )
        )
    return markdown(lines)


def families_table() -> str:
    """A table of the families: their model types, and their modules' docstrings."""
    from fdjax.models import FAMILIES

    lines = [("`model_type`", "Family and what is special about it")]
    for family in FAMILIES.values():
        types = ", ".join(f"`{name}`" for name in family.MODEL_TYPES)
        lines.append((types, " ".join(inspect.getdoc(family).split())))
    return markdown(lines)


def refused_table() -> str:
    """A table of the model types that are refused, by reason."""
    from fdjax.models.refused import REFUSED

    lines = [("`model_type`", "Why not")]
    for reason in dict.fromkeys(REFUSED.values()):
        types = ", ".join(f"`{name}`" for name, why in REFUSED.items() if why == reason)
        lines.append((types, reason))
    return markdown(lines)


def attributes(doc: str) -> dict[str, str]:
    """The entries of a docstring's section "Attributes", by name, each as one line."""
    section = doc.partition("Attributes:\n")[2]
    found = re.findall(r"^  (\w+(?:, \w+)*): (.*(?:\n {4}.*)*)", section, re.MULTILINE)
    return {
        name: " ".join(text.split()).replace("|", "\\|")
        for names, text in found
        for name in names.split(", ")
    }


def room_of(module: str) -> str | None:
    """The room that a module belongs to, or None: a folder or file of `fdjax`, or `benchmarks`."""
    first, *rest = module.split(".")
    if first == "benchmarks":
        return first
    if first != "fdjax" or not rest or rest[0].startswith("__"):
        return None
    return rest[0]


def imports(folder: Path, package: str) -> Iterator[tuple[str, str]]:
    """Pairs (room, imported room) for every import in a folder, also inside functions."""
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        here = room_of(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from fdjax import lm` imports fdjax.lm.
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for there in map(room_of, names):
                if here and there and here != there:
                    yield here, there


def rooms() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    folders = {"pallas_kernels": "fdjax.pallas_kernels", "models": "fdjax.models", "fdjax": "fdjax"}
    found: dict[str, set[str]] = {}
    for folder, package in (folders | {"benchmarks": "benchmarks"}).items():
        for here, there in imports(ROOT / folder, package):
            found.setdefault(here, set()).add(there)
            found.setdefault(there, set())
    # Names that `fdjax` itself exports are not rooms.
    known = {path.stem for path in (ROOT / "fdjax").iterdir()} | {"benchmarks"}
    return {name: imported & known for name, imported in found.items() if name in known}


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """A graph without the arrows that follow from others. The graph must have no cycles."""

    def reached(name: str) -> set[str]:
        return {name}.union(*map(reached, graph[name]))

    return {
        name: {o for o in others if not any(o in reached(other) for other in others - {o})}
        for name, others in graph.items()
    }


def picture() -> str:
    """The rooms as a Mermaid diagram; arrows point at the imported room."""
    graph = reduced(rooms())
    arrows = [f"  {name} --> {other}" for name in sorted(graph) for other in sorted(graph[name])]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```"])


def updated() -> dict[Path, str]:
    """The up-to-date text of each file that has generated parts."""
    options, architecture = DOCS / "options.md", DOCS / "architecture.md"
    models = DOCS / "models.md"
    families = put(models.read_text(encoding="utf-8"), "families", families_table())
    return {
        models: put(families, "refused", refused_table()),
        options: put(options.read_text(encoding="utf-8"), "options", options_table()),
        architecture: put(architecture.read_text(encoding="utf-8"), "picture", picture()),
    }


def main() -> int:
    """Update the files."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path, text in updated().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
