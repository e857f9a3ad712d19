"""Programs kept on disk as JAX lowered them."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from fdjax import lowered, step
from fdjax.lowered import kept
from fdjax.models.decoder import Decoder

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def folder(tmp_path):
    """JAX's compilation cache, on."""
    settings = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(tmp_path)}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield tmp_path / "fdjax"
    for name, value in before.items():
        jax.config.update(name, value)


class Doubled:
    """A function that counts its traces."""

    def __init__(self):
        self.traces = 0

    def __call__(self, pair, x):
        self.traces += 1
        return [pair[0] + pair[1] @ x], 2 * x


def run(function, description="doubled", n=3):
    x = jnp.arange(n, dtype=jnp.float32)
    pair = (x, jnp.eye(n))
    return jax.jit(kept(function, description, jax.devices()[0]))(pair, x)


def test_a_program_on_disk_is_not_traced(folder):
    first, again = Doubled(), Doubled()
    expected = run(first)
    result = run(again)
    assert (first.traces, again.traces) == (1, 0)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert len(list(folder.iterdir())) == 1


def another_source(monkeypatch):
    """Has the package another source on disk."""
    digest = types.FunctionType((lambda: "another").__code__, vars(lowered))
    monkeypatch.setattr(lowered, "_source_digest", digest)


def test_of_a_package_that_has_changed_since_it_was_loaded_nothing_is_kept(folder, monkeypatch):
    run(Doubled())
    another_source(monkeypatch)
    function = Doubled()
    run(function)
    assert function.traces == 1 and len(list(folder.iterdir())) == 1


def test_whatever_changes_the_program_changes_its_name(folder, monkeypatch):
    run(Doubled())
    run(Doubled(), description="another")
    run(Doubled(), n=4)
    with jax.default_matmul_precision("highest"):
        run(Doubled())
    another_source(monkeypatch)
    monkeypatch.setattr(lowered, "_SOURCE", "another")
    run(Doubled())
    monkeypatch.setattr(jax, "__version__", "another")
    run(Doubled())
    assert len(list(folder.iterdir())) == 6


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda _: b"", lambda _: b"x" * 99])
def test_a_damaged_program_is_traced_anew(folder, damage):
    expected = run(Doubled())
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    function = Doubled()
    jax.tree.map(np.testing.assert_array_equal, run(function), expected)
    assert function.traces == 1
    function = Doubled()
    run(function)
    assert function.traces == 0


def test_without_a_compilation_cache_nothing_is_kept(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    function = Doubled()
    run(function)
    run(function)
    assert function.traces == 2
    assert not folder.exists()


def test_in_a_folder_that_is_not_local_nothing_is_kept(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    assert lowered._path(jax.devices()[0], "") is None


def test_a_folder_that_cannot_be_written_is_no_obstacle(folder):
    folder.write_text("a file")
    function = Doubled()
    run(function)
    assert function.traces == 1


def test_a_callback_is_no_obstacle(folder):
    def function(x):
        return jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32), x)

    assert jax.jit(kept(function, "callback", jax.devices()[0]))(jnp.float32(1)) == 2
    assert not folder.exists()


def generated():
    with mock.patch("fdjax.lm._loaded", {}):  # no other model's programs
        lm = fdjax.load("tiny", compilation_cache=None, progress=False)
    return lm.generate("Hi", max_new_tokens=4, return_logprobs=True)


def test_generate_needs_no_trace_of_what_it_has_traced_before(folder, monkeypatch):
    before = generated()
    assert len(list(folder.iterdir())) == 2

    def reduce(*_):
        raise AssertionError("traced")

    monkeypatch.setattr(jax.lax, "reduce", reduce)  # of any program that chooses a token
    after = generated()
    assert after.tokens == before.tokens and after.logprobs == before.logprobs
    jax.config.update("jax_enable_compilation_cache", False)
    with pytest.raises(AssertionError, match="traced"):
        generated()


@pytest.mark.parametrize("owner, name", [(step, "next_tokens"), (Decoder, "logits")])
def test_what_others_put_in_place_of_a_function_is_traced(folder, monkeypatch, owner, name):
    generated()
    function, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(name)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    generated()
    assert len(calls) == 2 and len(list(folder.iterdir())) == 2


def test_nothing_is_of_others_as_it_is():
    assert not list(lowered._foreign())


def test_processors_of_ones_own_are_not_kept(folder):
    lm = fdjax.load("tiny", compilation_cache=None, progress=False)
    lm.generate("Hi", max_new_tokens=2, logits_processors=[lambda *args: args[-1]])
    assert not folder.exists()
