"""Stacked weights: who holds them, and which programs take them."""

import copy
import dataclasses
import functools
import gc
import logging
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fdjax
from any_size import ANY_SIZE
from fdjax.engine import engine
from fdjax.models import decoder, describe, layers_shape, random_params
from fdjax.pallas_kernels.layers import decode_layers
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.pallas_kernels.quantised import QTensor, WeightFormat
from fdjax.weights import stacked as stacked_module
from fdjax.weights.stacked import (
    LayerStacks,
    layer_slices,
    layer_views,
    random_stacked_params,
    stack_layers,
)

CASE = Path(__file__).parents[1] / "fixtures" / "hf" / "llama3_gqa_tied"
LARGEST = "mlp.gate_up.weight"
GREEDY = {"do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.usefixtures("quick_compiles")


def load(plan, **options):
    return fdjax.load(
        str(CASE), dtype="float32", plan=plan, compilation_cache=False, progress=False, **options
    )


@pytest.fixture(scope="module")
def plain():
    """A model that runs every layer by itself."""
    return load(Plan(batch_invariant=True))


@pytest.fixture(scope="module")
def plan(plain):
    """A plan that runs up to two rows with at most 1024 slots in one launch."""
    shape = layers_shape(plain.config, 2, 512, 4)
    choice = Choice("mosaic_gpu", source="table")
    table = (Entry("decode_layers", tuple(sorted(shape.items())), choice),)
    return Plan(batch_invariant=True, table=table, implementations=ANY_SIZE)


@pytest.fixture
def model(plain, plan):
    """A model with its own programs."""
    return dataclasses.replace(plain.model, plan=plan)


def address(array):
    return array.unsafe_buffer_pointer()


def weights(params, kind):
    """The weights of one kind, layer by layer."""
    return [
        functools.reduce(lambda tree, key: tree[key], kind.split("."), block)
        for block in params["blocks"].values()
    ]


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


def is_free(array):
    """Whether only this array holds its memory."""
    jax.block_until_ready(jax.jit(lambda a: a + 1, donate_argnums=0)(array))
    return array.is_deleted()


# --- views


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "bool"])
def test_views_lie_where_the_array_lies(dtype):
    stacked = (jnp.arange(3 * 4 * 128).reshape(3, 4, 128) % 7).astype(dtype)
    layers = layer_views(stacked)
    assert [address(a) - address(stacked) for a in layers] == [
        i * stacked.nbytes // 3 for i in range(3)
    ]
    for layer, want in zip(layers, stacked, strict=True):
        assert (layer.shape, layer.dtype) == (want.shape, want.dtype)
        assert layer.devices() == stacked.devices()
        np.testing.assert_array_equal(layer, want)
    np.testing.assert_array_equal(jax.jit(jnp.array_equal)(layers[2], stacked[2]), True)


def test_memory_is_held_as_long_as_a_view_is():
    stacked = jnp.ones((3, 4, 128))
    layers = layer_views(stacked)
    del layers[0]
    layers[0].delete()
    assert not is_free(stacked)
    reference = weakref.ref(stacked)
    stacked.delete()
    del stacked
    assert not alive([reference])
    other = [jnp.zeros((3, 4, 128)) for _ in range(50)]
    np.testing.assert_array_equal(layers[1], 1)
    del other

    stacked = jnp.ones((3, 4, 128))
    layers = layer_views(stacked)
    del layers
    gc.collect()
    assert is_free(stacked)


def test_what_is_not_taken_is_let_go(monkeypatch):
    stacked = jnp.ones((3, 4, 128))
    capsule = stacked_module._Layer(stacked, 1).__dlpack__()
    assert not is_free(stacked)
    del capsule

    def refuse(layer, **_):
        layer.__dlpack__()
        raise jax.errors.JaxRuntimeError("no view")

    monkeypatch.setattr(jax.dlpack, "from_dlpack", refuse)
    with pytest.raises(ValueError, match="layer_views: no view"):
        layer_views(stacked)
    assert is_free(stacked)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: jnp.zeros(()), r"on one device, got float32\[\] on 1"),
        (lambda: jnp.zeros((2, 33)), r"a multiple of 128 bytes, got float32\[2, 33\]"),
        (lambda: jnp.zeros((2, 256), "int4"), "S4 has no DLPack equivalent"),
        (lambda: [a := jnp.zeros((2, 64)), a.delete()][0], "must not be deleted"),
    ],
    ids=["no layers", "unaligned", "dtype", "deleted"],
)
def test_of_some_arrays_there_are_no_views(made, message):
    with pytest.raises(ValueError, match=f"^layer_views: .*{message}"):
        layer_views(made())


