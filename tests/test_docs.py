"""README.md and docs/ are true: commands, Python, links, and parts made from code and records."""

import dataclasses
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fdjax
from benchmarks import table
from documents import (
    DOCUMENTS,
    README,
    ROOT,
    anchors,
    blocks,
    commands,
    every,
    inline_commands,
    prose,
    python_of,
    text_of,
)
from fdjax.bench import record as records
from fdjax.bench import suite
from fdjax.bench.__main__ import main as bench_main
from fdjax.bench.timing import Timing
from fdjax.cli.main import _parser, main
from fdjax.pallas_kernels.quantised import BITS
from fdjax.system import platform

CONFIG = ROOT / "tests" / "fixtures" / "hf" / "configs" / "llama-2-7b.old.json"
EXTENDING = ROOT / "docs" / "extending.md"
# Variables that may stand before a command.
VARIABLE = re.compile(r"(XLA_\w+=\S+) ")
# These commands measure for minutes. Tests of the command line run them with smaller numbers.
NEEDS_GPU = ("fdjax tune path", "fdjax bench")

pytestmark = pytest.mark.usefixtures("quick_compiles")


def program(name: str) -> list[str]:
    """The commands of a program in all documents, without variables before them."""
    found = [VARIABLE.sub("", command) for command in every(commands)]
    return list(dict.fromkeys(c for c in found if c == name or c.startswith(f"{name} ")))


# Commands are understood


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(path):
    languages = {block.language for block in blocks(path)}
    assert languages <= {"python", "bash", "diff", "mermaid"}


def test_every_command_is_of_a_known_program():
    known = (
        "pip install -e ",
        "fdjax ",
        "pytest",
        "python -m fdjax.bench ",
        "python -m benchmarks.",
    )
    strange = [c for c in every(commands) if not VARIABLE.sub("", c).startswith(known)]
    assert strange == []


@pytest.mark.parametrize("command", program("fdjax"))
def test_a_command_line_is_understood(command):
    assert "run" in _parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("command", every(inline_commands))
def test_a_command_in_the_text_is_understood(command):
    words = shlex.split(command)
    if words[0] == "fdjax":
        # A command without its required arguments cannot be parsed further.
        with pytest.raises(SystemExit, match=r"^0$"):
            _parser().parse_args([words[1], "--help"])
        assert len(words) == 2 or _parser().parse_args(words[1:])
    elif words[:2] == ["python", "-m"]:
        understood(words[2], words[3:]) if words[3:] else importlib.import_module(words[2])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[0] == "pytest":
        markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
        known = {m.partition(":")[0] for m in markers["ini_options"]["markers"]}
        assert len(words) == 1 or (words[1] == "-m" and words[2] in known)
    elif words[0] == ".ci/run":
        listed = subprocess.run([ROOT / ".ci" / "run", "--list"], capture_output=True, text=True)
        stages = {line.split()[0] for line in listed.stdout.splitlines()}
        assert stages.union(["--list", "--whole"]).issuperset(words[1:])
    else:
        installs(words)


def understood(module: str, argv: list[str]) -> None:
    """The module exists and accepts the options."""
    if module == "fdjax.bench":
        assert argv[0] == "compare"  # another test runs it
        return
    if module == "benchmarks.plots":
        pytest.importorskip("matplotlib")
    found = importlib.import_module(module)
    (suite if hasattr(found, "CASES") else found).parse_args(argv)


@pytest.mark.parametrize("command", [c for c in every(commands) if c.startswith("python -m ")])
def test_a_module_is_understood(command):
    _, _, module, *argv = shlex.split(command)
    understood(module, argv)


