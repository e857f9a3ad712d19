"""All layers in one launch with quantised weights: `layers_mosaic` beside itself in bfloat16."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fdjax.pallas_kernels.attention.cache import dequantised, quantise
from fdjax.pallas_kernels.layers import LayerWeights, formats_of
from fdjax.pallas_kernels.layers.hopper import decode_layers
from fdjax.pallas_kernels.layers.hopper.decode_layers import layers_mosaic
from fdjax.pallas_kernels.plan import Plan, can_chain
from fdjax.pallas_kernels.quantised import BITS, BRICKS, WeightFormat, dequantise, in_layout, pack

from .test_decode_layers import exact_results

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

LAYERS, SLOTS = 2, 512


def _shapes(width, hidden, heads, kv_heads):
    n = (heads + 2 * kv_heads) * 128
    return {
        "qkv": (width, n),
        "out": (heads * 128, width),
        "gate_up": (width, 2, hidden),
        "down": (hidden, width),
    }


def _weight(key, kind, group, shape, zeros):
    """A stack of weights whose values bfloat16 holds: scales are powers of two."""
    plain = WeightFormat(kind, group or shape[0], zeros, scales="bfloat16").empty(shape)

    def one(key):
        codes, exponents, middles = jax.random.split(key, 3)
        if kind == "fp8":
            values = jax.random.normal(codes, shape).astype(jnp.float8_e4m3fn)
            codes = lax.bitcast_convert_type(values, jnp.uint8)
            size = round(np.log2(shape[0] ** 0.5))
        else:
            codes = jax.random.randint(codes, shape, 0, 2 ** BITS[kind], jnp.int32)
            size = round(np.log2(shape[0] ** 0.5 * 2 ** BITS[kind] / 4))
        exponents = jax.random.randint(exponents, plain.scales.shape, -2, 1) - size
        scales = jnp.exp2(exponents.astype(jnp.float32)).astype(jnp.bfloat16)
        made = dataclasses.replace(plain, words=pack(codes, kind), scales=scales)
        if zeros:
            at = jax.random.randint(middles, scales.shape, 0, 2 ** BITS[kind], jnp.int32)
            made = dataclasses.replace(made, zeros=at.astype(jnp.bfloat16))
        return made

    return jax.vmap(one)(jax.random.split(key, LAYERS))


def _operands(rows, kind, group, zeros=False, *, width, hidden, heads, kv_heads):
    keys = iter(jax.random.split(jax.random.key(0), 9))
    shapes = _shapes(width, hidden, heads, kv_heads)
    packed = {
        name: _weight(next(keys), kind, group, shape, zeros) for name, shape in shapes.items()
    }
    dense = {name: jax.vmap(lambda q: dequantise(q, "bfloat16"))(w) for name, w in packed.items()}
    dense["qkv"] = dense["qkv"].reshape(LAYERS, width, kv_heads, -1, 128)
    bricks = {
        name: jax.vmap(functools.partial(in_layout, layout="bricks"))(w)
        for name, w in packed.items()
    }
    norms = {
        name: jax.random.uniform(next(keys), (LAYERS, width), jnp.bfloat16) + 0.5
        for name in ("attention_norm", "mlp_norm")
    }
    k, v = (
        jax.random.normal(next(keys), (LAYERS, rows, kv_heads, SLOTS, 128), jnp.bfloat16)
        for _ in "kv"
    )
    x = jax.random.normal(next(keys), (rows, width), jnp.bfloat16)
    lengths = jnp.arange(rows, dtype=jnp.int32) * 37 + 150
    angle = jnp.linspace(0, 3, 64)[None, None].repeat(rows, 0)
    state = x, k, v, lengths, jnp.cos(angle), jnp.sin(angle)
    return state, LayerWeights(**norms, **dense), LayerWeights(**norms, **bricks)


SMALL = dict(width=1024, hidden=1536, heads=8, kv_heads=2)
LLAMA2_7B = dict(width=4096, hidden=11008, heads=32, kv_heads=32)
QWEN25_1B = dict(width=1536, hidden=8960, heads=12, kv_heads=2)
CASES = [
    (1, "int4", 128, False, SMALL),
    (1, "int4", 128, True, LLAMA2_7B),
    (8, "int4", 64, False, SMALL),
    (8, "int4", 64, True, SMALL),
    (5, "int8", None, False, SMALL),
    (3, "int8", 64, True, SMALL),
    (1, "fp8", None, False, LLAMA2_7B),
    (8, "fp8", 128, False, SMALL),
    (3, "fp8", None, False, SMALL),
    (16, "fp8", 64, False, QWEN25_1B),
    (16, "int4", 128, False, LLAMA2_7B),
    (2, "int4", 128, False, QWEN25_1B),
    (16, "int4", 64, False, QWEN25_1B),
]
_run = functools.partial(layers_mosaic, eps=1e-5, gate="silu", scale=128**-0.5)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("kind", "zeros", "int8"),
    [
        ("int4", False, False),
        ("int4", True, False),
        ("fp8", False, False),
        pytest.param("int4", True, True, marks=pytest.mark.soak),
    ],
)
def test_compiles_in_place_and_fits_into_the_instruction_cache(
    kind, zeros, int8, monkeypatch, capfd
):
    from deviceless import alias_bytes, code_bytes, compile_for, large_copies

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")

    shape = (1, kind, 128, zeros)
    state, _, packed = jax.eval_shape(lambda: _operands(*shape, **LLAMA2_7B))
    x, *caches, rest = *state[:3], state[3:]
    if int8:
        caches = jax.eval_shape(lambda: [quantise(jnp.zeros(c.shape, c.dtype)) for c in caches])
    k, v = caches

    def run(k, v, x, rest, packed):
        return _run(x, k, v, *rest, weights=packed)

    compiled = compile_for("h100", run, k, v, x, rest, packed, donate_argnums=(0, 1))
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(k))
    assert alias_bytes(compiled) == 2 * cache_bytes
    assert not large_copies(compiled, 2**20)
    _, version, ptx = capfd.readouterr().out.partition(".version")
    # If it is larger, each layer reads all of it from the L2 cache again.
    assert code_bytes(version + ptx) <= 128 * 1024


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("weight", "differing", "want"),
    [
        (WeightFormat("int4", 128, layout=BRICKS), False, "mosaic_gpu"),
        (WeightFormat("int4", 64, layout=BRICKS), False, "mosaic_gpu"),
        (WeightFormat("int4", 128, zeros=True, layout=BRICKS), False, "mosaic_gpu"),
        (WeightFormat("int8", 64, layout=BRICKS), False, "mosaic_gpu"),
        (WeightFormat("fp8", 128, layout=BRICKS), False, "mosaic_gpu"),
        # The kernel cannot do these.
        (WeightFormat("int4", 32, layout=BRICKS), False, "xla"),
        (WeightFormat("int4", 128), False, "xla"),
        (WeightFormat("int4", 4096, zeros=True, layout=BRICKS), False, "xla"),
        (WeightFormat("int4", 128, layout=BRICKS), True, "xla"),
    ],
    ids=str,
)
def test_plans_choose_it_for_quantised_weights(rows, weight, differing, want):
    found = formats_of([(4096, weight)] * 3 + [(11008, None if differing else weight)])
    shape = dict(m=rows, k=4096, width=4096, hidden=11008, n=12288, itemsize=2, hkv=32, d=128)
    key = shape | {"s": 2048} | found.key
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    assert plan.choose("decode_layers", found.features, **key).implementation == want
    if want != "xla":
        for more in ({"m": 9}, {"ranks": 2}):
            choice = plan.choose("decode_layers", found.features, **key | more)
            assert choice.implementation == "xla"


def test_formats_of_products():
    def found(*weights):
        formats = formats_of(weights)
        return sorted(formats.features), formats.key

    int4 = WeightFormat("int4", 128)
    names = ["weight.int4", "weight.layout.plain"]
    assert found((64, None), (128, None)) == ([], {})
    assert found((256, int4), (512, int4)) == (names, {"int4": 128})
    zeros = WeightFormat("int4", 128, zeros=True)
    assert found((256, zeros), (512, zeros)) == (
        ["weight.int4", "weight.layout.plain", "weight.zeros"],
        {"int4": 128, "zeros": 1},
    )
    # A group of all rows is 0, however many these are.
    assert found((128, int4), (128, int4)) == (names, {"int4": 0})
    int8 = [(k, WeightFormat("int8", k)) for k in (64, 256)]
    assert found(*int8) == (["weight.int8", "weight.layout.plain"], {"int8": 0})
    for other in (None, WeightFormat("int4", 64), WeightFormat("int4", 128, scales="bfloat16")):
        features, key = found((256, int4), (512, other))
        assert "differing_weights" in features and not key


def test_more_registers_than_a_block_has_are_refused(monkeypatch):
    """Warpgroups would wait for them forever."""
    monkeypatch.setattr(decode_layers, "_PACKED_REGISTERS", (184, 72, 80))
    state, _, packed = jax.eval_shape(lambda: _operands(1, "int4", 128, **SMALL))
    with pytest.raises(ValueError, match="layers_kernel: registers must be at most 128 on average"):
        jax.eval_shape(lambda state, packed: _run(*state, weights=packed), state, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("rows", "kind", "group", "zeros", "shape"), CASES, ids=str)
def test_results_are_those_of_the_kernel_for_bfloat16(rows, kind, group, zeros, shape, int8):
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the kernel would not all run at once here, and wait forever")
    state, dense, packed = jax.jit(lambda: _operands(rows, kind, group, zeros, **shape))()
    if int8:
        x, k, v, *rest = state
        state = x, quantise(k), quantise(v), *rest
    run = jax.jit(_run)
    want, k_want, _ = run(*state, weights=dense)
    got, k_got, _ = run(*state, weights=packed)
    want, got = (np.asarray(a, np.float32) for a in (want, got))
    # Sums in another order round intermediate results to other neighbours in bfloat16.
    assert np.abs(got - want).max() <= 2**-5 * want.std()
    step = float(k_want.scales.max()) if int8 else 0  # a code may be rounded to its neighbour
    k_got, k_want = (np.asarray(dequantised(k), np.float32) for k in (k_got, k_want))
    assert np.abs(k_got - k_want).max() <= 2**-5 + step


@pytest.mark.gpu
@pytest.mark.parametrize("outlier", [1, 300])
@pytest.mark.parametrize(
    ("rows", "kind", "group", "zeros"), [(1, "int4", 128, True), (8, "int8", None, False)]
)
def test_is_as_accurate_as_the_kernel_for_bfloat16(rows, kind, group, zeros, outlier):
    """Beside float64, also if one value of x is much larger than the others."""
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the kernel would not all run at once here, and wait forever")
    state, dense, packed = jax.jit(lambda: _operands(rows, kind, group, zeros, **SMALL))()
    x, k, v, lengths, cos, sin = state
    x = x.at[:, 70].multiply(outlier)
    want, *_ = exact_results(x, k, v, lengths, (cos, sin), dense)
    run = jax.jit(_run)
    errors = [
        np.abs(np.asarray(run(x, k, v, lengths, cos, sin, weights=w)[0], np.float64) - want)
        for w in (packed, dense)
    ]
    ours, other = (np.sqrt((error**2).mean()) for error in errors)
    assert ours <= 1.1 * other


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_many_launches_give_the_same_bits(int8):
    """Fewer fences than blocks need show only now and then (benchmarks/LOG.md, 2026-11-29)."""
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the kernel would not all run at once here, and wait forever")
    state, _, packed = jax.jit(lambda: _operands(1, "int4", 128, **LLAMA2_7B))()
    if int8:
        x, k, v, *rest = state
        state = x, quantise(k), quantise(v), *rest

    @jax.jit
    def run(state, packed):
        return jax.tree.leaves(_run(*state, weights=packed))

    assert int(_differing(run, run(state, packed), state, packed)) == 0


@functools.partial(jax.jit, static_argnums=0)
def _differing(run, first, *operands):
    """How many of 5000 runs have other bits than the first."""

    def one(_, count):
        differ = [jnp.any(a != b) for a, b in zip(run(*operands), first, strict=True)]
        return count + jnp.any(jnp.stack(differ)).astype(jnp.int32)

    return lax.fori_loop(0, 5000, one, jnp.int32(0))
