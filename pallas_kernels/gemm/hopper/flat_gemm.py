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
from fdjax.pallas_kernels.gemm.hopper.flat_tile import FlatTile, in_groups
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised

MAX_SCALED_ROWS = 64
# The same for a LayerNorm, which takes two rows of a block.
MAX_CENTRED_ROWS = 32
_FEW_COLUMNS = 128


@dataclasses.dataclass(frozen=True)
class FlatGemmConfig:
    """Tiling of `matmul_flat_gemm`.

    Attributes:
      block_n: columns of a block, a multiple of 64; with a gate, columns of each half.
      block_k: rows of a weight tile, a multiple of 64 up to 256.
      stages: largest number of weight tiles in the ring; K or shared memory may allow fewer.
      split: number of blocks that share K, at most 8.
      block_m: largest number of rows of a block, 64 or 128; a tile has no more rows than M needs.
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
    def for_shape(
        cls, m: int, k: int, n: int, *, gate: bool = False, normed: bool = False
    ) -> "FlatGemmConfig":
        """A good tiling for an unmeasured shape: one wave, with at most one block per SM."""
        if n <= _FEW_COLUMNS and not gate:
            # Other blocks' sums for the norm must leave room for the ring.
            split = 8 if m <= 16 or not normed else 4 if m <= 24 else 2
            return cls(block_n=64, stages=2, split=split)
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
    norm: RMSNorm | LayerNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    dtype: Any,
    config: FlatGemmConfig | None = None,
) -> Array:
    """`matmul` of x [M,K] as one Mosaic GPU kernel. For more than 64 rows, XLA runs the norm first.

    Args:
      x: [M,K] bfloat16 or float16.
      w: [K,N], or [K,2,N] with `gate`; with `layer` stacks of these.
      layer, norm, bias, gate, activation, residual: as for `matmul`; residual is [M,N].
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
    centred = isinstance(norm, LayerNorm)
    if norm is not None and m > (MAX_CENTRED_ROWS if centred else MAX_SCALED_ROWS):
        x, norm, centred = normalised(x, norm), None, False
    x, residual = in_groups(x, residual)
    operands = {
        "x": x,
        "w": w,
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "scale": None if norm is None else norm.scale,
        "shift": norm.bias if centred else None,
        "bias": bias,
        "residual": residual,
    }
    y = _launch(
        {name: operand for name, operand in operands.items() if operand is not None},
        eps=None if norm is None else norm.eps,
        centred=centred,
        gate=gate,
        activation=activation,
        dtype=jnp.dtype(dtype),
        config=config
        or FlatGemmConfig.for_shape(m, k, n, gate=gate is not None, normed=norm is not None),
    )
    return y.reshape(-1, n)[:m]


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(
    jax.jit, static_argnames=("eps", "centred", "gate", "activation", "dtype", "config")
)
def _launch(operands, *, eps, centred, gate, activation, dtype, config):
    """Launch the kernel; `operands` are arrays by name, without those that are None.

    x, residual and the result are [groups, rows, ...]. In shared memory, each of several groups
    takes 8 rows.
    """
    tile = FlatTile(
        operands,
        n=operands["w"].shape[-1],
        wide=1,
        width=config.block_n,
        block_k=config.block_k,
        block_m=config.block_m,
        split=config.split,
        gate=gate,
        activation=activation,
        eps=eps,
        dtype=dtype,
        centred=centred,
    )
    block_k, parts, steps = config.block_k, tile.parts, tile.steps
    weights = {"w": ((parts, block_k, config.block_n), tile.in_dtype)}
    stages, scratch = tile.scratch(weights, (), parts, config)
    names = ("w", *tile.stage)

    def fetch(step, slot, names):
        """Copy a tile of each named operand into its ring; past K, M or N it is zero."""
        ks = pl.ds((tile.rank * steps + step) * block_k, block_k)
        arrived = tile.smem["arrived"].at[slot]
        for name in names:
            if name == "w":
                for part in range(parts):
                    at = (*tile.layer, ks, *((part,) if gate else ()), tile.columns)
                    target = tile.smem["w"].at[slot, part]
                    plgpu.copy_gmem_to_smem(tile.gmem["w"].at[at], target, arrived)
            else:
                tile.fetch(name, ks, slot, arrived)

    def accumulate(*accumulators):  # [block_n, block_m] each
        def step(i, squares):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(tile.smem["arrived"].at[slot])
            x, squares = tile.input(i, slot, squares)
            for part, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, tile.smem["w"].at[slot, part].T, x.T)
            # The previous step's products have finished reading their tiles. This step's run.
            plgpu.wgmma_wait(parts)
            refill = i - 1 + stages

            @when((i > 0) & (refill < steps))
            def _():
                fetch(refill, lax.rem(i - 1, stages), names)

            return squares

        squares = lax.fori_loop(0, steps, step, tile.no_squares())
        return [accumulator[...] for accumulator in accumulators], squares

    def body():
        for name in names:
            for slot in range(stages):
                fetch(slot, slot, (name,))
        tile.fetch_late()
        accumulator = plgpu.ACC((tile.block_n, tile.block_m), jnp.float32)
        tile.finish(*pl.run_scoped(accumulate, *[accumulator] * parts))

    return tile.launch("flat_gemm_kernel", scratch, body)


# (block_n, block_k, stages, split) for up to 64 rows. In sweeps over all combinations, the fastest
# was always one of these.
CANDIDATES = tuple(
    FlatGemmConfig(*c)
    for c in (
        *((64, 128, 3, 1), (64, 128, 5, 1), (64, 128, 8, 1), (64, 64, 8, 1)),
        *((64, 128, 2, 1), (64, 128, 4, 2), (64, 128, 8, 2), (64, 64, 8, 2)),
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
    # TMA clips a single tile of the result, which has 32 columns of fp32, but not the last of many.
    is_narrow = columns in (8, 16, 24, 32) and not shape["gate"]
    if k % 64 or (columns % 64 and not is_narrow):
        return f"needs K and N that are multiples of 64, got {k} and {columns}"
    return None


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    """True for sizes where an H100 ran the kernel at 0.93 to 2.7 times the speed of XLA's."""
    usual = 512 <= shape["k"] <= 2**14 and 512 <= shape["n"] <= 2**15
    # With few columns, such as those of a router, blocks share K.
    narrow = shape["k"] >= 2048 and shape["n"] <= _FEW_COLUMNS and shape["m"] <= 8
    return capability is not None and shape["m"] <= 32 and (usual or narrow)


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_flat_gemm(x, w, **keywords)


FLAT_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"}),
    fits=_fits,
    heuristic=_heuristic,
    capabilities=((9, 0), (9, 1)),
    config=FlatGemmConfig,
    candidates=_candidates,
    in_place=True,
)
