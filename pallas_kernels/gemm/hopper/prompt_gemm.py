"""GEMM for prompts on Hopper: epilogue(x @ w) for hundreds of rows, in one launch.

The tensor cores bound such a product, and cuBLAS keeps them as busy. But after cuBLAS, activation,
gate, bias and residual are kernels of their own, which read and write the result again. They take
7 % of the time of gate and up. Here they are the end of the product, in fp32. And w may be a layer
of a stack, so that a program can run its layers in a loop. XLA would copy each layer.

A block is persistent: it computes one tile of the result after another. One warpgroup copies tiles
of x and w into a ring. It begins the next tile of the result while the others finish this one. Two
warpgroups multiply; each has 64 rows and all columns of the tile. The blocks of a cluster have
different rows and the same columns. Each copies a part of the tile of w to all of them. Otherwise
the multiprocessors would read more than L2 delivers.

The residual comes through the ring as well, in the place of tiles of x. XLA runs the norm.
"""

import dataclasses
import functools
import itertools
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
    LAYOUT,
    finished,
    in_eights,
    load,
    matrix,
    shared_bytes,
)
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised

_LEAST_ROWS = 257  # up to 256 rows, the flat GEMM was measured
_MOST_ROWS = 1024  # that it takes unless it is named
_CONSUMERS = 2
_ROWS = 64  # rows of a warpgroup that multiplies: M of wgmma
_TILE_M = _CONSUMERS * _ROWS
_BLOCK_K = 64
_WIDTHS = {False: (256, 192, 128), True: (256, 128)}  # values of `block_n`, by gate
# Measured on an H200: the time of a tile beside that of its columns, and the number of rows up to
# which blocks are not slower alone.
_COLUMNS_OF_A_TILE, _FEW_ROWS = 32, 1024
_CHUNK = 64  # columns of the result that a warpgroup stores at once
_SMEM_BYTES = 227 * 1024 - 1024  # shared memory of a block, less its barriers
_MOST_STAGES = 8
# Registers of a thread that multiplies, and of one that copies.
_REGISTERS = 232, 40


