"""Time to first token and decode step on 1, 2, ... GPUs: `python -m benchmarks.tensor_parallel`.

One run measures all numbers of GPUs with the same random weights, and compares their results with
one pass of a single GPU over the same text. Peers run first, on the same numbers of GPUs, in
processes that end before JAX takes the memory: `--gpt-fast` the same model in PyTorch in the manner
of gpt-fast, `--transformers` a checkpoint with `tp_plan="auto"`.
"""

import argparse
import dataclasses
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.arguments import read_config
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.experts import chosen_experts
from fdjax.bench.model import model_rows
from fdjax.bench.one_pass import one_pass
from fdjax.bench.record import Record, emit, environment, write
from fdjax.engine.memory import plan_memory
from fdjax.lm import LM
from fdjax.models import (
    DecoderConfig,
    describe,
    layers_features,
    layers_shape,
    parse_config,
)
from fdjax.pallas_kernels.plan import Choice, Entry, Plan
from fdjax.system.files import output_file
from fdjax.weights.stacked import LayerStacks, random_stacked_params

# Ways to sum over GPUs: XLA's all-reduce, our kernel, and the sums inside one kernel for all
# layers.
SUMS = ("psum", "all-reduce kernel", "one launch")
# A cache in pages is planned for more rows than a point has, and leaves a part of the memory free.
_SPARE = 1.25
# Llama 2 7B.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "num_hidden_layers": 32,
    "max_position_embeddings": 4096,
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, help="a config.json; default: Llama 2 7B")
    parser.add_argument(
        "--devices", type=int, nargs="+", metavar="N", default=[1, 2], help="numbers of GPUs"
    )
    parser.add_argument(
        "--points",
        nargs="+",
        default=["1x1024", "8x1024"],
        metavar="BxP",
        help="prompts of a call, and tokens of each",
    )
    parser.add_argument(
        "--sums",
        nargs="+",
        choices=SUMS,
        default=SUMS,
        help="how several GPUs sum in a decode step",
    )
    parser.add_argument(
        "--tiles",
        type=int,
        nargs="+",
        metavar="N",
        default=[1],
        help="tiles of a call of prompts, see `Plan.prompt_tiles`",
    )
    parser.add_argument(
        "--table", type=Path, help="a table of `fdjax tune`, before the shipped one"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5, help="timed calls")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--transformers", type=Path, metavar="FOLDER", help="run this checkpoint")
    parser.add_argument("--gpt-fast", action="store_true", help="run the model in PyTorch, too")
    parser.add_argument(
        "--peer-seconds", type=float, metavar="S", help="limit of a peer on each number of GPUs"
    )
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def run_peer(name: str, model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a peer, for each number of GPUs and each point."""
    found = []
    for devices in args.devices:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}"]
        command += ["-m", "benchmarks.tensor_parallel_peer", name, str(model), args.dtype]
        command += [str(args.new_tokens), str(args.runs), *args.points]
        # In a file: processes that outlive the peer could hold a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            peer = subprocess.Popen(command, stdout=output)
            try:
                code = peer.wait(args.peer_seconds)
                problem = f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                problem = f"took more than {args.peer_seconds:g} s"
                end(peer)
            output.seek(0)
            lines = output.read().splitlines()
        if problem:
            found.append({"devices": devices, "problem": problem})
        else:
            found.append(json.loads(lines[-1]))
    return found


def end(launcher: subprocess.Popen, seconds: float = 60) -> None:
    """Ask PyTorch's launcher to end the processes that it has started, and wait for that."""
    launcher.terminate()
    try:
        launcher.wait(seconds)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    points = [tuple(map(int, point.split("x"))) for point in args.points]
    config = read_config(args.config) if args.config else CONFIG
    parsed = parse_config(config)
    context = parsed.max_position_embeddings
    # Before minutes go by until the first of these points.
    if any(prompt + args.new_tokens > context for _, prompt in points):
        sys.exit(f"--points: prompts and {args.new_tokens} new tokens must fit into {context}")
    extra = {}
    if args.gpt_fast:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config))
            extra["gpt-fast"] = run_peer("gpt-fast", file, args)
    if args.transformers:
        extra["transformers"] = run_peer("transformers", args.transformers, args)
    on_gpu = jax.default_backend() == "gpu"
    record = Record(
        environment(args.commit),
        {"model": config, "dtype": args.dtype, "devices": args.devices, **extra},
        {"before": measure_ceiling(2**30 if on_gpu else 2**24, matmul_size=0)},
    )
    batch, prompt = max(points, key=math.prod)
    room = batch, prompt + args.new_tokens

    def model_for(sums: str | None, devices: int, tiles: int = 1) -> tuple[LM, LayerStacks]:
        plan = with_sums(Plan.for_device(table=args.table), parsed, devices, sums)
        plan = dataclasses.replace(plan, prompt_tiles=tiles)
        return random_lm(config, plan, devices, args.dtype, room)

    single, _stacks = model_for(None, 1)
    for devices, sums, tiles in cases(args):
        name = f"{devices} devices" if sums is None else f"{devices} devices, {sums}"
        name += f", {tiles} tiles" if tiles > 1 else ""
        lm = single if devices == 1 else model_for(sums, devices, tiles)[0]
        for batch, prompt in points:
            rows, costs = model_rows(
                lm,
                batch=batch,
                prompt_tokens=prompt,
                new_tokens=args.new_tokens,
                runs=args.runs,
                implementation=name,
                check="tokens",
                logits=lambda _, ids, n: one_pass(single, ids, n),
                experts=lambda _, ids: chosen_experts(single, ids),
                progress=lambda doing, name=name: print(f"{name}: {doing}", file=sys.stderr),
            )
            record.rows += rows
            record.costs |= costs
            if args.output:
                write(record.so_far(), args.output)
            for row in rows:
                took = row.timing and f"{row.timing['median_us']:.0f} us"
                print(f"{row.case}, {name}: {took or row.reason}", file=sys.stderr, flush=True)
        lm.release()
    emit(record.finish(), args.output)
    return int(record.failed)


