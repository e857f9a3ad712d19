"""Flat GEMM with quantised weights (prototype)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fdjax.pallas_kernels.hopper.conditional import when
from fdjax.pallas_kernels.hopper.fragments import brick_words, unpacked
from fdjax.pallas_kernels.hopper.tiles import (
    KERNEL_ACTIVATIONS,
    LAYOUT,
    load,
    matrix,
    shared_bytes,
)
from fdjax.pallas_kernels.gemm.hopper.flat_gemm import _SMEM_BYTES, _groups

BRICK = 64


@dataclasses.dataclass(frozen=True)
class PackedGemmConfig:
    """Tiling: bricks of columns and of rows of a tile, tiles in the ring, blocks that share K."""

    wide: int = 1
    deep: int = 2
    stages: int = 6
    split: int = 1
    block_m: int = 64


def matmul_packed(x, words, scales, *, kind, layer=None, norm=None, bias=None, gate=None,
                  residual=None, dtype, config):
    m, k = x.shape
    n = words.shape[-4] * BRICK
    groups = _groups(m)
    if groups is None:
        groups, padding = 1, ((0, -m % 8), (0, 0))
        x = jnp.pad(x, padding)
        residual = None if residual is None else jnp.pad(residual, padding)
    operands = {
        "x": x.reshape(groups, -1, k),
        "w": words,
        "scales": scales,
        "layer": None if layer is None else jnp.asarray(layer, jnp.int32).reshape(1),
        "scale": None if norm is None else norm.scale,
        "bias": bias,
        "residual": None if residual is None else residual.reshape(groups, -1, n),
    }
    y = _launch(
        {name: operand for name, operand in operands.items() if operand is not None},
        kind=kind, eps=None if norm is None else norm.eps, gate=gate, dtype=jnp.dtype(dtype),
        config=config,
    )
    return y.reshape(-1, n)[:m]


@functools.partial(jax.jit, static_argnames=("kind", "eps", "gate", "dtype", "config"))
def _launch(operands, *, kind, eps, gate, dtype, config):
    groups, m, k = operands["x"].shape
    n = operands["w"].shape[-4] * BRICK
    in_dtype = operands["x"].dtype
    tile_m = min(-(-m // 8) * 8, config.block_m)
    block_m = groups * tile_m
    wide, deep, split = config.wide, config.deep, config.split
    block_n, block_k = wide * BRICK, deep * BRICK
    parts = 2 if gate else 1
    steps = -(-k // (block_k * split))
    normed = "scale" in operands
    late = groups * ("residual" in operands) + parts * ("bias" in operands)
    scale_rows = operands["scales"].shape[-2]  # groups along K
    group = k // scale_rows
    per_channel = scale_rows == 1
    words = brick_words(kind)

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
    stage = {"w": ((parts * wide, deep, *words), jnp.int32), "x": ((block_m, block_k), in_dtype)}
    sdt = operands["scales"].dtype
    if per_channel:
        buffers["scales"] = ((parts * wide, 1, BRICK), sdt)
    else:
        per_step = block_k // group
        stage["scales"] = ((parts * wide, per_step, BRICK), sdt)
    if normed:
        stage["scale"] = ((block_k,), operands["scale"].dtype)
    room = _SMEM_BYTES - 8 * block_m - shared_bytes(buffers)
    stages = min(config.stages, steps, room // shared_bytes(stage))
    if stages < min(2, steps):
        raise NotImplementedError(f"matmul: {config} does not fit into shared memory at M = {m}")
    buffers |= {name: ((stages, *shape), dtype) for name, (shape, dtype) in stage.items()}
    plain = ("scale", "bias", "w", "scales")
    scratch = {
        name: (plgpu.SMEM if name in plain else matrix)(*buffer)
        for name, buffer in buffers.items()
    }
    copies = parts * wide * (1 if per_channel else 2) + groups + normed
    scratch["arrived"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    if late or per_channel:
        scratch["late_arrived"] = plgpu.Barrier(num_arrivals=late + per_channel * parts * wide)
    if split > 1:
        scratch["partial_arrived"] = plgpu.Barrier(num_arrivals=(split - 1) * (parts * wide + normed))

    def packed_gemm_kernel(*refs):
        gmem = dict(zip((*operands, "y"), refs, strict=False))
        pl.run_scoped(functools.partial(body, gmem), **scratch)

    def body(gmem, **smem):
        tile_n = lax.axis_index("n")
        columns = pl.ds(tile_n * block_n, block_n)
        rows = pl.ds(pl.multiple_of(lax.axis_index("m") * tile_m, 8), tile_m)
        tiles = [pl.ds(g * tile_m, tile_m) for g in range(groups)]
        rank = lax.axis_index("k")
        layer = (gmem["layer"][0],) if "layer" in gmem else ()

        def part_of(ref, part, c, *rest):
            at = (*layer, *((part,) if gate else ()), tile_n * wide + c, *rest)
            return ref.at[at]

        def fetch(step, slot, names):
            at = rank * steps + step
            ks = pl.ds(at * block_k, block_k)
            arrived = smem["arrived"].at[slot]
            if "w" in names:
                for part in range(parts):
                    for c in range(wide):
                        source = part_of(gmem["w"], part, c, pl.ds(at * deep, deep))
                        plgpu.copy_gmem_to_smem(source, smem["w"].at[slot, part * wide + c], arrived)
            if "scales" in names:
                for part in range(parts):
                    for c in range(wide):
                        source = part_of(gmem["scales"], part, c, pl.ds(at * per_step, per_step))
                        plgpu.copy_gmem_to_smem(
                            source, smem["scales"].at[slot, part * wide + c], arrived
                        )
            if "x" in names:
                for g, tile in enumerate(tiles):
                    source, target = gmem["x"].at[g, rows, ks], smem["x"].at[slot, tile]
                    plgpu.copy_gmem_to_smem(source, target, arrived)
            if "scale" in names:
                plgpu.copy_gmem_to_smem(gmem["scale"].at[ks], smem["scale"].at[slot], arrived)

        def scale_x(slot, scaled, squares):
            for start in range(0, block_k, 64):
                ks = pl.ds(start, 64)
                x = load(smem["x"].at[slot, :, ks].T)
                scale = load(smem["scale"].at[slot, ks], LAYOUT.reduce(1))
                squares += x * x
                x *= lax.broadcast_in_dim(scale, x.shape, [0])
                scaled.at[:, ks].T[...] = x.astype(in_dtype)
            plgpu.commit_smem()
            return squares

        def step(i, carry):
            totals, squares = carry
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(smem["arrived"].at[slot])
            x = smem["x"].at[slot]
            if normed:
                x = smem["scaled_x"].at[lax.rem(i, 2)]
                squares = scale_x(slot, x, squares)
            totals = list(totals)
            unit = block_k if per_channel else group
            for u in range(block_k // unit):
                ks = pl.ds(u * unit, unit)
                bricks = pl.ds(u * unit // BRICK, unit // BRICK)

                def product(*accs, ks=ks, bricks=bricks):
                    for c, acc in enumerate(accs):
                        a = unpacked(smem["w"].at[slot, c, bricks], kind, in_dtype)
                        plgpu.wgmma(acc, a, x.at[:, ks].T)
                    return [acc[...] for acc in accs]

                sums = pl.run_scoped(
                    product, *[plgpu.ACC((BRICK, block_m), jnp.float32)] * (parts * wide)
                )
                for c, value in enumerate(sums):
                    if not per_channel:
                        s = load(smem["scales"].at[slot, c, u], LAYOUT.reduce(1))
                        value = value * lax.broadcast_in_dim(s, value.shape, [0])
                    totals[c] += value
            refill = i + stages

            @when(refill < steps)
            def _():
                fetch(refill, slot, stage)

            return totals, squares

        for name in ("w", *(name for name in stage if name != "w")):
            for slot in range(stages):
                fetch(slot, slot, (name,))
        if per_channel:
            for part in range(parts):
                for c in range(wide):
                    plgpu.copy_gmem_to_smem(
                        part_of(gmem["scales"], part, c), smem["scales"].at[part * wide + c],
                        smem["late_arrived"],
                    )
        if "residual" in gmem:
            for g, tile in enumerate(tiles):
                source = gmem["residual"].at[g, rows, columns]
                plgpu.copy_gmem_to_smem(source, smem["residual"].at[tile], smem["late_arrived"])
        if "bias" in gmem:
            for part in range(parts):
                source = gmem["bias"].at[(part, columns) if gate else columns]
                plgpu.copy_gmem_to_smem(source, smem["bias"].at[part], smem["late_arrived"])

        def zeros(shape):
            return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)

        carry = [zeros((BRICK, block_m))] * (parts * wide), zeros((64, block_m)) if normed else None
        products, squares = lax.fori_loop(0, steps, step, carry)

        def epilogue():
            total, sum_of_squares = list(products), squares
            if split > 1:
                plgpu.barrier_wait(smem["partial_arrived"])
                for peer in range(split - 1):
                    for part in range(parts * wide):
                        at = smem["partial"].at[peer, part // wide, pl.ds(part % wide * BRICK, BRICK)]
                        total[part] += load(at)
                    if normed:
                        sum_of_squares += load(smem["partial_squares"].at[peer])
            if late or per_channel:
                plgpu.barrier_wait(smem["late_arrived"])
            if per_channel:
                for part in range(parts * wide):
                    s = load(smem["scales"].at[part, 0], LAYOUT.reduce(1))
                    total[part] *= lax.broadcast_in_dim(s, total[part].shape, [0])
            if normed:
                r = lax.rsqrt(jnp.sum(sum_of_squares, axis=0) / k + eps)
                total = [t * lax.broadcast_in_dim(r, t.shape, [1]) for t in total]
            if "bias" in gmem:
                for part in range(parts * wide):
                    at = smem["bias"].at[part // wide, pl.ds(part % wide * BRICK, BRICK)]
                    b = load(at, LAYOUT.reduce(1))
                    total[part] += lax.broadcast_in_dim(b, total[part].shape, [0])
            for c in range(wide):
                here = pl.ds(c * BRICK, BRICK)
                y = KERNEL_ACTIVATIONS[gate](total[c]) * total[wide + c] if gate else total[c]
                if "residual" in gmem:
                    y += load(smem["residual"].at[:, here].T)
                y = y.astype(dtype)
                if dtype.itemsize == 4:
                    y = plgpu.layout_cast(y, plgpu.Layout.WGMMA_TRANSPOSED)
                smem["y"].at[:, here].T[...] = y
            plgpu.commit_smem()
            for g, tile in enumerate(tiles):
                plgpu.copy_smem_to_gmem(smem["y"].at[tile], gmem["y"].at[g, rows, columns])
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
            for part in range(parts * wide):
                at = smem["partial"].at[rank - 1, part // wide, pl.ds(part % wide * BRICK, BRICK)]
                send(products[part], at)
            if normed:
                send(squares, smem["partial_squares"].at[rank - 1])

        when(rank == 0)(epilogue)

    return plgpu.kernel(
        packed_gemm_kernel,
        out_type=jax.ShapeDtypeStruct((groups, m, n), dtype),
        grid=(n // block_n, -(-m // config.block_m)),
        grid_names=("n", "m"),
        cluster=(split,),
        cluster_names=("k",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands.values())

