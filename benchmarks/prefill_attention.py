"""Prefill attention compared with cuDNN: `python -m benchmarks.prefill_attention`.

Every shape runs the kernel with its default configuration, cuDNN with a cache in the layout it
prefers, and ablations: a running maximum ("online" in records) instead of the unified one, other
first-level blocks, and a mask on every block. In `recompute` cases, the scores of some query heads
leave the range of the unified maximum. In `naive` cases the peer is attention without fusion, which
writes its scores to memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fdjax.bench.suite import Case, main
from fdjax.pallas_kernels.attention import AttentionSpec, prefill_attention
from fdjax.pallas_kernels.attention.hopper.prefill import default_config, prefill_mosaic

# B, H, Hkv, S, D; causal, and all rows are full
SHAPES = (
    (1, 32, 32, 1024, 128),
    (16, 32, 32, 1024, 128),
    (16, 32, 8, 1024, 128),
    (4, 32, 32, 4096, 128),
    (4, 32, 8, 4096, 128),
    (1, 32, 32, 16384, 128),
    (1, 32, 8, 16384, 128),
    (1, 32, 32, 16384, 64),
)
# block_kv and stages, by D
BLOCKS = {128: ((64, 4), (128, 2)), 64: ((64, 4), (128, 2), (192, 2), (256, 2))}

# Prompt tokens of the cases that compare with attention without fusion (one prompt, 32 heads).
NAIVE = (512, 1024, 2048, 4096, 8192)

# Number of heads, of 32, that leave the range of the unified maximum.
RECOMPUTED = (1, 32)


def _spec(q):
    return AttentionSpec(q.shape[-1] ** -0.5)


def _prefill(q, k, v, lengths):
    return prefill_attention(q, k, v, lengths, spec=_spec(q), implementation="mosaic_gpu")


def _with_config(config, q, k, v, lengths):
    o, _ = prefill_mosaic(
        *(q, k, v, lengths, jnp.zeros_like(lengths)),
        spec=_spec(q),
        return_lse=False,
        config=config,
    )
    return o


def _cudnn(q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _for_cudnn(q, k, v, lengths):
    """Convert caches [B,Hkv,S,D] to [B,S,Hkv,D]."""
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2), lengths


def _naive(q, k, v, lengths):
    """Two products with a softmax between them; scores [B,H,S,S] in float32 go through memory."""
    scores = jnp.einsum("bqhd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    s = scores.shape[-1]
    seen = jnp.tril(jnp.ones((s, s), bool))[None, None]
    p = jax.nn.softmax(jnp.where(seen, q.shape[-1] ** -0.5 * scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bhkd->bqhd", p.astype(q.dtype), v)


def _reference(q, k, v, lengths):
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    return prefill_attention(q, k, v, lengths, spec=_spec(q), implementation="xla")


@functools.partial(jax.jit, static_argnums=(1, 2))
def _operands(seed, shape, outside):
    """Random arrays; in the first `outside` heads, scores have a standard deviation of 100."""
    b, h, kv_heads, s, d = shape
    q, k, v = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(q, (b, s, h, d), jnp.bfloat16)
    k, v = (jax.random.normal(key, (b, kv_heads, s, d), jnp.bfloat16) for key in (k, v))
    q = jnp.where(jnp.arange(h)[:, None] < outside, 100 * q, q)
    return q, k, v, jnp.full((b,), s, jnp.int32)


def _case(shape, outside=0, naive=False):
    b, h, kv_heads, s, d = shape
    name = f"B{b} H{h} Hkv{kv_heads} S{s} D{d}"
    implementations = {"mosaic_gpu": _prefill}
    if outside:
        name = f"recompute {outside} heads {name}"
    elif naive:
        name = f"naive {name}"
        implementations["naive"] = _naive
    else:
        default = default_config(d)
        implementations["cudnn"] = _cudnn
        variants = {
            "online": dataclasses.replace(default, unified=False),
            "every block masked": dataclasses.replace(default, skip_masks=False),
        }
        for block_kv, stages in BLOCKS[d]:
            config = dataclasses.replace(default, block_kv=block_kv, stages=stages)
            if config.block_kv != default.block_kv:
                variants[f"block_kv {block_kv}"] = config
            elif config != default:
                variants[f"{stages} stages"] = config
        for variant, config in variants.items():
            implementations[variant] = functools.partial(_with_config, config)
    return Case(
        name=name,
        make_args=lambda seed: _operands(seed, shape, outside),
        implementations=implementations,
        reference=_reference,
        bytes=2 * b * s * d * 2 * (h + kv_heads),
        flops=2 * b * h * d * s * (s + 1),
        tolerance=2e-2,
        prepare={"cudnn": _for_cudnn},
    )


CASES = [_case(shape) for shape in SHAPES]
CASES += [_case((1, 32, 32, 4096, 128), outside) for outside in RECOMPUTED]
CASES += [_case((1, 32, 32, tokens, 128), naive=True) for tokens in NAIVE]

if __name__ == "__main__":
    raise SystemExit(main(CASES))
