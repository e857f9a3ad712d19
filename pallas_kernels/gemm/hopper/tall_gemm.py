"""GEMM with quantised weights for more than a few rows on Hopper, in one launch.

At 64 rows, int4 takes as long to read as to multiply. So a kernel must read each code once, unpack
it few times, and keep the tensor cores busy meanwhile. Here, warpgroups of a block have different
work. One copies tiles of x and of the weight into a ring. Each of the others owns 64 columns or
128, whose weights it unpacks into registers while the tensor cores multiply its previous ones. All
of them read the same tile of x. In `packed_gemm`, each block of 64 columns copies all of x. With
many rows, a block computes one tile of the result after another.

Scales of groups multiply the weights, not the sums. So the tensor cores need not stop at the end of
a group, and only one sum [64, rows] takes registers. A weight has the bits of `dequantise`, with
the exception that `fragments.dequantised` describes. A scale of a whole column multiplies its sums
at the end, which saves two of five instructions for a pair of codes of 8 bits.

If N gives too few blocks, `split` blocks of a cluster share K. Each sends the others their rows of
its sums, adds what it receives in a fixed order, and stores its own rows.

XLA runs the norm.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, brick_words, unpack_bricks
from fdjax.pallas_kernels.dispatch import Capability, Implementation, Shape, needs_half
from fdjax.pallas_kernels.gemm.hopper.dequantised import group_misfit
from fdjax.pallas_kernels.gemm.hopper.tall_tiling import (
    CLUSTER_MULTIPROCESSORS,
    REGISTERS,
    SMEM_BYTES,
    STORED_BYTES,
    TallGemmConfig,
    bits_of,
    candidates,
    row_tiles_of,
)
from fdjax.pallas_kernels.hopper import MULTIPROCESSORS
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.fragments import dequantised, unpacked
from fdjax.pallas_kernels.hopper.tiles import (
    LAYOUT,
    finished,
    in_eights,
    load,
    matrix,
    shared_bytes,
)
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm, normalised
from fdjax.pallas_kernels.quantised import BITS, PLAIN, WEIGHT_FEATURES, QTensor

_LEAST_ROWS = 9
# Up to 32 rows, it was faster than `packed_gemm` with at least so many columns and more rows than
# these, and with int4 if all blocks run at once.
_MANY_COLUMNS, _FEW_ROWS = 8192, {"int4": 16, "int8": 8, "fp8": 8}


def matmul_tall(
    x: Array,
    w: QTensor,
    *,
    layer: Array | int | None = None,
    norm: RMSNorm | LayerNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    dtype: Any,
    config: TallGemmConfig | None = None,
    interpret: Any = None,
) -> Array:
    """`matmul` of x [M,K] and a quantised weight as one Mosaic GPU kernel, after a norm by XLA.

    Args:
      x: [M,K] bfloat16 or float16.
      w: [K,N], or [K,2,N] with `gate`, in the layout "bricks"; with `layer` stacks of these.
      layer, norm, bias, gate, activation, residual: as for `matmul`; residual is [M,N].
      dtype: dtype of the result.
      config: default `TallGemmConfig.for_shape`.
      interpret: parameters of the interpreter, or None. It knows no clusters.

    Returns:
      [M,N].

    Raises:
      NotImplementedError: registers or shared memory have no room for the configuration.
    """
    (m, k), n = x.shape, w.shape[-1]
    if m == 0:
        return jnp.zeros((m, n), dtype)
    config = config or TallGemmConfig.for_shape(m, k, n, bits=BITS[w.kind], gate=gate is not None)
    if norm is not None:
        x = normalised(x, norm)
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.astype(jnp.float32)
        y = matmul_tall(
            *(x, w),
            layer=layer,
            bias=bias,
            gate=gate,
            activation=activation,
            dtype=jnp.float32,
            config=config,
            interpret=interpret,
        )
        return (y + residual).astype(dtype)
    x, residual = in_eights(x, residual)
    y = launch(
        {"x": x} | operands_beside_x(w, layer, bias, residual),
        TallTile,
        kind=w.kind,
        group=w.group,
        gate=gate,
        activation=activation,
        dtype=jnp.dtype(dtype),
        config=config,
        interpret=interpret,
    )
    return y[:m]


def operands_beside_x(
    w: QTensor, layer: Array | int | None, bias: Array | None, residual: Array | None
) -> dict[str, Array]:
    """The operands of `launch` but x, by name."""
    # Axes of a weight's parts and of a stack, if there are none. Words [L * parts, ...] have five
    # axes, the most that TMA takes.
    (k, *_, n), parts, (count, *_) = w.shape, len(w.shape) - 1, (*w.stack, 1)
    factors = (count, k // w.group, parts, n)
    operands = {
        "w": w.words.reshape(count * parts, *w.words.shape[-4:]),
        "scales": w.scales.reshape(factors),
        "zeros": None if w.zeros is None else w.zeros.reshape(factors),
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "bias": None if bias is None else bias.reshape(parts, n),
        "residual": residual,
    }
    return {name: operand for name, operand in operands.items() if operand is not None}


# Jitted separately, so that layers of the same shape share one lowering.
@functools.partial(
    jax.jit,
    static_argnames=("make", "kind", "group", "gate", "activation", "dtype", "config", "interpret"),
)
def launch(operands, make, *, kind, group, gate, activation, dtype, config, interpret):
    """Launch the kernel of the tiles that `make`, a `TallTile` class, makes of operands by name."""
    tile = make(
        operands,
        kind=kind,
        group=group,
        gate=gate,
        activation=activation,
        dtype=dtype,
        config=config,
        interpreted=interpret is not None,
    )
    scratch = tile.scratch()

    def kernel(*refs):
        gmem = dict(zip((*operands, "y"), refs, strict=False))
        tile.run(gmem, dict(zip(scratch, refs[len(gmem) :], strict=True)))

    kernel.__name__ = tile.kernel_name
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tile.m, tile.n), dtype),
        scratch_types=tuple(scratch.values()),
        grid=(tile.blocks,),
        grid_names=("block",),
        cluster=(config.split,),
        cluster_names=("k",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        # All layouts are given. Inferring them would take longer than the rest of the lowering.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(*operands.values())


class TallTile:
    """A block's tiles of the result: `tile_m` rows and `wide` columns of bricks each.

    A block computes one tile after another. It copies what the next one needs while it finishes
    one. Blocks that share K have one tile.

    Attributes:
      warpgroups: number of warpgroups that multiply.
      pieces: columns of bricks of each of them.
      parts: 2 for gate and up, 1 without a gate.
      m, k, n: rows of x with padding, rows and columns of the weight.
      tiles_m, tile_m: tiles along M, and rows of each.
      count, blocks: number of tiles, and of blocks or clusters that compute them.
      block_k, steps: rows of the weight in one step, and steps of this block along K.
      unit: rows of the weight that are unpacked at once.
      shares: rows (first, end) of the tile that each block of the cluster stores.
      by_column: whether each column has one scale, which multiplies its sums at the end.
      registers: registers of a thread that multiplies, and of one that copies, see `REGISTERS`.
      gmem, smem: references by name, once the kernel runs.
      column, row: the tile's first column of bricks and first row, once the kernel runs.
      first: the first step of the tile, counting those of all tiles of the block and their
        residuals, once the kernel runs.
    """

    kernel_name = "tall_gemm_kernel"
    scales_columns_late = True  # if they have one scale
    sum_dtype = jnp.float32
    row_step = 8  # `tile_m` is a multiple of it

    def __init__(
        self, operands, *, kind, group, gate, activation, dtype, config, interpreted
    ) -> None:
        self.operands, self.kind, self.group, self.dtype = operands, kind, group, dtype
        self.gate, self.activation, self.interpreted = gate, activation, interpreted
        self.wide, self.deep, self.split = config.wide, config.deep, config.split
        self.config, self.parts = config, 2 if gate else 1
        self.in_dtype = operands["x"].dtype
        (self.m, self.k), self.n = operands["x"].shape, operands["scales"].shape[-1]
        self.tiles_m, self.tile_m = row_tiles_of(self.m, config.block_m, self.row_step)
        self.count = self.tiles_m * -(-self.n // (self.wide * BRICK))
        self.blocks = self.count if self.split > 1 else min(self.count, MULTIPROCESSORS)
        self.block_k = self.deep * BRICK
        self.steps = -(-self.k // (self.block_k * self.split))
        share = -(-self.tile_m // (8 * self.split)) * 8
        ends = [min(at * share, self.tile_m) for at in range(self.split + 1)]
        self.shares = list(itertools.pairwise(ends))
        self.set_warpgroups()
        # Groups that rows of a step may belong to.
        self.groups = -(-self.block_k // group) + (
            self.block_k % group > 0 and group % self.block_k > 0
        )
        self.by_column = self.scales_columns_late and group >= self.k
        at_once = () if self.by_column else ("scales",)
        self.factors = [name for name in (*at_once, "zeros") if name in operands]
        self.gmem, self.smem = {}, {}

    def set_warpgroups(self) -> None:
        """Set `warpgroups`, `pieces`, `registers` and `unit`."""
        config = self.config
        self.warpgroups, self.pieces = config.warpgroups, config.pieces
        self.registers = REGISTERS[self.warpgroups]
        self.unit = config.unit(self.tile_m, gate=self.gate is not None)
        if self.unit is None:
            raise NotImplementedError(
                f"matmul: {config} has no registers for {self.parts} x {self.tile_m} rows of sums"
            )

    def stored_rows(self) -> int:
        """Rows of a result that a warpgroup stores at once."""
        return min(STORED_BYTES // (BRICK * self.dtype.itemsize), self.shares[0][1])

    def x_swizzle(self) -> int:
        """Bytes of a row of a tile of x in memory."""
        return self.unit * self.in_dtype.itemsize

    def more_vectors(self) -> dict[str, Any]:
        """(shape, dtype) of other buffers without tiles."""
        return {}

    def late_tiles(self) -> int:
        """Tiles of the ring that hold the residual."""
        return -(-self.wide // self.deep) if "residual" in self.operands else 0

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers. Sets `stages`, the number of tiles in the ring.

        Raises:
          NotImplementedError: shared memory has no room for two tiles.
        """
        buffers = {"y": ((self.wide, self.stored_rows(), BRICK), self.dtype), **self.more_vectors()}
        others = self.split - 1
        if others:
            sums = (others, self.wide, self.parts, BRICK, self.shares[0][1])
            buffers["partial"] = (sums, jnp.float32)
        if self.interpreted:
            buffers["a"] = ((self.wide, BRICK, self.unit), self.in_dtype)
        words = (self.parts, self.wide, self.deep, *brick_words(self.kind))
        stage = {"x": ((self.tile_m, self.block_k), self.in_dtype), "w": (words, jnp.int32)}
        for name in self.factors:
            shape = (self.parts, self.groups, self.wide * BRICK)
            stage[name] = (shape, self.operands[name].dtype)
        room = SMEM_BYTES - shared_bytes(buffers)
        self.late = self.late_tiles()
        self.stages = min(
            self.config.stages, max(self.steps, self.late), room // shared_bytes(stage)
        )
        if self.stages < max(min(2, self.steps), self.late):
            raise NotImplementedError(
                f"matmul: {self.config} does not fit into shared memory at M = {self.m}"
            )
        buffers |= {name: ((self.stages, *shape), dtype) for name, (shape, dtype) in stage.items()}
        vectors = ("w", *self.factors, *self.more_vectors())
        scratch = {
            name: (plgpu.SMEM if name in vectors else matrix)(*buffer)
            for name, buffer in buffers.items()
        }
        scratch["x"] = matrix(*buffers["x"], most=self.x_swizzle())
        if others:
            # Shares of rows are multiples of 8.
            scratch["partial"] = matrix(*buffers["partial"], most=32)
            # One for all warpgroups: JAX 0.11 reaches only the first of another block's barriers.
            scratch["partial_full"] = plgpu.Barrier(num_arrivals=others * self.parts * self.wide)
        copies = 1 + self.parts * (1 + len(self.factors))
        scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
        scratch["empty"] = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        if self.late:
            scratch["late_full"] = plgpu.Barrier(num_barriers=self.late)
        return scratch

    # Within the kernel.

    def run(self, gmem: dict[str, Any], smem: dict[str, Any]) -> None:
        """The work of all warpgroups."""
        self.gmem, self.smem = gmem, smem
        self.rank = lax.axis_index("k")
        self.layer = gmem["layer"][0] if "layer" in gmem else 0
        warpgroup = lax.axis_index("warpgroup")
        most, least = self.registers

        @when(warpgroup == self.warpgroups)
        def _():
            if least:
                plgpu.set_max_registers(least, action="decrease")
            self._produce()

        @when(warpgroup < self.warpgroups)
        def _():
            if least:
                plgpu.set_max_registers(most, action="increase")
            self.each_tile(functools.partial(self._consume, warpgroup))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def each_tile(self, run: Any) -> Any:
        """Call `run` for each tile of this block. Returns the number of tiles."""
        block, each = lax.axis_index("block"), self.steps + self.late

        def tile(index, _):
            at = index * self.blocks + block
            # Tiles of the same columns follow one another: they share codes in the L2 cache.
            column = lax.div(at, self.tiles_m)
            self.row = pl.multiple_of((at - column * self.tiles_m) * self.tile_m, 8)
            self.column, self.first = column * self.wide, index * each
            run()

        if self.count == self.blocks:
            tile(jnp.int32(0), None)
            return jnp.int32(1)
        tiles = lax.div(self.count - block + self.blocks - 1, self.blocks)
        lax.fori_loop(0, tiles, tile, None)
        return tiles

    def slot(self, step: Any) -> Any:
        """The place in the ring of a step of the tile, or of its residual after the last step."""
        return lax.rem(self.first + step, self.stages)

    def release(self, step: Any) -> None:
        """Let the place of a step be overwritten."""
        plgpu.barrier_arrive(self.smem["empty"].at[self.slot(step)])

    def at(self, step: Any) -> Any:
        """The place of a step among those of all blocks that share K."""
        return self.rank * self.steps + step

    def _produce(self) -> None:
        """Copy what all tiles need into the ring."""
        empty = self.smem["empty"]

        def acquire(step):
            """Wait until the place of a step may be overwritten; returns its index."""
            slot = self.slot(step)
            used = self.first + step >= self.stages
            when(used)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def tile():
            self.fetch_all(lambda step, _: self._fetch(self.at(step), acquire(step)))
            for late in range(self.late):
                self._fetch_residual(late, acquire(jnp.int32(self.steps + late)))

        end = self.each_tile(tile) * (self.steps + self.late)

        # Every arrival is waited for.
        def drain(i, _):
            plgpu.barrier_wait(empty.at[lax.rem(i, self.stages)])

        lax.fori_loop(jnp.maximum(end - self.stages, 0), end, drain, None)

    def fetch_all(self, fetch: Any) -> None:
        """Call `fetch` for each step, and copy what else is needed."""
        lax.fori_loop(0, self.steps, fetch, None)

    def _fetch(self, at, slot) -> None:
        """Copy x, codes, scales and zeros of a step; past M, K and N they are zero."""
        gmem, smem, full = self.gmem, self.smem, self.smem["full"].at[slot]
        column = self.column
        groups = pl.ds(lax.div(at * self.block_k, self.group), self.groups)
        for part in range(self.parts):
            place = (self.layer * self.parts + part, pl.ds(column, self.wide))
            words = gmem["w"].at[(*place, pl.ds(at * self.deep, self.deep))]
            plgpu.copy_gmem_to_smem(words, smem["w"].at[slot, part], full)
            for name in self.factors:
                columns = pl.ds(column * BRICK, self.wide * BRICK)
                source = gmem[name].at[self.layer, groups, part, columns]
                plgpu.copy_gmem_to_smem(source, smem[name].at[slot, part], full)
        rows, ks = pl.ds(self.row, self.tile_m), pl.ds(at * self.block_k, self.block_k)
        plgpu.copy_gmem_to_smem(gmem["x"].at[rows, ks], smem["x"].at[slot], full)

    def _fetch_residual(self, late, slot) -> None:
        """Copy `deep` columns of bricks of the residual to the place of a tile of x."""
        columns = pl.ds((self.column + late * self.deep) * BRICK, self.block_k)
        for rank, (first, end) in enumerate(self.shares):

            @when(jnp.int32(self.rank) == rank)
            def _(first=first, size=end - first):
                if size == 0:
                    plgpu.barrier_arrive(self.smem["late_full"].at[late])
                    return
                source = self.gmem["residual"].at[pl.ds(self.row + first, size), columns]
                target = self.smem["x"].at[slot, pl.ds(first, size)]
                plgpu.copy_gmem_to_smem(source, target, self.smem["late_full"].at[late])

    def _consume(self, warpgroup) -> None:
        """Multiply a warpgroup's columns, and store their results."""
        own = [warpgroup * self.pieces + piece for piece in range(self.pieces)]
        # Read early, because it takes long.
        of_columns = [self._of_columns(brick) for brick in own]
        sums = self.sums(warpgroup)
        results = list(zip(own, itertools.batched(sums, self.parts), of_columns, strict=True))
        if self.split == 1:
            self._store_all(results, 0)
        else:
            for rank in range(self.split):
                for brick, values, _ in results:
                    when(self.rank != rank)(functools.partial(self._send, brick, values, rank))
            for rank in range(self.split):
                when(self.rank == rank)(functools.partial(self._store_all, results, rank))
        self.end_tile()

    def end_tile(self) -> None:
        """Tell that a warpgroup needs nothing of the tile any more."""
        for late in range(self.late):
            self.release(self.steps + late)

    def _of_columns(self, brick) -> tuple[list[Array], list[Array]]:
        """Scales and biases [64] of a column of bricks, for each part; none if there are none."""
        column = jnp.minimum(self.column + brick, self.n // BRICK - 1)
        columns, parts = pl.ds(column * BRICK, BRICK), range(self.parts)
        scales, biases = [], []
        if self.by_column:
            scales = [self.gmem["scales"].at[self.layer, 0, part, columns] for part in parts]
        if "bias" in self.gmem:
            biases = [self.gmem["bias"].at[part, columns] for part in parts]
        return tuple([load(ref, LAYOUT.reduce(1)) for ref in refs] for refs in (scales, biases))

    def sums(self, warpgroup) -> list[Array]:
        """Sums [64, tile_m] of all steps, for each part of each of a warpgroup's pieces."""
        bricks = [warpgroup * self.pieces + piece for piece in range(self.pieces)]
        each = [(brick, part) for brick in bricks for part in range(self.parts)]
        accumulator = plgpu.ACC((BRICK, self.tile_m), self.sum_dtype)
        multiply = functools.partial(self._multiply, each)
        return pl.run_scoped(multiply, *[accumulator] * len(each))

    def _multiply(self, each, *accumulators) -> list[Array]:
        """Sums [64, tile_m] of all steps, for each (column of bricks, part)."""
        smem = self.smem

        def step(i, _, *, first=False):
            slot = self.slot(i)
            plgpu.barrier_wait(smem["full"].at[slot])
            for start in range(0, self.block_k, self.unit):
                x = smem["x"].at[slot, :, pl.ds(start, self.unit)]
                for (brick, part), accumulator in zip(each, accumulators, strict=True):
                    a = self._weights(brick, self.at(i), slot, part, start)
                    plgpu.wgmma(accumulator, a, x.T)
                    # The product before has ended. This one runs while the next weights are
                    # unpacked.
                    plgpu.wgmma_wait(0 if self.interpreted else 1)
                    if start == 0 and accumulator is accumulators[0] and not first:
                        self.release(i - 1)

        # A condition in the loop would keep the compiler from overlapping products. Units take
        # turns with two sets of registers, so the loop has an even number of them.
        step(jnp.int32(0), None, first=True)
        together = 2 if self.unit == self.block_k and len(each) == 1 else 1
        alone = 1 + (self.steps - 1) % together
        for i in range(1, alone):
            step(jnp.int32(i), None)

        def some_steps(index, _):
            for i in range(together):
                step(alone + index * together + i, None)

        lax.fori_loop(0, (self.steps - alone) // together, some_steps, None)
        sums = [accumulator[...] for accumulator in accumulators]
        self.release(self.steps - 1)
        return sums

    def _weights(self, brick, at, slot, part, start) -> Any:
        """Some rows of a column of bricks in a step, as the left operand [64,unit]."""
        words = self.smem["w"].at[slot, part, brick]
        if self.interpreted:
            return self._interpreted_weights(words, brick, at, slot, part, start)
        scales, zeros = (
            tuple(
                load(self.factor(name, brick, at, slot, part, start + row), LAYOUT.reduce(1))
                for row in range(0, self.unit, min(self.group, self.unit))
                if name in self.factors
            )
            for name in ("scales", "zeros")
        )
        if self.by_column:
            zero = zeros[0] if zeros else None
            return unpacked(words, self.kind, self.in_dtype, start, self.unit, zero)
        short = self.operands["scales"].dtype == jnp.bfloat16
        return dequantised(
            *(words, self.kind, self.in_dtype, start, self.unit, scales, zeros), short=short
        )

    def factor(self, name, brick, at, slot, part, start) -> Any:
        """Reference to the scales or zeros [64] of a column of bricks, for a row of a step."""
        if self.block_k % self.group == 0:
            row = start // self.group
        elif self.groups == 1:
            row = 0
        else:
            first = at * self.block_k
            row = lax.div(first + start, self.group) - lax.div(first, self.group)
        return self.smem[name].at[slot, part, row, pl.ds(brick * BRICK, BRICK)]

    def _interpreted_weights(self, words, brick, at, slot, part, start) -> Any:
        """The interpreter knows no operand in registers, nor the code that unpacks."""
        words = words[...][None, :, :, :]  # one column of bricks
        codes = unpack_bricks(words, self.kind)[start : start + self.unit]  # [K,N]
        if self.kind == "fp8":
            codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        values = codes.astype(jnp.float32)
        rows = range(start, start + self.unit, min(self.group, self.unit))

        def factor(name):
            found = [self.factor(name, brick, at, slot, part, row)[...] for row in rows]
            return jnp.repeat(jnp.stack(found), self.unit // len(rows), axis=0).astype(jnp.float32)

        if "zeros" in self.factors:
            values -= factor("zeros")
        elif self.kind != "fp8":
            values -= 2.0 ** (BITS[self.kind] - 1)
        if not self.by_column:
            values *= factor("scales")
        a = self.smem["a"].at[brick]
        a[...] = values.T.astype(self.in_dtype)
        plgpu.commit_smem()
        return a

    def _send(self, brick, sums, rank) -> None:
        """Send another block of the cluster its rows of the sums of a column of bricks."""
        first, end = self.shares[rank]
        if first == end:
            return
        peer = jnp.where(self.rank < rank, self.rank, self.rank - 1)
        for part, values in enumerate(sums):
            plgpu.async_store_smem(
                values[:, first:end],
                self.smem["partial"].at[peer, brick, part, :, pl.ds(0, end - first)],
                barrier=self.smem["partial_full"],
                cluster_idx=rank,
                cluster_dim="k",
                optimized=False,
            )

    def _store_all(self, results, rank) -> None:
        """Store a block's rows of (column of bricks, sums, `_of_columns`) of a warpgroup."""
        first, end = self.shares[rank]
        self.await_late()
        if first == end:
            return
        if self.split > 1:
            plgpu.barrier_wait(self.smem["partial_full"])
        for result in results:
            self._store(*result, first, end)

    def await_late(self) -> None:
        """Wait for the residual. Each warpgroup waits for all of it, since it releases all of it.

        Otherwise it could release a place that another one still reads a step from.
        """
        for late in range(self.late):
            plgpu.barrier_wait(self.smem["late_full"].at[late])

    def with_scales(self, sums, start) -> list[Array]:
        """The sums of rows from `start` on, times what the codes were not multiplied by."""
        return sums

    def residual(self, brick, start, rows) -> Any:
        """Reference to the residual [rows, 64], or None."""
        if not self.late:
            return None
        slot = self.slot(self.steps + lax.div(brick, self.deep))
        columns = pl.ds(lax.rem(brick, self.deep) * BRICK, BRICK)
        return self.smem["x"].at[slot, pl.ds(start, rows), columns]

    def _store(self, brick, sums, of_columns, first, end) -> None:
        """Store rows of the result, of one column of bricks."""
        smem, column, (scales, biases) = self.smem, self.column + brick, of_columns
        y_tile = smem["y"].at[brick]
        for start in range(first, end, y_tile.shape[0]):
            rows = min(y_tile.shape[0], end - start)
            total = [values[:, start : start + rows] for values in sums]
            for part in range(self.parts):
                for peer in range(self.split - 1):
                    held = pl.ds(start - first, rows)
                    total[part] += load(smem["partial"].at[peer, brick, part, :, held])
            total = self.with_scales(total, start)
            if scales:
                total = [
                    values * lax.broadcast_in_dim(scale, values.shape, [0])
                    for values, scale in zip(total, scales, strict=True)
                ]
            if biases:
                total = [
                    values + lax.broadcast_in_dim(bias, values.shape, [0])
                    for values, bias in zip(total, biases, strict=True)
                ]
            y = finished(total, self.gate, self.activation)
            if (residual := self.residual(brick, start, rows)) is not None:
                y += load(residual.T)
            y = y.astype(self.dtype)
            if self.dtype.itemsize == 4:
                y = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            y_tile.at[pl.ds(0, rows)].T[...] = y
            plgpu.commit_smem()

            @when((column < self.n // BRICK) & (self.row + start < self.m))
            def _(start=start, rows=rows):
                place = (pl.ds(self.row + start, rows), pl.ds(column * BRICK, BRICK))
                plgpu.copy_smem_to_gmem(y_tile.at[pl.ds(0, rows)], self.gmem["y"].at[place])


def _fits(shape: Shape) -> str | None:
    if problem := needs_half(shape):
        return problem
    if any(kind in shape for kind in BITS) and shape["m"] < _LEAST_ROWS:
        return f"takes at least {_LEAST_ROWS} rows, got {shape['m']}"
    return group_misfit(shape)


def _heuristic(shape: Shape, capability: Capability | None) -> bool:
    return capability is not None and (shape["m"] > 32 or _is_faster_than_packed(shape))


def _is_faster_than_packed(shape: Shape) -> bool:
    m, k, n, gate = (shape[name] for name in ("m", "k", "n", "gate"))
    few = next((rows for kind, rows in _FEW_ROWS.items() if kind in shape), 0)
    if m <= few or n < _MANY_COLUMNS:
        return False
    config = TallGemmConfig.for_shape(m, k, n // (1 + gate), bits=bits_of(shape), gate=bool(gate))
    blocks = -(-n // (BRICK * config.wide * (1 + gate))) * config.split
    return "int4" not in shape or blocks <= CLUSTER_MULTIPROCESSORS[config.split]


def _run(x, w, *, batch_invariant, **keywords):
    return matmul_tall(x, w, **keywords)


TALL_GEMM = Implementation(
    *("matmul", "mosaic_gpu", _run),
    can=frozenset({"norm", "layer_norm", "bias", "gate", "activation", "residual"})
    | (WEIGHT_FEATURES - {f"weight.layout.{PLAIN}", "weight.fp4"}),
    fits=_fits,
    heuristic=_heuristic,
    capabilities=((9, 0), (9, 1)),
    config=TallGemmConfig,
    candidates=candidates,
    in_place=True,
)
