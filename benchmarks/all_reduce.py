"""All-reduce of decode steps and prompts between GPUs: `python -m benchmarks.all_reduce`.

Each implementation sums rows again and again, those of a decode step in a CUDA graph, one sum right
after the other as in its layers. The time of one sum is the slope between a few and many sums.
"mosaic_gpu" is our kernel with a mailbox for all sums, as in the model; "without mailbox" opens one
for each. "in one kernel" does the same in one kernel, by the exchange of the launch of all layers,
with the residual and the sums of squares that it needs. Peers are NCCL and symmetric memory in
PyTorch, also in a graph, in processes that end before JAX starts.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fdjax.bench.record import environment
from fdjax.engine.engine import compiler_options
from fdjax.engine.step import decode_steps, prompt_logits
from fdjax.models import describe, parse_config
from fdjax.pallas_kernels.all_reduce import all_reduce, mailbox
from fdjax.pallas_kernels.hopper.persistent import exchange
from fdjax.pallas_kernels.hopper.persistent.sizes import BRICK
from fdjax.pallas_kernels.hopper.tiles import LAYOUT, matrix, put
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.system.files import output_file, write_whole

IN_ONE_KERNEL = "in one kernel"
WITHOUT_MAILBOX = "mosaic_gpu, without mailbox"
IMPLEMENTATIONS = ("xla", "mosaic_gpu", WITHOUT_MAILBOX, IN_ONE_KERNEL)
SHAPES = ("1x4096", "8x4096", "32x4096", "1x5120", "1x8192", "32x8192", "512x4096", "4096x4096")
COUNTS = (64, 1088)
# Sums in a turn of the loop, about as many as a step of 32 layers has.
_UNROLLED = 32
# The exchange in one kernel has a block for each 64 columns, with all rows in registers.
_MOST_ROWS_IN_ONE_KERNEL = 32
_FEWEST_ROWS_OF_PROMPTS = 128
_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 1,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxE", help="rows and width")
    parser.add_argument("--counts", type=int, nargs=2, default=COUNTS, help="sums of a call")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def peers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Microseconds in PyTorch, or the reason why there are none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=gpu"]
    command += ["-m", "benchmarks.all_reduce_peer", *args.shapes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return [{"problem": f"exit code {done.returncode}"}]
    return json.loads(done.stdout.splitlines()[-1])


def microseconds(name: str, m: int, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of one sum of [m, width], with a residual."""
    ranks = jax.local_device_count()
    mesh = Mesh(np.array(jax.local_devices()), (AXIS,))
    whole = PartitionSpec()
    # Programs of prompts are not captured in a graph with their loop.
    function = decode_steps if m < _FEWEST_ROWS_OF_PROMPTS else prompt_logits
    options = compiler_options(function, describe(parse_config(_CONFIG), tensor_parallel=ranks))
    # Sums of zeros remain zeros. The tests check that sums are right.
    x = jax.device_put(jnp.zeros((m, width), args.dtype), NamedSharding(mesh, whole))
    if name == IN_ONE_KERNEL and m > _MOST_ROWS_IN_ONE_KERNEL:
        raise NotImplementedError(f"needs at most {_MOST_ROWS_IN_ONE_KERNEL} rows")
    medians = []
    for count in args.counts:

        def repeat(x, count=count):
            if name == IN_ONE_KERNEL:
                return means_in_one_kernel(x, x, count)[0]
            once = functools.partial(
                all_reduce, name="benchmark", implementation=name.split(",")[0]
            )
            named = None if name == WITHOUT_MAILBOX else name
            with mailbox(m, width, x.dtype, after=x, named=named):
                return lax.fori_loop(
                    0, count, lambda _, y: once(y, residual=x), x, unroll=_UNROLLED
                )

        many = jax.shard_map(repeat, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        call = jax.jit(many).lower(x).compile(options)
        times = []
        for _ in range(args.runs + 3):
            began = time.perf_counter()
            jax.block_until_ready(call(x))
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times[3:]))
    few, many = args.counts
    return {"us": 1e6 * (medians[1] - medians[0]) / (many - few), "seconds": medians}


def means_in_one_kernel(x: Array, residual: Array, rounds: int) -> tuple[Array, Array]:
    """The mean over devices plus a residual, again and again in one kernel.

    Args:
      x, residual: [M, width] in half precision, width a multiple of 64 and at most 64 · 132.
      rounds: number of rounds, even. Each rounds the sum as a layer rounds the residual stream.

    Returns:
      (the last x [M, width], the sums of its squares over 64 columns, added up over the rounds
      [width / 64, M] fp32).
    """
    ranks, (m, width) = lax.axis_size(AXIS), x.shape
    padded = -(-m // 8) * 8
    columns = (jnp.pad(a, ((0, padded - m), (0, 0))).T for a in (x, residual))

    def kernel(x, residual, inbox, y, sums, of_tile, square_row):
        tile = lax.axis_index("tile")
        own = pl.ds(tile * BRICK, BRICK)
        value, added = (
            plgpu.load(ref.at[own], layout=LAYOUT, optimized=False).astype(jnp.float32)
            for ref in (x, residual)
        )

        def layer(at, carry):
            value, squares = carry
            for which in range(exchange.ROUNDS):
                total = exchange.Exchange(ranks, which).sum({"inbox": inbox}, at, tile, value)
                value = (total * (1 / ranks) + added).astype(x.dtype).astype(jnp.float32)
                squares += jnp.sum(value * value, axis=0)
            return value, squares

        squares = plgpu.layout_cast(jnp.zeros((padded,), jnp.float32), LAYOUT.reduce(0))
        value, squares = lax.fori_loop(0, rounds // exchange.ROUNDS, layer, (value, squares))
        put(of_tile, value)
        square_row[...] = squares
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(of_tile, y.at[:, own])
        plgpu.copy_smem_to_gmem(square_row, sums.at[tile])
        plgpu.wait_smem_to_gmem(0)

    y, squares = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((padded, width), x.dtype),
            jax.ShapeDtypeStruct((width // BRICK, padded), jnp.float32),
        ],
        kernel_name="means_in_one_kernel",
        scratch_types=(matrix((padded, BRICK), x.dtype), plgpu.SMEM((padded,), jnp.float32)),
        grid=(width // BRICK,),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*columns, exchange.new_inbox(ranks, padded, width))
    return y[:m], squares[:, :m]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    of_peers = [] if args.no_peers else peers(args)
    rows = []
    for shape in args.shapes:
        m, width = map(int, shape.split("x"))
        for name in args.implementations:
            row = {"m": m, "width": width, "implementation": name}
            try:
                row |= microseconds(name, m, width, args)
            except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
                row["problem"] = str(error).splitlines()[0]
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    rows += of_peers
    for row in rows:
        if "us" in row:
            print(f"{row['m']:4} x {row['width']}  {row['implementation']:28} {row['us']:6.2f} us")
    record = {"environment": environment(args.commit), "all_reduce": rows}
    print(json.dumps(record))
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
