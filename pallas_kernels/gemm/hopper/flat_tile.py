"""Parts of a flat GEMM on Hopper that do not depend on the weight's format."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.tiles import (
    KERNEL_ACTIVATIONS,
    LAYOUT,
    in_eights,
    load,
    matrix,
    shared_bytes,
)

Buffers = dict[str, tuple[tuple[int, ...], Any]]
Sums = tuple[Array, ...]

_SMEM_BYTES = 227 * 1024 - 256  # shared memory of a block, less its barriers
_MAX_GROUPS = 8
_VECTORS = ("scale", "shift", "bias")
# Rows of a block that a LayerNorm takes for itself: its scale and its shift.
_NORM_ROWS = 2


def in_groups(x: Array, residual: Array | None) -> tuple[Array, Array | None]:
    """x [M,K] and residual [M,N] as [groups, rows, ...] that TMA can copy, padded if need be."""
    groups = _groups(len(x))
    if groups is None:
        groups = 1
        x, residual = in_eights(x, residual)
    if residual is not None:
        residual = residual.reshape(groups, -1, residual.shape[1])
    return x.reshape(groups, -1, x.shape[1]), residual


def _groups(m: int) -> int | None:
    """Number of equal groups in which TMA copies the rows: 1 if 8 divides M, else of under 8 rows.

    None if there is no such number up to `_MAX_GROUPS`. Then the rows must be padded.
    """
    if m % 8 == 0:
        return 1
    return next((g for g in range(-(-m // 8), _MAX_GROUPS + 1) if m % g == 0), None)


class FlatTile:
    """A block's tile of epilogue(norm(x) @ w).

    Its sums are [width, block_m] each: `wide` pieces of columns for every part. If blocks of a
    cluster share K, the first adds the others' sums in a fixed order.

    A LayerNorm of rows with mean μ and standard deviation σ is ((x ⊙ scale) w - μ (scale w)) / σ +
    shift w. Scale and shift take two spare rows of the block, so one pass gives all three products.

    Attributes:
      parts: 2 for gate and up, 1 without a gate.
      pieces: number of sums.
      block_n, block_m, block_k: columns, rows, and rows of the weight in one step.
      steps: number of steps of this block along K.
      normed: x is normalised: scaled in every step, and its squares are summed [64, block_m].
      centred: the norm is a LayerNorm: x is summed as well.
      late: number of copies that arrive at "late_arrived".
      gmem, smem: references by name, once the kernel runs.
      layer: index into stacked weights, empty if they are not stacked, once the kernel runs.
    """

    def __init__(
        self,
        operands: dict[str, Any],
        *,
        n: int,
        wide: int,
        width: int,
        block_k: int,
        block_m: int,
        split: int,
        gate: str | None,
        activation: str | None,
        eps: float | None,
        dtype: Any,
        centred: bool = False,
        unit: int = 64,
    ):
        """`operands` are arrays by name; x and residual are [groups, rows, ...].

        A product may take as few as `unit` columns of x.
        """
        self.operands = operands
        self.groups, self.m, self.k = operands["x"].shape
        self.n, self.gate, self.eps, self.dtype, self.split = n, gate, eps, dtype, split
        self.activation, self.centred = activation, centred
        self.in_dtype = operands["x"].dtype
        self.parts = 2 if gate else 1
        self.wide, self.width, self.pieces = wide, width, wide * self.parts
        rows = self.m + _NORM_ROWS * centred
        self.tile_m = min(-(-rows // 8) * 8, block_m)
        self.grid = -(-n // (wide * width)), -(-self.m // block_m)
        self.block_n, self.block_m = wide * width, self.groups * self.tile_m
        self.unit, self.block_k, self.steps = unit, block_k, -(-self.k // (block_k * split))
        self.normed = "scale" in operands
        self.late = self.groups * ("residual" in operands) + self.parts * ("bias" in operands)
        self.gmem, self.smem, self.layer = {}, {}, ()

    # Shared memory.

    @property
    def stage(self) -> Buffers:
        """Buffers of one step, without those of the weight."""
        stage = {"x": ((self.block_m, self.block_k), self.in_dtype)}
        for name in self._factors:
            stage[name] = ((self.block_k,), self.operands[name].dtype)
        return stage

    @property
    def _factors(self) -> tuple[str, ...]:
        return tuple(name for name in ("scale", "shift") if name in self.operands)

    @property
    def copies(self) -> int:
        """Number of copies that fill the buffers of `stage`."""
        return self.groups + len(self._factors)

    @property
    def _statistics(self) -> int:
        """Number of sums over x that the norm takes."""
        return self.normed + self.centred

    def scratch(
        self, weights: Buffers, vectors: tuple[str, ...], copies: int, config: Any
    ) -> tuple[int, dict[str, Any]]:
        """Shared memory of the kernel.

        Args:
          weights: buffers of the weight in one step.
          vectors: names of buffers without a swizzle.
          copies: number of copies that fill the weight's buffers.
          config: the tiling. K or shared memory may allow fewer `stages` in the ring.

        Returns:
          (steps in the ring, scratch by name).

        Raises:
          NotImplementedError: shared memory has no room for them.
        """
        buffers = {"y": ((self.block_m, self.block_n), self.dtype)}
        if self.normed:
            buffers["scaled_x"] = ((2, self.block_m, self.block_k), self.in_dtype)
        if "residual" in self.operands:
            dtype = self.operands["residual"].dtype
            buffers["residual"] = ((self.block_m, self.block_n), dtype)
        if "bias" in self.operands:
            buffers["bias"] = ((self.parts, self.block_n), self.operands["bias"].dtype)
        others = self.split - 1
        if others:
            sums = (others, self.pieces, self.width, self.block_m)
            buffers["partial"] = (sums, jnp.float32)
            if self.normed:
                sums = (others, self._statistics, 64, self.block_m)
                buffers["partial_squares"] = (sums, jnp.float32)
        stage = weights | self.stage
        # The sum of squares over the warps of a block takes 8 bytes per row.
        room = _SMEM_BYTES - 8 * self.block_m - shared_bytes(buffers)
        stages = min(config.stages, self.steps, room // shared_bytes(stage))
        if stages < min(2, self.steps):
            raise NotImplementedError(
                f"matmul: {config} does not fit into shared memory at M = {self.m}"
            )
        buffers |= {name: ((stages, *shape), dtype) for name, (shape, dtype) in stage.items()}
        vectors += _VECTORS
        scratch = {
            name: (plgpu.SMEM if name in vectors else matrix)(*buffer)
            for name, buffer in buffers.items()
        }
        scratch["x"] = matrix(*buffers["x"], most=self.unit * self.in_dtype.itemsize)
        scratch["arrived"] = plgpu.Barrier(num_arrivals=copies + self.copies, num_barriers=stages)
        if self.late:
            scratch["late_arrived"] = plgpu.Barrier(num_arrivals=self.late)
        if others:
            arrivals = others * (self.pieces + self._statistics)
            scratch["partial_arrived"] = plgpu.Barrier(num_arrivals=arrivals)
        return stages, scratch

    # Within the kernel.

    @property
    def rank(self) -> Array:
        """This block's part of K."""
        return lax.axis_index("k")

    @property
    def columns(self) -> Any:
        """This block's columns."""
        return pl.ds(lax.axis_index("n") * self.block_n, self.block_n)

    @property
    def rows(self) -> Any:
        """This block's rows of each group."""
        return pl.ds(pl.multiple_of(lax.axis_index("m") * self.tile_m, 8), self.tile_m)

    def _row_tiles(self) -> list[Any]:
        return [pl.ds(group * self.tile_m, self.tile_m) for group in range(self.groups)]

    def fetch(self, name: str, ks: Any, slot: Any, arrived: Any) -> None:
        """Copy x or a factor of the norm, of the rows `ks` of the weight; zero past M or K."""
        gmem, smem = self.gmem, self.smem
        if name in self._factors:
            plgpu.copy_gmem_to_smem(gmem[name].at[ks], smem[name].at[slot], arrived)
            return
        for group, tile in enumerate(self._row_tiles()):
            source, target = gmem["x"].at[group, self.rows, ks], smem["x"].at[slot, tile]
            plgpu.copy_gmem_to_smem(source, target, arrived)

    def fetch_late(self) -> None:
        """Copy residual and bias."""
        gmem, smem = self.gmem, self.smem
        if "residual" in gmem:
            for group, tile in enumerate(self._row_tiles()):
                source = gmem["residual"].at[group, self.rows, self.columns]
                target = smem["residual"].at[tile]
                plgpu.copy_gmem_to_smem(source, target, smem["late_arrived"])
        if "bias" in gmem:
            for part in range(self.parts):
                source = gmem["bias"].at[(part, self.columns) if self.gate else self.columns]
                plgpu.copy_gmem_to_smem(source, smem["bias"].at[part], smem["late_arrived"])

    def no_squares(self) -> Sums:
        """The sums for the norm before the first step: of squares, and of x for a LayerNorm."""
        if not self.normed:
            return ()
        blank = plgpu.layout_cast(jnp.zeros((64, self.block_m), jnp.float32), LAYOUT)
        return (blank,) * self._statistics

    def input(self, step: Array, slot: Array, squares: Sums) -> tuple[Any, Sums]:
        """x of a step [block_m, block_k], scaled if there is a norm, and the sums for the norm."""
        x = self.smem["x"].at[slot]
        if self.normed:
            x = self.smem["scaled_x"].at[lax.rem(step, 2)]
            squares = self._scale_x(slot, x, squares)
        return x, squares

    def _scale_x(self, slot, scaled, squares):
        """Scale a tile of x, and add to the sums for the norm, [64, block_m] each."""
        for start in range(0, self.block_k, 64):
            ks = pl.ds(start, 64)
            x = load(self.smem["x"].at[slot, :, ks].T)  # [64, block_m]
            factors = [
                load(self.smem[name].at[slot, ks], LAYOUT.reduce(1)) for name in self._factors
            ]
            squares = tuple(s + a for s, a in zip(squares, (x * x, x), strict=False))
            factors = [lax.broadcast_in_dim(factor, x.shape, [0]) for factor in factors]
            x *= factors[0]
            if self.centred:
                for at, factor in enumerate(factors):
                    x = jnp.where(self._is_row(x, at), factor, x)
            scaled.at[:, ks].T[...] = x.astype(self.in_dtype)
        plgpu.commit_smem()
        return squares

    def _is_row(self, values, at) -> Array:
        """Where values [_, block_m] belong to the row of the norm's scale (0) or shift (1)."""
        rows = plgpu.broadcasted_iota(jnp.int32, values.shape, 1, layout=LAYOUT)
        return rows == self.block_m - _NORM_ROWS + at

    def _norm_row(self, values, at) -> Array:
        """The product of the norm's scale (0) or shift (1), repeated for all rows."""
        row = jnp.where(self._is_row(values, at), values, jnp.zeros_like(values)).sum(axis=1)
        return lax.broadcast_in_dim(row, values.shape, [0])

    def finish(self, sums: list[Array], squares: Sums) -> None:
        """Turn the sums of all blocks that share K into the result, and store it."""
        if self.split == 1:
            self._epilogue(sums, squares)
            return
        when(self.rank > 0)(functools.partial(self._send, sums, squares))
        when(self.rank == 0)(functools.partial(self._epilogue, sums, squares))

    def _send(self, sums, squares) -> None:
        smem, peer = self.smem, self.rank - 1
        send = functools.partial(
            plgpu.async_store_smem,
            barrier=smem["partial_arrived"],
            cluster_idx=0,
            cluster_dim="k",
            optimized=False,
        )
        for piece, values in enumerate(sums):
            send(values, smem["partial"].at[peer, piece])
        for at, values in enumerate(squares):
            send(values, smem["partial_squares"].at[peer, at])

    def _epilogue(self, sums, squares) -> None:
        smem, gmem, total = self.smem, self.gmem, list(sums)
        if self.split > 1:
            plgpu.barrier_wait(smem["partial_arrived"])
            for peer in range(self.split - 1):
                for piece in range(self.pieces):
                    total[piece] += load(smem["partial"].at[peer, piece])
                squares = tuple(
                    values + load(smem["partial_squares"].at[peer, at])
                    for at, values in enumerate(squares)
                )
        if self.normed:
            total = self._normalised(total, squares)
        if self.late:
            plgpu.barrier_wait(smem["late_arrived"])
        if "bias" in gmem:
            for piece in range(self.pieces):
                part, at = divmod(piece, self.wide)
                b = load(smem["bias"].at[part, self._piece(at)], LAYOUT.reduce(1))  # [width]
                total[piece] += lax.broadcast_in_dim(b, total[piece].shape, [0])
        for at in range(self.wide):
            y = total[at]
            if self.gate:
                y = KERNEL_ACTIVATIONS[self.gate](y) * total[self.wide + at]
            elif self.activation:
                y = KERNEL_ACTIVATIONS[self.activation](y)
            if "residual" in gmem:
                y += load(smem["residual"].at[:, self._piece(at)].T)
            y = y.astype(self.dtype)
            if self.dtype.itemsize == 4:
                y = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
            smem["y"].at[:, self._piece(at)].T[...] = y
        plgpu.commit_smem()
        for group, tile in enumerate(self._row_tiles()):
            target = gmem["y"].at[group, self.rows, self.columns]
            plgpu.copy_smem_to_gmem(smem["y"].at[tile], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _normalised(self, total, squares):
        """The products [width, block_m] of the normalised x, from those of the scaled x."""
        variance, *mean = (jnp.sum(values, axis=0) / self.k for values in squares)  # [block_m]
        if not self.centred:
            r = lax.rsqrt(variance + self.eps)
            return [t * lax.broadcast_in_dim(r, t.shape, [1]) for t in total]
        (mean,) = mean
        r = lax.rsqrt(jnp.maximum(variance - mean * mean, 0.0) + self.eps)
        normalised = []
        for t in total:
            factor, subtracted = (lax.broadcast_in_dim(a, t.shape, [1]) for a in (r, mean))
            y = (t - subtracted * self._norm_row(t, 0)) * factor
            normalised.append(y + self._norm_row(t, 1) if "shift" in self.gmem else y)
        return normalised

    def _piece(self, at: int) -> Any:
        return pl.ds(at * self.width, self.width)

    def launch(self, name: str, scratch: dict[str, Any], body: Any) -> Array:
        """Run a kernel that calls `body`, with `gmem` and `smem` set."""

        def kernel(*refs):
            self.gmem = dict(zip((*self.operands, "y"), refs, strict=False))
            pl.run_scoped(run, **scratch)

        def run(**smem):
            self.smem = smem
            self.layer = (self.gmem["layer"][0],) if "layer" in self.gmem else ()
            body()

        kernel.__name__ = name
        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct((self.groups, self.m, self.n), self.dtype),
            grid=self.grid,
            grid_names=("n", "m"),
            cluster=(self.split,),
            cluster_names=("k",),
            # All layouts are given. Inferring them would take longer than the rest of the lowering.
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        )(*self.operands.values())