def installs(words: list[str]) -> None:
    assert words[:3] == ["pip", "install", "-e"]
    extras = re.fullmatch(r"\.(?:\[(.+)\])?", words[3])[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras is None or extras in project["optional-dependencies"]


@pytest.mark.parametrize("command", program("pip"))
def test_an_extra_is_there(command):
    installs(shlex.split(command))


# Commands run


@pytest.fixture(scope="module")
def lm():
    return fdjax.load("tiny", compilation_cache=False, progress=False)


@pytest.fixture
def folder(tmp_path, monkeypatch, lm):
    """A folder with the files that documents call path/to/..., and a `load` that takes no time."""
    there = tmp_path / "path" / "to"
    shutil.copytree(Path(fdjax.__file__).parent / "models" / "tiny", there / "checkpoint")
    shutil.copy(CONFIG, there / "config.json")
    (there / "book.txt").write_text("The largest ocean is the Pacific. " * 200)
    table_of_h100 = ROOT / "pallas_kernels" / "tables" / "NVIDIA_H100_80GB_HBM3.json"
    shutil.copy(table_of_h100, tmp_path / "table.json")
    signature = inspect.signature(fdjax.load)

    def load(*args, **options):
        signature.bind(*args, **options)
        return lm

    monkeypatch.setattr(fdjax, "load", load)
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# The table of an H100 names kernels that do not run on a CPU.
RUN = [
    c for c in program("fdjax") if not c.startswith(NEEDS_GPU) and '--table table.json "' not in c
]
LONG = ("--temperature", "score")
# Other tests run these with files of their own.
ELSEWHERE = ("calibrate", "--num-return", "score --file", "quantize")


def marks_of(command):
    if any(words in command for words in ELSEWHERE):
        return [pytest.mark.soak]
    return [pytest.mark.slow] if any(words in command for words in LONG) else []


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=marks_of(c)) for c in RUN],
)
def test_a_command_line_runs(command, folder, capsys):
    assert main(shlex.split(command)[1:]) == 0
    out, err = capsys.readouterr()
    assert out.strip() or "chat" in command
    assert "error" not in err


def test_records_are_compared_as_it_says(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (command,) = program("python -m fdjax.bench")
    *_, compare, old, new = shlex.split(command)
    for name, slower, code in ((old, 1, 0), (new, 2, 1)):
        timing = dataclasses.asdict(Timing.from_samples([[100.0 * slower] * 3], "host"))
        row = records.Measurement("case", "fdjax", ok=True, timing=timing)
        environment = {"device_kind": "cpu", "device_count": 1}
        records.write(records.Record(environment, {}, {}, [row]), name)
        assert bench_main([compare, old, name]) == code
    assert "regression" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in DOCUMENTS if python_of(p)], ids=lambda p: p.name)
def test_the_python_runs(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(python_of(path), path.name, "exec"), names)
    out = capsys.readouterr().out
    for text in {"README.md": ("Pacific", "7 + 5 = 12"), "extending.md": ("mine",)}.get(
        path.name, ()
    ):
        assert text in out
    if path.name == "getting-started.md":
        config, ids = names["config"], names["ids"]
        assert names["logits"].shape == (*ids.shape, 1024)
        assert names["tokens"].shape == (1, config.max_new_tokens)
        tokens = [t for t in names["tokens"][0].tolist() if t > 0]
        assert "Tokyo" in names["lm"].tokenizer.decode(tokens)
    if path.name == "extending.md":
        import jax.numpy as jnp

        from fdjax.pallas_kernels.gemm import matmul

        x, w = jnp.ones((2, 8)), jnp.full((8, 4), 2.0)
        assert (matmul(x, w, plan=names["plan"]) == 16).all()


# Links, files


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_are_there(path):
    """Paths in backquotes. `hopper/` alone is inside the folder named before it."""
    named = re.findall(r"`((?:\w+/)+[\w.-]*\.(?:py|json|md))`", prose(path))
    for name in named:
        if "NAME" in name or name.startswith(("path/", "hopper/")):
            continue
        assert (ROOT / name).exists(), name


def test_every_document_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", text_of(README)))
    assert linked == {f"docs/{path.name}" for path in DOCUMENTS if path != README}


# Generated parts


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_made_from_code_is_current():
    """`python docs/generate.py` updates it."""
    for path, text in generator().updated().items():
        assert text_of(path) == text, path.name


def test_what_is_made_from_records_is_current():
    """`python -m benchmarks.table --write` updates it."""
    for path, text in table.updated().items():
        assert text_of(path) == text, path.name


