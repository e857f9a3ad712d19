"""Attention with pages in random order and with rows in one piece: `python -m benchmarks.pages`.

Both run the same kernel as the plan runs it. A page has 128 slots.
"""

import functools

import jax
import jax.numpy as jnp

from fdjax.bench.suite import Case, main
from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    attention_reference,
    decode_attention,
    prefill_attention,
)

PAGE = 128

# B, H, Hkv, S, D
DECODE = (
    (1, 32, 32, 128, 128),
    (1, 32, 32, 1024, 128),
    (1, 32, 32, 8192, 128),
    (8, 32, 32, 1024, 128),
    (32, 32, 32, 1024, 128),
    (1, 32, 8, 1024, 128),
    (1, 32, 8, 32768, 128),
    (16, 32, 8, 4096, 128),
    (64, 32, 8, 1024, 128),
    (8, 32, 8, 2048, 64),
)
PREFILL = ((1, 32, 32, 1024, 128), (8, 32, 8, 1024, 128), (4, 32, 8, 2048, 64))


def _spec(q):
    return AttentionSpec(q.shape[-1] ** -0.5)


def _decode(q, k, v, lengths, pages=None):
    return decode_attention(
        q, k, v, lengths, pages=pages, spec=_spec(q), implementation="mosaic_gpu"
    )


def _prefill(q, k, v, lengths, pages=None):
    return prefill_attention(
        q, k, v, lengths, pages=pages, spec=_spec(q), implementation="mosaic_gpu"
    )


def _in_pages(q, k, v, lengths):
    """Convert caches [B,Hkv,S,D] to pools [P,Hkv,page,D] in random order."""
    b, kv_heads, s, d = k.shape
    n = s // PAGE
    table = jax.random.permutation(jax.random.key(1), b * n).astype(jnp.int32).reshape(b, n)

    def pool(cache):
        pages = cache.reshape(b, kv_heads, n, PAGE, d).swapaxes(1, 2)
        return jnp.zeros((b * n, kv_heads, PAGE, d), cache.dtype).at[table].set(pages)

    return q, pool(k), pool(v), lengths, table


@functools.partial(jax.jit, static_argnums=(1, 2))
def _operands(seed, shape, tokens):
    b, h, kv_heads, s, d = shape
    q, k, v = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(q, (b, tokens, h, d), jnp.bfloat16)
    k, v = (jax.random.normal(key, (b, kv_heads, s, d), jnp.bfloat16) for key in (k, v))
    return q, k, v, jnp.full((b,), s, jnp.int32)


def _reference(q, k, v, lengths):
    return attention_reference(q, k, v, lengths, lengths - q.shape[1], spec=_spec(q))[0]


def _case(name, function, shape, tokens):
    b, h, kv_heads, s, d = shape
    return Case(
        name=f"{name} B{b} H{h} Hkv{kv_heads} S{s} D{d}",
        make_args=lambda seed: _operands(seed, shape, tokens),
        implementations={"pages": function, "rows": function},
        reference=_reference,
        bytes=2 * b * kv_heads * s * d * 2,
        flops=4 * b * h * d * (s if tokens == 1 else s * (s + 1) // 2),
        tolerance=2e-2,
        prepare={"pages": _in_pages},
    )


CASES = [
    *(_case("decode", _decode, shape, 1) for shape in DECODE),
    *(_case("prefill", _prefill, shape, shape[3]) for shape in PREFILL),
]

if __name__ == "__main__":
    raise SystemExit(main(CASES))
