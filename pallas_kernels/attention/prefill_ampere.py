"""Prefill attention on Ampere: warps multiply from registers, and copies run one product ahead.

FlashAttention-2 (Dao 2023) with the two-level tiles and the masks of FastAttention (Lin et al.
2024), sections 4.1 and 4.3, and the unified maximum of FlashDecoding++ (Hong et al. 2024), section
3, for GPUs of compute capability 8.x, which have neither TMA nor wgmma. (The Volta of section 4.3
is older than what Mosaic compiles for.)

A block of the grid is four warps with 64 or 128 query rows of a head, 16 or 32 for each warp.
ldmatrix loads slots of the cache from shared memory into registers, and mma.m16n8k16 multiplies
there, so P never leaves the registers. While a block of slots is multiplied by its keys, cp.async
loads its values; while it is multiplied by its values, cp.async loads the next block's keys. So one
buffer for each is enough, (block_q + 2·block_kv)·D·2 bytes in all, and two blocks of the grid share
a multiprocessor: the vector units work for one while the tensor cores work for the other.

The unified maximum, its check, the rerun of an unsafe tile and the masks are the same as in
`hopper.prefill`, except that a rerun masks every block.

It must spend 4·D FLOPs on each visible (query, key) pair. It reads K and V once for every block_q
query rows of each head, mostly from L2.

In bfloat16 it compiles for an A100 without spills at D = 64, and at D = 128 up to 8192 slots. Its
results and its speed were measured on an H100 only, which has the same instructions
(benchmarks/LOG.md).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.attention.cache import cache_features, features_of
from fdjax.pallas_kernels.attention.operands import take_layer
from fdjax.pallas_kernels.attention.prefill_tiles import (
    COLUMN,
    MATRIX,
    SAFE,
    operands,
    scale_and_mask,
    visible_blocks,
)
from fdjax.pallas_kernels.attention.scores import LOG2E, LOWEST
from fdjax.pallas_kernels.attention.spec import ALL_FEATURES
from fdjax.pallas_kernels.dispatch import Implementation, Shape, needs_half, never
from fdjax.pallas_kernels.hopper.conditional import cond, when

_SWIZZLE = 128
_K = 16  # slots of an mma


@dataclasses.dataclass(frozen=True)
class PrefillAmpereConfig:
    """Tile sizes and options.

    Attributes:
      block_q: query rows of a tile, 64 or 128. More rows need more registers and read the cache
        less often.
      block_kv: slots per step, a multiple of 32.
      held: keep the query rows in registers; otherwise read them from shared memory at each step.
      unified: use the unified maximum; False uses a running maximum.
    """

    block_q: int = 64
    block_kv: int = 64
    held: bool = True
    unified: bool = True

    def __post_init__(self):
        if self.block_q not in (64, 128):
            raise ValueError(f"prefill_attention: block_q must be 64 or 128, got {self}")
        if self.block_kv < 32 or self.block_kv % 32:
            raise ValueError(f"prefill_attention: block_kv must be a multiple of 32, got {self}")


def default_config(d: int, s: int) -> PrefillAmpereConfig:
    """The fastest on an H100 at D = 64 and 128 (benchmarks/LOG.md); otherwise one that fits."""
    if d == 64:
        return PrefillAmpereConfig(block_q=128)
    if d == 256:
        return PrefillAmpereConfig(block_kv=32, held=False)
    return PrefillAmpereConfig(block_q=128, held=False) if s > 8192 else PrefillAmpereConfig()


@functools.partial(jax.jit, static_argnames=("spec", "return_lse", "config", "interpret"))
def prefill_ampere(
    q, k, v, lengths, offsets, *, spec, return_lse=True, config=None, interpret=None, **named
):
    """`prefill_attention`; returns o [B,T,H,D] and lse [B,T,H] or None.

    Jitted, so that the layers of a model share one lowering. `named` are `phi` [H], `layer`, and
    `rows` [B] int32, the row of k and v for each row of q.
    """
    b, t, h, d = q.shape
    s = k.shape[-2]
    config = config or default_config(d, s)
    if q.dtype == jnp.float16 or not spec.unified:
        config = dataclasses.replace(config, unified=False)
    tiles = pl.cdiv(t, config.block_q)
    q = _pad(q, 1, tiles * config.block_q)
    k, v = (_pad(cache, cache.ndim - 2, max(s, config.block_kv)) for cache in (k, v))
    inputs = operands(
        q.reshape(b, tiles * config.block_q, h * d),
        k,
        v,
        jnp.minimum(lengths, s),
        offsets,
        spec=spec,
        **named,
    )
    outputs = dict(o=jax.ShapeDtypeStruct(inputs["q"].shape, q.dtype))
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((b, h, tiles * config.block_q), jnp.float32)

    def smem(rows):
        tiling = plgpu.TilingTransform((8, _SWIZZLE // q.dtype.itemsize))
        return plgpu.SMEM((rows, d), q.dtype, transforms=(tiling, plgpu.SwizzleTransform(_SWIZZLE)))

    scratch = dict(q=smem(config.block_q), k=smem(config.block_kv), v=smem(config.block_kv))

    if config.unified:
        scratch["unsafe"] = plgpu.SMEM((config.block_q,), jnp.float32)
        scratch["again"] = plgpu.SMEM((1,), jnp.int32)

    def body(*refs):
        refs = iter(refs)
        _prefill_kernel(
            *({name: next(refs) for name in names} for names in (inputs, outputs, scratch)),
            t=t,
            spec=spec,
            config=config,
        )

    out = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        kernel_name="prefill_attention",
        scratch_types=tuple(scratch.values()),
        grid=(h, tiles, b),
        grid_names=("head", "tile", "row"),
        # All layouts are given. With `Warpgroup`, inferring them would take minutes.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(*inputs.values())
    o = out[0].reshape(b, tiles * config.block_q, h, d)[:, :t]
    return o, out[1].transpose(0, 2, 1)[:, :t] if return_lse else None


def _pad(x: Array, axis: int, size: int) -> Array:
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)]) if missing else x


def _prefill_kernel(
    inputs,  # q [B,T,H·D], k, v [(L,)B,Hkv,S,D], lengths, offsets [B], (layer, rows, phi, slopes)
    outputs,  # o [B,T,H·D], (lse [B,H,T])
    scratch,  # q [M,D], k, v [N,D], (unsafe [M], again [1])
    *,
    t,
    spec,
    config,
):
    m, n = config.block_q, config.block_kv
    caches = [inputs["k"], inputs["v"]]
    if "layer" in inputs:
        index = inputs["layer"][0]
        caches = [cache.at[index] for cache in caches]
    _, kv_heads, slots, d = caches[0].shape
    dtype = caches[0].dtype
    row, head = (lax.axis_index(axis) for axis in ("row", "head"))
    kv_head = lax.div(head, inputs["q"].shape[2] // d // kv_heads)
    cache_row = inputs["rows"][row] if "rows" in inputs else row
    k, v = (cache.at[cache_row, kv_head] for cache in caches)
    # Tiles that see the most slots start first.
    first = (pl.cdiv(t, m) - 1 - lax.axis_index("tile")) * m
    length, offset = inputs["lengths"][row], inputs["offsets"][row]
    phi = inputs["phi"][head] if "phi" in inputs else None
    slope = inputs["slopes"][head] if "slopes" in inputs else None
    blocks = visible_blocks(first, length, offset, t=t, rows=m, block_kv=n, spec=spec)
    position = offset + first + plgpu.broadcasted_iota(jnp.int32, (m,), 0, layout=COLUMN)
    padding = position >= jnp.minimum(offset + t, length)
    tile = (row, pl.ds(first, m), pl.ds(head * d, d))
    q_s, k_s, v_s = (scratch[name] for name in ("q", "k", "v"))
    left = plgpu.Layout.MMA_LHS(dtype)
    right = plgpu.Layout.MMA_RHS(dtype)

    def across(x, columns):
        return lax.broadcast_in_dim(x, (m, columns), [0])

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def start_of(j):
        """First slot of block j. The last block ends with the cache and may repeat slots."""
        return jnp.minimum(j * n, slots - n)

    def copy(cache, j, block):
        _copy(cache.at[pl.ds(start_of(j), n)], block)

    _copy(inputs["q"].at[tile], q_s)
    if config.held:
        plgpu.wait_gmem_to_smem(0)
        q = plgpu.load(q_s, layout=left)

    def scores(j, masked, shift=None):
        start = start_of(j)
        plgpu.wait_gmem_to_smem(0)
        copy(v, j, v_s)
        rows = q if config.held else plgpu.load(q_s, layout=left)
        z = plgpu.mma(full((m, n), 0.0, MATRIX), rows, plgpu.load(k_s.T, layout=right))
        copy(k, j + 1, k_s)  # after the last block, this copy is not read
        return scale_and_mask(
            z,
            start,
            position,
            length,
            spec=spec,
            slope=slope,
            shift=shift,
            masked=masked,
            skipped=j * n - start if masked and slots % n else None,
        )

    def add_values(o, z, j, masked):
        """(o + P·V, row sums of P)."""
        p = jnp.exp2(z).astype(dtype)
        l = p.astype(jnp.float32).sum(axis=1)
        plgpu.wait_gmem_to_smem(1)
        if masked:
            live = length - start_of(j)
            when(live < n)(lambda: _zero_dead(v_s, live))
        for i in range(0, n, _K):
            values = plgpu.load(v_s.at[pl.ds(i, _K)], layout=right)
            o = plgpu.mma(o, _as_left(p[:, i : i + _K]), values)
        return o, l

    def over_blocks(step, carry, *, mask_all=False):
        """Run step(j, carry, masked) over the blocks of slots."""
        copy(k, blocks.begin, k_s)
        masked = functools.partial(step, masked=True)
        if mask_all:
            carry = lax.fori_loop(blocks.begin, blocks.end, masked, carry)
        else:
            if spec.window is not None:
                carry = lax.fori_loop(blocks.begin, blocks.bare_begin, masked, carry)
            bare = functools.partial(step, masked=False)
            carry = lax.fori_loop(blocks.bare_begin, blocks.bare_end, bare, carry)
            carry = lax.fori_loop(blocks.bare_end, blocks.end, masked, carry)
        plgpu.wait_gmem_to_smem(0)
        return carry

    nothing = full((m, d), 0.0, MATRIX), full((m,), 0.0, COLUMN)

    def attend_unified():
        """o and l, with φ as the maximum."""

        def step(j, carry, masked):
            o, l = carry
            o, added = add_values(o, scores(j, masked, phi), j, masked)
            return o, l + added

        return over_blocks(step, nothing)

    def attend_with_running_maximum(**options):
        """o, l and the maximum of each row, in natural units."""

        def step(j, carry, masked):
            o, l, top = carry
            z = scores(j, masked)
            new = jnp.maximum(top, z.max(axis=1))
            shrink = jnp.exp2(top - new)
            o, added = add_values(o * across(shrink, d), z - across(new, n), j, masked)
            return o, l * shrink + added, new

        o, l, top = over_blocks(step, (*nothing, full((m,), LOWEST, COLUMN)), **options)
        return o, l, top * (1 / LOG2E)

    if not config.unified:
        o, l, top = attend_with_running_maximum()
    else:
        o, l = attend_unified()
        top = nothing[1] if phi is None else nothing[1] + phi
        finite = (o * 0.0).sum(axis=1) == 0.0  # 0 · x is 0 for every finite x
        safe = (l >= SAFE[0]) & (l <= SAFE[1]) & finite
        scratch["unsafe"][...] = jnp.where(safe, 0.0, jnp.where(padding, 0.0, 1.0))
        unsafe = plgpu.load(scratch["unsafe"], layout=MATRIX.reduce(0))
        scratch["again"][0] = unsafe.max(axis=0).astype(jnp.int32)
        # A rerun is rare, so it masks every block, which halves its code.
        again = functools.partial(attend_with_running_maximum, mask_all=True)
        o, l, top = cond(scratch["again"][0] > 0, again, lambda: (o, l, top))

    seen = ~padding & (l > 0.0)
    inverse = across(jnp.where(seen, 1.0 / l, 0.0), d)
    # The result goes through shared memory, so that whole cache lines are written.
    q_s[...] = jnp.where(inverse > 0.0, o * inverse, 0.0).astype(dtype)
    whole = plgpu.Layout.SMEM_GMEM_COPY((m, d), dtype, _SWIZZLE)
    outputs["o"].at[tile][...] = plgpu.load(q_s, layout=whole)
    if "lse" in outputs:
        lse = jnp.where(seen, top + jnp.log(l), -jnp.inf)
        outputs["lse"].at[row, head, pl.ds(first, m)][...] = lse


def _copy(src, dst):
    """Copy with cp.async, which does not check the bounds of the array."""
    plgpu.copy_gmem_to_smem(src, dst, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def _zero_dead(values, live):
    """Zero the values of dead slots: they may be NaN, and 0 * NaN is NaN."""
    n, d = values.shape
    layout = plgpu.Layout.SMEM_GMEM_COPY((n, d), values.dtype, _SWIZZLE)
    x = plgpu.load(values, layout=layout)
    slot = plgpu.broadcasted_iota(jnp.int32, (n, d), 0, layout=layout)
    values[...] = jnp.where(slot < live, x, jnp.zeros_like(x))


def _as_left(x):
    """Reinterpret a result of mma as the left operand of the next, in the same registers."""
    left = plgpu.Layout.MMA_LHS(x.dtype)

    @plgpu.inline_mgpu(
        arg_types=(MATRIX,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=left)
    )
    def rename(_, x):
        layout = left.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return rename(x)


def _fits(shape: Shape) -> str | None:
    if shape["d"] not in (64, 128, 256):
        return f"on Ampere needs D of 64, 128 or 256, got {shape['d']}"
    return needs_half(shape)


def _run(q, k, v, *live, batch_invariant, pages, layer, rows, **keywords):
    if pages is not None or features_of(k):
        (k, v), layer = take_layer(k, v, layer, rows, pages), None
        rows = None
    return prefill_ampere(q, k, v, *live, layer=layer, rows=rows, **keywords)


PREFILL_AMPERE = Implementation(
    *("prefill_attention", "mosaic_gpu", _run),
    can=ALL_FEATURES | cache_features("int8"),
    fits=_fits,
    heuristic=never,
    capabilities=((8, 0), (9, 0)),
)
