"""All layers of a decode step, in every implementation.

The clusters of the kernel wait for each other, which the interpreter cannot do. So its results are
tested on a GPU only. Tests without a GPU check that it compiles without spills and in place.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fdjax.pallas_kernels.attention.cache import dequantised, quantise
from fdjax.pallas_kernels.layers import DecodeLayersConfig, LayerWeights, decode_layers
from fdjax.pallas_kernels.plan import Choice, Entry, Plan, can_chain
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, random_quantised
from fdjax.pallas_kernels.ranks import AXIS

from . import oracle

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

EPS = 1e-5
SCALE = 128**-0.5
LLAMA2_7B = dict(width=4096, heads=32, kv_heads=32, hidden=11008)
LLAMA3_8B = dict(width=4096, heads=32, kv_heads=8, hidden=14336)
SMALL = dict(width=512, heads=6, kv_heads=2, hidden=448)
MANY_HEADS = dict(width=256, heads=80, kv_heads=80, hidden=64)


def _operands(rows, width, heads, kv_heads, hidden, layers=3, slots=256, dtype="bfloat16", d=128):
    keys = map(
        functools.partial(jax.random.fold_in, jax.random.key(rows, impl="rbg")), itertools.count()
    )

    def normal(*shape, scale=1.0, mean=0.0, dtype=dtype):
        return (mean + scale * jax.random.normal(next(keys), shape)).astype(dtype)

    weights = LayerWeights(
        attention_norm=normal(layers, width, scale=0.2, mean=1.0),
        qkv=normal(layers, width, kv_heads, heads // kv_heads + 2, d, scale=width**-0.5),
        out=normal(layers, heads * d, width, scale=(heads * d) ** -0.5),
        mlp_norm=normal(layers, width, scale=0.2, mean=1.0),
        gate_up=normal(layers, width, 2, hidden, scale=width**-0.5),
        down=normal(layers, hidden, width, scale=hidden**-0.5),
    )
    angles = normal(rows, 1, d // 2, dtype="float32")
    # Slots filled: none, a tile but one, a tile, the cache but one, and 150.
    lengths = [(0, 63, 64, slots - 1, 150)[i % 5] for i in range(rows, 0, -1)]
    return {
        "x": normal(rows, width),
        "k": normal(layers, rows, kv_heads, slots, d),
        "v": normal(layers, rows, kv_heads, slots, d),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "rotation": (jnp.cos(angles), jnp.sin(angles)),
        "weights": weights,
    }


def _run(operands, **options):
    options = {"eps": EPS, "gate": "silu", "scale": SCALE} | options
    return decode_layers(**operands, **options)


def exact_results(x, k, v, lengths, rotation, weights):
    """(x, k, v) in float64, with the new token in each cache."""
    x, k, v = (np.asarray(a).astype(np.float64) for a in (x, k, v))
    rows = np.arange(len(x))
    cos, sin = (np.asarray(a, np.float64)[:, 0, None] for a in rotation)
    lengths = np.asarray(lengths)
    for layer in range(len(k)):
        w = LayerWeights(*(a[layer] for a in weights))
        columns = w.qkv.reshape(len(w.qkv), -1)
        qkv = oracle.matmul(x, columns, norm=(w.attention_norm, EPS)).value
        qkv = qkv.reshape(len(x), *w.qkv.shape[1:])
        half = qkv.shape[-1] // 2
        a, b = qkv[..., :half], qkv[..., half:]
        turned = np.concatenate(
            [a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], axis=-1
        )
        k[layer][rows, :, lengths] = turned[:, :, -2]
        v[layer][rows, :, lengths] = qkv[:, :, -1]
        q = turned[:, :, :-2].reshape(len(x), 1, -1, 2 * half)
        o = oracle.attention(q, k[layer], v[layer], lengths + 1, lengths, scale=SCALE).o
        x = oracle.matmul(o.reshape(len(x), -1), w.out, residual=x).value
        hidden = oracle.matmul(x, w.gate_up, norm=(w.mlp_norm, EPS), gate="silu").value
        x = oracle.matmul(hidden, w.down, residual=x).value
    return x, k, v


def _error(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.soak), 5])
def test_xla_is_right(rows):
    shape = SMALL | dict(width=64, hidden=96)
    operands = jax.jit(lambda: _operands(rows, **shape, layers=2, slots=192, dtype="float32"))()
    for got, want in zip(jax.jit(_run)(operands), exact_results(**operands), strict=True):
        assert _error(got, want) < 1e-5


def _quantised(weights):
    """The same model with stacks of int8 weights, and with what these stand for."""
    rows = weights.qkv.shape[1]
    q, dense = {}, {}
    for name, w in weights.products.items():
        flat = w.reshape(*w.shape[:2], -1) if name == "qkv" else w
        like = WeightFormat("int8", 32).empty(flat.shape[1:], flat.shape[:1])
        q[name] = random_quantised(jax.random.key(len(name)), like, rows**-0.5)
        dense[name] = jax.vmap(lambda q: dequantise(q, "float32"))(q[name]).reshape(w.shape)
    return weights._replace(**q), weights._replace(**dense)


@pytest.mark.slow
def test_quantised_weights_are_those_that_they_stand_for():
    shape = SMALL | dict(width=64, hidden=96)
    operands = jax.jit(lambda: _operands(2, **shape, layers=2, slots=192, dtype="float32"))()
    quantised, dense = _quantised(operands["weights"])
    run = jax.jit(_run)
    want = run(operands | {"weights": dense})
    got = run(operands | {"weights": quantised})
    for a, b in zip(got, want, strict=True):
        assert _error(a, np.asarray(b, np.float64)) < 1e-5


def test_a_quantised_weight_of_another_size_is_refused():
    shape = SMALL | dict(width=64, hidden=96)
    operands = jax.eval_shape(lambda: _operands(2, **shape, layers=2, slots=192))
    weights, _ = jax.eval_shape(_quantised, operands["weights"])
    other = dataclasses.replace(weights.out, shape=(768, 128))
    for wrong, message in (
        (weights._replace(out=other), r"out must be \[2, 768, 64\] .*, got \[2, 768, 128\]"),
        (
            weights._replace(down=dataclasses.replace(weights.down, scales=weights.out.scales)),
            r"w.scales must be \[2, 3, 64\], got \[2, 24, 64\]",
        ),
    ):
        with pytest.raises(ValueError, match=f"decode_layers: {message}"):
            jax.eval_shape(_run, operands | {"weights": wrong})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "relu6"}, "gate must be one of"),
        ({"k": (3, 2, 0, 256, 128)}, r"k \[3, 2, 0, 256, 128\] must not be empty"),
        ({"x": (2, 1, 512)}, r"x, k, qkv and down must be \[B,E\]"),
        ({"k": (3, 2, 2, 200, 128)}, r"v must be \[3, 2, 2, 200, 128\] beside .* got .*256"),
        ({"lengths": (3,)}, r"lengths must be \[2\]"),
        ({"lengths": (2,)}, "lengths must be signed integers, got bfloat16"),
        ({"pages": (2, 1)}, r"pages must be signed integers \[2,N\], got bfloat16 \[2, 1\]"),
        ({"pages": (2,)}, r"pages must be signed integers \[2,N\], got bfloat16 \[2\]"),
        ({"out": (3, 512, 512)}, r"out must be \[3, 768, 512\]"),
        ({"gate_up": (3, 512, 448)}, r"gate_up must be \[3, 512, 2, 448\]"),
        ({"mlp_norm": (2, 512)}, r"mlp_norm must be \[3, 512\]"),
        ({"implementation": "triton"}, "implementation must be one of"),
    ],
    ids=str,
)
def test_refuses_what_does_not_fit(change, message):
    operands, options = jax.eval_shape(lambda: _operands(2, **SMALL)), {}
    for name, value in change.items():
        new = jax.ShapeDtypeStruct(value, jnp.bfloat16) if isinstance(value, tuple) else value
        if name in LayerWeights._fields:
            operands["weights"] = operands["weights"]._replace(**{name: new})
        else:
            (operands if name in operands else options)[name] = new
    with pytest.raises(ValueError, match=f"^decode_layers: .*{message}"):
        jax.eval_shape(functools.partial(_run, **options), operands)


def test_refuses_one_cache_in_int8():
    operands = jax.eval_shape(lambda: _int8_operands(1, **SMALL))
    operands["v"] = jax.ShapeDtypeStruct(operands["k"].shape, "bfloat16")
    with pytest.raises(ValueError, match=r"^decode_layers: k and v must both be quantised"):
        jax.eval_shape(lambda: _run(operands))


@pytest.mark.parametrize("pages", [None, np.zeros((0, 2), np.int32)], ids=["apart", "pages"])
def test_no_rows(pages):
    operands = jax.eval_shape(lambda: _operands(1, **SMALL))
    empty = jax.tree.map(lambda a: jnp.zeros((0, *a.shape[1:]), a.dtype), operands)
    cache = jnp.zeros((3, 0 if pages is None else 2, 2, 256, 128), jnp.bfloat16)
    operands |= {name: empty[name] for name in ("x", "lengths", "rotation")}
    operands |= {"k": cache, "v": cache}
    got = jax.eval_shape(functools.partial(_run, pages=pages), operands)
    assert [a.shape for a in got] == [(0, 512), cache.shape, cache.shape]


def test_refuses_mixed_dtypes():
    operands = jax.eval_shape(lambda: _operands(2, **SMALL))
    operands["k"] = jax.ShapeDtypeStruct(operands["k"].shape, jnp.float32)
    with pytest.raises(ValueError, match="of one floating-point dtype, got bfloat16, float32"):
        jax.eval_shape(_run, operands)


@pytest.mark.parametrize(
    ("rows", "change", "message"),
    [
        (2, dict(dtype="float32"), "needs bfloat16 or float16, got float32"),
        (33, {}, r"takes 1..32 rows, got 33"),
        (2, dict(hidden=440), "multiples of 64"),
        (2, dict(width=576), "up to 512 or a multiple of it, got 576"),
        (2, dict(d=64), "takes D of 128 and up to 6 queries per KV head, got 64 and 3"),
        (2, dict(kv_heads=1, heads=7), "got 128 and 7"),
        (2, dict(slots=196), "S to be a multiple of 8, got 196"),
        (32, dict(width=40960), "no room in shared memory for 32 rows of width 40960"),
    ],
    ids=str,
)
def test_kernel_refuses_what_it_cannot_do(rows, change, message):
    operands = jax.eval_shape(lambda: _operands(rows, **SMALL | change))
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(functools.partial(_run, implementation="mosaic_gpu"), operands)


def test_there_is_no_cudnn_for_it():
    with pytest.raises(NotImplementedError, match="no 'cudnn' implementation"):
        jax.eval_shape(
            functools.partial(_run, implementation="cudnn"),
            jax.eval_shape(lambda: _operands(2, **SMALL)),
        )


@pytest.mark.parametrize(
    "config", [dict(shared=0), dict(alone=0), dict(cache=0), dict(ahead=-1)], ids=str
)
def test_impossible_configs_raise(config):
    with pytest.raises(ValueError, match=r"^decode_layers: .*got DecodeLayersConfig\("):
        DecodeLayersConfig(**config)


def _planned(config, operands):
    """A plan that runs the kernel with a configuration."""
    (m, width), (_, _, kv_heads, s, d) = operands["x"].shape, operands["k"].shape
    weights = operands["weights"]
    shape = dict(m=m, k=weights.out.shape[1], width=width, hidden=weights.down.shape[1])
    shape |= dict(n=kv_heads * weights.qkv.shape[3] * d, hkv=kv_heads, d=d, s=s, itemsize=2)
    choice = Choice("mosaic_gpu", tuple(dataclasses.asdict(config).items()), source="table")
    return Plan(table=(Entry("decode_layers", tuple(sorted(shape.items())), choice),))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("rows", "shape", "clusters", "int8"),
    [
        *(pytest.param(rows, LLAMA2_7B, 1, False, marks=pytest.mark.soak) for rows in (1, 8)),
        *((rows, LLAMA3_8B, clusters, False) for rows, clusters in ((1, 8), (8, 1))),
        (1, LLAMA3_8B, 8, True),
        pytest.param(8, LLAMA2_7B, 1, True, marks=pytest.mark.soak),
        (5, SMALL, 1, False),
        (8, MANY_HEADS, 1, False),
    ],
    ids=str,
)
def test_compiles_in_place_without_spills(rows, shape, clusters, int8, monkeypatch, capfd):
    from deviceless import alias_bytes, compile_for, large_copies

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    made = _int8_operands if int8 else _operands
    operands = jax.eval_shape(lambda: made(rows, **shape))
    caches = operands.pop("k"), operands.pop("v")
    config = DecodeLayersConfig(alone=3, ahead=3, clusters=clusters)
    plan = _planned(config, operands | {"k": caches[0]})

    def run(caches, operands):
        return _run(operands | dict(zip("kv", caches, strict=True)), plan=plan)

    compiled = compile_for("h100", run, caches, operands, donate_argnums=0)
    printed = "".join(capfd.readouterr())
    assert "layers_kernel" in printed
    assert "0 bytes spill stores, 0 bytes spill loads" in printed
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches[0]))
    assert alias_bytes(compiled) == 2 * nbytes
    assert not large_copies(compiled, nbytes // 3)


@pytest.fixture
def multiprocessors():
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the kernel would not all run at once here, and wait forever")


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(
    ("rows", "shape", "dtype"),
    [
        *((rows, SMALL, "bfloat16") for rows in (1, 3, 9, 32)),
        *((rows, SMALL, "float16") for rows in (1, 2, 8)),
        *((rows, LLAMA2_7B, "bfloat16") for rows in (1, 8)),
        *((rows, LLAMA3_8B, "bfloat16") for rows in (1, 2)),
        (5, MANY_HEADS, "bfloat16"),
    ],
    ids=str,
)
def test_kernel_is_as_exact_as_xla(rows, shape, dtype):
    layers = 1 if shape["width"] == 4096 else 3  # large layers take long in float64
    operands = _operands(rows, **shape, layers=layers, dtype=dtype)
    exact = exact_results(**operands)
    xla = jax.jit(_run)(operands)
    # Unfilled slots must not affect the result, whatever they hold.
    slots = np.arange(operands["k"].shape[3])
    filled = slots < np.asarray(operands["lengths"])[:, None]
    for name in "kv":
        cache = operands[name]
        operands[name] = jnp.where(filled[None, :, None, :, None], cache, jnp.nan)
    got = jax.jit(functools.partial(_run, implementation="mosaic_gpu"))(operands)
    assert _error(got[0], exact[0]) < max(
        1.5 * _error(xla[0], exact[0]), 2 * float(jnp.finfo(dtype).eps)
    )
    new = slots == np.asarray(operands["lengths"])[:, None]
    for mine, old, of_xla, want in zip(
        got[1:], (operands["k"], operands["v"]), xla[1:], exact[1:], strict=True
    ):
        mine, old, of_xla = (np.asarray(a, np.float64) for a in (mine, old, of_xla))
        where = np.broadcast_to(new[None, :, None], mine.shape[:-1])
        np.testing.assert_array_equal(mine[~where], old[~where])
        assert _error(mine[where], want[where]) < max(
            1.5 * _error(of_xla[where], want[where]), 2 * float(jnp.finfo(dtype).eps)
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(
    ("rows", "shape", "clusters", "dtype"),
    [
        *((rows, SMALL, 1, "bfloat16") for rows in (1, 3, 9, 32)),
        *((rows, SMALL, 2, "float16") for rows in (1, 8)),
        *((1, LLAMA3_8B, clusters, "bfloat16") for clusters in (1, 3, 8)),
        (8, LLAMA2_7B, 1, "bfloat16"),
        (5, MANY_HEADS, 1, "bfloat16"),
    ],
    ids=str,
)
def test_reads_and_writes_int8(rows, shape, clusters, dtype):
    operands = _int8_operands(rows, **shape, layers=2, slots=512, dtype=dtype)
    k, v = (np.asarray(dequantised(c), np.float64) for c in _caches(operands))
    exact = exact_results(**operands | {"k": k, "v": v})
    xla = jax.jit(_run)(operands)
    lengths = np.asarray(operands["lengths"])[:, None]
    filled = (np.arange(512) < lengths)[None, :, None]
    for name, cache in zip("kv", _caches(operands), strict=True):
        scales = jnp.where(filled, cache.scales, jnp.nan)
        operands[name] = dataclasses.replace(cache, scales=scales)
    plan = _planned(DecodeLayersConfig(clusters=clusters), operands)
    run = jax.jit(functools.partial(_run, plan=plan))
    got = run(operands)
    limit = 2 * float(jnp.finfo(dtype).eps)
    assert _error(got[0], exact[0]) < max(1.5 * _error(xla[0], exact[0]), limit)
    new = np.broadcast_to((np.arange(512) == lengths)[None, :, None], k.shape[:-1])
    for mine, old, of_xla in zip(got[1:], _caches(operands), xla[1:], strict=True):
        for now, before in zip(jax.tree.leaves(mine), jax.tree.leaves(old), strict=True):
            np.testing.assert_array_equal(np.asarray(now)[~new], np.asarray(before)[~new])
        values, want = (
            np.asarray(c.codes, np.float64)[new] * np.asarray(c.scales)[new][:, None]
            for c in (mine, of_xla)
        )
        # A code may differ by one, because its value was rounded after other products.
        assert _error(values, want) < 2 / 127
    bits = _bits(got)
    for _ in range(10):
        assert _bits(run(operands)) == bits


def _int8_operands(rows, **options):
    """`_operands` with caches in int8."""
    operands = _operands(rows, **options)
    return operands | {name: quantise(operands[name]) for name in "kv"}


def _caches(operands):
    return operands["k"], operands["v"]


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(
    ("rows", "shape", "clusters"),
    [
        *((1, LLAMA3_8B, clusters) for clusters in (2, 3, 8)),
        *((rows, SMALL, clusters) for rows, clusters in ((5, 2), (5, 6), (1, 33), (32, 2))),
    ],
    ids=str,
)
def test_clusters_share_a_head(rows, shape, clusters):
    """Also where a head has fewer tiles than blocks, and with NaN in unused slots."""
    operands = _operands(rows, **shape, layers=2, slots=1024)
    lengths = [(700, 0, 63, 1023, 64)[i % 5] for i in range(rows)]
    operands["lengths"] = jnp.asarray(lengths, jnp.int32)
    exact = exact_results(**operands)
    xla = jax.jit(_run)(operands)
    filled = np.arange(1024) < np.asarray(lengths)[:, None]
    for name in "kv":
        operands[name] = jnp.where(filled[None, :, None, :, None], operands[name], jnp.nan)
    plan = _planned(DecodeLayersConfig(clusters=clusters), operands)
    run = jax.jit(functools.partial(_run, plan=plan))
    got = run(operands)
    limit = 2 * float(jnp.finfo(jnp.bfloat16).eps)
    assert _error(got[0], exact[0]) < max(1.5 * _error(xla[0], exact[0]), limit)
    bits = _bits(got)
    for _ in range(20):
        assert _bits(run(operands)) == bits


def _bits(results):
    """The bytes of all results, so that NaN in unused slots equals itself."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