def test_the_picture_has_what_is_imported():
    module = generator()
    rooms = module.rooms()
    assert "pallas_kernels" in rooms["models"] and not rooms["system"]
    assert "lm" not in rooms["engine"] and "engine" in rooms["tools"]
    drawn = module.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert drawn == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_marks_must_be_there_once():
    assert table.put("a\n<!-- x -->\nold\n<!-- /x -->\nb", "x", "new") == (
        "a\n<!-- x -->\nnew\n<!-- /x -->\nb"
    )
    with pytest.raises(ValueError, match="must have <!-- x --> and <!-- /x --> once"):
        table.put("a", "x", "new")


# The worked example: a sampling option


def diffs() -> list[tuple[Path, str]]:
    """(file, lines of a diff) of the worked example; the text above a diff names its file."""
    found, file = [], None
    for name, diff in re.findall(
        r"In `([\w/.]+)`:|^```diff\n(.*?)^```$", text_of(EXTENDING), re.DOTALL | re.MULTILINE
    ):
        if name:
            file = Path(name)
        else:
            found.append((file, diff))
    return found


def applied(source: str, diff: str) -> str:
    """A source with the added lines of a diff, inserted after the unchanged lines before them."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line.startswith(" "))
    added = "".join(line[1:] for line in lines if line.startswith("+"))
    assert source.count(before) == 1, f"the example's context is there {source.count(before)} times"
    return source.replace(before, before + added)


NEW_OPTION = """
import jax, jax.numpy as jnp, numpy as np
import fdjax
from fdjax.bench.timing import Timing
from fdjax.cli.main import _parser
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import next_tokens

assert _parser().parse_args(["generate", "x", "--top-n-sigma", "1.5"]).top_n_sigma == 1.5
try:
    GenerationConfig(top_n_sigma=101)
except ValueError as error:
    assert "top_n_sigma must be a number in [0, 100]" in str(error), error
else:
    raise SystemExit("a value out of range was taken")

# Compare the drawn tokens with NumPy: the same logits in every row, another seed in each.
logits = np.random.default_rng(0).normal(size=24).astype(np.float32)
logits[3] = -np.inf  # forbidden, so it does not count for the deviation
finite = logits[np.isfinite(logits)]
allowed = set(np.flatnonzero(logits >= finite.max() - 1.5 * finite.std()).tolist())
configs = [GenerationConfig(do_sample=True, top_n_sigma=1.5, seed=i) for i in range(512)]
n = len(configs)
nothing = jnp.zeros((n, 8), jnp.int32), jnp.ones(n, jnp.int32), jnp.zeros(n, jnp.int32)
sampling = per_row(configs, n)
tokens, _ = jax.jit(next_tokens, static_argnums=5)(
    jnp.tile(logits, (n, 1)), sampling, *nothing, configs[0].processors
)
assert set(np.asarray(tokens).tolist()) == allowed, (tokens, allowed)

lm = fdjax.load("tiny", progress=False, compilation_cache=False)
options = {"max_new_tokens": 12, "seed": 1, "temperature": 30.0}
narrow, first, free = lm.generate(
    ["What is 7 + 5?"] * 3, top_n_sigma=[1e-6, 0.0, 0.0], top_k=[0, 1, 0], **options
).tokens
assert narrow == first != free
print("done")
"""


@pytest.mark.slow
def test_an_option_takes_two_files(tmp_path):
    """The example works in a copy of the package."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(fdjax.__file__).parent, tmp_path / "fdjax", ignore=ignored)
    for file, diff in diffs():
        path = tmp_path / file
        path.write_text(applied(path.read_text(), diff))
    assert {str(file) for file, _ in diffs()} == {
        "fdjax/sampling/options.py",
        "fdjax/sampling/sampler.py",
    }
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-W", "ignore", "-c", NEW_OPTION]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.endswith("done\n")


# Numbers in the pages


