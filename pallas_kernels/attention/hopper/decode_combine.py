"""Combines the splits of decode attention by their maxima, in a cluster or in a second launch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.hopper.decode_tiles import ROW, TILE, TILES
from fdjax.pallas_kernels.attention.scores import LOG2E, LOWEST

_PIPELINE_BYTES = 128 * 1024


def merge(os, ls, ms):
    """Combine splits, with o [D, R] each, by their maxima. A split with l = 0 may have any m."""
    ms = [jnp.where(l > 0, m, LOWEST) for l, m in zip(ls, ms, strict=True)]
    m = functools.reduce(jnp.maximum, ms)
    weights = [jnp.exp2(part - m) for part in ms]
    l = sum(w * part for w, part in zip(weights, ls, strict=True))
    o = sum(
        lax.broadcast_in_dim(w, part.shape, [1]) * part for w, part in zip(weights, os, strict=True)
    )
    return o, l, m


def write_result(o, l, m, out_s, lse_s):
    """Write o / l [D, R] to out_s, and the logsumexp [R] to lse_s unless that is None."""
    inverse = jnp.where(l > 0, 1.0 / l, 0.0)
    out = (o * lax.broadcast_in_dim(inverse, o.shape, [1])).astype(out_s.dtype)
    out_s.T[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
    if lse_s is not None:
        lse_s[...] = jnp.where(l > 0, m / LOG2E + jnp.log(l), -jnp.inf)


def tile_rows(row, tile, size, by_token):
    """The index of a tile's `size` query rows in q or o [B,tiles,R,D], by token [B,R,tiles,D]."""
    rows = pl.ds(row * 0, size)
    return (row, rows, tile) if by_token else (row, tile, rows)


def combine(o, lm, rows, dtype, interpret, by_token=False):
    """Combine splits o [B,Hkv,splits,D,R] and lm [B,Hkv,splits,2,R] in a separate kernel.

    Returns (o [B,Hkv,rows,D] in `dtype`, or [B,rows,Hkv,D] if `by_token`; lse [B,Hkv,R] fp32).
    """
    b, kv_heads, splits, d, padded = o.shape

    def body(o_g, lm_g, out_g, lse_g, lm_s, out_s, lse_s, barrier):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        plgpu.copy_gmem_to_smem(lm_g.at[row, head], lm_s, barrier)
        plgpu.barrier_wait(barrier)
        ls = [plgpu.load(lm_s.at[i, 0], layout=ROW) for i in range(splits)]
        ms = [plgpu.load(lm_s.at[i, 1], layout=ROW) for i in range(splits)]
        ms = [jnp.where(l > 0, m, LOWEST) for l, m in zip(ls, ms, strict=True)]
        m = functools.reduce(jnp.maximum, ms)
        l = sum(jnp.exp2(part - m) * part_l for part, part_l in zip(ms, ls, strict=True))

        def step(indices, o_s, total):
            i = indices[0]
            part_l, part_m = (plgpu.load(lm_s.at[i, j], layout=ROW) for j in range(2))
            weight = jnp.where(part_l > 0, jnp.exp2(part_m - m), 0.0)
            tile = plgpu.load(o_s, layout=TILE)
            return total + lax.broadcast_in_dim(weight, (d, padded), [1]) * tile

        total = plgpu.emit_pipeline(
            step,
            grid=(splits,),
            in_specs=[plgpu.BlockSpec((None, d, padded), lambda i: (i, 0, 0))],
            max_concurrent_steps=min(splits, 8, max(1, _PIPELINE_BYTES // (4 * d * padded))),
            init_carry=plgpu.layout_cast(jnp.zeros((d, padded), jnp.float32), TILE),
        )(o_g.at[row, head])
        write_result(total, l, m, out_s, lse_s)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_g.at[tile_rows(row, head, padded, by_token)])
        plgpu.copy_smem_to_gmem(lse_s, lse_g.at[row, head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(
                (b, rows, kv_heads, d) if by_token else (b, kv_heads, rows, d), dtype
            ),
            jax.ShapeDtypeStruct((b, kv_heads, padded), jnp.float32),
        ),
        kernel_name="decode_attention_combine",
        grid=(b, kv_heads),
        grid_names=("row", "head"),
        scratch_types=(
            plgpu.SMEM((splits, 2, padded), jnp.float32),
            plgpu.SMEM((padded, d), dtype, transforms=TILES),
            plgpu.SMEM((padded,), jnp.float32),
            plgpu.Barrier(),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(o, lm)
