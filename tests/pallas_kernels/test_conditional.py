"""Conditionals of kernels."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from fdjax.pallas_kernels.attention.hopper.decode import append_decode_mosaic, decode_mosaic
from fdjax.pallas_kernels.attention.hopper.prefill import prefill_mosaic
from fdjax.pallas_kernels.attention.hopper.prefill_front import write_chunk_mosaic
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import FlatGemmConfig, matmul_flat_gemm
from fdjax.pallas_kernels.hopper.conditional import cond, when
from fdjax.pallas_kernels.norm import RMSNorm

B, T, G, HKV, S, D = 2, 128, 4, 2, 2048, 128


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def rows(*sizes):
    return shape(*sizes, dtype=jnp.int32)


def cos_sin(tokens):
    return shape(B, tokens, D // 2, dtype=jnp.float32)


CACHE = shape(B, HKV, S, D)


def flat_gemm(x, w, scale):
    config = FlatGemmConfig(split=2)
    return matmul_flat_gemm(x, w, norm=RMSNorm(scale, 1e-5), dtype=x.dtype, config=config)


def decode(*args):
    return decode_mosaic(*args, spec=AttentionSpec(0.1, window=64))


def append(qkv, k, v, lengths, cos, sin):
    return append_decode_mosaic(qkv, k, v, lengths, cos=cos, sin=sin, spec=AttentionSpec(0.1))


def prefill(*args):
    return prefill_mosaic(*args, spec=AttentionSpec(0.1, causal=True))


KERNELS = {
    "flat_gemm": (flat_gemm, shape(32, 1024), shape(1024, 512), shape(1024)),
    "decode": (decode, shape(B, 1, G * HKV, D), CACHE, CACHE, rows(B)),
    "append": (append, shape(B, HKV, G + 2, D), CACHE, CACHE, rows(B), cos_sin(1), cos_sin(1)),
    "prefill": (prefill, shape(B, T, G * HKV, D), CACHE, CACHE, rows(B), rows(B)),
    "write_chunk": (
        write_chunk_mosaic,
        shape(B, T, HKV, G + 2, D),
        CACHE,
        CACHE,
        *[rows(B)] * 2,
        *[cos_sin(T)] * 2,
    ),
}


def inner_jaxprs(equation):
    for value in equation.params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def equations(jaxpr, inside=False):
    """Every equation inside the kernels of a jaxpr."""
    for equation in jaxpr.eqns:
        if inside:
            yield equation
        kernel = equation.primitive.name in ("mpmd_map", "core_map", "pallas_call")
        for inner in inner_jaxprs(equation):
            yield from equations(inner, inside or kernel)


@pytest.mark.parametrize("name", KERNELS)
def test_no_truth_value_becomes_an_integer(name):
    """On JAX 0.11 each such conversion starts ptxas while the kernel is lowered."""
    function, *operands = KERNELS[name]
    found = list(equations(jax.make_jaxpr(function)(*operands).jaxpr))
    assert any(e.primitive.name == "cond" for e in found)
    converted = [
        str(e)
        for e in found
        if e.primitive.name == "convert_element_type"
        and e.invars[0].aval.dtype == bool
        and e.params["new_dtype"] == jnp.int32
    ]
    assert not converted, converted


def test_when_and_cond():
    def body(flag, out):
        out[...] = jnp.zeros_like(out)

        @when(flag[0] > 0)
        def _():
            out[...] += 1

        when(flag[0] > 1)(lambda: None)
        when(flag[0] > 2)(lambda: out.__setitem__(..., out[...] + 2))
        when(True)(lambda: out.__setitem__(..., out[...] + 4))
        when(False)(lambda: out.__setitem__(..., out[...] + 8))

    run = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((4,), jnp.int32), interpret=True)
    for flag, want in ((0, 4), (1, 5), (2, 5), (3, 7)):
        assert run(jnp.full((1,), flag)).tolist() == [want] * 4

    chosen = jax.jit(lambda flag: cond(flag, lambda: (1, 2.0), lambda: (3, 4.0)))
    assert [jax.tree.map(float, chosen(flag)) for flag in (True, False)] == [(1, 2), (3, 4)]
