"""Tiles of products whose x and weights are codes of 8 bits, as tensor cores multiply them.

Each row of x has a scale, which multiplies the results. The words of a weight are those of all
other kernels: a thread has the codes that it needs, but in another order of rows, which
`rounded_rows` brings x into.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.bricks import BRICK, unpack_bricks
from fdjax.pallas_kernels.gemm.hopper.tall_gemm import TallTile, launch, operands_beside_x
from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.fragments import byte_codes, byte_dtype, in_byte_order
from fdjax.pallas_kernels.hopper.rounded_rows import rounded_rows
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, in_eights, load
from fdjax.pallas_kernels.norm import LayerNorm, RMSNorm
from fdjax.pallas_kernels.quantised import QTensor

STEP = 128  # rows of the weight that are multiplied at once


def product(
    x: Array,
    w: QTensor,
    make: type["ByteTile"],
    *,
    layer: Array | int | None = None,
    norm: RMSNorm | LayerNorm | None = None,
    bias: Array | None = None,
    gate: str | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    dtype: Any,
    config: Any = None,
    interpret: Any = None,
) -> Array:
    """`matmul` of x [M,K] after it is rounded, and a weight, as two kernels.

    Args:
      x: [M,K] bfloat16 or float16, which is rounded with a scale for each row.
      w: [K,N], or [K,2,N] with `gate`, in the layout "bricks"; with `layer` stacks of these.
      make: class of the tiles.
      layer, norm, bias, gate, activation, residual: as for `matmul`; residual is [M,N].
      dtype: dtype of the result.
      config: a `make.config_type`; default `for_shape` of it.
      interpret: parameters of the interpreter, or None. It knows no clusters.

    Returns:
      [M,N].

    Raises:
      NotImplementedError: registers or shared memory have no room for the configuration.
    """
    (m, k), n = x.shape, w.shape[-1]
    if m == 0:
        return jnp.zeros((m, n), dtype)
    config = config or make.config_type.for_shape(m, k, n, gate=gate is not None)
    added = None
    if residual is not None and residual.dtype != dtype:
        residual, added = None, residual.astype(jnp.float32)
    x, residual = in_eights(x, residual)
    codes, scales = rounded_rows(x, norm, kind=w.kind, in_xla=interpret is not None)
    y = launch(
        {"x": codes, "x_scales": scales} | operands_beside_x(w, layer, bias, residual),
        make,
        kind=w.kind,
        group=w.group,
        gate=gate,
        activation=activation,
        dtype=jnp.dtype(dtype if added is None else jnp.float32),
        config=config,
        interpret=interpret,
    )
    return y[:m] if added is None else (y[:m] + added).astype(dtype)


class ByteTile(TallTile):
    """A block's tiles. The residual comes to where the result leaves from.

    Attributes:
      config_type: class of the configurations.
    """

    config_type: type

    def stored_rows(self) -> int:
        """All rows of the block, if they come with a residual."""
        return self.shares[0][1] if "residual" in self.operands else super().stored_rows()

    def late_tiles(self) -> int:
        """None: neither the residual nor the scales of x come through the ring."""
        return 0

    def x_swizzle(self) -> int:
        """128 bytes, if they divide a row of x: TMA needs it."""
        return 64 if self.k % STEP else STEP

    def more_vectors(self) -> dict[str, Any]:
        """The scales of x. Mosaic copies multiples of 128 bytes."""
        return {"x_scales": ((-(-self.tile_m // 32) * 32,), jnp.float32)}

    def scratch(self) -> dict[str, Any]:
        """See `TallTile`."""
        scratch = super().scratch()
        copies = 1 + self.wide * ("residual" in self.operands)
        scratch["rest_full"] = plgpu.Barrier(num_arrivals=copies)
        scratch["rest_empty"] = plgpu.Barrier(num_arrivals=self.warpgroups)
        return scratch

    def fetch_all(self, fetch: Any) -> None:
        """Copy the scales of x and the residual after as many steps as the ring has room for."""
        first = min(self.stages, self.steps)
        lax.fori_loop(0, first, fetch, None)
        gmem, smem, full = self.gmem, self.smem, self.smem["rest_full"]
        when(self.first > 0)(lambda: plgpu.barrier_wait(smem["rest_empty"]))
        target = smem["x_scales"]
        scales = gmem["x_scales"].at[pl.ds(self.row, target.shape[0])]
        plgpu.copy_gmem_to_smem(scales, target, full)
        if "residual" in gmem:
            self._fetch_residual(full)
        lax.fori_loop(first, self.steps, fetch, None)

    def end_tile(self) -> None:
        """See `TallTile`."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.smem["rest_empty"])

    def _produce(self) -> None:
        """See `TallTile`."""
        super()._produce()
        plgpu.barrier_wait(self.smem["rest_empty"])

    def _fetch_residual(self, full) -> None:
        """Copy the rows of the residual that this block stores."""
        for rank, (first, end) in enumerate(self.shares):

            @when(jnp.int32(self.rank) == rank)
            def _(first=first, size=end - first):
                for brick in range(self.wide):
                    if size == 0:
                        plgpu.barrier_arrive(full)
                        continue
                    columns = pl.ds((self.column + brick) * BRICK, BRICK)
                    source = self.gmem["residual"].at[pl.ds(self.row + first, size), columns]
                    target = self.smem["y"].at[brick, pl.ds(0, size)]
                    plgpu.copy_gmem_to_smem(source, target, full)

    def await_late(self) -> None:
        """Wait for the scales of x, and the residual."""
        plgpu.barrier_wait(self.smem["rest_full"])

    def with_scales(self, sums, start) -> list[Array]:
        """The sums times the scales of x."""
        rows = sums[0].shape[1]
        scales = load(self.smem["x_scales"].at[pl.ds(start, rows)], LAYOUT.reduce(0))
        return [values * lax.broadcast_in_dim(scales, values.shape, [1]) for values in sums]

    def residual(self, brick, start, rows) -> Any:
        """See `TallTile`."""
        return self.smem["y"].at[brick, pl.ds(0, rows)] if "residual" in self.gmem else None

    def codes(self, words, brick) -> Any:
        """The codes of a step of a column of bricks, as the left operand."""
        if self.interpreted:
            return self._interpreted_codes(words, brick)
        return byte_codes(words, self.kind, 0, STEP)

    def _interpreted_codes(self, words, brick) -> Any:
        """The interpreter knows no operand in registers."""
        codes = unpack_bricks(words[...][None, :, :, :], self.kind)  # [K,N]
        if self.kind == "int8":
            codes ^= 128
        codes = lax.bitcast_convert_type(codes, byte_dtype(self.kind))
        a = self.smem["a"].at[brick]
        a[...] = in_byte_order(codes.T)
        plgpu.commit_smem()
        return a
