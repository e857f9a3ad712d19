"""Operands of attention ops: checks, the shape for the plan, selection of a layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fdjax.pallas_kernels.attention.cache import Cache, check_caches, dequantised
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import Features, Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamSlots:
    """The cache slots of beams: rows that share a prompt and parts of their responses.

    A row has ⌈P/page⌉ pages of its prompt, which the beams share. Its other pages are for its
    response, and only this row writes them: position P + t is their slot t. So a kernel can load
    the response pages of all beams of a prompt once, and use `rows` as a mask.

    Attributes:
      rows: [B, S] int32, for each position of the response, the row whose pages hold it. The rows
        of a prompt's beams are adjacent.
      prompts: [B] int32, P; or S for a row that shares nothing.
      first: [B] int32, the row of the first beam of the same prompt.
      width: W, the largest number of beams of a prompt.
      aligned: rows r·W to r·W + W - 1 are the beams of one prompt, or have no positions, for each
        r < ⌊B/W⌋; other rows have no positions.
      prompt_pages: [B] int32, entries of a row's table that belong to the prompt; default
        ⌈P/page⌉. It may be more on one of several devices that divide a row.
    """

    rows: Array
    prompts: Array
    first: Array
    width: int = dataclasses.field(metadata={"static": True})
    prompt_pages: Array | None = None
    aligned: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def features(self) -> Features:
        """Features that an implementation needs, see `Implementation.can`."""
        names = {"beams"} if self.width <= 16 else {"beams", "many_beams"}
        return frozenset(names if self.prompt_pages is None else names | {"prompt_pages"})

    def page_and_slot(self, positions: Array, size: int) -> tuple[Array, Array]:
        """(index into a row's table of pages, slot in that page) of positions [B, N]."""
        prompts = self.prompts[:, None]
        response = positions - prompts
        page = jnp.where(response < 0, positions, response) // size
        of_prompt = (prompts + size - 1) // size
        if self.prompt_pages is not None:
            of_prompt = self.prompt_pages[:, None]
        page = jnp.where(response < 0, page, page + of_prompt)
        return page, jnp.where(response < 0, positions, response) % size


def beam_features(beams: BeamSlots | None) -> Features:
    """Features that an implementation needs for `beams`."""
    return frozenset() if beams is None else beams.features


def check_attention(
    op: str,
    q: Array,
    k: Cache,
    v: Cache,
    lengths: Array,
    layer: Array | int | None,
    spec: AttentionSpec,
    rows: Array | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
    sinks: Array | None = None,
) -> None:
    """Raise ValueError if the operands of an attention op do not fit together."""
    stacked = layer is not None
    if q.ndim != 4:
        raise ValueError(f"{op}: q must be [B,T,H,D], got {list(q.shape)}")
    if k.ndim != 4 + stacked or k.shape != v.shape:
        axes = "[L,B,Hkv,S,D]" if stacked else "[B,Hkv,S,D]"
        raise ValueError(
            f"{op}: k and v must both be {axes}, got {list(k.shape)} and {list(v.shape)}"
        )
    check_caches(op, k, v)
    b, t, h, d = q.shape
    kb, kv_heads, s, kd = k.shape[stacked:]
    if pages is not None:
        if rows is not None:
            raise ValueError(f"{op}: rows and pages exclude each other")
        if pages.ndim != 2 or len(pages) != b or not jnp.issubdtype(pages.dtype, jnp.signedinteger):
            raise ValueError(
                f"{op}: pages must be signed integers [{b},N], got {pages.dtype} "
                f"{list(pages.shape)}"
            )
    if rows is not None and rows.shape != (b,):
        raise ValueError(f"{op}: rows must be [{b}], got {list(rows.shape)}")
    if (b, d) != (kb if rows is None and pages is None else b, kd):
        raise ValueError(f"{op}: q {list(q.shape)} and k {list(k.shape)} disagree on B or D")
    if not kv_heads or h % kv_heads:
        raise ValueError(f"{op}: H must be a multiple of Hkv, got {h} and {kv_heads}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{op}: q, k, v must be floating point, got {q.dtype}")
    if lengths.shape != (b,):
        raise ValueError(f"{op}: lengths must be [{b}], got {list(lengths.shape)}")
    if not jnp.issubdtype(lengths.dtype, jnp.signedinteger):
        raise ValueError(f"{op}: lengths must be signed integers, got {lengths.dtype}")
    if isinstance(layer, int | np.integer) and not 0 <= layer < k.shape[0]:
        raise ValueError(f"{op}: layer must be in 0..{k.shape[0] - 1}, got {layer}")
    s = s if pages is None else s * pages.shape[1]
    if beams is not None:
        if pages is None:
            raise ValueError(f"{op}: beams need pages")
        shapes = list(beams.rows.shape), list(beams.prompts.shape)
        if shapes != ([b, s], [b]):
            raise ValueError(f"{op}: beams must be [{b},{s}] and [{b}], got {shapes}")
        if beams.aligned and beams.width > b:
            raise ValueError(f"{op}: aligned beams need at least {beams.width} rows, got {b}")
    for axis, size in (("T", t), ("H", h), ("S", s)):
        if size < 1:
            raise ValueError(f"{op}: {axis} must be at least 1, got {size}")
    if not spec.scale > 0:
        raise ValueError(f"{op}: scale must be positive, got {spec.scale}")
    if spec.window is not None and not 1 <= spec.window < 2**31:
        raise ValueError(f"{op}: window must be from 1 to 2^31 - 1, got {spec.window}")
    if spec.soft_cap is not None and not spec.soft_cap > 0:
        raise ValueError(f"{op}: soft_cap must be positive, got {spec.soft_cap}")
    for name, unit, values in (("alibi", "slopes", spec.alibi), ("phi", "values", spec.phi)):
        if values is not None and len(values) != h * spec.ranks:
            raise ValueError(f"{op}: {name} must have {h * spec.ranks} {unit}, got {len(values)}")
    got = None if sinks is None else list(sinks.shape)
    if got != ([h] if spec.sinks else None):
        raise ValueError(f"{op}: sinks must be {[h] if spec.sinks else None}, got {got}")


def check_offsets(op: str, offsets: Array, rows: int) -> None:
    """Raise ValueError unless there is a slot for the first token of each row."""
    if offsets.shape != (rows,) or not jnp.issubdtype(offsets.dtype, jnp.signedinteger):
        raise ValueError(
            f"{op}: offsets must be signed integers [{rows}], got {offsets.dtype} "
            f"{list(offsets.shape)}"
        )


def attention_shape(
    q: Array, k: Cache, spec: AttentionSpec, pages: Array | None = None
) -> dict[str, int]:
    """The plan's shape key for attention of q [B,T,H,D] against k [...,Hkv,S,D], or pages of it."""
    b, t, h, d = q.shape
    return {
        "b": b,
        "t": t,
        "h": h,
        "hkv": k.shape[-3],
        "s": row_slots(k, pages),
        "d": d,
        "itemsize": q.dtype.itemsize,
        "masks": int(spec.is_masked),
    }


def slots_are_tiled(shape: Shape) -> str | None:
    """Check for `Implementation.fits`: TMA copies tiles of 8 slots."""
    return None if shape["s"] % 8 == 0 else f"needs S to be a multiple of 8, got {shape['s']}"


def rotation_features(rotation: tuple[Array, Array] | None, d: int) -> Features:
    """Features that a rotation needs beyond RoPE of whole heads, see `Implementation.can`."""
    whole = rotation is None or 2 * rotation[0].shape[-1] == d
    return frozenset() if whole else frozenset({"partial_rope"})


def no_rotation(b: int, t: int, d: int) -> tuple[Array, Array]:
    """(cos, sin) [b,t,d/2] that change no bit of a finite head, for kernels that always rotate."""
    shape = b, t, d // 2
    return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)


