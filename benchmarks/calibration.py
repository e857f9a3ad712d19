"""Predicted and measured rates of leaving the safe range: `python -m benchmarks.calibration`.

The embedded model is calibrated on its training documents and measured on held-out questions, in
rows of its whole context. Its scores are far inside the kernels' safe range. So the rates are also
compared for narrower ranges, which some scores leave.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence

import numpy as np

import fdjax
from fdjax.bench.record import environment
from fdjax.models.tiny.world import Example, World
from fdjax.system.files import output_file, write_whole
from fdjax.tools.calibrate import (
    BIN_LOG2,
    BINS,
    bin_edges,
    choose,
    gather,
    interval,
    plot,
)
from fdjax.weights.calibration import SAFE_LOG2

# Number of histogram bins that form one bin of a density.
_BINS_OF_A_DENSITY = 4

# Half the width of the safe range, in units of log2.
RANGES = (2, 4, 6, 8, 10, 12, 16, SAFE_LOG2)


def rows_of(lm: fdjax.LM, examples: list[Example], count: int) -> list[list[int]]:
    """Concatenate documents like the turns of a chat, and cut them into rows of a whole context."""
    context = lm.config.max_position_embeddings
    (eos,) = lm.defaults.eos_token_ids
    ids: list[int] = []
    for example in examples:
        ids += [*lm.tokenizer.encode(f"{example.question} {example.answer}"), eos]
    rows = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
    return rows[:count]


def leaving(maxima: np.ndarray, phi: np.ndarray | float, safe_log2: float) -> np.ndarray:
    """Share of rows whose maximum is outside the safe range of φ [L, H].

    `maxima` [L, H, BINS] counts the rows by their maximum.
    """
    centre = np.round(np.asarray(phi)[..., None] / np.diff(bin_edges())[0]) + BINS // 2
    bins, half = np.arange(BINS), round(safe_log2 / BIN_LOG2)
    inside = (bins >= centre - half) & (bins < centre + half)
    return 1 - (maxima * inside).sum(axis=-1) / maxima.sum(axis=-1)


def density(scores: np.ndarray) -> dict[str, list]:
    """The density of the scores of each layer, in wider bins.

    Bins beyond the outermost score of all layers are left out.

    Args:
      scores: [L, H, BINS] histograms.
    """
    wider = scores.sum(axis=1).reshape(len(scores), -1, _BINS_OF_A_DENSITY).sum(axis=-1)
    edges = bin_edges()[::_BINS_OF_A_DENSITY]
    found = np.flatnonzero(wider.any(axis=0))
    kept = slice(found[0], found[-1] + 1)
    widths = np.diff(edges)[kept]
    layers = wider[:, kept] / wider.sum(axis=1, keepdims=True) / widths
    centres = edges[:-1][kept] + widths / 2
    return {"centres": centres.round(4).tolist(), "layers": layers.tolist()}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="rows of 512 tokens of each text")
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--plot", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    lm = fdjax.load("tiny", calibration=False)
    world = World()
    trained = list(itertools.islice(world.documents(seed=1), 60 * args.rows))
    texts = {
        "calibration": rows_of(lm, trained, args.rows),
        "held out": rows_of(lm, [example for example, _ in world.held_out], args.rows),
    }
    counted, seconds = {}, {}
    for name, rows in texts.items():
        began = time.perf_counter()
        counted[name] = gather(lm.engine, lm.tokenizer, rows)
        seconds[name] = time.perf_counter() - began
    known, new = counted.values()
    rates = []
    for safe in RANGES:
        phi, predicted = choose(known.maxima, safe)
        measured, without = leaving(new.maxima, phi, safe), leaving(new.maxima, 0.0, safe)
        rates.append(
            {
                "safe_log2": safe,
                "predicted": predicted.mean(axis=1).tolist(),
                "measured": measured.mean(axis=1).tolist(),
                "phi_zero": without.mean(axis=1).tolist(),
            }
        )
        means = predicted.mean(), measured.mean(), without.mean()
        print("+-{:g} log2: predicted {:.3%}, measured {:.3%}, phi = 0 {:.3%}".format(safe, *means))
    record = {
        "environment": environment(args.commit),
        "model": "tiny",
        "dtype": lm.model.dtype,
        "rows": {name: int(s.maxima[0, 0].sum()) for name, s in counted.items()},
        "seconds": {name: round(s, 2) for name, s in seconds.items()},
        "phi": choose(known.maxima)[0].round(4).tolist(),
        "scores_99_99": {
            name: [end.round(4).tolist() for end in interval(s.scores)]
            for name, s in counted.items()
        },
        "score_density": density(new.scores),
        "rates": rates,
    }
    if args.plot:
        plot(known, "embedded model", args.plot)
    if args.output:
        write_whole(args.output, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
