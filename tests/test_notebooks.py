"""The notebooks are complete, and run from top to bottom on a CPU."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from fdjax.system import platform

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
# The text and results that readers need.
PRINTED = {
    "quickstart": ("Pacific", "7 + 5 = 12", "tok/s", "workspace"),
    "unified_max": ("0 of 4 parts", "1 of 4 parts", "0.00% of the rows leave"),
}


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_all_are_known():
    assert {path.stem for path in NOTEBOOKS} == set(PRINTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_as_it_was_run(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    code = code_cells(path)
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {(o["output_type"], o["name"]) for o in outputs} == {("stream", "stdout")}
    text = "".join(line for output in outputs for line in output["text"])
    assert [part for part in PRINTED[path.stem] if part not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)
    names: dict = {}
    printed = io.StringIO()
    for cell in code_cells(path):
        code = compile("".join(cell["source"]), path.name, "exec")
        with contextlib.redirect_stdout(printed):
            before = printed.tell()
            exec(code, names)
        # A cell prints output if the stored one did.
        assert (printed.tell() > before) == bool(cell["outputs"]), code
        if "plan_memory(" in "".join(cell["source"]):  # the same everywhere
            kept = "".join(line for output in cell["outputs"] for line in output["text"])
            assert printed.getvalue()[before:] == kept
    assert [part for part in PRINTED[path.stem] if part not in printed.getvalue()] == []
