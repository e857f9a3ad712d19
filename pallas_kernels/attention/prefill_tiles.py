"""Code that prefill kernels share: operands, visible blocks of slots, scaled and masked scores."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.scores import LOG2E
from fdjax.pallas_kernels.attention.spec import AttentionSpec

# With a constant maximum, the l of every row must be in this range; see `hopper.prefill`.
SAFE = (2.0**-60, 2.0**100)

# Register layouts: of a tile [64·n, 8·m], as wgmma returns it, or mma of four warps stacked in M;
# and of one value for each of its rows.
MATRIX = plgpu.Layout.WGMMA
COLUMN = MATRIX.reduce(1)


def operands(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array,
    offsets: Array,
    *,
    spec: AttentionSpec,
    phi: Array | None = None,
    layer: Array | int | None = None,
    rows: Array | None = None,
    pages: Array | None = None,
) -> dict[str, Array]:
    """The arrays that a kernel reads, by name; optional ones only if they are given."""
    named = {
        "q": q,
        "k": k,
        "v": v,
        "lengths": lengths.astype(jnp.int32),
        "offsets": offsets.astype(jnp.int32),
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "rows": None if rows is None else rows.astype(jnp.int32),
        "pages": None if pages is None else pages.astype(jnp.int32),
        "phi": None if phi is None else phi.astype(jnp.float32),
        "slopes": spec.slopes(),
    }
    return {name: operand for name, operand in named.items() if operand is not None}


class Blocks(NamedTuple):
    """Blocks of slots that a tile of query rows sees, as scalar indices.

    Blocks `begin` to `end` are visible to some row. In blocks `bare_begin` to `bare_end` every row
    sees every slot.
    """

    begin: Array
    bare_begin: Array
    bare_end: Array
    end: Array

    @property
    def steps(self) -> Array:
        """Number of blocks."""
        return self.end - self.begin

    def part(self, index: Array, count: int) -> "Blocks":
        """Part `index` of `count` about equal parts."""
        size = lax.div(self.steps + count - 1, jnp.int32(count))
        begin = jnp.minimum(self.begin + index * size, self.end)
        end = jnp.minimum(begin + size, self.end)
        bare_begin, bare_end = (jnp.clip(x, begin, end) for x in (self.bare_begin, self.bare_end))
        return Blocks(begin, bare_begin, bare_end, end)


def visible_blocks(
    first: Array,
    length: Array,
    offset: Array,
    *,
    t: int,
    rows: int,
    block_kv: int,
    spec: AttentionSpec,
) -> Blocks:
    """Blocks of `block_kv` slots that `rows` query rows from `first` see, of T rows in all.

    The first of these rows has position `offset + first`.
    """
    top = offset + first
    bottom = jnp.minimum(jnp.minimum(top + rows, offset + t), length)
    seen = bottom if spec.causal else length
    end = jnp.where(bottom > top, lax.div(seen + (block_kv - 1), block_kv), 0)
    bare_end = lax.div(top + 1 if spec.causal else length, block_kv)
    begin = bare_begin = jnp.int32(0)
    if spec.window is not None:
        lowest = top - (spec.window - 1)
        begin = jnp.minimum(lax.div(jnp.maximum(lowest, 0), block_kv), end)
        bare_begin = lax.div(jnp.maximum(lowest + (rows - 1), 0) + (block_kv - 1), block_kv)
    bare_begin = jnp.clip(bare_begin, begin, end)
    bare_end = jnp.clip(bare_end, bare_begin, end)
    return Blocks(begin, bare_begin, bare_end, end)


def scale_and_mask(
    z: Array,
    start: Array,
    position: Array,
    length: Array,
    *,
    spec: AttentionSpec,
    slope: Array | None = None,
    shift: Array | None = None,
    masked: bool = True,
    skipped: Array | None = None,
) -> Array:
    """Turn products q·k [R,N] into scores in units of log2, less `shift`; -inf where masked.

    Args:
      z: products of the query rows at `position` [R] with the slots from `start` on.
      start: first slot.
      position: [R] positions of the query rows.
      length: number of live slots.
      spec: as in `prefill_attention`.
      slope: slope of the head, with ALiBi.
      shift: in natural units.
      masked: False if every row sees every slot.
      skipped: number of slots at the beginning that no row sees; used only if masked.
    """
    rows, n = z.shape

    def across(x):
        return lax.broadcast_in_dim(x, (rows, n), [0])

    if spec.soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        twice = jnp.exp2(z * (2 * LOG2E * spec.scale / spec.soft_cap))
        z = spec.soft_cap * LOG2E * (1.0 - 2.0 / (twice + 1.0))
    else:
        z = z * (spec.scale * LOG2E)
    if shift is not None:
        z = z - shift * LOG2E
    if spec.alibi is None and not masked:
        return z
    slot = plgpu.broadcasted_iota(jnp.int32, (rows, n), 1, layout=MATRIX)
    if spec.alibi is not None:
        distance = slot - across(position - start)
        z = z + slope * LOG2E * distance.astype(jnp.float32)
    if masked:
        stop = length - start
        if spec.causal:
            stop = across(jnp.minimum(position - start + 1, stop))
        z = jnp.where(slot < stop, z, -jnp.inf)
        if spec.window is not None:
            lowest = across(position - (start + spec.window - 1))
            z = jnp.where(slot >= lowest, z, -jnp.inf)
        if skipped is not None:
            z = jnp.where(slot >= skipped, z, -jnp.inf)
    return z