@dataclasses.dataclass(frozen=True)
class PromptGemmConfig:
    """Tiling of `matmul_prompt_gemm`.

    Attributes:
      block_n: columns of a tile, 128, 192 or 256; with a gate, of both halves together, 128 or 256.
      share: blocks of a cluster, which share w, 1 or 2.
      tall: tiles above one another that are computed before those of the next columns.
    """

    block_n: int = 256
    share: int = 2
    tall: int = 16

    def __post_init__(self):
        if self.block_n not in (128, 192, 256):
            raise ValueError(f"prompt_gemm: block_n must be 128, 192 or 256, got {self.block_n}")
        if self.share not in (1, 2):
            raise ValueError(f"prompt_gemm: share must be 1 or 2, got {self.share}")
        if self.tall < self.share:
            raise ValueError(f"prompt_gemm: tall must be at least share, got {self.tall}")

    @classmethod
    def for_shape(cls, m: int, n: int, *, gate: bool = False) -> "PromptGemmConfig":
        """The tiling of the least estimated time."""
        shares = (1, 2) if m <= _FEW_ROWS else (2, 1)  # the first wins if both take as long
        options = [cls(*option) for option in itertools.product(_WIDTHS[gate], shares)]
        return min(options, key=lambda config: config.cost(m, n, gate=gate))

    def cost(self, m: int, n: int, *, gate: bool) -> int:
        """The estimated time of a block, as that of so many columns."""
        clusters = -(-m // (_TILE_M * self.share)) * -(-n // (self.block_n // (1 + gate)))
        tiles = -(-clusters // (MULTIPROCESSORS // self.share))
        return tiles * (self.block_n + _COLUMNS_OF_A_TILE)


def matmul_prompt_gemm(
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
    config: PromptGemmConfig | None = None,
    interpret: Any = None,
) -> Array:
    """`matmul` of x [M,K] as one Mosaic GPU kernel, after the norm by XLA.

    Args:
      x: [M,K] bfloat16 or float16; K is a multiple of 64.
      w: [K,N], or [K,2,N] with `gate`; with `layer` stacks of these. N is a multiple of 64.
      layer, norm, bias, gate, activation, residual: as for `matmul`; residual is [M,N].
      dtype: dtype of the result.
      config: default `PromptGemmConfig.for_shape`.
      interpret: parameters of the interpreter, or None. It knows no clusters.

    Returns:
      [M,N].

    Raises:
      NotImplementedError: the configuration is not for a gate.
    """
    (m, _), n = x.shape, w.shape[-1]
    config = config or PromptGemmConfig.for_shape(m, n, gate=gate is not None)
    if config.block_n not in _WIDTHS[gate is not None]:
        raise NotImplementedError(
            f"matmul: prompt_gemm has no tile of {config.block_n} columns with a gate"
        )
    if norm is not None:
        x = normalised(x, norm)
    added = None
    if residual is not None and residual.dtype != x.dtype:
        residual, added = None, residual.astype(jnp.float32)
    x, residual = in_eights(x, residual)
    operands = {
        "x": x,
        "w": w,
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "bias": None if bias is None else bias.reshape(-1, n),
        "residual": residual,
    }
    y = _launch(
        {name: operand for name, operand in operands.items() if operand is not None},
        gate=gate,
        activation=activation,
        dtype=jnp.dtype(dtype if added is None else jnp.float32),
        config=config,
        interpret=interpret,
    )
    return y[:m] if added is None else (y[:m] + added).astype(dtype)


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(jax.jit, static_argnames=("gate", "activation", "dtype", "config", "interpret"))
def _launch(operands, *, gate, activation, dtype, config, interpret):
    """Launch the kernel; `operands` are arrays by name, without those that are None."""
    kernel = _Kernel(operands, gate, activation, dtype, config)
    scratch = kernel.scratch()

    def prompt_gemm_kernel(*refs):
        gmem = dict(zip((*operands, "y"), refs, strict=False))
        kernel.run(gmem, dict(zip(scratch, refs[len(gmem) :], strict=True)))

    return plgpu.kernel(
        prompt_gemm_kernel,
        out_type=jax.ShapeDtypeStruct((kernel.m, kernel.n), dtype),
        scratch_types=tuple(scratch.values()),
        grid=(kernel.clusters,),
        grid_names=("cluster",),
        cluster=(config.share,),
        cluster_names=("share",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands.values())


class _Kernel:
    """The work of a block.

    Attributes:
      m, k, n: rows of x, rows and columns of w.
      parts: 2 for gate and up, 1 without a gate.
      columns: columns of the result in a tile.
      steps: tiles along K.
      late: tiles of the ring that the residual of a tile takes.
      tiles: (tiles along M for a whole cluster, tiles along N).
      clusters: clusters that run, each as many tiles as the others or one less.
      stages: tiles in the ring.
      gmem, smem: references by name, once the kernel runs.
    """

    def __init__(self, operands, gate, activation, dtype, config) -> None:
        self.operands, self.gate, self.activation = operands, gate, activation
        self.dtype, self.config = dtype, config
        (self.m, self.k), self.n = operands["x"].shape, operands["w"].shape[-1]
        self.parts = 1 if gate is None else 2
        self.columns = config.block_n // self.parts
        self.steps = self.k // _BLOCK_K
        self.chunks = self.columns // _CHUNK
        self.late = self.chunks if "residual" in operands else 0
        self.tiles = -(-self.m // (_TILE_M * config.share)), -(-self.n // self.columns)
        self.count = self.tiles[0] * self.tiles[1]
        self.clusters = min(MULTIPROCESSORS // config.share, self.count)
        self.gmem, self.smem = {}, {}

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers. Sets `stages`."""
        in_dtype = self.operands["x"].dtype
        store = {"y": ((_CONSUMERS, 2, _ROWS, _CHUNK), self.dtype)}
        stage = {
            "x": ((_TILE_M, _BLOCK_K), in_dtype),
            "w": ((self.parts, _BLOCK_K, self.columns), in_dtype),
        }
        room = _SMEM_BYTES - shared_bytes(store)
        # The ring holds no more than a tile of the result needs. So the residual of the next one is
        # requested only when this one's has been waited for, and a barrier counts one at a time.
        needed = self.steps + self.late
        self.stages = min(_MOST_STAGES, room // shared_bytes(stage), needed)
        buffers = store | {
            name: ((self.stages, *shape), dtype) for name, (shape, dtype) in stage.items()
        }
        scratch = {name: matrix(*buffer) for name, buffer in buffers.items()}
        empty = plgpu.Barrier
        if self.config.share > 1:
            empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("share",))
        scratch["full"] = plgpu.Barrier(num_arrivals=1 + self.parts, num_barriers=self.stages)
        scratch["empty"] = empty(num_arrivals=_CONSUMERS, num_barriers=self.stages)
        if self.late:
            scratch["late_full"] = plgpu.Barrier(num_barriers=self.late)
        return scratch

    # Within the kernel.

    def run(self, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
        """The work of all warpgroups."""
        self.gmem, self.smem = gmem, smem
        self.cluster, self.rank = lax.axis_index("cluster"), lax.axis_index("share")
        self.own = lax.div(self.count - self.cluster + self.clusters - 1, self.clusters)
        warpgroup = lax.axis_index("warpgroup")
        most, least = _REGISTERS

        @when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(least, action="decrease")
            self._produce()

        @when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(most, action="increase")
            self._consume(warpgroup)

    def _place(self, index) -> tuple[Any, Any]:
        """First row and column of one of the tiles of this block."""
        at, (rows, columns) = index * self.clusters + self.cluster, self.tiles
        tall = self.config.tall // self.config.share
        above = lax.div(at, tall * columns) * tall  # rows of clusters before this group of them
        height, left = jnp.minimum(rows - above, tall), at - above * columns
        column = lax.div(left, height)
        row = (above + left - column * height) * self.config.share + self.rank
        return pl.multiple_of(row * _TILE_M, _TILE_M), pl.multiple_of(column * self.columns, _CHUNK)

    def _produce(self) -> None:
        """Copy the tiles of x and w, and then those of the residual, of all tiles of the result."""
        smem, stages = self.smem, self.stages

        def acquire(i):
            """Wait until a tile of the ring is free; returns its index."""
            slot = lax.rem(i, stages)
            when(i >= stages)(lambda: plgpu.barrier_wait(smem["empty"].at[slot]))
            return slot

        def tile(index, i):
            row, column = self._place(index)

            def fetch(step, i):
                self._fetch(step, row, column, acquire(i))
                return i + 1

            i = lax.fori_loop(0, self.steps, fetch, i)
            for late in range(self.late):
                rows = pl.ds(row, _TILE_M), pl.ds(column + late * _CHUNK, _CHUNK)
                target, full = smem["x"].at[acquire(i + late)], smem["late_full"].at[late]
                plgpu.copy_gmem_to_smem(self.gmem["residual"].at[rows], target, full)
            return i + self.late

        end = lax.fori_loop(0, self.own, tile, jnp.int32(0))

        # Every arrival is waited for, also those of the other block.
        def drain(i, _):
            plgpu.barrier_wait(smem["empty"].at[lax.rem(i, stages)])

        lax.fori_loop(jnp.maximum(end - stages, 0), end, drain, None)

    def _fetch(self, step, row, column, slot) -> None:
        """Copy the tiles of x and w of a step; past M and N they are zero."""
        gmem, smem, full = self.gmem, self.smem, self.smem["full"].at[slot]
        ks, columns = pl.ds(step * _BLOCK_K, _BLOCK_K), pl.ds(column, self.columns)
        plgpu.copy_gmem_to_smem(gmem["x"].at[pl.ds(row, _TILE_M), ks], smem["x"].at[slot], full)
        layer = (gmem["layer"][0],) if "layer" in gmem else ()
        axes = ("share",) if self.config.share > 1 else None
        for part in range(self.parts):
            half = () if self.gate is None else (part,)
            source = gmem["w"].at[(*layer, ks, *half, columns)]
            target = smem["w"].at[slot, part]
            plgpu.copy_gmem_to_smem(source, target, full, collective_axes=axes)

    def _consume(self, warpgroup) -> None:
        """Multiply and store a warpgroup's rows of all tiles."""
        accumulators = [plgpu.ACC((_ROWS, self.columns), jnp.float32)] * self.parts

        def tile(index, i):
            row, column = self._place(index)
            sums = pl.run_scoped(functools.partial(self._multiply, warpgroup, i), *accumulators)
            self._store(warpgroup, row, column, sums, i + self.steps)
            return i + self.steps + self.late

        lax.fori_loop(0, self.own, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _release(self, i) -> None:
        plgpu.barrier_arrive(self.smem["empty"].at[lax.rem(i, self.stages)])

    def _multiply(self, warpgroup, first, *accumulators) -> list[Array]:
        """Sums [64, columns] of a tile, for each part, whose steps begin at `first`."""
        smem, rows = self.smem, pl.ds(warpgroup * _ROWS, _ROWS)

        def step(i, _):
            slot = lax.rem(i, self.stages)
            plgpu.barrier_wait(smem["full"].at[slot])
            for part, accumulator in enumerate(accumulators):
                plgpu.wgmma(accumulator, smem["x"].at[slot, rows], smem["w"].at[slot, part])
            # The products of the step before have ended. These run on.
            plgpu.wgmma_wait(self.parts)

        def later(i, _):
            step(i, None)
            self._release(i - 1)

        # A condition in the loop would keep the compiler from overlapping products.
        step(first, None)
        lax.fori_loop(first + 1, first + self.steps, later, None)
        sums = [accumulator[...] for accumulator in accumulators]
        self._release(first + self.steps - 1)
        return sums

    def _store(self, warpgroup, row, column, sums, late) -> None:
        """Finish and store sums. The residual is in the tiles of the ring from `late` on."""
        smem, rows = self.smem, pl.ds(warpgroup * _ROWS, _ROWS)

        def store(chunk, place):
            columns = slice(chunk * _CHUNK, (chunk + 1) * _CHUNK)
            y = self._finished([a[:, columns] for a in sums], place)
            if self.late:
                y += load(smem["x"].at[lax.rem(late + chunk, self.stages), rows])
            # Two buffers take turns, so the copy before the last must have read its own. At the
            # first chunk, so must the last one of the tile before, which has long done so.
            plgpu.wait_smem_to_gmem(min(chunk, 1), wait_read_only=True)
            source = smem["y"].at[warpgroup, chunk % 2]
            source[...] = y.astype(self.dtype)
            plgpu.commit_smem()
            at = pl.ds(row + warpgroup * _ROWS, _ROWS), pl.ds(place, _CHUNK)
            plgpu.copy_smem_to_gmem(source, self.gmem["y"].at[at])

        for chunk in range(self.chunks):
            place = column + chunk * _CHUNK
            if self.late:
                plgpu.barrier_wait(smem["late_full"].at[chunk])
            exists = self.n % self.columns == 0 or place < self.n
            when(exists)(functools.partial(store, chunk, place))
            if self.late:
                self._release(late + chunk)

    def _finished(self, sums, column) -> Array:
        """Bias, gate and activation of a chunk that begins at a column."""
        if "bias" in self.gmem:
            columns = pl.ds(column, _CHUNK)
            biases = [
                load(self.gmem["bias"].at[part, columns], LAYOUT.reduce(0))
                for part in range(self.parts)
            ]
            sums = [
                a + lax.broadcast_in_dim(bias, a.shape, (1,))
                for a, bias in zip(sums, biases, strict=True)
            ]
        return finished(sums, self.gate, self.activation)


def _candidates(shape: Shape) -> list[PromptGemmConfig]:
    """Tilings that may be the fastest."""
    options = itertools.product(_WIDTHS[bool(shape["gate"])], (1, 2), (8, 16, 32))
    return [PromptGemmConfig(*option) for option in options]


def _fits(shape: Shape) -> str | None:
    k, columns = shape["k"], shape["n"] // (1 + shape["gate"])
    if problem := needs_half(shape):
        return problem
    if k % _BLOCK_K or columns % _CHUNK:
        return f"needs K and N that are multiples of 64, got {k} and {columns}"
    if shape["m"] < _LEAST_ROWS:
        return f"needs at least {_LEAST_ROWS} rows, got {shape['m']}"
    return None


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    """True for sizes like those where an H200 ran it at 0.99 to 1.8 times the speed of XLA's.

    With more rows, single products are faster too, but not all of a long prompt, for which the
    clocks fall (benchmarks/LOG.md, 2026-11-29).
    """
    usual = 1024 <= shape["k"] <= 2**15 and 1024 <= shape["n"] <= 2**16
    return capability is not None and shape["m"] <= _MOST_ROWS and usual


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_prompt_gemm(x, w, **keywords)


PROMPT_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"}),
    fits=_fits,
    heuristic=_heuristic,
    capabilities=((9, 0), (9, 1)),
    config=PromptGemmConfig,
    candidates=_candidates,
    in_place=True,
    shared=False,  # it has not run there
    persistent=True,
)
