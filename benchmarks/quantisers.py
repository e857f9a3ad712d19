"""How far int4 moves the predictions of the embedded model: `python -m benchmarks.quantisers`.

Compares plain rounding with `fdjax quantize`: with the weights only, with texts that the model
writes itself, and with stories of the kind that it was trained on. One quantisation is one draw of
rounding errors, so each is repeated for models whose weights differ by a little noise. The stories
to compare with are not among those that help to quantise.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import fdjax
from fdjax.bench.record import environment
from fdjax.models import parse_config
from fdjax.models.tiny.stories import story
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat
from fdjax.system.files import output_file, write_whole
from fdjax.tools import quantise as tool
from fdjax.tools.own_texts import own_texts
from fdjax.tools.smoothing import observe
from fdjax.weights.checkpoint import locate
from fdjax.weights.formats.layer import Codes, pack_rows
from fdjax.weights.stored import stored_tensors
from fdjax.weights.written import Planned, write_tensors

GROUPS = 32, 64, 128
METHODS = "plain rounding", "weights only", "own texts", "stories"
# Noise of a draw, relative to each weight: far less than a step of int4.
_NOISE = 0.003
_LONG_TOKENS = 500


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--groups", type=int, nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--stories", type=int, default=60, help="short texts to compare with")
    parser.add_argument("--long", type=int, default=12, help="long texts to compare with")
    parser.add_argument("--output", type=output_file, help="write the record to this file as well")
    parser.add_argument("--commit", help="commit to record if git cannot be asked")
    return parser.parse_args(argv)


def plain_rounding(
    weight: np.ndarray, form: WeightFormat, importance: np.ndarray | None = None, **factors: None
) -> Codes:
    """`quantise` with the usual scale, max|w| / 7, and no other factors."""
    assert set(factors.values()) <= {None}
    n, k = weight.shape
    groups = np.asarray(weight, np.float32).reshape(n, -1, form.group)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 7
    codes = np.clip(np.round(groups / np.where(scales == 0, 1, scales)), -8, 7) + 8
    return Codes(pack_rows(codes.astype(np.uint8).reshape(n, k), 4), scales[..., 0])


def draw(folder: Path, output: Path, seed: int) -> None:
    """Write a checkpoint in fp32 whose matrices differ from the original by noise."""
    drawn = np.random.default_rng(seed)
    groups = []
    for name, tensor in stored_tensors(folder).items():
        values = np.array(tensor.view()).astype(np.float32)
        if values.ndim == 2:
            values *= 1 + _NOISE * drawn.standard_normal(values.shape, np.float32)
        groups.append(((Planned(name, "F32", values.shape),), lambda values=values: (values,)))
    output.mkdir()
    for path in folder.glob("*.json"):
        shutil.copy(path, output)
    data = json.loads((folder / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(data | {"torch_dtype": "float32"}))
    write_tensors(output, groups)


def measure(original: Path, args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Quantise a checkpoint by all methods, and compare each result with the original."""
    lm = fdjax.load(str(original), plan=Plan(), progress=False)
    tokenizer = lm.tokenizer

    def texts(seed: int, count: int, stories: int, tokens: int) -> list[list[int]]:
        drawn = random.Random(seed)
        made = (" ".join(" ".join(story(drawn)) for _ in range(stories)) for _ in range(count))
        return [tokenizer.encode(text)[:tokens] for text in made]

    compared = {
        "short": texts(1, args.stories, 1, 200),
        "long": texts(2, args.long, 30, _LONG_TOKENS),
    }
    own = own_texts(lm.generate, tokenizer.bos_token_id, vocab_size=lm.config.vocab_size)
    inputs = {
        "own texts": observe(lm.engine, own),
        # As many and as long as the pieces of a file that `fdjax quantize --text` takes.
        "stories": observe(lm.engine, texts(77, 128, 30, 512)),
    }
    config = parse_config(json.loads((original / "config.json").read_text()))
    rows = []
    for group in args.groups:
        for method in METHODS:
            output = work / f"{group} {method}"
            quantiser = plain_rounding if method == "plain rounding" else tool.quantise
            with mock.patch.object(tool, "quantise", quantiser):
                tool.quantise_checkpoint(
                    *(original, output, config),
                    bits=4,
                    group=group,
                    scales="float32",
                    inputs=inputs.get(method),
                )
            other = fdjax.load(str(output), plan=Plan(), progress=False)
            row: dict[str, Any] = {"group": group, "method": method}
            for kind, pieces in compared.items():
                found = tool.compare_models(lm.engine, other.engine, pieces)
                row |= {
                    f"mean_kl_{kind}": found.mean_kl,
                    f"p99_kl_{kind}": found.p99_kl,
                    f"agreement_{kind}": found.agreement,
                }
            rows.append(row)
            shutil.rmtree(output)
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means of a method over groups and draws, and the standard errors of mean KL over draws."""
    found: dict[str, dict[str, float]] = {}
    draws = sorted({row["draw"] for row in rows})
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        of: dict[str, float] = {}
        for kind in ("short", "long"):
            means = [
                np.mean([row[f"mean_kl_{kind}"] for row in mine if row["draw"] == i]) for i in draws
            ]
            of[f"mean_kl_{kind}"] = float(np.mean(means))
            if len(draws) > 1:
                of[f"error_{kind}"] = float(np.std(means, ddof=1) / len(draws) ** 0.5)
            of[f"agreement_{kind}"] = float(np.mean([row[f"agreement_{kind}"] for row in mine]))
        found[method] = of
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.draws):
            original = Path(folder) / str(i)
            draw(Path(locate("tiny")), original, seed=i)
            rows += [{"draw": i} | row for row in measure(original, args, Path(folder))]
            print(f"draw {i}: {summary(rows)}", file=sys.stderr, flush=True)
    record = {"environment": environment(args.commit), "summary": summary(rows), "rows": rows}
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