def cases(args: argparse.Namespace) -> list[tuple[int, str | None, int]]:
    """Numbers of devices, with each way to sum and each number of tiles if there are several."""
    several = list(itertools.product(args.sums, args.tiles))
    return [(n, *how) for n in args.devices for how in (several if n > 1 else [(None, 1)])]


def random_lm(
    config: dict[str, Any],
    plan: Plan,
    devices: int,
    dtype: str,
    room: tuple[int, int] | None = None,
    **options,
) -> tuple[LM, LayerStacks]:
    """A model with random weights.

    Args:
      config: a config.json.
      plan: which implementations run.
      devices: number of devices that share it.
      dtype: dtype of the weights.
      room: rows, and tokens of each, for which the cache must have room. LM's own default is as
        much cache as weights.
      **options: of `LM`.

    Returns:
      (the model, the arrays that hold its layers).
    """
    model = describe(parse_config(config), dtype=dtype, plan=plan, tensor_parallel=devices)
    if room is not None:
        planned = plan_memory(model.local, batch=room[0], max_len=room[1])
        most = max(int(_SPARE * planned.total_bytes), 2 * model.local.weight_bytes)
        options["memory_bytes"] = most
    params, stacks = random_stacked_params(model)
    return LM(model, params, **options), stacks


def with_sums(plan: Plan, config: DecoderConfig, ranks: int, sums: str | None) -> Plan:
    """A plan whose devices sum in a way of `SUMS`. None changes nothing."""
    if sums == "one launch":
        return with_one_launch(plan, config, ranks)
    if sums is None:
        return plan
    # For some shapes the shipped tables choose one launch.
    plan = plan.with_xla("decode_layers")
    return with_all_reduce(plan, "xla" if sums == "psum" else "mosaic_gpu", config.width, ranks)


def with_all_reduce(plan: Plan, name: str, width: int, ranks: int) -> Plan:
    """A plan that uses this implementation to sum, in decode steps and prompts."""
    shape = {"width": width, "ranks": ranks, "itemsize": 2}
    choice = Choice(name, source="table")
    entries = (
        Entry("all_reduce", tuple(sorted((shape | {"m": m}).items())), choice)
        for m in (2**i for i in range(15))
    )
    return dataclasses.replace(plan, table=(*plan.table, *entries))


def with_one_launch(plan: Plan, config: DecoderConfig, ranks: int) -> Plan:
    """A plan that runs all layers of a decode step in one launch, for any rows and slots.

    Configurations of its table stay.

    Args:
      plan: the plan to change.
      config: config of the whole model.
      ranks: number of devices that share it.
    """
    local = describe(config, tensor_parallel=ranks).local.config
    choice = Choice("mosaic_gpu", source="table")
    features = layers_features(local)
    shapes = (
        layers_shape(local, rows, slots, 2)
        for rows in (1, 2, 4, 8, 16, 32)
        for slots in (128, 512, 2048, 8192, 32768)
    )
    entries = (
        Entry("decode_layers", tuple(sorted(shape.items())), choice)
        for shape in shapes
        if plan.choose("decode_layers", features, **shape).implementation != choice.implementation
    )
    return dataclasses.replace(plan, table=(*plan.table, *entries))


if __name__ == "__main__":
    sys.exit(main())
