"""Quantises and loads a checkpoint of real size: `python -m benchmarks.checkpoints`.

Writes a checkpoint with random weights in the shapes of a config, and quantises it with `fdjax
quantize`, in a process whose seconds and host memory are measured. Then it loads the result and
times a decode step. With `--layers`, only so many layers are written and quantised, and the others
are copies of them: a model whose bf16 weights do not fit onto the disk can still be loaded.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

import fdjax
from benchmarks.arguments import read_config
from fdjax.bench.ceiling import measure_ceiling
from fdjax.bench.model import model_rows
from fdjax.bench.record import Record, emit, environment
from fdjax.models import parse_config, weight_map
from fdjax.system.files import output_file
from fdjax.weights.stored import stored_tensors
from fdjax.weights.written import Planned, write_tensors

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")  # the index of a layer in the name of a tensor
_SAMPLE_SECONDS = 0.02
_GROWTH = 0.25  # GB


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int, help="as in `fdjax quantize`")
    parser.add_argument("--weights-only", action="store_true", help="as in `fdjax quantize`")
    parser.add_argument("--layers", type=int, help="layers to quantise; default: all")
    parser.add_argument("--point", default="1x1024", metavar="BxP", help="of the decode step")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5, help="timed calls")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def write_random(folder: Path, data: dict[str, Any]) -> int:
    """Write a bf16 checkpoint with random weights. Returns its bytes."""
    values = np.random.default_rng(0).standard_normal(2**24 + 1, np.float32) / 50
    values = values.astype(ml_dtypes.bfloat16)  # an odd number, so that no two tensors are equal
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    began = 0

    def group(name: str, shape: tuple[int, ...]):
        def make() -> list[np.ndarray]:
            nonlocal began
            if len(shape) == 1:
                return [np.ones(shape, values.dtype)]
            array = np.resize(np.roll(values, -began), shape)
            began += array.size
            return [array]

        return [Planned(name, "BF16", shape)], make

    sources = [s for weight in weight_map(parse_config(data)).values() for s in weight.sources]
    return write_tensors(folder, [group(*source) for source in sources])


def repeat_layers(folder: Path, output: Path, layers: int) -> int:
    """Write a checkpoint with the layers of another again and again. Returns its bytes."""
    data = json.loads((folder / "config.json").read_text())
    stored = stored_tensors(folder)
    count = data["num_hidden_layers"]

    def group(name: str, tensor) -> tuple[list[Planned], Callable]:
        return [Planned(name, tensor.dtype, tensor.shape)], lambda: [tensor.view()]

    groups = []
    for name, tensor in stored.items():
        found = _LAYER.search(name)
        if found is None:
            groups.append(group(name, tensor))
            continue
        for i in range(int(found[0]), layers, count):
            groups.append(group(_LAYER.sub(str(i), name, count=1), tensor))
    output.mkdir()
    (output / "config.json").write_text(json.dumps(data | {"num_hidden_layers": layers}))
    return write_tensors(output, groups)


def run_and_watch(command: Sequence[str]) -> tuple[float, list[tuple[float, float]]]:
    """Run a command.

    Returns:
      (its seconds; (second, GB) whenever its memory, without the file cache, is a quarter of a GB
      larger than ever before, and at the peak).
    """
    began, growth, highest = time.perf_counter(), [(0.0, 0.0)], (0.0, 0.0)
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        while process.poll() is None:
            if (held := _own_bytes(process.pid) / 1e9) > highest[1]:
                highest = time.perf_counter() - began, held
                if held >= growth[-1][1] + _GROWTH:
                    growth.append(highest)
            time.sleep(_SAMPLE_SECONDS)
    if process.returncode:
        sys.exit(f"{command[0]} ... failed: exit code {process.returncode}")
    return time.perf_counter() - began, [*growth[1:], highest]


def _own_bytes(pid: int) -> int:
    """Bytes of a process in memory, without pages of files."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # it has ended
    found = re.findall(r"^(?:RssAnon|RssShmem):\s+(\d+) kB", status, re.M)
    return 1024 * sum(map(int, found))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    data = read_config(args.config)
    layers = data["num_hidden_layers"]
    costs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        original, quantised = Path(folder) / "original", Path(folder) / "quantised"
        few = args.layers or layers
        costs["GB before"] = write_random(original, data | {"num_hidden_layers": few}) / 1e9
        command = [sys.executable, "-m", "fdjax", "quantize", str(original)]
        command += ["--bits", str(args.bits), "--output", str(quantised)]
        command += ["--group", str(args.group)] if args.group else []
        command += ["--weights-only"] if args.weights_only else []
        costs["seconds of fdjax quantize"], growth = run_and_watch(command)
        costs["GB of host memory of fdjax quantize"] = growth[-1][1]
        print(costs, growth, file=sys.stderr, flush=True)
        if few < layers:
            repeat_layers(quantised, quantised := Path(folder) / "whole", layers)
        costs["GB"] = sum(tensor.nbytes for tensor in stored_tensors(quantised).values()) / 1e9
        on_gpu = jax.default_backend() == "gpu"
        ceiling = {"before": measure_ceiling(2**30 if on_gpu else 2**24, matmul_size=0)}
        record = Record(
            environment(args.commit),
            {
                "model": data,
                "bits": args.bits,
                "group": args.group,
                "layers_quantised": few,
                "host_gb_by_second": growth,
            },
            ceiling,
            costs=costs,
        )
        began = time.perf_counter()
        lm = fdjax.load(str(quantised), progress=False, compilation_cache=False)
        jax.block_until_ready(lm.params)
        costs["seconds of load"] = time.perf_counter() - began
    print(costs, file=sys.stderr, flush=True)
    batch, prompt = map(int, args.point.split("x"))
    rows, more = model_rows(
        lm,
        batch=batch,
        prompt_tokens=prompt,
        new_tokens=args.new_tokens,
        runs=args.runs,
        implementation=f"int{args.bits}",
        check="tokens",
        progress=lambda doing: print(doing, file=sys.stderr, flush=True),
    )
    record.rows += rows
    record.costs |= more
    emit(record.finish(), args.output)
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