def medians(name: str, folder: str = "nvidia_h100_80gb_hbm3") -> dict[str, dict[str, float]]:
    """The medians of a record in µs, by case and implementation."""
    found: dict[str, dict[str, float]] = {}
    for row in records.read(ROOT / "benchmarks" / "results" / folder / f"{name}.json").rows:
        if row.timing:
            found.setdefault(row.case, {})[row.implementation] = row.timing["median_us"]
    return found


def over_ours(name: str, other: str) -> list[float]:
    cases = medians(name).values()
    return [us[other] / us["mosaic_gpu"] for us in cases if other in us]


def extremes(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def products(rows: range) -> list[float]:
    """Speed-ups over XLA of fused products in the H100's table, for these numbers of rows."""
    file = ROOT / "pallas_kernels" / "tables" / "NVIDIA_H100_80GB_HBM3.json"
    ratios = []
    for entry in json.loads(file.read_text())["entries"]:
        times = entry.get("microseconds") or {}
        shape = entry["shape"]
        # XLA dequantises quantised weights for each product, which says nothing of flat GEMM.
        fused = entry["op"] == "matmul" and shape["fused"] and not BITS.keys() & shape.keys()
        if fused and shape["m"] in rows and {"xla", "mosaic_gpu"} <= times.keys():
            runs = "mosaic_gpu" if entry["implementation"] == "mosaic_gpu" else "xla"
            ratios.append(times["xla"] / times[runs])
    return ratios


def test_the_papers_are_held_against_records():
    """The column "Here" of docs/papers.md, line by line."""
    decode = medians("decode_attention")
    outside = decode["recompute 100.00% B64 H32 Hkv8 S1024 D128"]
    step = medians("breakdown_llama2_7b")["decode step B1 P1024"]
    launch = medians("end_to_end_llama2_7b_one_launch")["decode step B1 P1024"]
    few, many = products(range(1, 17)), products(range(96, 129))
    want = {
        "Unified maximum, decode": (
            extremes(table.unified_maximum()["decode"]),
            f"1 × 1024: {step['without unified maximum'] / step['fdjax']:.2f}",
        ),
        "Unified maximum, prefill": (extremes(over_ours("prefill_attention", "online")),),
        "Recomputation": (f"a factor of {outside['mosaic_gpu'] / outside['synchronised']:.2f}",),
        "Two-level tiling": (extremes(over_ours("prefill_attention", "block_kv 64")),),
        "Tiling mask": (extremes(over_ours("prefill_attention", "every block masked")),),
        "Fused SDPA": (extremes(over_ours("decode_attention", "cudnn")),),
        "Flat GEMM": (
            f"{extremes(few)}, geometric mean {statistics.geometric_mean(few):.2f}",
            f"96 and 128 rows {statistics.geometric_mean(many):.2f}",
        ),
        "Few operations": (f"1 × 1024: {launch['without launch'] / launch['fdjax']:.2f}",),
    }
    lines = text_of(ROOT / "docs" / "papers.md").splitlines()
    for technique, texts in want.items():
        (line,) = [line for line in lines if line.startswith(f"| {technique}")]
        assert [text for text in texts if text not in line] == [], technique


def test_what_sampling_costs():
    found = medians("sampled_steps_llama3_8b", "nvidia_h200")
    text = text_of(ROOT / "docs" / "performance.md")
    for name in ("greedy", "temperature", "top-p", "top-k and top-p"):
        cells = [name]
        for point in ("B1 P128", "B64 P128"):
            of_case = found[f"decode step {point}, {name}"]
            by_xla = f"{of_case['limits by XLA'] / 1e3:.2f} ms" if name.startswith("top") else ""
            cells += [f"{of_case['fdjax'] / 1e3:.2f} ms", by_xla]
        assert f"| {' | '.join(cells)} |".replace("  ", " ") in text


def test_the_papers_name_the_figures_there_are():
    plots = pytest.importorskip("benchmarks.plots")
    text = text_of(ROOT / "docs" / "papers.md")
    for name in plots.FIGURES:
        drawn = f"[{name}](../benchmarks/results/nvidia_h100_80gb_hbm3/figures/{name}.png)"
        assert drawn in text or re.search(rf"not run: .*`{name}`", text) or name == "headline", name