def _looped_back(operands, ranks, **options):
    """`decode_layers` on a mesh of one device, which exchanges its sums with itself."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), (AXIS,))
    whole = jax.sharding.PartitionSpec()
    run = functools.partial(_run, ranks=ranks, **options)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))(
        operands
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(
    ("rows", "shape", "ranks"),
    [(1, SMALL, 2), (9, SMALL, 4), (32, SMALL, 2), (1, LLAMA2_7B, 2), (8, LLAMA3_8B, 4)],
    ids=str,
)
def test_an_exchange_of_equal_parts_changes_no_bit(rows, shape, ranks):
    """Each of the devices has a fraction of the sums, a power of two, so nothing is rounded."""
    operands = _operands(rows, **shape, layers=3)
    want = jax.jit(functools.partial(_run, implementation="mosaic_gpu"))(operands)
    weights = operands["weights"]
    operands["weights"] = weights._replace(out=weights.out / ranks, down=weights.down / ranks)
    for _ in range(3):
        got = _looped_back(operands, ranks, implementation="mosaic_gpu")
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_a_full_cache_is_left_as_it_is(rows):
    operands = _operands(rows, **SMALL)
    operands["lengths"] = jnp.full_like(operands["lengths"], operands["k"].shape[3])
    x, *caches = jax.jit(functools.partial(_run, implementation="mosaic_gpu"))(operands)
    assert np.isfinite(np.asarray(x, np.float32)).all()
    for got, name in zip(caches, "kv", strict=True):
        np.testing.assert_array_equal(got, operands[name])


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(("rows", "shape"), [(1, LLAMA2_7B), (8, LLAMA3_8B), (5, SMALL)], ids=str)
def test_what_is_in_flight_changes_no_bit(rows, shape):
    """Few tiles, as measured, more than fit, and more than a product has."""
    operands = _operands(rows, **shape)
    run = jax.jit(_run, static_argnames=("implementation", "plan"))
    want = jax.device_get(run(operands, implementation="mosaic_gpu"))
    for numbers in ((1, 1, 1, 0), (2, 3, 4, 3), (3, 2, 2, 7), (9, 9, 9, 1000)):
        plan = _planned(DecodeLayersConfig(*numbers), operands)
        for _ in range(10):
            got = jax.device_get(run(operands, plan=plan))
            for g, w in zip(got, want, strict=True):
                np.testing.assert_array_equal(g, w, err_msg=str(numbers))


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize("rows", [1, 8])
def test_many_launches_give_the_same_bits(rows):
    operands = _operands(rows, **LLAMA2_7B, layers=4)

    @jax.jit
    def steps(operands):
        def step(_, operands):
            x, k, v = _run(operands, implementation="mosaic_gpu")
            return operands | {"x": x * jnp.asarray(0.5, x.dtype), "k": k, "v": v}

        return lax.fori_loop(0, 200, step, operands)["x"]

    first = np.asarray(steps(operands), np.float32)
    assert np.isfinite(first).all()
    for _ in range(5):
        np.testing.assert_array_equal(np.asarray(steps(operands), np.float32), first)
