"""Programs kept on disk as JAX lowered them."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fdjax
from fdjax.engine import disk_cache as lowered
from fdjax.engine import step
from fdjax.engine.disk_cache import cached_on_disk
from fdjax.models.decoder import Decoder
from fdjax.models.model import Model

pytestmark = pytest.mark.usefixtures("quick_compiles")


@contextlib.contextmanager
def cache_in(path):
    """JAX's compilation cache, on."""
    settings = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(path)}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield path / "fdjax"
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def folder(tmp_path):
    with cache_in(tmp_path) as folder:
        yield folder


class Doubled:
    """A function that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, pair, x):
        self.traces += 1
        return [pair[0] + pair[1] @ x], 2 * x


def run(function, description="doubled", n=3):
    x = jnp.arange(n, dtype=jnp.float32)
    pair = (x, jnp.eye(n))
    return jax.jit(cached_on_disk(function, description, jax.devices()[0]))(pair, x)


def test_a_program_on_disk_is_not_traced(folder):
    first, again = Doubled(), Doubled()
    expected = run(first)
    result = run(again)
    assert (first.traces, again.traces) == (1, 0)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert len(list(folder.iterdir())) == 1


def path(description="doubled"):
    return lowered._path(jax.devices()[0], description, "no arrays")


def another_source(monkeypatch):
    """Give the package another source on disk."""
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[:-1],
        lambda d: d[:40],
        lambda _: b"",
        lambda _: b"x" * 99,
        lambda d: bytes([d[0] ^ 1]) + d[1:],
        lambda d: d[:-1] + bytes([d[-1] ^ 128]),
    ],
    ids=["cut", "cut to its head", "emptied", "overwritten", "head flipped", "flipped"],
)
def test_a_damaged_program_is_traced_anew(folder, damage):
    expected = run(Doubled())
    (path,) = folder.iterdir()
    assert lowered.damaged_programs(folder.parent) == []
    path.write_bytes(damage(path.read_bytes()))
    assert lowered.damaged_programs(folder.parent) == [path]
    function = Doubled()
    jax.tree.map(np.testing.assert_array_equal, run(function), expected)
    assert function.traces == 1
    function = Doubled()
    run(function)
    assert function.traces == 0


def test_a_program_under_the_name_of_another_is_traced_anew(folder):
    expected = run(Doubled())
    (one,) = folder.iterdir()
    run(Doubled(), n=4)
    (other,) = set(folder.iterdir()) - {one}
    shutil.copyfile(other, one)
    function = Doubled()
    jax.tree.map(np.testing.assert_array_equal, run(function), expected)
    assert function.traces == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_compilation_cache_dir", None),
        ("jax_compilation_cache_dir", ""),
        ("jax_compilation_cache_dir", "gs://bucket/programs"),
        ("jax_compilation_cache_max_size", 10**6),
    ],
)
def test_where_there_is_no_such_cache_nothing_is_kept(folder, monkeypatch, name, value):
    monkeypatch.chdir(folder.parent)
    assert path()
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    assert path() is None
    jax.config.update(name, before)


def test_in_a_mesh_nothing_is_kept(folder):
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        assert path() is None
    assert path()


def test_a_source_that_cannot_be_read_has_no_digest(tmp_path, monkeypatch):
    digest = types.FunctionType(
        lowered._source_digest.__code__,
        vars(lowered) | {"__file__": str(tmp_path / "engine" / "disk_cache.py")},
    )
    assert digest() is None  # as in a zip
    (tmp_path / "lowered.py").write_text("")
    assert digest() is not None
    before = digest()
    (tmp_path / ".#lowered.py").symlink_to("of an editor")
    assert digest() == before
    (tmp_path / "gone.py").symlink_to("gone")
    assert digest() is None
    monkeypatch.setattr(lowered, "_SOURCE", None)
    assert path() is None


def test_what_cannot_be_written_to_the_end_leaves_nothing(folder, monkeypatch):
    def replace(self, target):
        assert self.stat().st_size > 100
        raise OSError("no space left")

    monkeypatch.setattr(pathlib.Path, "replace", replace)
    run(Doubled())
    assert list(folder.iterdir()) == []


def test_what_nothing_has_read_for_long_goes(folder):
    """But files that were read since, and files of others, remain."""
    names = {}
    for description in ("read", "unread"):
        run(Doubled(), description)
        (names[description],) = {p.name for p in folder.iterdir()} - set(names.values())
    (folder / "notes").touch()
    (folder / f"{names['read']}.123").touch()  # left by a process that was killed
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    run(Doubled(), "read")
    assert len(list(folder.iterdir())) == 4
    run(Doubled(), "another")
    left = {p.name for p in folder.iterdir()}
    assert len(left) == 3 and {"notes", names["read"]} < left


def test_a_folder_that_cannot_be_written_is_no_obstacle(folder):
    folder.write_text("a file")
    function = Doubled()
    run(function)
    assert function.traces == 1


def test_a_callback_is_no_obstacle(folder):
    def function(x):
        return jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((), jnp.float32), x)

    assert jax.jit(cached_on_disk(function, "callback", jax.devices()[0]))(jnp.float32(1)) == 2
    assert not folder.exists()


def generated(checkpoint):
    with mock.patch("fdjax.lm._loaded", {}):  # without programs of another model
        lm = fdjax.load(checkpoint, compilation_cache=None, progress=False)
    return lm.generate("Hi", max_new_tokens=4, return_logprobs=True)


def stored(folder):
    """Names of the programs in a folder."""
    return {path.name for path in folder.glob("*") if path.is_file()}


@pytest.fixture(scope="module")
def first_answer(two_layers, tmp_path_factory):
    """(a folder with the programs of an answer, the answer)"""
    with cache_in(tmp_path_factory.mktemp("programs")) as folder:
        return folder, generated(two_layers)


@pytest.fixture
def before(folder, first_answer):
    """An answer whose programs are on disk."""
    programs, answer = first_answer
    shutil.copytree(programs, folder)
    return answer


@pytest.mark.slow
def test_generate_needs_no_trace_of_what_it_has_traced_before(
    two_layers, before, folder, monkeypatch
):
    assert len(stored(folder)) == 3

    def reduce(*_):
        raise AssertionError("traced")

    monkeypatch.setattr(jax.lax, "reduce", reduce)  # of any program that chooses a token
    after = generated(two_layers)
    assert after.tokens == before.tokens and after.logprobs == before.logprobs
    jax.config.update("jax_enable_compilation_cache", False)
    with pytest.raises(AssertionError, match="traced"):
        generated(two_layers)


@pytest.mark.slow
@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(
    "owner, name", [pytest.param(step, "next_tokens", marks=pytest.mark.soak), (Decoder, "logits")]
)
def test_what_others_put_in_place_of_a_function_is_traced(
    two_layers, folder, monkeypatch, owner, name
):
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def counted(*args, **options):
        calls.append(name)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    generated(two_layers)
    assert len(calls) == 2 and len(stored(folder)) == 3


def mine(*args):
    """A function of the caller."""


@pytest.mark.parametrize(
    "thing",
    [
        mine,
        functools.wraps(step.prefill)(mine),
        functools.partial(mine),
        functools.cache(mine),
        property(mine),
        staticmethod(mine),
        classmethod(mine),
        jax.jit(mine),
        [mine],
        {"mine": mine},
        mock.Mock(),
        Doubled(),
        Doubled().__call__,
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_is_of_others_is_found(folder, monkeypatch, thing):
    monkeypatch.setattr(Decoder, "logits", thing)
    assert path() is None
    monkeypatch.undo()
    monkeypatch.setattr(step, "another", thing, raising=False)
    assert path() is None


def test_nothing_is_of_others_as_it_is(two_layers, folder):
    lm = fdjax.load(two_layers, compilation_cache=None, progress=False)
    assert lowered._foreign([*lowered._modules(), lm.model]) is None
    assert path(lm.model)


@pytest.mark.slow
def test_a_model_of_ones_own_classes_is_traced(two_layers, folder):
    class Negated(Decoder):
        def logits(self, *args):
            return -super().logits(*args)

    class Described(Model):
        pass

    lm = fdjax.load(two_layers, compilation_cache=None, progress=False)
    model = lm.model
    graph, state = nnx.split(nnx.eval_shape(lambda: Negated(model.config, jnp.dtype(model.dtype))))
    negated = Model(model.config, model.dtype, model.plan, graph, state)
    described = Described(*(getattr(model, field.name) for field in dataclasses.fields(model)))
    assert repr(negated) == repr(model)
    assert path(("decode", negated)) is path(("decode", described)) is None
    assert path(("decode", model))
    assert (
        fdjax.LM(negated, lm.params).generate([1, 2, 3], max_new_tokens=1).tokens
        != lm.generate([1, 2, 3], max_new_tokens=1).tokens
    )


@pytest.mark.slow
def test_processors_of_ones_own_are_not_kept(two_layers, folder):
    lm = fdjax.load(two_layers, compilation_cache=None, progress=False)
    lm.generate("Hi", max_new_tokens=2)
    before = stored(folder)
    lm.generate("Hi", max_new_tokens=2, logits_processors=[lambda *args: args[-1]])
    assert stored(folder) == before
