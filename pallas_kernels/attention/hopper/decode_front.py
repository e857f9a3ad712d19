"""The work around attention in a decode step: norms and RoPE of q and k, append of k and v.

q, k and v of a KV head are the rows of a buffer that has each of them twice, side by side. Its
columns from D/2 on are then the row with its halves exchanged, so that RoPE is the elementwise
x cos + swapped(x) sin. The scales of norms are loaded in both ways, too.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.cache import LARGEST
from fdjax.pallas_kernels.attention.hopper.decode_tiles import COLUMN, ROW, TILE
from fdjax.pallas_kernels.hopper.conditional import when


def load_front(inputs, smem, row, head):
    """Begin to load q, k and v of the new token. Rows past them are undefined."""
    _, _, parts, d = inputs["qkv"].shape
    for part in range(parts):
        source, target = inputs["qkv"].at[row, head, part], smem["qkv"].at[part]
        for begin in (0, d):
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(begin, d)], smem["q_arrived"])
    plgpu.copy_gmem_to_smem(inputs["rotation"].at[row], smem["rotation"], smem["q_arrived"])
    if "norms" in inputs:
        plgpu.copy_gmem_to_smem(inputs["norms"], smem["norms"], smem["q_arrived"])


def rotate_rows(smem, group, eps):
    """Rotate all staged rows: x cos + swapped(x) sin. The first half of sin is negated.

    With `eps`, of the norms of q and k, each query and the key are normalised first.
    """
    x, swapped = (_load_new(smem, begin) for begin in (0, smem["q"].shape[1] // 2))
    if eps is not None:
        x, swapped = _normalised(smem, x, swapped, group, eps)
    cos, sin = (
        lax.broadcast_in_dim(plgpu.load(smem["rotation"].at[i], layout=COLUMN), x.shape, [0])
        for i in range(2)
    )
    rotated = (x * cos + swapped * sin).astype(smem["q"].dtype)
    smem["q"].T[...] = plgpu.layout_cast(rotated, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()


def _normalised(smem, x, swapped, group, eps):
    """RMS norm of columns x [D,R]: of the first `group`, which are queries, and of the key."""
    d, rows = x.shape
    mean = (x * x).sum(axis=0) / d
    is_query = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW) < group
    factor = lax.rsqrt(mean + jnp.where(is_query, *eps))
    factor = lax.broadcast_in_dim(factor, x.shape, [1])
    is_query = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=TILE) < group

    def scaled(x, which):
        q, k = (plgpu.load(smem["norms"].at[at, which], layout=COLUMN) for at in range(2))
        q, k = (lax.broadcast_in_dim(scale, x.shape, [0]) for scale in (q, k))
        y = x * factor * jnp.where(is_query, q, k)
        return y.astype(smem["q"].dtype).astype(jnp.float32)  # rounded as in `rms_norm`

    return scaled(x, 0), scaled(swapped, 1)


def _load_rows(ref):
    """Rows [R, D] of shared memory as fp32 columns [D, R]."""
    columns = plgpu.load(ref.T, layout=plgpu.Layout.WGMMA_TRANSPOSED)
    return plgpu.layout_cast(columns, TILE).astype(jnp.float32)


def _load_new(smem, begin):
    """D values of each row of the new token from column `begin` on, as fp32 columns [D, R]."""
    rows = smem["qkv"].at[:, pl.ds(begin, smem["q"].shape[1])]
    return plgpu.load(rows.T, layout=TILE, optimized=False).astype(jnp.float32)


def receive_token(smem, group):
    """Store the rotated k, and v, of the new token in smem["new"]; returns q·k of all rows, [R].

    For a cache in int8, they are rounded to codes and scales, which are stored, too.
    """
    padded, d = smem["p"].shape[0], smem["q"].shape[1]

    def column(columns, index):
        rows = plgpu.broadcasted_iota(jnp.int32, columns.shape, 1, layout=TILE)
        return jnp.where(rows == index, columns, 0.0).sum(axis=1)

    key = column(_load_rows(smem["q"]), group)
    value = column(_load_new(smem, 0), group + 1)
    # "new" may lie where "qkv" does.
    plgpu.commit_smem()
    if "codes" in smem:
        key, value = (_rounded(smem, i, values) for i, values in enumerate((key, value)))
    for i, values in enumerate((key, value)):
        smem["new"].at[i][...] = values.astype(smem["new"].dtype)
    q = _load_rows(smem["q"].at[pl.ds(0, padded)])
    return (q * lax.broadcast_in_dim(key, (d, padded), [0])).sum(axis=0)


def _rounded(smem, i, values):
    """Store codes and scale of values [D]; returns their product."""
    (codes,), scale = rounded_to_codes([values])
    smem["codes"].at[i][...] = codes.astype(jnp.int8)
    smem["new_scales"][i] = scale
    return codes * scale


def rounded_to_codes(parts):
    """Codes and scale of a token's head, given in parts [n] fp32, as `cache.quantise` does.

    For several tokens, parts are [tokens, n].
    """
    scale = functools.reduce(jnp.maximum, map(jnp.abs, parts)).max(axis=-1) / LARGEST
    divisor = jnp.where(scale > 0, scale, 1.0)
    if parts[0].ndim > 1:
        divisor = lax.broadcast_in_dim(divisor, parts[0].shape, [0])
    codes = (part / divisor for part in parts)
    return [jnp.clip(jnp.round(part), -LARGEST, LARGEST) for part in codes], scale


def write_token(caches, scales, smem, slot):
    """Begin to write the new k and v to their slot, if the row has it."""
    new = smem["codes" if scales else "new"]

    @when(slot < caches["k"].slots)
    def _():
        for i, cache in enumerate(caches.values()):
            plgpu.copy_smem_to_gmem(new.at[i], cache.token(slot))
        for i, cache in enumerate(scales.values()):
            cache.token(slot)[...] = smem["new_scales"][i]