def row_slots(cache: Cache, pages: Array | None) -> int:
    """Slots of a row of a cache [...,S,D], or of `pages` [B,N] of a pool [...,page,D]."""
    return cache.shape[-2] * (1 if pages is None else pages.shape[1])


def take_layer(
    k: Cache,
    v: Cache,
    layer: Array | int | None,
    rows: Array | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
) -> tuple[Array, Array]:
    """The caches [R,Hkv,S,D] of one layer, for all rows, for `rows` [R] or for `pages`.

    Rows and pages are copied. Of a quantised cache, only these copies are dequantised.
    """
    if beams is not None:
        index = _positions(k, layer, pages, beams)

        def take(pool):
            return pool[index]

    elif pages is not None:
        take = functools.partial(_gathered, layer=layer, pages=pages)
    else:
        take = functools.partial(_of_layer, layer=layer, rows=rows)
    return tuple(dequantised(jax.tree.map(take, cache)) for cache in (k, v))


def _of_layer(cache: Array, layer: Array | int | None, rows: Array | None) -> Array:
    """One layer of a cache [(L,)B,...], of all rows or of `rows` [R]."""
    if layer is not None:
        cache = lax.dynamic_index_in_dim(cache, layer, keepdims=False)
    return cache if rows is None else cache[rows]


def _gathered(pool: Array, layer: Array | int | None, pages: Array) -> Array:
    """Copy `pages` [R,N] of a pool [(L,)P,Hkv,page,...] into rows [R,Hkv,N·page,...]."""
    found = pool[pages] if layer is None else pool[layer, pages]
    r, n, kv_heads, size, *rest = found.shape
    return found.swapaxes(1, 2).reshape(r, kv_heads, n * size, *rest)


def _positions(
    pool: Cache, layer: Array | int | None, pages: Array, beams: BeamSlots
) -> tuple[Array | int, ...]:
    """Index of the positions of beams [B,Hkv,S] into a pool [(L,)P,Hkv,page,...]."""
    b, s = beams.rows.shape
    positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
    page, slot = beams.page_and_slot(positions, pool.shape[-2])
    own = jnp.arange(b, dtype=jnp.int32)[:, None]
    row = jnp.where(positions < beams.prompts[:, None], own, beams.rows)
    page = pages[row, jnp.minimum(page, pages.shape[1] - 1)]
    heads = jnp.arange(pool.shape[-3], dtype=jnp.int32)[None, :, None]
    index = page[:, None], heads, slot[:, None]
    return index if layer is None else (layer, *index)
