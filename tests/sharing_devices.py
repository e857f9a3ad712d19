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
from fdjax.engine import engine, runner
from fdjax.engine.state import SLOT_MULTIPLE as PAGE
from fdjax.engine.watch import Watch
from fdjax.lm import LM
from fdjax.models import decoder, describe, parse_config, random_params
from fdjax.pallas_kernels.all_reduce import all_reduce
from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    QuantisedCache,
    append_decode_divided,
    append_prefill_divided,
)
from fdjax.pallas_kernels.attention.cache import dequantised
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
    """A checkpoint on some devices. Calls of up to 4 rows share a program for prompts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "max_len 264 exceeds", UserWarning)
        options = {"dtype": "float32", "compilation_cache": False, "max_batch": 4} | options
        options |= {"progress": False}
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
            "page": lm.engine.page_tokens,
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
        results = [lm.generate(PROMPTS, **options | more) for more in ({"do_sample": False}, drawn)]
        report[count] = [[result.tokens, result.sequences_scores] for result in results]
    return report


def pure(paths, *ranks, generates=()):
    """`forward` of checkpoints in a trace, and of those in `generates` outside, with `generate`."""
    ids = np.random.default_rng(1).integers(3, 90, (3, 20))
    lengths = np.array([20, 1, 17])
    config = fdjax.GenerationConfig(max_new_tokens=6, temperature=0.8, seed=4)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(model, params):
        return fdjax.forward(model, params, ids, lengths, last=1)

    def answer(path, lm):
        found = {"logits": logits(lm.model, lm.params)}
        if path in generates:
            found["untraced"] = fdjax.forward(lm.model, lm.params, ids, lengths, last=1)
            found["tokens"] = fdjax.generate(lm.model, lm.params, ids, config, lengths)
        return {name: np.asarray(value).tolist() for name, value in found.items()}

    return {
        path: {count: answer(path, load(path, count)) for count in (1, *ranks)} for path in paths
    }


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
            time.sleep(2.5)
        return np.float32(0)

    def processor(ids, lengths, logits):
        zero = jax.ShapeDtypeStruct((), np.float32)
        return logits + jax.experimental.io_callback(stall, zero, jax.lax.axis_index(AXIS))

    lm = load(path, ranks)
    expected = lm.generate([1, 2, 3], max_new_tokens=6, eos_token_id=None).tokens
    lm.engine.watch = Watch(seconds=1.0)
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
    shorter = jax.tree.map(lambda a: a[:2], lm.params)
    attempt("shape", lambda: fdjax.forward(lm.model, shorter, np.ones((1, 4), np.int32)))
    attempt("nothing", lambda: setattr(lm, "params", {}))
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


def divided_tokens(ranks, *, kv_heads=2, beams=0, **options):
    """What an `LM` answers if devices divide the tokens of KV heads, beside one device.

    A pool begins with NaN, except in int8. Its 7 pages are too few for the last 4 requests. All
    requests have the same pool and equally many slots, because programs depend on their sizes.
    """
    init_pool, preempt, preempted = engine.init_pool, runner.Runner._preempt, []

    def full_of_nan(*args):
        return jax.tree.map(lambda a: a + np.asarray(np.nan, a.dtype), init_pool(*args))

    def counted(self, row):
        preempted.append(row)
        preempt(self, row)

    runner.Runner._preempt = counted
    engine.init_pool = init_pool if "kv_dtype" in options else full_of_nan
    fields = {"num_key_value_heads": kv_heads, "max_position_embeddings": 2048}
    config, plan = parse_config(CONFIG | fields), Plan.for_device()
    page = ranks // kv_heads * PAGE
    rng = np.random.default_rng(3)
    beginning = rng.integers(3, 90, page + 9).tolist()
    prompts = [rng.integers(3, 90, n).tolist() for n in (1, 127, 129)]
    prompts += [beginning + rng.integers(3, 90, n).tolist() for n in (1, page)]
    sampled = rng.integers(3, 90, page + 150).tolist()
    report, params = {}, None
    for count in (1, ranks):
        model = describe(config, dtype="float32", plan=plan, tensor_parallel=count, **options)
        params = _spread(random_params(model, 5)) if params is None else params
        lm = LM(model, params, max_len=4 * page, max_batch=4)
        lm.engine._most_pages = lambda slots, most=1 + 7 * page // lm.engine.page_tokens: most
        seen = Ranks()
        found = report[count] = {
            "all": generated(lm, prompts, max_new_tokens=6),
            "alone": generated(lm, prompts[-1:], max_new_tokens=6),
            "cached": lm.generate(prompts[-1], max_new_tokens=1).stats.cached_tokens,
            "samples": lm.generate(sampled, num_return_sequences=4, seed=1, **_SAMPLED).tokens,
        }
        if beams:
            search = lm.generate(prompts[2:], max_new_tokens=7, num_beams=beams, do_sample=False)
            found["beams"] = search.tokens, search.sequences_scores
        cache = jax.tree.leaves(lm.engine.reusable.state.kv)
        found["bytes"] = sum(a.addressable_shards[0].data.nbytes for a in cache)
        found["capacity"] = lm.engine.pool.count * lm.engine.pool.size
        lm.engine.pool.check([])
        preempted.clear()
        growing = [[5 + i] * (page - 10 - i) for i in range(4)]
        found["few"] = generated(lm, growing, max_new_tokens=20)
        found["few pages"] = lm.engine.pool.count
        found["preempted"], found["ranks"] = len(preempted), model.token_ranks
        found["compared"], found["differing"] = seen.compared, seen.differing
    return report


def _spread(params):
    """Parameters whose attention is not almost uniform."""
    return jax.tree.map(lambda a: 8 * a if a.ndim > 1 else a, params)


def divided_attention(ranks, kv_heads, quantised=False, block=PAGE, **spec):
    """Attention to a cache that devices divide by tokens, beside float64.

    Prompts of some rows in blocks, then decode steps of all. Slots that nobody writes are NaN.

    Returns:
      The largest errors of o in prompts and steps, and what is wrong with the cache.
    """
    n, page, width, group, d, layers = ranks // kv_heads, PAGE, 3, 2, 16, 2
    heads = kv_heads * n * group
    # Less than a page for each device, ends of pages, and full rows.
    lengths = np.array([0, 1, 127, 128, 129, 200, n * page - 1, n * page, 2 * n * page + 131])
    steps, most = 3, width * n * page
    rng = np.random.default_rng(0)
    b = len(lengths)
    k, v = rng.standard_normal((2, b, most, kv_heads, d)).astype(np.float32)
    q = rng.standard_normal((b, most, heads, d)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32) if spec.pop("sinks", False) else None
    phi = tuple(rng.standard_normal(heads).tolist()) if spec.pop("phi", False) else None
    spec = AttentionSpec(0.3, sinks=sinks is not None, phi=phi, ranks=ranks, **spec)
    pages = 1 + rng.permutation(b * width).reshape(b, width).astype(np.int32)

    def qkv(rows, slots):
        """[ranks, len(rows), T, 1, group + 2, d] of tokens [len(rows), T]."""
        rows = rows[:, None]
        queries = q[rows, slots].reshape(*slots.shape, ranks, group, d)
        parts = [np.repeat(a[rows, slots], n, axis=2)[..., None, :] for a in (k, v)]
        return np.moveaxis(np.concatenate([queries, *parts], axis=-2), 2, 0)[:, :, :, None]

    def wanted(row, slot):
        """o [heads, d] of a token in float64."""
        keys, values = (
            np.repeat(a[row, : slot + 1].astype(np.float64), heads // kv_heads, axis=1)
            for a in (k, v)
        )
        scores = np.einsum("hd,shd->hs", q[row, slot].astype(np.float64), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        weights = np.exp(scores)
        total = weights.sum(1) + (0 if sinks is None else np.exp(sinks.astype(np.float64)))
        return np.einsum("hs,shd->hd", weights / total[:, None], values)

    def over_devices(function):
        def run(qkv, caches, sinks, *args):
            sinks = None if sinks is None else sinks[0]
            options = {"token_ranks": n, "spec": spec, "layer": 1, "sinks": sinks}
            caches = jax.tree.map(lambda a: a[0], caches)
            o, *caches = function(qkv[0], *caches, *args[:-1], pages=args[-1], **options)
            return o[None], jax.tree.map(lambda a: a[None], tuple(caches))

        return run

    mesh = Mesh(np.array(jax.devices()[:ranks]), (AXIS,))

    def jitted(function, count):
        specs = *[PartitionSpec(AXIS)] * 3, *[PartitionSpec()] * count
        run = over_devices(function)
        out = PartitionSpec(AXIS)
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=(out, out), check_vma=False)
        )

    pool = np.full((ranks, layers, 1 + b * width, 1, page, d), np.nan, np.float32)
    caches = pool, pool
    if quantised:
        empty = QuantisedCache(np.zeros(pool.shape, np.int8), pool[..., 0], np.dtype("float32"))
        caches = empty, empty
    own_sinks = None if sinks is None else sinks.reshape(ranks, group)
    # Blocks in any order, and one without work.
    blocks = [(r, s) for r in range(b) for s in range(0, lengths[r], block)]
    blocks = [blocks[i] for i in rng.permutation(len(blocks))] + [(0, 0)]
    rows, offsets = np.array(blocks, np.int32).T
    slots = offsets[:, None] + np.arange(block)
    ends = np.minimum(lengths[rows], offsets + block).astype(np.int32)
    ends[-1] = 0
    run = jitted(append_prefill_divided, 3)
    o, caches = run(qkv(rows, slots), caches, own_sinks, ends, offsets, pages[rows])
    o = np.moveaxis(np.asarray(o), 0, 2).reshape(len(rows), block, heads, d)
    errors = [
        np.abs(o[i, t] - (wanted(rows[i], s) if s < ends[i] else 0)).max()
        for i, line in enumerate(slots)
        for t, s in enumerate(line)
        if s >= ends[i] or t in (0, 1, block // 2, block - 1) or s == ends[i] - 1
    ]
    report = {"prompts": float(np.max(errors)), "steps": 0.0}
    run = jitted(append_decode_divided, 2)
    for step in range(steps):
        now = (lengths + step).astype(np.int32)
        o, caches = run(qkv(np.arange(b), now[:, None]), caches, own_sinks, now, pages)
        o = np.moveaxis(np.asarray(o), 0, 2).reshape(b, heads, d)
        error = np.max([np.abs(o[i] - wanted(i, now[i])) for i in range(b)])
        report["steps"] = float(np.max([report["steps"], error]))
    expected = np.full((2, *pool.shape), np.nan, np.float32)
    for i, s in ((row, slot) for row in range(b) for slot in range(lengths[row] + steps)):
        for rank in range(s // page % n, ranks, n):
            expected[:, rank, 1, pages[i, s // (n * page)], 0, s % page] = (
                k[i, s, rank // n],
                v[i, s, rank // n],
            )
    tolerance = 0.05 if quantised else 0
    report["cache"] = all(
        np.allclose(np.asarray(dequantised(cache)), want, rtol=0, atol=tolerance, equal_nan=True)
        for cache, want in zip(caches, expected, strict=True)
    )
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
