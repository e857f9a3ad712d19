"""Decode attention compared with cuDNN: `python -m benchmarks.decode_attention`.

Every shape runs the kernel as the plan runs it, the kernel with a running maximum as in
FlashDecoding ("synchronised" in records), and cuDNN with a cache in the layout it prefers. In
`recompute` cases, the scores of some or all rows leave the range of the unified maximum; there the
kernel has a unified maximum at every shape, even if the plan would choose the running one. With
several tokens per row the peer is XLA, because cuDNN cannot align a causal mask with the end of
each row's length. In `int8` cases the cache is quantised, and the peer is XLA, which dequantises
it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fdjax.bench.suite import Case, main
from fdjax.pallas_kernels.attention import AttentionSpec, attention_reference, decode_attention
from fdjax.pallas_kernels.attention.cache import dequantised, quantise
from fdjax.pallas_kernels.attention.hopper.decode import decode_mosaic, default_config

# B, H, Hkv, S, D
SHAPES = (
    (1, 32, 32, 128, 128),
    (1, 32, 32, 1024, 128),
    (1, 32, 32, 8192, 128),
    (8, 32, 32, 1024, 128),
    (1, 32, 8, 1024, 128),
    (1, 32, 8, 8192, 128),
    (1, 32, 8, 32768, 128),
    (16, 32, 8, 4096, 128),
    (64, 32, 8, 1024, 128),
    (4, 40, 40, 2048, 128),
    (8, 32, 8, 2048, 64),
)

# (B, H, Hkv, S, D) and the share of rows that leave the range of the unified maximum: the share of
# Llama 2 7B in section 3 of FlashDecoding++, one row, and all rows.
RECOMPUTED = (
    ((64, 32, 8, 1024, 128), 0.0045),
    ((64, 32, 8, 1024, 128), 1.0),
    ((1, 32, 32, 1024, 128), 1 / 32),
    ((1, 32, 32, 1024, 128), 1.0),
)

# (B, H, Hkv, S, D) of an int8 cache.
INT8 = (
    (1, 32, 32, 1024, 128),
    (1, 32, 8, 32768, 128),
    (16, 32, 8, 4096, 128),
    (64, 32, 8, 1024, 128),
)

# Tokens per row and (B, H, Hkv, S, D). They give 32, 64 and 128 query rows per KV head.
SEVERAL_TOKENS = (
    (8, (4, 32, 8, 4096, 128)),
    (16, (4, 32, 8, 4096, 128)),
    (16, (32, 64, 8, 1024, 128)),
)


def _spec(q):
    return AttentionSpec(q.shape[-1] ** -0.5)


def _as_planned(q, k, v, lengths):
    return decode_attention(q, k, v, lengths, spec=_spec(q), implementation="mosaic_gpu")


def _with_maximum(q, k, v, lengths, *, unified):
    config = default_config(q.shape[0], *k.shape[1:])
    config = dataclasses.replace(config, unified=unified)
    return decode_mosaic(q, k, v, lengths, spec=_spec(q), config=config)[0]


_synchronised = functools.partial(_with_maximum, unified=False)
_always_unified = functools.partial(_with_maximum, unified=True)


def _cudnn(q, k, v, lengths):
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def _xla(q, k, v, lengths):
    return decode_attention(q, k, v, lengths, spec=_spec(q), implementation="xla")


def _for_cudnn(q, k, v, lengths):
    """Convert caches [B,Hkv,S,D] to [B,S,Hkv,D]."""
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2), lengths


def _reference(q, k, v, lengths):
    return attention_reference(q, k, v, lengths, lengths - q.shape[1], spec=_spec(q))[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _operands(seed, shape, outside, tokens):
    """Random arrays; in a share `outside` of the rows, scores have a standard deviation of 100."""
    b, h, kv_heads, s, d = shape
    q, k, v = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(q, (b, tokens, h, d), jnp.bfloat16)
    k, v = (jax.random.normal(key, (b, kv_heads, s, d), jnp.bfloat16) for key in (k, v))
    row = jnp.arange(b * h).reshape(b, 1, h, 1)
    q = jnp.where(row < round(outside * b * h), 100 * q, q)
    return q, k, v, jnp.full((b,), s, jnp.int32)


def _int8_operands(seed, shape):
    q, k, v, lengths = _operands(seed, shape, 0.0, 1)
    return q, *map(jax.jit(quantise), (k, v)), lengths


def _int8(q, k, v, lengths):
    return decode_attention(q, k, v, lengths, spec=_spec(q), implementation="mosaic_gpu")


def _int8_reference(q, k, v, lengths):
    return _reference(q, dequantised(k), dequantised(v), lengths)


def _int8_case(shape):
    b, h, kv_heads, s, d = shape
    return Case(
        name=f"int8 B{b} H{h} Hkv{kv_heads} S{s} D{d}",
        make_args=lambda seed: _int8_operands(seed, shape),
        implementations={"mosaic_gpu": _int8, "xla": _xla},
        reference=_int8_reference,
        bytes=2 * b * kv_heads * s * (d + 4),
        flops=4 * b * h * s * d,
        tolerance=2e-2,
    )


def _case(shape, outside=None, tokens=1):
    b, h, kv_heads, s, d = shape
    implementations = {"mosaic_gpu": _as_planned, "synchronised": _synchronised}
    name = f"B{b} H{h} Hkv{kv_heads} S{s} D{d}"
    if tokens > 1:
        implementations = {"mosaic_gpu": _as_planned, "xla": _xla}
        name = f"tokens {tokens} {name}"
    elif outside is None:
        implementations["cudnn"] = _cudnn
    else:
        implementations["mosaic_gpu"] = _always_unified
        name = f"recompute {outside:.2%} {name}"
    return Case(
        name=name,
        make_args=lambda seed: _operands(seed, shape, outside or 0.0, tokens),
        implementations=implementations,
        reference=_reference,
        bytes=2 * b * kv_heads * s * d * 2,
        flops=4 * b * tokens * h * s * d,
        tolerance=2e-2,
        prepare={"cudnn": _for_cudnn},
    )


CASES = [
    *(_case(shape) for shape in SHAPES),
    *(_case(shape, outside) for shape, outside in RECOMPUTED),
    *(_case(shape, tokens=tokens) for tokens, shape in SEVERAL_TOKENS),
    *(_int8_case(shape) for shape in INT8),
]

if __name__ == "__main__":
    raise SystemExit(main(CASES))
