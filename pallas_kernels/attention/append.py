"""One decode step of attention: RoPE of the new tokens, append to the cache, attention.

Where the plan runs "mosaic_gpu" and there is one new token per row, all of it is one launch.
"""

import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.attention.decode import choose_decode, decode_attention, decode_config
from fdjax.pallas_kernels.attention.decode_mosaic import append_decode_mosaic
from fdjax.pallas_kernels.attention.masks import Masking, check_attention
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import rotate


def append_decode_attention(
    qkv: Array,
    k_cache: Array,
    v_cache: Array,
    lengths: Array,
    *,
    scale: float,
    rotation: tuple[Array, Array] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: tuple[float, ...] | None = None,
    phi: Array | None = None,
    unified: bool = True,
    implementation: str | None = None,
    plan: Plan | None = None,
) -> tuple[Array, Array, Array]:
    """Attention of T new tokens of each row against its cache and each other.

    Args:
      qkv: [B, T, Hkv, G+2, D], T in 1..16: the G queries of each KV head, its key and its value,
        before RoPE.
      k_cache, v_cache: [B, Hkv, S, D]; updated in place where they are donated or in a loop.
      lengths: [B] int32 slots filled before; token t goes to slot lengths[b] + t, or nowhere if
        there is no such slot.
      rotation: (cos, sin) of `rope.rotation` at the tokens' positions, or None for no RoPE.
      scale, window, soft_cap, alibi, phi, unified, implementation, plan: see `decode_attention`.

    Returns:
      (o [B, T, H, D], k_cache, v_cache).

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot do this.
    """
    masking = Masking(window=window, soft_cap=soft_cap, alibi=alibi)
    if qkv.ndim != 5 or qkv.shape[3] < 3:
        raise ValueError(
            f"append_decode_attention: qkv must be [B,T,Hkv,G+2,D], got {list(qkv.shape)}"
        )
    t, kv_heads, _, d = qkv.shape[1:]
    q, k, v = split_qkv(qkv)
    check_attention("append_decode_attention", q, k_cache, v_cache, lengths, None, scale, masking)
    if k_cache.shape[1] != kv_heads:
        raise ValueError(
            f"append_decode_attention: qkv must have the {k_cache.shape[1]} KV heads of the cache, "
            f"got {kv_heads}"
        )
    choice = choose_decode(q, k_cache, masking, implementation, plan)
    turns_heads = rotation is not None and 2 * rotation[0].shape[-1] == d
    if choice.implementation == "mosaic_gpu" and t == 1 and turns_heads:
        return append_decode_mosaic(
            qkv[:, 0],
            k_cache,
            v_cache,
            lengths,
            cos=rotation[0],
            sin=rotation[1],
            scale=scale,
            masking=masking,
            phi=phi,
            unified=unified,
            config=decode_config(choice),
        )
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    k_cache, v_cache = (append(c, new, lengths) for c, new in ((k_cache, k), (v_cache, v)))
    o = decode_attention(
        q,
        k_cache,
        v_cache,
        lengths + t,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        alibi=alibi,
        phi=phi,
        unified=unified,
        implementation=implementation,
        plan=plan,
    )
    return o, k_cache, v_cache


def split_qkv(qkv: Array) -> tuple[Array, Array, Array]:
    """qkv [B,T,Hkv,G+2,D] as q [B,T,H,D], k and v [B,T,Hkv,D]."""
    b, t, _, _, d = qkv.shape
    return qkv[..., :-2, :].reshape(b, t, -1, d), qkv[..., -2, :], qkv[..., -1, :]


def append(cache: Array, new: Array, lengths: Array) -> Array:
    """Write new [B,T,Hkv,D] into cache [B,Hkv,S,D] from slot lengths[b] on."""
    b, t = new.shape[:2]
    if b == 1:
        return lax.dynamic_update_slice(cache, new.transpose(0, 2, 1, 3), (0, 0, lengths[0], 0))
    slots = lengths[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    return write(cache, new, jnp.arange(b, dtype=jnp.int32), slots)


def write_chunk(cache: Array, new: Array, rows: Array, offsets: Array, live: Array) -> Array:
    """Write the first live[r] of new [R,T,Hkv,D] into cache [B,Hkv,S,D], row rows[r].

    They go to the slots from offsets[r] on, offsets[r] + T <= S. A single row is written whole: the
    slots behind its live ones hold nothing of meaning, and a window is copied in half the time that
    a scatter of the same takes.
    """
    if len(rows) == 1:
        start = rows[0], 0, offsets[0], 0
        return lax.dynamic_update_slice(cache, new.transpose(0, 2, 1, 3), start)
    t = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    slots = jnp.where(t < live[:, None], offsets[:, None] + t, cache.shape[2])
    return write(cache, new, rows, slots)


def write(cache: Array, new: Array, rows: Array, slots: Array) -> Array:
    """Write new [R,T,Hkv,D] into cache [B,Hkv,S,D] at rows [R] and slots [R,T], if they exist.

    Every axis but D is indexed: a window over the heads would have XLA transpose the whole cache.
    """
    heads = jnp.arange(cache.shape[1], dtype=jnp.int32)
    at = cache.at[rows[:, None, None], heads[None, :, None], slots[:, None, :]]
    return at.set(new.transpose(0, 2, 1, 3), mode="drop", unique_indices=True)
