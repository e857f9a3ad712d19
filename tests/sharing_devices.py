"""Runs models on several fake CPU devices, in a process of its own, and prints a report.

    python tests/sharing_devices.py FUNCTION '[ARGUMENT, ..., {KEYWORDS}]'

prints the result of a function below as JSON. A process has several CPU devices only from its
start, and tests of other things are slower with them.
"""

import collections
import dataclasses
import functools
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import fdjax
from any_size import ANY_SIZE
from fdjax.engine import runner
from fdjax.engine.watch import Watch
from fdjax.lm import LM
from fdjax.models import decoder, describe, parse_config, random_params
from fdjax.pallas_kernels.all_reduce import all_reduce
from fdjax.pallas_kernels.layers import decode_layers
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.ranks import AXIS
from fdjax.tools import calibrate, tune_layers
from fdjax.weights import stacked

FIXTURES = Path(__file__).parent / "fixtures"
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "return_logprobs": True}
PROMPTS = [[1, 2, 3, 4, 5], [7] * 150, [9, 8]]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 99,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_SAMPLED = {"max_new_tokens": 8, "temperature": 0.9, "eos_token_id": None}


class Ranks:
    """Compares what the devices computed, whenever results are read.

    Attributes:
      compared: number of results that several devices had.
      differing: number of those that were not the same bits everywhere.
    """

    def __init__(self):
        self.compared = self.differing = 0
        self._read, runner._numpy = runner._numpy, self

    def __call__(self, results):
        for leaf in jax.tree.leaves(results):
            first, *others = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
            self.compared += bool(others)
            self.differing += any(other != first for other in others)
        return self._read(results)


