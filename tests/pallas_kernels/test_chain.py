"""The linear layers between two attentions, in every implementation.

The clusters of the kernel wait for each other, which the interpreter cannot do. So its results are
tested on a GPU only. Tests without a GPU check that it compiles without spills and in place.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fdjax.pallas_kernels.gemm import (
    LinearChainConfig,
    chain_counters,
    linear_chain,
    matmul,
)
from fdjax.pallas_kernels.gemm.hopper import linear_chain as hopper_chain
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm
from fdjax.pallas_kernels.plan import Choice, Entry, Plan, can_chain

from . import oracle

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

EPS = 1e-5
LLAMA2_7B = dict(k=4096, width=4096, hidden=11008, n=12288)
LLAMA3_8B = dict(k=4096, width=4096, hidden=14336, n=6144)
UNEVEN = dict(k=320, width=192, hidden=448, n=576)
WIDE = dict(k=64, width=8704, hidden=64, n=64)
TOO_WIDE = dict(k=64, width=40960, hidden=64, n=64)
TWO_ROUNDS = dict(k=5120, width=5120, hidden=1024, n=8512)


def _operands(m, k, width, hidden, n, dtype="bfloat16", scale_dtype=None):
    rng = np.random.default_rng(m)

    def normal(*shape, scale=1.0, mean=0.0, dtype=dtype):
        return jnp.asarray(mean + scale * rng.standard_normal(shape, np.float32), dtype)

    def norm():
        return RMSNorm(normal(width, scale=0.2, mean=1.0, dtype=scale_dtype or dtype), EPS)

    arrays = {"o": normal(m, k), "x": normal(m, width)}
    weights = {
        "out": normal(k, width, scale=k**-0.5),
        "mlp_norm": norm(),
        "gate_up": normal(width, 2, hidden, scale=width**-0.5),
        "down": normal(hidden, width, scale=hidden**-0.5),
        "next_norm": norm(),
        "following": normal(width, n, scale=width**-0.5),
    }
    return arrays, weights


def _planned(config, m, k, width, hidden, n):
    """A plan that runs the kernel with a configuration."""
    shape = dict(m=m, k=k, width=width, hidden=hidden, n=n, itemsize=2)
    choice = Choice("mosaic_gpu", tuple(dataclasses.asdict(config).items()), source="table")
    return Plan(table=(Entry("linear_chain", tuple(sorted(shape.items())), choice),))


def _run(arrays, weights, **options):
    """(x, y, values of the counters)."""
    counters = chain_counters(3)
    x, y = linear_chain(
        arrays["o"], arrays["x"], counters, 1, **weights, **{"gate": "silu"} | options
    )
    return x, y, jax.freeze(counters)


def _exact(arrays, weights, gate="silu"):
    """(x, y) in float64."""

    def norm(operand):
        return operand.scale, operand.eps

    def product(x, name, **fused):
        return oracle.matmul(x, weights[name], **fused).value

    x = product(arrays["o"], "out", residual=arrays["x"])
    hidden = product(x, "gate_up", norm=norm(weights["mlp_norm"]), gate=gate)
    x = product(hidden, "down", residual=x)
    return x, product(x, "following", norm=norm(weights["next_norm"]))


def _error(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m", [1, 3])
def test_xla_is_right(m, gate):
    arrays, weights = _operands(m, **UNEVEN, dtype="float32")
    x, y, counts = _run(arrays, weights, gate=gate)
    for got, want in zip((x, y), _exact(arrays, weights, gate), strict=True):
        assert _error(got, want) < 1e-5
    assert not np.asarray(counts).any()


def test_xla_is_one_matmul_after_the_other():
    arrays, weights = _operands(2, **UNEVEN)
    x, y, _ = _run(arrays, weights, plan=Plan())
    first = matmul(arrays["o"], weights["out"], residual=arrays["x"])
    hidden = matmul(first, weights["gate_up"], norm=weights["mlp_norm"], gate="silu")
    want = matmul(hidden, weights["down"], residual=first)
    np.testing.assert_array_equal(x, want)
    np.testing.assert_array_equal(y, matmul(want, weights["following"], norm=weights["next_norm"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "relu6"}, "gate must be one of"),
        ({"o": (2, 3, 320)}, r"o and x must be \[M,K\] and \[M,E\]"),
        ({"o": (3, 320)}, r"o must be \[2, 320\] beside x \[2, 192\], got \[3, 320\]"),
        ({"out": (320, 128)}, r"out must be \[320, 192\]"),
        ({"gate_up": (192, 448)}, r"gate_up and following must be \[E,2,F\] and \[E,N\]"),
        ({"gate_up": (192, 3, 448)}, r"gate_up must be \[192, 2, 448\]"),
        ({"gate": ["silu"]}, "gate must be one of"),
        ({"down": (192, 448)}, r"down must be \[448, 192\]"),
        ({"following": (320, 576)}, r"following must be \[192, 576\]"),
        ({"implementation": "triton"}, "implementation must be one of"),
        ({"mlp_norm": LayerNorm(None, None, 1e-5)}, "mlp_norm must be an RMSNorm"),
        ({"next_norm": None}, "next_norm must be an RMSNorm, got NoneType"),
    ],
    ids=str,
)
def test_refuses_what_does_not_fit(change, message):
    arrays, weights = _operands(2, **UNEVEN)
    options = {"gate": "silu"}
    for name, value in change.items():
        place = next((d for d in (arrays, weights) if name in d), options)
        place[name] = jnp.zeros(value, "bfloat16") if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=message):
        _run(arrays, weights, **options)


def test_refuses_mixed_dtypes():
    arrays, weights = _operands(2, **UNEVEN)
    weights["down"] = weights["down"].astype("float32")
    with pytest.raises(
        ValueError, match="must be of one floating-point dtype, got bfloat16, float32"
    ):
        _run(arrays, weights)


@pytest.mark.parametrize(
    ("m", "shape", "dtype", "message"),
    [
        (2, UNEVEN, "float32", "needs bfloat16 or float16, got float32"),
        (33, UNEVEN, "bfloat16", r"takes 1..32 rows, got 33"),
        (2, UNEVEN | {"hidden": 440}, "bfloat16", "multiples of 64"),
        (2, UNEVEN | {"width": 576}, "bfloat16", "up to 512 or a multiple of it, got 576"),
        (2, UNEVEN | {"width": 3200}, "bfloat16", "up to 512 or a multiple of it, got 3200"),
    ],
)
def test_kernel_refuses_what_it_cannot_do(m, shape, dtype, message):
    arrays, weights = _operands(m, **shape, dtype=dtype)
    with pytest.raises(NotImplementedError, match=message):
        _run(arrays, weights, implementation="mosaic_gpu")


def test_a_plan_says_how_much_is_in_flight(monkeypatch):
    got = []

    def kernel(o, x, *args, config, following, **weights):
        got.append(config)
        return x, x @ following

    monkeypatch.setattr(hopper_chain, "chain_mosaic", kernel)
    config = LinearChainConfig(shared=3, alone=4, ahead=5)
    _run(*_operands(2, **UNEVEN), plan=_planned(config, 2, **UNEVEN))
    _run(*_operands(2, **UNEVEN), implementation="mosaic_gpu")
    assert got == [config, None]


@pytest.mark.parametrize("config", [dict(shared=0), dict(alone=0), dict(ahead=-1)], ids=str)
def test_impossible_configs_raise(config):
    with pytest.raises(ValueError, match=r"^linear_chain: .*got LinearChainConfig\("):
        LinearChainConfig(**config)


def test_there_is_no_cudnn_for_it():
    with pytest.raises(NotImplementedError, match="no 'cudnn' implementation"):
        _run(*_operands(2, **UNEVEN), implementation="cudnn")


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("m", "shape"),
    [
        (1, LLAMA2_7B),
        *(pytest.param(m, LLAMA2_7B, marks=pytest.mark.soak) for m in (8, 16, 32)),
        pytest.param(32, LLAMA3_8B, marks=pytest.mark.soak),
        *((32, shape) for shape in (TWO_ROUNDS, WIDE)),
        (12, UNEVEN),
    ],
    ids=str,
)
def test_compiles_without_spills(m, shape, monkeypatch, capfd):
    from deviceless import compile_for

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    operands = jax.eval_shape(lambda: _operands(m, **shape))
    plan = _planned(LinearChainConfig(alone=3, ahead=2), m, **shape)
    compile_for("h100", functools.partial(_run, plan=plan), *operands)
    printed = "".join(capfd.readouterr())
    assert "chain_kernel" in printed
    assert "0 bytes spill stores, 0 bytes spill loads" in printed


def test_kernel_refuses_what_shared_memory_has_no_room_for():
    operands = jax.eval_shape(lambda: _operands(32, **TOO_WIDE))
    with pytest.raises(NotImplementedError, match="no room in shared memory for 32 rows of width"):
        jax.eval_shape(functools.partial(_run, implementation="mosaic_gpu"), *operands)


def _steps(arrays, layers, n, **options):
    """Run n steps of some layers, each with the result of the step before, kept small."""

    def step(_, carry):
        x, y = carry
        counters = chain_counters(len(layers))
        for i, weights in enumerate(layers):
            x, y = linear_chain(
                *(y[:, : arrays["o"].shape[1]], x, counters, jnp.int32(i)),
                **weights,
                gate="silu",
                **options,
            )
            x, y = (a * jnp.asarray(0.5, a.dtype) for a in (x, y))
        return x, y

    return lax.fori_loop(0, n, step, (arrays["x"], arrays["y"]))


@pytest.mark.deviceless
def test_layers_share_a_lowering_and_counters_stay_in_place():
    from deviceless import compile_for

    def run(arrays, layers):
        return _steps(arrays, layers, 3, implementation="mosaic_gpu")

    arrays, weights = jax.eval_shape(lambda: _operands(8, **LLAMA2_7B))
    arrays["y"] = jax.ShapeDtypeStruct((8, LLAMA2_7B["n"]), "bfloat16")
    lowered = jax.jit(run).trace(arrays, [weights] * 4).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 1
    compiled = compile_for("h100", run, arrays, [weights] * 4)
    assert "s32[4,32]" in (text := compiled.as_text())
    assert not re.search(r"= s32\[4,32\]\S* copy\(", text)


@pytest.fixture
def multiprocessors():
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the chain would not all run at once here, and wait forever")


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(
    ("m", "shape", "dtype"),
    [
        *((m, LLAMA2_7B, "bfloat16") for m in (1, 8, 12, 32)),
        *((m, LLAMA3_8B, "bfloat16") for m in (2, 16)),
        *((m, UNEVEN, "bfloat16") for m in (1, 7, 9, 24, 32)),
        *((m, UNEVEN, "float16") for m in (3, 8, 32)),
        *((m, TWO_ROUNDS, "bfloat16") for m in (5, 32)),
    ],
    ids=str,
)
def test_kernel_is_as_exact_as_xla(m, shape, dtype):
    arrays, weights = _operands(m, **shape, dtype=dtype, scale_dtype="float32" if m == 8 else None)
    run = jax.jit(_run, static_argnames=("implementation", "gate"))
    for gate in ("silu", "gelu") if m == 12 else ("silu",):
        want = _exact(arrays, weights, gate)
        *got, counts = run(arrays, weights, implementation="mosaic_gpu", gate=gate)
        *xla, _ = run(arrays, weights, implementation="xla", gate=gate)
        for g, x, w in zip(got, xla, want, strict=True):
            assert _error(g, w) < max(1.5 * _error(x, w), 2 * float(jnp.finfo(dtype).eps))
        # The three barriers of the launch use only their own row.
        assert not np.asarray(counts)[[0, 2]].any()
        tiles = 2 * shape["width"] // 64 + -(-shape["hidden"] // 128)
        assert np.asarray(counts)[1, 0] == tiles


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize(
    ("m", "shape"), [(1, LLAMA2_7B), (32, LLAMA2_7B), (9, UNEVEN), (5, TWO_ROUNDS)], ids=str
)
def test_what_is_in_flight_changes_no_bit(m, shape):
    """Few tiles, as measured, more than fit, and more than a product has."""
    arrays, weights = _operands(m, **shape)
    run = jax.jit(_run, static_argnames=("implementation", "plan"))
    want = jax.device_get(run(arrays, weights, implementation="mosaic_gpu"))
    for numbers in ((1, 1, 0), (1, 3, 1), (2, 2, 2), (2, 3, 2), (3, 2, 7), (9, 9, 1000)):
        plan = _planned(LinearChainConfig(*numbers), m, **shape)
        for _ in range(20):
            got = jax.device_get(run(arrays, weights, plan=plan))
            for g, w in zip(got, want, strict=True):
                np.testing.assert_array_equal(g, w, err_msg=str(numbers))


@pytest.mark.gpu
@pytest.mark.usefixtures("multiprocessors")
def test_many_launches_give_the_same_bits():
    arrays, weights = _operands(32, **LLAMA2_7B)
    arrays["y"] = jnp.tile(arrays["o"], (1, 3))
    layers = [weights, jax.tree.map(lambda a: a * jnp.asarray(0.5, a.dtype), weights)]
    run = jax.jit(functools.partial(_steps, n=200, implementation="mosaic_gpu"))
    first = jax.device_get(run(arrays, layers))
    assert np.isfinite(np.asarray(first[0], np.float32)).all()
    for _ in range(5):
        for got, want in zip(jax.device_get(run(arrays, layers)), first, strict=True):
            np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
