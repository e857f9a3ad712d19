"""README.md is true: its Python runs, its command lines are right, its links lead somewhere."""

import dataclasses
import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

import fdjax
from benchmarks.table import updated
from fdjax.bench import record as records
from fdjax.bench.__main__ import main as bench_main
from fdjax.bench.timing import Timing
from fdjax.cli.main import _parser, main
from fdjax.system import platform

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PYTHON = "\n".join(code for language, code in FENCED if language == "python")
SHELL = [
    line for language, code in FENCED if language == "bash" for line in code.splitlines() if line
]
# What the README stands in for with a name of its own.
PLACEHOLDER = "path/to/"

pytestmark = pytest.mark.usefixtures("quick_compiles")


def command_lines(program: str) -> list[str]:
    """The shell lines of a program, also where it follows an installation."""
    parts = [part.strip() for line in SHELL for part in line.split("&&")]
    return [part for part in parts if re.match(f"{program}( |$)", part)]


def test_every_block_says_what_it_is():
    assert {language for language, _ in FENCED} <= {"python", "bash", ""}
    known = ("pip install -e ", "fdjax ", "python -m fdjax.bench ", "python -m benchmarks.")
    assert [line for line in SHELL if not line.startswith(known)] == []


def test_the_two_commands_are_lines_of_their_own():
    lines = README.splitlines()
    assert lines.count('pip install -e . && fdjax generate "What is the largest ocean?"') == 1
    assert lines.count("pip install -e '.[test]' && pytest") == 1
    assert lines.count("pip install -e '.[cuda13]'") == 1


@pytest.mark.slow
def test_the_python_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(PYTHON, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "Pacific" in out
    assert "7 + 5 = 12" in out
    assert "Once upon a time" in out
    config, ids = names["config"], names["ids"]
    assert names["logits"].shape == (*ids.shape, 1024)
    assert names["logits"].dtype == "float32"
    assert names["tokens"].shape == (1, config.max_new_tokens)
    assert "Tokyo" in names["lm"].tokenizer.decode(
        [t for t in names["tokens"][0].tolist() if t > 0]
    )


@pytest.fixture(scope="module")
def lm():
    return fdjax.load("tiny", compilation_cache=False, progress=False)


@pytest.mark.parametrize("line", command_lines("fdjax"))
def test_a_command_line_is_understood(line):
    assert "run" in _parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize(
    "line",
    [line for line in command_lines("fdjax") if PLACEHOLDER not in line and "--temp" not in line],
)
def test_a_command_line_runs(line, lm, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    signature = inspect.signature(fdjax.load)

    def load(*args, **options):
        signature.bind(*args, **options)
        return lm

    monkeypatch.setattr(fdjax, "load", load)
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)
    assert main(shlex.split(line)[1:]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert err == ""


def test_records_are_compared_as_it_says(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (line,) = command_lines("python -m fdjax.bench")
    program, old, new = re.fullmatch(r"(python -m fdjax\.bench) compare (\S+) (\S+)", line).groups()
    assert program
    for name, slower, code in ((old, 1, 0), (new, 2, 1)):
        timing = dataclasses.asdict(Timing.from_samples([[100.0 * slower] * 3], "host"))
        row = records.Measurement("case", "fdjax", ok=True, timing=timing)
        environment = {"device_kind": "cpu", "device_count": 1}
        records.write(records.Record(environment, {}, {}, [row]), name)
        assert bench_main(["compare", old, name]) == code
    assert "regression" in capsys.readouterr().out


@pytest.mark.parametrize("line", command_lines("python -m benchmarks.[a-z_]*"))
def test_a_benchmark_line_is_understood(line):
    """The module is there, and takes its options."""
    module, *argv = shlex.split(line)[2:]
    if module == "benchmarks.plots":
        pytest.importorskip("matplotlib")
    importlib.import_module(module).parse_args(argv)


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    headings = re.findall(r"^#+ (.+)$", README, re.MULTILINE)
    anchors = {"#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    for target in targets:
        assert target in anchors or (ROOT / target).exists(), target


def test_the_layout_is_there():
    folders = re.findall(r"^(\w+)/ {2,}\w|^(\w+)/$", README, re.MULTILINE)
    names = {a or b for a, b in folders}
    assert names >= {"pallas_kernels", "models", "fdjax", "benchmarks", "tests"}
    assert all((ROOT / name).is_dir() for name in names)


def test_the_changelog_knows_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert fdjax.__version__ in changelog


def test_the_measurements_are_those_of_the_records():
    """`python -m benchmarks.table --write` brings them up to date."""
    readme = (ROOT / "README.md").read_text()
    assert "decode step" in readme
    assert updated(readme) == readme