def load(path, ranks, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_len 264 exceeds", UserWarning)
        options = {"dtype": "float32", "compilation_cache": False, "progress": False} | options
        return fdjax.load(FIXTURES / path, tensor_parallel=ranks, max_len=264, **options)


def generated(lm, prompts=PROMPTS, **options):
    result = lm.generate(prompts, **OPTIONS | options)
    return {"tokens": result.tokens, "logprobs": result.logprobs}


def same_tokens(paths, *ranks, **options):
    """Greedy tokens of checkpoints on one device and on several, or why there are none."""
    seen, report = Ranks(), {}
    for path in paths:
        report[path] = {count: _tokens_or_error(path, count, **options) for count in (1, *ranks)}
    mixing = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT")
    return report | {"compared": seen.compared, "differing": seen.differing, "mixing": mixing}


def _tokens_or_error(path, count, **options):
    try:
        return generated(load(path, count, **options))
    except ValueError as error:
        return {"error": str(error)}


def serving(path, ranks, vocab_size=90):
    """Everything that an `LM` does, on one device and on several."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(3, vocab_size, 140).tolist()
    prompts = [beginning + rng.integers(3, vocab_size, i).tolist() for i in range(1, 13)]
    mixed = {
        "temperature": [0.0, 0.7, 1.0] * 4,
        "top_k": [None, 20, None] * 4,
        "repetition_penalty": [1.0, 1.2, 1.0, 1.1] * 3,
        "max_new_tokens": [3, 9, 14] * 4,
        "seed": 5,
        "do_sample": None,
    }
    report = {}
    for count in (1, ranks):
        lm = load(path, count, max_batch=4)
        answers = sorted(lm.generate_iter(prompts, **OPTIONS), key=lambda a: a.index)
        report[count] = {
            "mixed": generated(lm, prompts, **mixed),
            "iter": [answer.tokens for answer in answers],
            "submit": lm.submit(prompts[0], **OPTIONS).result().tokens,
            "cached": lm.generate(prompts, **OPTIONS).stats.cached_tokens,
            "score": lm.score(prompts[:3]).logprobs,
            "samples": lm.generate(prompts[0], num_return_sequences=3, seed=1, **_SAMPLED).tokens,
            "reruns": lm.generate([1, 2], max_new_tokens=4, return_reruns=True).stats.reruns,
        }
    return report


def beams(path, ranks):
    """Two searches on one device and on several, one of them with drawn tokens."""
    options = {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}
    drawn = {"do_sample": True, "temperature": 0.9, "seed": 3}
    report = {}
    for count in (1, ranks):
        lm = load(path, count)
        results = [lm.generate(PROMPTS, **options | more) for more in ({}, drawn)]
        report[count] = [[result.tokens, result.sequences_scores] for result in results]
    return report


def pure(paths, *ranks, generates=True):
    """`forward` and `generate` of checkpoints, traced and not, on one device and on several."""
    ids = np.random.default_rng(1).integers(3, 90, (3, 20))
    lengths = np.array([20, 1, 17])
    config = fdjax.GenerationConfig(max_new_tokens=6, temperature=0.8, seed=4)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(model, params):
        return fdjax.forward(model, params, ids, lengths, last=1)

    def answer(lm):
        found = {"logits": logits(lm.model, lm.params)}
        if generates:
            found["untraced"] = fdjax.forward(lm.model, lm.params, ids, lengths, last=1)
            found["tokens"] = fdjax.generate(lm.model, lm.params, ids, config, lengths)
        return {name: np.asarray(value).tolist() for name, value in found.items()}

    return {path: {count: answer(load(path, count)) for count in (1, *ranks)} for path in paths}


def calibrated(path, ranks):
    """The statistics of `calibrate`, on one device and on several."""
    text = [np.random.default_rng(2).integers(3, 90, n).tolist() for n in (200, 33, 5)]
    report = {}
    for count in (1, ranks):
        lm = load(path, count)
        found = calibrate.gather(lm.engine, lm.tokenizer, text, context=128)
        phi, _ = calibrate.choose(found.maxima)
        report[count] = {
            "scores": found.scores.sum(axis=-1).tolist(),
            "phi": phi.tolist(),
            "lowest": found.lowest.tolist(),
            "highest": found.highest.tolist(),
        }
    return report


def in_tiles(ranks, *counts, **config):
    """Several devices, with calls of prompts divided into so many tiles, and how many ran."""
    prompts = [list(range(3, 90)) * 2, [5] * 200, [7, 8]]
    report, ran, in_tiles = {}, [], decoder.Decoder.in_tiles

    def counted(self, tokens, kv, tiles, *args, **options):
        ran.append(len(tiles))
        return in_tiles(self, tokens, kv, tiles, *args, **options)

    decoder.Decoder.in_tiles = counted
    for count in (1, *counts):
        ran.clear()
        plan = dataclasses.replace(Plan.for_device(), prompt_tiles=count)
        parsed = parse_config(CONFIG | {"max_position_embeddings": 512} | config)
        model = describe(parsed, dtype="float32", plan=plan, tensor_parallel=ranks)
        lm = LM(model, random_params(model, 3))
        report[count] = generated(lm, prompts, max_new_tokens=3) | {"ran": [*ran]}
    return report


def tuned(ranks):
    """Entries that `fdjax tune` makes of a model's layers, with XLA in place of the kernel."""
    genuine, reports = decoder.decode_layers, []

    def kernel(*operands, plan, **options):
        return genuine(*operands, implementation="xla", **options)

    decoder.decode_layers, tune_layers.can_chain = kernel, lambda device: True
    stacked.layer_views = list  # JAX makes views only on its first CPU
    config = parse_config(CONFIG | {"torch_dtype": "bfloat16"})
    model = describe(config, plan=Plan(implementations=ANY_SIZE), tensor_parallel=ranks)
    found = tune_layers.measure_layers(model, (2,), (128,), steps=2, runs=1, report=reports.append)
    return {"entries": list(found), "reports": reports}


def own_weights(ranks, **config):
    """`LM` of given weights: of one device, and the same weights divided."""
    plan = Plan.for_device()
    config = parse_config(CONFIG | config)
    one, many = (
        describe(config, dtype="float32", plan=plan, tensor_parallel=count) for count in (1, ranks)
    )
    params = random_params(one, 3)
    lm = LM(many, params)
    report = {1: generated(LM(one, params)), ranks: generated(lm)}
    lm.params = jax.tree.map(np.asarray, lm.params)  # whole arrays of the host, in their shapes
    report["again"] = generated(lm)
    made = random_params(many, 3)
    report["random"] = generated(LM(many, made))
    shards = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(made)]
    return report | {"bytes": [sum(shards), many.local.weight_bytes, one.weight_bytes]}


