"""Effects of changing one file in a copy of the package: a new family, an edited kernel."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fdjax

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
KERNEL = Path("fdjax", "pallas_kernels", "attention", "hopper", "decode_kernel.py")


@pytest.fixture
def package(tmp_path):
    """A folder with a copy of the package, where links are replaced by files."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(fdjax.__file__).parent, tmp_path / "fdjax", ignore=ignored)
    return tmp_path


def run_in(package, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles in half the time
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, env=environment, cwd=package, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


CACHED = """
import pathlib, jax, jax.numpy as jnp
import fdjax
assert pathlib.Path(fdjax.__file__).parents[1] == pathlib.Path.cwd()
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", "cache")
from fdjax.engine.disk_cache import cached_on_disk
traces = []
def double(x):
    traces.append(x)
    return [2 * x]
jax.jit(cached_on_disk(double, "double", jax.devices()[0]))(jnp.ones(3))
print("traced" if traces else "found")
"""


@pytest.mark.slow
def test_an_edited_kernel_is_not_found_in_the_disk_cache(package):
    assert run_in(package, CACHED) == "traced\n"
    kernel = package / KERNEL
    source = kernel.read_text()
    kernel.write_text(source.replace("_SAFE_LOG2 = 64", "_SAFE_LOG2 = 63"))
    assert kernel.read_text() != source
    assert run_in(package, CACHED) == "traced\n"
    kernel.write_text(source)
    assert run_in(package, CACHED) == "found\n"


FAMILY = """
\"\"\"A family of this test: a Llama by another name, whose q, k, v and output have biases.\"\"\"

from fdjax.models.config import ConfigReader, DecoderConfig, read_dimensions, read_layers
from fdjax.models.rope import read_rope
from fdjax.pallas_kernels.attention.spec import AttentionSpec

MODEL_TYPES = ("newcomer",)
ARCHITECTURE = "NewcomerForCausalLM"
DEFAULTS = {}
IGNORED_TENSORS = ()


def parse_config(reader: ConfigReader) -> DecoderConfig:
    dimensions = read_dimensions(reader)
    head_dim = dimensions["head_dim"]
    spec = AttentionSpec(scale=head_dim**-0.5, rope=read_rope(reader, head_dim))
    return DecoderConfig.alike(
        family="newcomer",
        activation="silu",
        attention=(spec,) * read_layers(reader),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        **dimensions,
    )
"""

GREEDY = """
import json, fdjax
lm = fdjax.load("newcomer", progress=False, compilation_cache=False)
prompts = json.loads(open("prompts.json").read())
out = lm.generate(prompts, max_new_tokens=16, do_sample=False, eos_token_id=None)
print(json.dumps([lm.config.family, out.tokens]))
"""


@pytest.mark.slow
def test_a_dense_family_is_one_file(package):
    """The fixture is added too. Here it has transformers' tokens of a Llama with biases."""
    case = FIXTURES / "llama_bias"
    data = json.loads((case / "config.json").read_text()) | {"model_type": "newcomer"}
    shutil.copytree(case, package / "newcomer")
    (package / "newcomer" / "config.json").write_text(json.dumps(data))
    with np.load(case / "expected.npz") as expected:
        prompts = [expected[f"prompt_{i}"].tolist() for i in range(2)]
        want = [expected[f"tokens_{i}"].tolist()[:16] for i in range(2)]
    (package / "prompts.json").write_text(json.dumps(prompts))
    family = package / "fdjax" / "models" / "families" / "newcomer.py"
    family.write_text(FAMILY.lstrip())
    assert json.loads(run_in(package, GREEDY)) == ["newcomer", want]
