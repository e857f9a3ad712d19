"""Flat GEMM on Hopper's tensor cores: epilogue(norm(x) @ w) for a few rows x, in one launch.

FlashDecoding++ (Hong et al. 2024), section 4. With M = 1-128 rows the product is bound by its
weight: K·N·itemsize bytes (twice that with a gate) are read once. x and y take M·(K + N)·itemsize
bytes and stay in L2. At 3 TB/s and about 0.8 us of latency, 2.5 MB must be in flight at all times,
20 kB for each of 132 SMs. The ramps at both ends take about 2 us more than bytes / bandwidth.

The operands are swapped, y^T = w^T x^T: the 64 rows that a wgmma instruction needs come from N, and
M is padded only to a multiple of 8. A block owns `block_n` columns and walks along K; a ring of
`stages` TMA copies loads its weight tiles. All blocks should run at once, each with its share of
the bandwidth: in a second wave, most SMs would be idle while the last blocks stream
(`FlatGemmConfig.for_shape`). If N gives too few blocks, `split` blocks of a cluster share K. The
first adds the others' partial sums in a fixed order from its own shared memory: no second launch,
no atomics, the same bits in every run.

The norm is y = r · ((x · scale) @ w) with r = 1 / sqrt(mean(x²) + eps). Each block scales the tiles
of x before they are multiplied and sums their squares; r multiplies the accumulator. x · scale is
rounded where XLA rounds x · r · scale, so the errors are alike. For more than 64 rows, scaling in
every block would take longer than the product, so XLA normalises them first. The epilogue is fp32
and rounds once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.dispatch import Capability, Implementation, Shape, needs_half
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.tiles import (
    KERNEL_ACTIVATIONS,
    LAYOUT,
    load,
    matrix,
    shared_bytes,
)
from fdjax.pallas_kernels.norm import RMSNorm, rms_norm

_SMEM_BYTES = 227 * 1024 - 256  # shared memory of a block, less its barriers
_MAX_GROUPS = 8
_MAX_SCALED_ROWS = 64


@dataclasses.dataclass(frozen=True)
class FlatGemmConfig:
    """Tiling of `matmul_flat_gemm`.

    Attributes:
      block_n: columns of a block, a multiple of 64; with a gate, columns of each half.
      block_k: rows of a weight tile, a multiple of 64 up to 256.
      stages: most weight tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K, at most 8.
      block_m: most rows of a block, 64 or 128; a tile has no more than M needs.
    """

    block_n: int = 64
    block_k: int = 128
    stages: int = 4
    split: int = 1
    block_m: int = 64

    def __post_init__(self):
        if self.block_n < 64 or self.block_n % 64 or self.block_n > 256:
            raise ValueError(f"flat_gemm: block_n must be 64, 128, 192 or 256, got {self.block_n}")
        if self.block_k < 64 or self.block_k % 64 or self.block_k > 256:
            raise ValueError(f"flat_gemm: block_k must be 64, 128, 192 or 256, got {self.block_k}")
        if self.stages < 2:
            raise ValueError(f"flat_gemm: stages must be at least 2, got {self.stages}")
        if not 1 <= self.split <= 8:
            raise ValueError(f"flat_gemm: split must be in 1..8, got {self.split}")
        if self.block_m not in (64, 128):
            raise ValueError(f"flat_gemm: block_m must be 64 or 128, got {self.block_m}")

    @classmethod
    def for_shape(cls, m: int, k: int, n: int, *, gate: bool = False) -> "FlatGemmConfig":
        """A good tiling for an unmeasured shape: one wave, with at most one block per SM."""
        widest = 128 if gate or m > 32 else 256
        block_n = next((b for b in range(64, widest, 64) if -(-n // b) <= MULTIPROCESSORS), widest)
        columns = block_n * (2 if gate else 1)
        blocks = -(-n // block_n)
        return cls(
            block_n=block_n,
            block_k=128 if columns <= 128 else 64,
            stages=4 if columns == 64 else 3,
            split=2 if blocks <= MULTIPROCESSORS // 2 and k >= 2048 else 1,
        )


def matmul_flat_gemm(
    x: Array,
    w: Array,
    *,
    layer: Array | int | None = None,
    norm: RMSNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    residual: Array | None = None,
    dtype: Any,
    config: FlatGemmConfig | None = None,
) -> Array:
    """`matmul` of x [M,K] as one Mosaic GPU kernel. For more than 64 rows, XLA runs the norm first.

    Args:
      x: [M,K] bfloat16 or float16.
      w: [K,N], or [K,2,N] with `gate`; with `layer` stacks of these.
      layer, norm, bias, gate, residual: as for `matmul`; residual is [M,N].
      dtype: dtype of the result.
      config: default `FlatGemmConfig.for_shape`.

    Returns:
      [M,N].

    Raises:
      NotImplementedError: shared memory has no room for the configuration.
    """
    m, k = x.shape
    n = w.shape[-1]
    if m == 0:
        return jnp.zeros((m, n), dtype)
    if norm is not None and m > _MAX_SCALED_ROWS:
        x, norm = rms_norm(x, norm.scale, eps=norm.eps), None
    groups = _groups(m)
    if groups is None:
        groups, padding = 1, ((0, -m % 8), (0, 0))
        x = jnp.pad(x, padding)
        residual = None if residual is None else jnp.pad(residual, padding)
    operands = {
        "x": x.reshape(groups, -1, k),
        "w": w,
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "scale": None if norm is None else norm.scale,
        "bias": bias,
        "residual": None if residual is None else residual.reshape(groups, -1, n),
    }
    y = _launch(
        {name: operand for name, operand in operands.items() if operand is not None},
        eps=None if norm is None else norm.eps,
        gate=gate,
        dtype=jnp.dtype(dtype),
        config=config or FlatGemmConfig.for_shape(m, k, n, gate=gate is not None),
    )
    return y.reshape(-1, n)[:m]


def _groups(m: int) -> int | None:
    """Number of equal groups in which TMA copies the rows: 1 if 8 divides M, else of under 8 rows.

    None if there is no such number up to `_MAX_GROUPS`. Then the rows must be padded.
    """
    if m % 8 == 0:
        return 1
    return next((g for g in range(-(-m // 8), _MAX_GROUPS + 1) if m % g == 0), None)


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(jax.jit, static_argnames=("eps", "gate", "dtype", "config"))
def _launch(operands, *, eps, gate, dtype, config):
    """Launch the kernel; `operands` are arrays by name, without those that are None.

    x, residual and the result are [groups, rows, ...]. In shared memory, each of several groups
    takes 8 rows.
    """
    groups, m, k = operands["x"].shape
    n = operands["w"].shape[-1]
    in_dtype = operands["x"].dtype
    tile_m = min(-(-m // 8) * 8, config.block_m)
    block_m = groups * tile_m
    block_n, block_k, split = config.block_n, config.block_k, config.split
    parts = 2 if gate else 1
    steps = -(-k // (block_k * split))
    normed = "scale" in operands
    late = groups * ("residual" in operands) + parts * ("bias" in operands)

    buffers = {"y": ((block_m, block_n), dtype)}
    if normed:
        buffers["scaled_x"] = ((2, block_m, block_k), in_dtype)
    if "residual" in operands:
        buffers["residual"] = ((block_m, block_n), operands["residual"].dtype)
    if "bias" in operands:
        buffers["bias"] = ((parts, block_n), operands["bias"].dtype)
    if split > 1:
        buffers["partial"] = ((split - 1, parts, block_n, block_m), jnp.float32)
        if normed:
            buffers["partial_squares"] = ((split - 1, 64, block_m), jnp.float32)
    stage = {"w": ((parts, block_k, block_n), in_dtype), "x": ((block_m, block_k), in_dtype)}
    if normed:
        stage["scale"] = ((block_k,), operands["scale"].dtype)
    # The sum of squares over the warps of a block takes 8 bytes per row.
    room = _SMEM_BYTES - 8 * block_m - shared_bytes(buffers)
    stages = min(config.stages, steps, room // shared_bytes(stage))
    if stages < min(2, steps):
        raise NotImplementedError(f"matmul: {config} does not fit into shared memory at M = {m}")
    buffers |= {name: ((stages, *shape), dtype) for name, (shape, dtype) in stage.items()}
    scratch = {
        name: (plgpu.SMEM if name in ("scale", "bias") else matrix)(*buffer)
        for name, buffer in buffers.items()
    }
    scratch["arrived"] = plgpu.Barrier(num_arrivals=parts + groups + normed, num_barriers=stages)
    if late:
        scratch["late_arrived"] = plgpu.Barrier(num_arrivals=late)
    if split > 1:
        scratch["partial_arrived"] = plgpu.Barrier(num_arrivals=(split - 1) * (parts + normed))

    def flat_gemm_kernel(*refs):
        gmem = dict(zip((*operands, "y"), refs, strict=False))
        pl.run_scoped(functools.partial(body, gmem), **scratch)

    def body(gmem, **smem):
        columns = pl.ds(lax.axis_index("n") * block_n, block_n)
        rows = pl.ds(pl.multiple_of(lax.axis_index("m") * tile_m, 8), tile_m)
        tiles = [pl.ds(group * tile_m, tile_m) for group in range(groups)]
        rank = lax.axis_index("k")
        layer = (gmem["layer"][0],) if "layer" in gmem else ()

        def fetch(step, slot, names):
            """Copy a tile of each named operand into its ring; past K, M or N it is zero."""
            ks = pl.ds((rank * steps + step) * block_k, block_k)
            arrived = smem["arrived"].at[slot]
            if "w" in names:
                for part in range(parts):
                    tile = (*layer, ks, part, columns) if gate else (*layer, ks, columns)
                    plgpu.copy_gmem_to_smem(gmem["w"].at[tile], smem["w"].at[slot, part], arrived)
            if "x" in names:
                for group, tile in enumerate(tiles):
                    source, target = gmem["x"].at[group, rows, ks], smem["x"].at[slot, tile]
                    plgpu.copy_gmem_to_smem(source, target, arrived)
            if "scale" in names:
                plgpu.copy_gmem_to_smem(gmem["scale"].at[ks], smem["scale"].at[slot], arrived)

        def scale_x(slot, scaled, squares):
            """Scale a tile [block_m, block_k] of x; add its squares to `squares` [64, block_m]."""
            for start in range(0, block_k, 64):
                ks = pl.ds(start, 64)
                x = load(smem["x"].at[slot, :, ks].T)  # [64, block_m]
                scale = load(smem["scale"].at[slot, ks], LAYOUT.reduce(1))  # [64]
                squares += x * x
                x *= lax.broadcast_in_dim(scale, x.shape, [0])
                scaled.at[:, ks].T[...] = x.astype(in_dtype)
            plgpu.commit_smem()
            return squares

        def accumulate(*accumulators):  # [block_n, block_m] each
            def step(i, squares):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(smem["arrived"].at[slot])
                x = smem["x"].at[slot]
                if normed:
                    x = smem["scaled_x"].at[lax.rem(i, 2)]
                    squares = scale_x(slot, x, squares)
                for part, accumulator in enumerate(accumulators):
                    plgpu.wgmma(accumulator, smem["w"].at[slot, part].T, x.T)
                # The previous step's products have finished reading their tiles. This step's run.
                plgpu.wgmma_wait(parts)
                refill = i - 1 + stages

                @when((i > 0) & (refill < steps))
                def _():
                    fetch(refill, lax.rem(i - 1, stages), stage)

                return squares

            squares = None
            if normed:
                squares = plgpu.layout_cast(jnp.zeros((64, block_m), jnp.float32), LAYOUT)
            squares = lax.fori_loop(0, steps, step, squares)
            return [accumulator[...] for accumulator in accumulators], squares

        for name in ("w", *(name for name in stage if name != "w")):
            for slot in range(stages):
                fetch(slot, slot, (name,))
        if "residual" in gmem:
            for group, tile in enumerate(tiles):
                source, target = (
                    gmem["residual"].at[group, rows, columns],
                    smem["residual"].at[tile],
                )
                plgpu.copy_gmem_to_smem(source, target, smem["late_arrived"])
        if "bias" in gmem:
            for part in range(parts):
                source = gmem["bias"].at[(part, columns) if gate else columns]
                plgpu.copy_gmem_to_smem(source, smem["bias"].at[part], smem["late_arrived"])

        products, squares = pl.run_scoped(
            accumulate, *[plgpu.ACC((block_n, block_m), jnp.float32)] * parts
        )

        def epilogue():
            total, sum_of_squares = list(products), squares
            if split > 1:
                plgpu.barrier_wait(smem["partial_arrived"])
                for peer in range(split - 1):
                    for part in range(parts):
                        total[part] += load(smem["partial"].at[peer, part])
                    if normed:
                        sum_of_squares += load(smem["partial_squares"].at[peer])
            if normed:
                r = lax.rsqrt(jnp.sum(sum_of_squares, axis=0) / k + eps)  # [block_m]
                total = [t * lax.broadcast_in_dim(r, t.shape, [1]) for t in total]
            if late:
                plgpu.barrier_wait(smem["late_arrived"])
            if "bias" in gmem:
                for part in range(parts):
                    b = load(smem["bias"].at[part], LAYOUT.reduce(1))  # [block_n]
                    total[part] += lax.broadcast_in_dim(b, total[part].shape, [0])
            y = KERNEL_ACTIVATIONS[gate](total[0]) * total[1] if gate else total[0]
            if "residual" in gmem:
                y += load(smem["residual"].T)
            y = y.astype(dtype)
            if dtype.itemsize == 4:
                y = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            smem["y"].T[...] = y
            plgpu.commit_smem()
            for group, tile in enumerate(tiles):
                plgpu.copy_smem_to_gmem(smem["y"].at[tile], gmem["y"].at[group, rows, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if split == 1:
            epilogue()
            return

        @when(rank > 0)
        def _send():
            send = functools.partial(
                plgpu.async_store_smem,
                barrier=smem["partial_arrived"],
                cluster_idx=0,
                cluster_dim="k",
                optimized=False,
            )
            for part in range(parts):
                send(products[part], smem["partial"].at[rank - 1, part])
            if normed:
                send(squares, smem["partial_squares"].at[rank - 1])

        when(rank == 0)(epilogue)

    return plgpu.kernel(
        flat_gemm_kernel,
        out_type=jax.ShapeDtypeStruct((groups, m, n), dtype),
        grid=(-(-n // block_n), -(-m // block_m)),
        grid_names=("n", "m"),
        cluster=(split,),
        cluster_names=("k",),
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())


# (block_n, block_k, stages, split) for up to 64 rows. In sweeps over all combinations, the fastest
# was always one of these.
CANDIDATES = tuple(
    FlatGemmConfig(*c)
    for c in (
        *((64, 128, 3, 1), (64, 128, 5, 1), (64, 128, 8, 1), (64, 64, 8, 1)),
        *((64, 128, 2, 1), (64, 128, 4, 2), (64, 64, 8, 2)),
        *((128, 64, 3, 1), (128, 64, 4, 1), (128, 64, 6, 1), (128, 128, 2, 1), (128, 128, 3, 1)),
        *((192, 64, 4, 1), (256, 64, 3, 1), (256, 64, 4, 1)),
    )
)

# (block_n, block_k, stages, split, block_m) for more than 64 rows.
TALL_CANDIDATES = tuple(
    FlatGemmConfig(*c)
    for c in (
        *((64, 64, 4, 1, 64), (64, 64, 6, 1, 64), (128, 64, 3, 1, 64), (128, 64, 4, 1, 64)),
        *((64, 64, 3, 1, 128), (64, 64, 4, 1, 128), (64, 64, 6, 1, 128), (64, 64, 6, 2, 128)),
        *((128, 64, 2, 1, 128), (128, 64, 4, 1, 128), (128, 64, 6, 1, 128), (192, 64, 4, 1, 128)),
    )
)


def _candidates(shape: Shape) -> list[FlatGemmConfig]:
    """Tilings with enough blocks to use the bandwidth, but no more than run at once."""
    tilings = CANDIDATES if shape["m"] <= 64 else TALL_CANDIDATES
    return [config for config in tilings if _runs_at_once(shape, config)]


def _runs_at_once(shape: Shape, config: FlatGemmConfig) -> bool:
    parts = 1 + shape["gate"]
    tiles = -(-shape["n"] // (parts * config.block_n)) * -(-shape["m"] // config.block_m)
    blocks = tiles * config.split
    ring_bytes = 2 * parts * config.block_n * config.block_k * config.stages
    return blocks >= 48 and ring_bytes * -(-blocks // MULTIPROCESSORS) <= 200 * 1024


def _fits(shape: Shape) -> str | None:
    k, columns = shape["k"], shape["n"] // (1 + shape["gate"])
    if problem := needs_half(shape):
        return problem
    if k % 64 or columns % 64:
        return f"needs K and N that are multiples of 64, got {k} and {columns}"
    return None


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    """True for sizes where an H100 ran the kernel at 0.93 to 2.7 times the speed of XLA's."""
    usual = 512 <= shape["k"] <= 2**14 and 512 <= shape["n"] <= 2**15
    return capability is not None and shape["m"] <= 32 and usual


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_flat_gemm(x, w, **keywords)


FLAT_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "bias", "gate", "residual"}),
    fits=_fits,
    heuristic=_heuristic,
    capabilities=((9, 0), (9, 1)),
    config=FlatGemmConfig,
    candidates=_candidates,
)