def in_a_process(code, **environment):
    imports = "import jax\nimport jax.numpy as jnp\nfrom fdjax.weights.stacked import layer_views"
    code = f"{imports}\n{code}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


@pytest.mark.slow
def test_views_may_outlive_everything():
    in_a_process("""
import threading
held = layer_views(jnp.ones((8, 4, 128)))
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
held += layer_views(jnp.ones((8, 4, 128)))
held.append(held)
""")


@pytest.mark.slow
def test_views_are_on_the_device_of_the_array():
    in_a_process(
        """
one, other = jax.devices()
several = jax.sharding.NamedSharding(jax.make_mesh((2,), "x"), jax.P("x"))
for where, message in ((one, ""), (other, "not on "), (several, "on one device, got ")):
    try:
        layers = layer_views(jax.device_put(jnp.ones((2, 4, 128)), where))
        assert not message and all(layer.devices() == {one} for layer in layers)
    except ValueError as error:
        assert message and message in str(error), error
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )


@pytest.mark.gpu
def test_views_take_no_memory_of_a_gpu():
    def in_use():
        gc.collect()
        return jax.local_devices()[0].memory_stats()["bytes_in_use"]

    # Garbage of other tests may be freed at any time, so the tolerance is just below the size of a
    # view.
    view = 2 * 1024 * 1024
    product = jax.jit(jnp.dot)
    stacked = jax.random.normal(jax.random.key(0), (8, 1024, 1024), "bfloat16")
    want = np.asarray(product(stacked[1], stacked[2]))
    before = in_use()
    layers = layer_views(stacked)
    assert in_use() < before + view
    del stacked
    assert in_use() > before - view
    results = [product(layers[1], layers[2]) for _ in range(50)]
    del layers  # before the products are there
    for result in results:
        np.testing.assert_array_equal(result, want)
    del result, results
    assert in_use() < before - 7 * view


# --- stacking


def test_layers_are_stacked_where_the_plan_has_them(plain, model):
    params = random_params(model)
    want = jax.tree.map(np.asarray, params)
    assert stack_layers(plain.model, params) is None
    stacked = stack_layers(model, params)
    assert stacked.keys() == {
        *("attention_norm.scale", "attention.qkv.weight", "attention.out.weight"),
        *("mlp_norm.scale", "mlp.gate_up.weight", "mlp.down.weight"),
    }
    for kind, array in stacked.items():
        if kind.endswith("scale"):
            continue
        assert [address(a) for a in weights(params, kind)] == [
            address(array) + i * array.nbytes // len(array) for i in range(len(array))
        ]
    jax.tree.map(np.testing.assert_array_equal, params, want)
    jax.tree.map(np.testing.assert_array_equal, want["blocks"], layer_slices(stacked))


@pytest.fixture
def quantised(model):
    """The model with quantised weights in its layers."""
    config = model.config
    formats = {
        ("blocks", i, *linear.path, "weight"): WeightFormat("int4", 32)
        for i, block in enumerate(config.blocks)
        for linear in block.linears.values()
    }
    plan = dataclasses.replace(model.plan, table=(), named=(("decode_layers", "mosaic_gpu"),))
    return describe(config.with_formats(formats), dtype="float32", plan=plan)


def arrays(params, kind):
    """Words and scales of the weights of a kind, layer by layer."""
    return [(q.words, q.scales) for q in weights(params, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("made_as", ["stacked later", "stacked while they are made"])
def test_quantised_weights_are_stacked(quantised, made_as):
    if made_as == "stacked later":
        params = random_params(quantised)
    else:
        params, _stacks = random_stacked_params(quantised)
        views = arrays(params, LARGEST)
    stacked = stack_layers(quantised, params)
    whole = stacked[LARGEST]
    assert isinstance(whole, QTensor) and whole.stack == (quantised.config.layers,)
    places = [tuple(map(address, layer)) for layer in arrays(params, LARGEST)]
    assert places == [
        tuple(address(a) + i * a.nbytes // len(a) for a in (whole.words, whole.scales))
        for i in range(quantised.config.layers)
    ]
    if made_as != "stacked later":
        assert places == [tuple(map(address, layer)) for layer in views]
    want = random_params(quantised)
    jax.tree.map(np.testing.assert_array_equal, params, want)
    jax.tree.map(np.testing.assert_array_equal, want["blocks"], layer_slices(stacked))


@pytest.fixture
def made(monkeypatch):
    """References to the weights that `LayerStacks` has taken; few are alive at any time."""
    references, take = [], LayerStacks.take

    def watched(self, path, weight):
        assert alive(references) <= 1  # JAX may still copy the one before
        taken = take(self, path, weight)
        if taken is None:
            references.append(weakref.ref(weight))
        return taken

    monkeypatch.setattr(LayerStacks, "take", watched)
    return references


@pytest.mark.slow
def test_random_weights_are_stacked_while_they_are_made(plain, model, made):
    params, stacks = random_stacked_params(model)
    assert len(made) == 4 * model.config.layers
    jax.tree.map(np.testing.assert_array_equal, params, random_params(model))
    views = weights(params, LARGEST)
    stacked = stack_layers(model, params)
    assert [address(a) for a in views] == [
        address(stacked[LARGEST]) + i * views[0].nbytes for i in range(len(views))
    ]
    references = [weakref.ref(array) for array in stacked.values() if array.ndim > 2]
    del stacked, stacks
    assert not alive(references)
    # Nothing is stacked for a plan without the kernel.
    made.clear()
    random_stacked_params(plain.model)
    assert not made


@pytest.mark.slow
def test_loading_leaves_no_second_copy(plan, made, monkeypatch):
    monkeypatch.setattr(stacked_module, "_stack", None)  # for arrays that are not vectors
    vectors = stacked_module._stack_of
    monkeypatch.setattr(
        stacked_module, "_stack_of", lambda a: vectors(a) if a[0].ndim > 1 else jnp.stack(a)
    )
    lm = load(plan)
    assert made and not alive(made)
    lm.params = lm.params
    copied = copy.copy(lm)
    other = fdjax.LM(lm.model, lm.params)
    for one in (copied, other):
        assert address(weights(one.params, LARGEST)[0]) == address(weights(lm.params, LARGEST)[0])


@pytest.mark.parametrize("kind", [0, 2])
def test_what_has_no_room_for_a_stack_is_loaded_as_it_is(plain, plan, kind, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fdjax")
    stacked_module._log_once.cache_clear()
    zeros, calls = jnp.zeros, []

    def full(shape, *args, device=None, **options):
        if device is not None and len(shape) > 2:
            calls.append(shape)
            if len(calls) > kind:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return zeros(shape, *args, device=device, **options)

    monkeypatch.setattr(stacked_module.jnp, "zeros", full)
    monkeypatch.setattr(stacked_module, "free_memory_bytes", lambda device: 0)
    lm = load(plan)
    assert len(calls) == kind + 1
    assert caplog.messages[0].startswith("layers are not stacked: no room for ")
    assert lm.engine.stacked_params is None
    assert not lm.engine.stacks(1, 512)
    jax.tree.map(np.testing.assert_array_equal, lm.params, plain.params)


@pytest.fixture
def launches(monkeypatch):
    """XLA in place of the kernel."""

    def by_xla(*args, plan, **options):
        return decode_layers(*args, **options, implementation="xla")

    monkeypatch.setattr(decoder, "decode_layers", by_xla)


@pytest.mark.slow
@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("kind", ["attention_norm.scale", LARGEST])
def test_no_weight_is_written_over_unnoticed(plain, model, kind):
    """JAX reuses the memory of a donated weight. On a GPU it does so for views as well."""
    lm = fdjax.LM(model, random_params(model))
    want = lm.generate([5, 6, 7], max_new_tokens=5, **GREEDY).tokens
    stacked = stack_layers(model, params := lm.params)[kind]
    lie = [address(a) - address(stacked) for a in weights(params, kind)]
    assert all(0 <= place < stacked.nbytes for place in lie) == (kind == LARGEST)
    doubled = jax.jit(lambda weights: [2 * w for w in weights], donate_argnums=0)
    jax.block_until_ready(doubled(weights(lm.params, kind)))
    if kind == LARGEST:
        with pytest.raises(RuntimeError, match="deleted"):
            lm.generate([5, 6, 7], max_new_tokens=5, **GREEDY)
    else:
        assert lm.generate([5, 6, 7], max_new_tokens=5, **GREEDY).tokens == want


def test_other_weights_are_stacked_anew(model):
    lm = fdjax.LM(model, random_params(model))
    first = weights(lm.params, LARGEST)
    before = weakref.ref(stacked_module._stack_of(first))
    given = random_params(model, 1)
    want = jax.tree.map(np.asarray, given)
    own = jax.tree.leaves(given)
    lm.params = given
    assert all(a is b for a, b in zip(jax.tree.leaves(given), own, strict=True))
    assert stacked_module._stack_of(weights(given, LARGEST)) is None
    assert stacked_module._stack_of(weights(lm.params, LARGEST)) is not None
    jax.tree.map(np.testing.assert_array_equal, lm.params, want)
    assert not alive([before])
    np.testing.assert_array_equal(first[1], weights(random_params(model), LARGEST)[1])

    # The same layer twice is not the stacked array.
    lm.params = lm.params | {"blocks": dict.fromkeys((0, 1), lm.params["blocks"][0])}
    one, other = weights(lm.params, LARGEST)
    assert address(one) != address(other)
    np.testing.assert_array_equal(one, other)


def test_what_does_not_fit_is_not_stacked(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fdjax")
    stacked_module._log_once.cache_clear()
    params = random_params(model)
    leaves = jax.tree.leaves(params)
    sizes = [array.nbytes for array in jax.tree.leaves(params["blocks"])]
    need = sum(sizes)
    total = need + sum(leaf.nbytes for leaf in leaves)
    for free, memory_bytes in ((need - 1, None), (need, total - 1)):
        monkeypatch.setattr(stacked_module, "free_memory_bytes", lambda device, free=free: free)
        assert stack_layers(model, params, memory_bytes=memory_bytes) is None
    assert all(a is b for a, b in zip(jax.tree.leaves(params), leaves, strict=True))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("layers are not stacked: no room for ")
    assert stack_layers(model, params, memory_bytes=total) is not None


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: other"])
def test_weights_are_whole_where_stacking_ends_early(model, monkeypatch, error):
    params, stack = random_params(model), stacked_module._stack
    want = jax.tree.map(np.asarray, params)

    def fail(layers, kind):
        if kind == LARGEST:
            raise jax.errors.JaxRuntimeError(error)
        return stack(layers, kind)

    monkeypatch.setattr(stacked_module, "_stack", fail)
    if error.startswith("INTERNAL"):
        with pytest.raises(jax.errors.JaxRuntimeError, match=error):
            stack_layers(model, params)
    else:
        assert stack_layers(model, params) is None
    jax.tree.map(np.testing.assert_array_equal, params, want)


# --- programs


def test_packed_and_unpacked_parameters_are_the_same(model):
    params = random_params(model)
    want = jax.tree.map(np.asarray, params)
    made = engine.Engine(model, params)
    unpacked = made.stacked_packing.unpack(made.stacked_params)
    slices = layer_slices(unpacked["blocks"])
    jax.tree.map(np.testing.assert_array_equal, unpacked | {"blocks": slices}, want)
    jax.tree.map(np.testing.assert_array_equal, made.packing.unpack(made.params), want)
    assert len(made.stacked_params) <= 9