def stalled(path, ranks, stalls):
    """What a watch reports if a device stalls: in the program's second step, before its tokens."""
    reports, calls = [], collections.Counter()
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: reports.append(record.getMessage())
    logging.getLogger("fdjax").addHandler(handler)

    def stall(rank):
        calls[int(rank)] += 1
        if int(rank) == stalls and calls[int(rank)] == 3:
            time.sleep(4)
        return np.float32(0)

    def processor(ids, lengths, logits):
        zero = jax.ShapeDtypeStruct((), np.float32)
        return logits + jax.experimental.io_callback(stall, zero, jax.lax.axis_index(AXIS))

    lm = load(path, ranks)
    expected = lm.generate([1, 2, 3], max_new_tokens=6, eos_token_id=None).tokens
    lm.engine.watch = Watch(seconds=1.5)
    watched = lm.generate(
        [1, 2, 3], max_new_tokens=6, eos_token_id=None, logits_processors=[processor]
    )
    return {"reports": reports, "same": watched.tokens == expected, "calls": sum(calls.values())}


def disk_cache(path, ranks):
    """Tokens and compile time of two loads with a cache on disk, the second from it."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        report = {}
        for run in ("first", "second"):
            lm = load(path, ranks, compilation_cache=None)
            report[run] = generated(lm)
            report[f"{run} programs"] = len(list(Path(folder, "fdjax").iterdir()))
            del lm
            jax.clear_caches()
    return report


def refusals():
    """What is said where devices cannot share a model."""
    said = {}

    def attempt(name, function):
        try:
            function()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    path = "hf/llama_bias"
    for ranks in (0, -1, 2.5, True, "2", 3, 16):
        attempt(repr(ranks), lambda ranks=ranks: load(path, ranks))
    attempt("device", lambda: load(path, 2, device=jax.devices()[0]))
    attempt(
        "kv heads", lambda: _described(4, num_attention_heads=12, num_key_value_heads=6, head_dim=8)
    )
    attempt("heads", lambda: _described(8, num_attention_heads=4))
    attempt("F", lambda: _described(4, intermediate_size=90))
    lm = load(path, 2)
    attempt("expert", lambda: _described(4, **MIXTURE, intermediate_size=90))
    one = jax.tree.map(np.asarray, lm.params)
    attempt("forward", lambda: fdjax.forward(lm.model, one, np.ones((1, 4), np.int32)))
    attempt("module", lambda: lm.model.module(lm.params))
    attempt("params", lambda: setattr(lm, "params", lm.params | {"embed": np.zeros((3, 3))}))
    return said


def in_one_launch(path, ranks):
    """Greedy tokens on one device, and on several whose steps run in one launch, by XLA."""
    launches = []

    def by_xla(x, *args, plan, **options):
        launches.append((len(x), options["ranks"]))
        return decode_layers(x, *args, **options, implementation="xla")

    decoder.decode_layers = by_xla
    stacked.layer_views = list  # JAX makes views only on its first CPU
    one = generated(load(path, 1))
    seen = Ranks()
    plan = Plan(
        batch_invariant=True,
        named=(("decode_layers", "mosaic_gpu"),),
        implementations=ANY_SIZE,
    )
    several = load(path, ranks, plan=plan)
    found = generated(several)
    return {
        "one": one,
        "several": found,
        "stacks": several.engine.stacks(1, 128),
        "launches": launches,
        "differing": seen.differing,
        "compared": seen.compared,
    }


def all_reduce_sums(ranks):
    """Largest errors of `all_reduce` in float32, over what is added, and whether ranks differ."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ranks, 3, 1, 64)).astype(np.float32)
    bias, residual = (rng.standard_normal(s).astype(np.float32) for s in (64, (3, 1, 64)))
    report = {}
    for added in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):

        def run(x, added):
            return all_reduce(x[0], "test", **added)[None]

        specs = (PartitionSpec(AXIS), PartitionSpec())
        summed = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
        found = np.asarray(jax.jit(summed)(x, added))
        want = x.astype(np.float64).sum(0) + sum(added.values())
        error = float(np.abs(found - want).max())
        report[" ".join(added)] = error, bool((found != found[0]).any())
    return report


def _described(ranks, **config):
    return describe(parse_config(CONFIG | config), tensor_parallel=ranks)


def main():
    function, arguments = sys.argv[1], json.loads(sys.argv[2])
    jax.config.update("jax_disable_most_optimizations", True)
    options = arguments.pop()
    print(json.dumps(globals()[function](*arguments, **options)))


if __name__ == "__main__":
    main()
