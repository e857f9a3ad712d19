"""Calibration: counts equal a brute force, φ has the fewest rows outside, `load` checks files."""

import dataclasses
import functools
import importlib.util
import json
import math
import re
import shutil
import statistics
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import fdjax
from fdjax.cli.main import main
from fdjax.engine.mesh import Place
from fdjax.engine.state import init_cache
from fdjax.models import AttentionSpec, CheckpointError, DecoderConfig, describe, random_params
from fdjax.pallas_kernels.attention import (
    prefill_attention,
    prefill_tiles,
    split_qkv,
)
from fdjax.pallas_kernels.attention.cache import dequantised, quantise
from fdjax.pallas_kernels.attention.hopper import decode_kernel
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import Rope, apply_rope
from fdjax.system import platform
from fdjax.tools import calibrate
from fdjax.tools.calibrate import (
    BIN_LOG2,
    BINS,
    ScoreStatistics,
    bin_edges,
    choose,
    interval,
)
from fdjax.weights import calibration as calibration_file
from fdjax.weights.checkpoint import fingerprint, locate

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
BIN = BIN_LOG2 / math.log2(math.e)
SAFE = calibration_file.SAFE_LOG2 / math.log2(math.e)

pytestmark = pytest.mark.usefixtures("quick_compiles")


def gather(lm, texts, **options):
    return calibrate.gather(lm.engine, lm.tokenizer, texts, **options)


def _pieces(lm, text, i, context):
    return calibrate.pieces_of(lm.engine, lm.tokenizer, text, i, context)


CONFIG = DecoderConfig.alike(
    family="llama",
    vocab_size=64,
    width=32,
    mlp_width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    activation="silu",
    attention=(
        AttentionSpec(scale=90.0, rope=Rope(8, 10_000.0)),
        AttentionSpec(scale=90.0, rope=Rope(8, 100.0), window=7),
        AttentionSpec(scale=90.0, soft_cap=5.0),
        AttentionSpec(scale=90.0, alibi=(0.5, 0.25, 0.125, 2.0), window=100),
    ),
    tie_embeddings=True,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    max_position_embeddings=512,
    dtype="float32",
)


def random_lm(config=CONFIG, plan=None, **options):
    model = describe(config, plan=plan, **options)
    return fdjax.LM(model, random_params(model, seed=3))


@pytest.fixture(scope="module")
def tiny():
    return fdjax.load("tiny", dtype="float32", compilation_cache=False, progress=False)


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded checkpoint."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in locate("tiny").iterdir():
        if path.suffix in (".json", ".safetensors"):
            shutil.copy(path, copy)
    return copy


def load(folder, **options):
    return fdjax.load(str(folder), compilation_cache=False, progress=False, **options)


def token_ids(count, seed=0, vocab=64):
    return np.random.default_rng(seed).integers(vocab, size=count).tolist()


# What is counted


def rows_by_brute_force(lm, texts):
    """The visible scores of every row of every text, in float64: [L][H] lists of arrays.

    The model runs without a cache or chunks. Only its modules and RoPE are shared with the tested
    code.
    """
    lengths = jnp.array([len(ids) for ids in texts], jnp.int32)
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def attend(spec, kv, qkv):
        q, k, v = split_qkv(qkv)
        if spec.rope is not None:
            q, k = (
                apply_rope(a, positions, spec.rope, prompt=lengths, limit=lengths) for a in (q, k)
            )
        if lm.model.kv_dtype is not None:
            k, v = (dequantised(quantise(a)) for a in (k, v))
        o = prefill_attention(
            q,
            *(a.transpose(0, 2, 1, 3) for a in (k, v)),
            lengths,
            spec=spec,
        )
        return o, (q, k)

    @jax.jit
    def run(params, tokens):
        _, found = lm.model.module(params)(
            tokens, [None] * lm.config.layers, attend, lm.model.plan, starts=None
        )
        return found

    found = jax.device_get(run(lm.params, tokens))
    return [
        [
            [
                row
                for i, ids in enumerate(texts)
                for row in _rows_of_head(spec, q[i, : len(ids)], k[i, : len(ids)], head)
            ]
            for head in range(lm.config.heads)
        ]
        for spec, (q, k) in zip(lm.config.attention, found, strict=True)
    ]


def _rows_of_head(spec, q, k, head):
    group = q.shape[1] // k.shape[1]
    q, k = (a.astype(np.float64) for a in (q[:, head], k[:, head // group]))
    rows = []
    for position, query in enumerate(q):
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        scores = k[first : position + 1] @ query * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        if spec.alibi is not None:
            scores += spec.alibi[head] * (np.arange(first, position + 1) - position)
        rows.append(scores)
    return rows


def same_counts(got, values):
    """Whether a histogram fits these values, except for those at the edge of a bin."""
    want, _ = np.histogram(values, bin_edges())
    assert got.sum() == want.sum() == len(values)
    # A value that rounds to the other side of an edge is missing in one bin and extra in the next.
    return np.abs(np.cumsum(got) - np.cumsum(want)).max() <= 1 + len(values) / 1000


@pytest.fixture(scope="module", params=[None, pytest.param("int8", marks=pytest.mark.slow)])
def by_force(request):
    """Texts of two chunks, of one token, and between, with their rows; the model."""
    texts = [token_ids(140, 1), token_ids(1, 2), token_ids(33, 3)]
    lm = random_lm(kv_dtype=request.param)
    return texts, rows_by_brute_force(lm, texts), lm


# All queries of a chunk at once, and in blocks of 16.
@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [2**26, 2**18])
def test_counts_are_those_of_a_brute_force(by_force, monkeypatch, block_bytes):
    monkeypatch.setattr(calibrate, "_SCORES_BYTES", block_bytes)
    texts, found, lm = by_force
    done = []
    counted = gather(lm, texts, progress=lambda *p: done.append(p))
    assert done == [(174, 174)]
    for layer in range(CONFIG.layers):
        for head in range(CONFIG.heads):
            rows = found[layer][head]
            scores, maxima = np.concatenate(rows), np.array([row.max() for row in rows])
            assert same_counts(counted.scores[layer, head], scores)
            assert same_counts(counted.maxima[layer, head], maxima)
            extremes = counted.lowest[layer, head], counted.highest[layer, head]
            np.testing.assert_allclose(extremes, (scores.min(), scores.max()), rtol=1e-3, atol=1e-3)
            assert scores.max() - scores.min() > 4 * BIN
    # A capped score is counted after the cap, and a window of 7 gives at most 7 scores per row.
    assert counted.highest[2].max() <= 5.0
    assert (counted.scores[1].sum(axis=-1) == 7 * 140 - 21 + 1 + 7 * 33 - 21).all()


def test_what_lies_beyond_the_bins_is_counted_at_their_ends():
    spec = AttentionSpec(scale=1e6)
    counted = gather(random_lm(CONFIG.with_attention((spec,))), [token_ids(64)])
    assert counted.scores.sum(axis=-1).tolist() == [[64 * 65 // 2] * 4]
    assert counted.scores[..., [0, -1]].sum() > 0 and counted.highest.max() > bin_edges()[-1]


def test_a_long_text_is_cut_into_pieces_that_begin_as_a_text_does(tiny):
    text = "The largest ocean is the Pacific Ocean. " * 20
    ids = tiny.tokenizer.encode(text)
    pieces = _pieces(tiny, text, 0, 50)
    assert len({piece[0] for piece in pieces}) == 1 and max(map(len, pieces)) == 50
    assert [ids[0], *(t for piece in pieces for t in piece[1:])] == ids
    # Ids are used without changes.
    assert _pieces(tiny, ids, 0, 50) == [ids[i : i + 50] for i in range(0, len(ids), 50)]


def test_one_text_is_one(tiny):
    counted = [gather(tiny, texts) for texts in ("An owl.", ["An owl."])]
    counted.append(gather(tiny, tiny.tokenizer.encode("An owl.")))
    for got in counted[1:]:
        for a, b in zip(counted[0], got, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "there is no text"),
        (b"abc", {}, "texts must be text or token ids, got b'abc'"),
        ([[]], {}, "there is no text"),
        ([[1, 64]], {}, r"text 0 has id 64, the vocabulary is 0\.\.63"),
        ([[1, True]], {}, "text 0 has id True, which is no integer"),
        ([[1], [1, "a"]], {}, "text 1 has id 'a', which is no integer"),
        ([[1], None], {}, "text 1 must be text or token ids, got None"),
        ([[1, 2]], {"context": 8.5}, r"context must be from 2 to 512, got 8\.5"),
        ([[1, 2]], {"context": "8"}, "context must be from 2 to 512, got '8'"),
        ([[1, 2]], {"context": 1}, "context must be from 2 to 512, got 1"),
        ([[1, 2]], {"context": 513}, "context must be from 2 to 512, got 513"),
    ],
)
def test_what_cannot_be_counted(texts, options, message):
    with pytest.raises(ValueError, match=message):
        gather(random_lm(), texts, **options)


def test_scores_that_are_not_finite_are_told():
    lm = random_lm(CONFIG.with_attention(CONFIG.attention[:1]))
    params = {**lm.params, "embed": lm.params["embed"].at[5].set(jnp.nan)}
    damaged = fdjax.LM(lm.model, params)
    with pytest.raises(FloatingPointError, match="scores of layer 0 are not finite"):
        gather(damaged, [[1, 5, 7]])


@pytest.mark.slow
def test_the_limits_of_memory_hold(monkeypatch):
    lm, made = random_lm(CONFIG.with_attention(CONFIG.attention[:1])), []
    lm.generate([[5, 6, 7]] * 4, max_new_tokens=2)
    reusable = weakref.ref(lm.engine.reusable.state.kv.k)
    monkeypatch.setattr(
        calibrate,
        "init_cache",
        lambda *s, **k: made.append((s[1], reusable())) or init_cache(*s, **k),
    )
    texts = [token_ids(100, seed) for seed in range(5)]
    free = gather(lm, texts)
    assert made == [(5, None)]
    one, two = (calibrate._plan(lm.model, 100, rows).total_bytes for rows in (1, 2))
    monkeypatch.setattr(lm.engine, "memory_bytes", two)
    limited = gather(lm, texts)
    np.testing.assert_array_equal(limited.scores.sum(axis=-1), free.scores.sum(axis=-1))
    assert made[1:] == [(2, None)] * 3
    monkeypatch.setattr(lm.engine, "memory_bytes", one - 1)
    with pytest.raises(MemoryError, match="calibrate: must fit into"):
        gather(lm, texts)


def test_scores_are_never_all_there():
    heads, chunk, slots = 8, 2048, 8192
    block = dataclasses.replace(CONFIG.blocks[0], heads=heads, kv_heads=heads)
    config = dataclasses.replace(CONFIG, blocks=(block,))
    model = describe(config)
    ids = jax.ShapeDtypeStruct((1, chunk), jnp.int32)
    row, scalar = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), ()))
    cache = jax.eval_shape(lambda: init_cache(model, 1, slots))
    lowered = calibrate._observe_chunk.lower(
        model, Place.for_ranks(1), model.abstract_params, cache, ids, row, scalar, row
    )
    shapes = {m for m in re.findall(r"tensor<((?:\d+x)+)(?:f32|i32)>", lowered.as_text())}
    largest = max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes)
    assert largest < heads * chunk * slots
    results = jax.tree.leaves(lowered.out_info[1])
    assert {r.shape for r in results} == {(heads, BINS), (heads,)}


# What is chosen


def histogram(values):
    counts, _ = np.histogram(np.clip(values, bin_edges()[0], bin_edges()[-1]), bin_edges())
    return counts


def normal(low, high, count=200_000):
    """A histogram of normally distributed values, 99.99 % of them between low and high."""
    quantile = statistics.NormalDist().inv_cdf((1 + 0.9999) / 2)
    share = (np.arange(count) + 0.5) / count
    standard = np.array([statistics.NormalDist().inv_cdf(x) for x in share])
    return histogram((low + high) / 2 + (high - low) / 2 / quantile * standard)


@functools.cache
def published(low, high):
    """A layer with such scores, one in each row. So the maxima are spread as widely as possible."""
    counts = normal(low, high)[None, None]
    edges = bin_edges()[np.flatnonzero(counts[0, 0])]
    return ScoreStatistics(
        counts, counts, edges.min(keepdims=True)[None], edges.max(keepdims=True)[None]
    )


@pytest.mark.parametrize(
    ("model", "low", "high", "applies"),
    [
        ("Llama2-7B", -16.8, 6.5, True),
        ("ChatGLM2-6B", -10.5, 13.7, True),
        ("CodeLlama-7B", -0.25, 17.6, True),
        ("Vicuna-7B", -0.8, 9.8, True),
        ("OPT-6.7B", -496.8, 363.5, False),
    ],
)
def test_the_decision_is_that_of_the_paper(model, low, high, applies):
    (layer,) = calibrate.calibration_of(published(low, high), "", {}).layers
    assert (layer.lower[0], layer.upper[0]) == pytest.approx((low, high), rel=0.01, abs=2 * BIN)
    assert layer.applies == applies
    if applies:
        assert layer.phi[0] == pytest.approx((low + high) / 2, abs=2 * BIN)
        assert layer.phi[0] - SAFE < low < high < layer.phi[0] + SAFE
        assert layer.rate <= 1e-4
    else:
        assert layer.rate > 0.5


def test_the_decision_is_made_layer_by_layer():
    layers = [published(-16.8, 6.5), published(-496.8, 363.5)]
    both = ScoreStatistics(*map(np.concatenate, zip(*layers, strict=True)))
    calibration = calibrate.calibration_of(both, "", {})
    assert [layer.applies for layer in calibration.layers] == [True, False]
    assert "1 of 2 layers subtract a constant" in str(calibration)


def test_no_kernel_bears_less_than_the_safe_range():
    assert decode_kernel._NEAR_LOG2 == calibration_file.SAFE_LOG2
    most_slots = 2**24
    for lowest, highest in (
        (2.0**-decode_kernel._SAFE_LOG2, 2.0**decode_kernel._SAFE_LOG2),
        prefill_tiles.SAFE,
    ):
        assert lowest <= 2.0**-calibration_file.SAFE_LOG2
        assert most_slots * 2.0**calibration_file.SAFE_LOG2 <= highest


@pytest.mark.slow
@given(st.data())
def test_no_other_phi_loses_fewer_rows(data):
    spread = data.draw(st.floats(0.1, 60))
    seed = data.draw(st.integers(0, 2**32 - 1))
    safe_log2 = data.draw(st.sampled_from([1, 2.5, 8, 32]))
    rng = np.random.default_rng(seed)
    values = rng.normal(rng.uniform(-300, 300), spread, size=rng.integers(1, 300))
    counts = histogram(values)
    phi, rate = choose(counts, safe_log2)
    centres = np.flatnonzero(counts) - BINS / 2 + 0.5
    half = safe_log2 / BIN_LOG2

    def leaving(phi_bins):
        return 1 - counts[counts > 0][np.abs(centres - phi_bins) < half].sum() / counts.sum()

    candidates = np.arange(centres[0] - half - 1, centres[-1] + half + 2) // 1
    rates = np.array([leaving(c) for c in candidates])
    assert leaving(round(phi / BIN)) == pytest.approx(rate, abs=1e-12)
    assert rate == pytest.approx(rates.min(), abs=1e-12)
    if rates.min() == 0:
        assert phi / BIN == pytest.approx((centres[0] + centres[-1]) / 2, abs=1)


def test_what_is_beyond_the_bins_is_never_in_range():
    counts = np.zeros((2, BINS), np.int64)
    counts[0, 0] = counts[1, -1] = 3
    counts[:, BINS // 2] = 1
    phi, rate = choose(counts)
    assert rate.tolist() == [0.75, 0.75]
    assert np.abs(phi).max() < SAFE


def test_an_interval_holds_its_share_and_no_bin_more():
    values = np.random.default_rng(0).gumbel(3, 4, size=100_000)
    for values in (values, -values):  # noqa: B020
        low, high = interval(histogram(values))
        assert max(np.mean(values < low), np.mean(values >= high)) <= 5e-5
        assert min(np.mean(values < low + BIN), np.mean(values >= high - BIN)) >= 5e-5


def questions(lm, first):
    """Every second question of the embedded model's fixture, as texts of at most 128 tokens."""
    asked = json.loads((FIXTURES / "tiny" / "prompts.json").read_text())
    return _pieces(lm, " ".join(asked[first:120:2]), 0, 128)


@pytest.fixture(scope="module")
def counted(tiny):
    return gather(tiny, questions(tiny, 0))


@pytest.mark.slow
def test_the_predicted_rate_is_the_measured_one(tiny, counted):
    """On the embedded model, with questions not used for calibration, within a factor of 1.25."""
    found = rows_by_brute_force(tiny, questions(tiny, 1))
    maxima = np.array([[[row.max() for row in rows] for rows in heads] for heads in found])
    for safe_log2 in (3, 6):
        phi, predicted = choose(counted.maxima, safe_log2)
        far = np.abs(maxima - phi[..., None]) > safe_log2 / math.log2(math.e)
        assert far.mean() > 0.02
        assert 1 / 1.25 < predicted.mean() / far.mean() < 1.25
    phi, predicted = choose(counted.maxima)
    assert predicted.max() == 0
    assert np.abs(maxima - phi[..., None]).max() < SAFE


# Files


@pytest.fixture(scope="module")
def calibration(counted):
    return calibrate.calibration_of(
        counted, fingerprint(locate("tiny")), {"texts": ["questions.txt"]}
    )


@pytest.mark.slow
def test_a_file_holds_the_calibration(calibration, tiny, tmp_path):
    path = tmp_path / "new" / "calibration.json"
    calibration_file.write_calibration(calibration, path)
    assert calibration_file.read_calibration(path, tiny.config) == calibration
    data = json.loads(path.read_text())
    assert data["schema"] == calibration_file.SCHEMA
    assert data["safe_range"] == pytest.approx([-SAFE, SAFE])
    assert [layer["applies"] for layer in data["layers"]] == [True] * tiny.config.layers


@pytest.mark.slow
def test_load_takes_what_lies_beside_the_checkpoint(calibration, folder):
    calibration_file.write_calibration(calibration, folder / calibration_file.FILE)
    assert [spec.phi for spec in load(folder).config.attention] == [
        layer.phi for layer in calibration.layers
    ]
    declined = load(folder, calibration=False)
    assert {spec.phi for spec in declined.config.attention} == {None}


@pytest.mark.slow
def test_phi_reaches_the_attention_of_its_layer():
    phis = [(1.0, -2.5, 3.25, 0.0), (-40.0, 40.0, 0.5, 7.0), None]
    specs = [dataclasses.replace(CONFIG.attention[i], phi=phi) for i, phi in enumerate(phis)]
    got = []

    def recorded(*args, phi, **options):
        if phi is not None:
            jax.debug.callback(lambda phi: got.append(tuple(phi.tolist())), phi)
        return xla.run(*args, phi=phi, **options)

    others = Plan().implementations
    xla = next(one for one in others if (one.op, one.name) == ("decode_attention", "xla"))
    plan = Plan(implementations=(dataclasses.replace(xla, run=recorded), *others))
    lm = random_lm(CONFIG.with_attention(specs), plan)
    generate = jax.jit(fdjax.generate, static_argnums=(0, 3))
    ids = jnp.array([token_ids(5)], jnp.int32)
    generate(lm.model, lm.params, ids, fdjax.GenerationConfig(max_new_tokens=3)).block_until_ready()
    jax.effects_barrier()
    assert sorted(got) == sorted(phis[:2] * 2)


def test_a_layer_outside_the_range_runs_without_a_unified_maximum(calibration, folder):
    path = folder / calibration_file.FILE
    calibration_file.write_calibration(calibration, path)
    _set(path, "layers", 1, "rates", value=[0.0, 0.5, 0.0, 0.0])
    assert [spec.unified for spec in load(folder).config.attention] == [True, False, *[True] * 3]


def _set(path, *keys, value):
    data = json.loads(path.read_text())
    node = data
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_text("{"), "not valid JSON"),
        (lambda p: p.write_text("[1]"), "must be a JSON object, got list"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        (lambda p: _set(p, "layers", value=None), "must have 5 layers, got 0"),
        (lambda p: _set(p, "layers", value=[{}] * 4), "must have 5 layers, got 4"),
        (lambda p: _set(p, "layers", 2, value=7), "'phi' of layer 2 must be 4 finite numbers"),
        (
            lambda p: _set(p, "layers", 1, "phi", value=[0.0] * 8),
            "'phi' of layer 1 must be 4 finite numbers",
        ),
        (
            lambda p: _set(p, "layers", 0, "rates", value=None),
            "'rates' of layer 0 must be 4 finite numbers",
        ),
        *(
            (lambda p, x=x: _set(p, "layers", 3, "phi", 0, value=x), "'phi' of layer 3 must be 4")
            for x in (math.nan, math.inf, 1e39, "0", None, True, [1.0], 10**400)
        ),
    ],
)
def test_a_damaged_file_is_told(calibration, folder, damage, message):
    path = folder / calibration_file.FILE
    calibration_file.write_calibration(calibration, path)
    damage(path)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        load(folder)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    assert str(error.value).endswith("run `fdjax calibrate` again, or remove the file")
    load(folder, calibration=False)


def test_a_file_is_written_whole_or_not_at_all(calibration, tmp_path, monkeypatch):
    path = tmp_path / calibration_file.FILE
    calibration_file.write_calibration(calibration, path)
    before = path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == [calibration_file.FILE]

    def interrupted(self, text, **kwargs):
        self.write_bytes(text[:9].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibration_file.write_calibration(calibration, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [calibration_file.FILE]


def test_a_file_of_another_schema_is_not_used(calibration, folder):
    path = folder / calibration_file.FILE
    calibration_file.write_calibration(calibration, path)
    _set(path, "schema", value=2)
    with pytest.warns(UserWarning, match="not used, the schema must be 1, got 2") as warned:
        lm = load(folder)
    assert Path(warned[0].filename) == Path(__file__)
    assert {spec.phi for spec in lm.config.attention} == {None}


@pytest.mark.parametrize("fingerprint", ["0" * 64, None])
def test_a_calibration_of_other_weights_is_not_used(calibration, folder, fingerprint):
    """The weights beside it may be saved again, and it never changes a result."""
    path = folder / calibration_file.FILE
    calibration_file.write_calibration(calibration, path)
    _set(path, "fingerprint", value=fingerprint)
    with pytest.warns(
        UserWarning, match="not used, it was made for other weights; run `fdjax"
    ) as warned:
        lm = load(folder)
    assert Path(warned[0].filename) == Path(__file__)
    assert {spec.phi for spec in lm.config.attention} == {None}


def test_a_fingerprint_tells_weights_apart(folder):
    want = fingerprint(locate("tiny"))
    assert fingerprint(folder) == want
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    # The middle of the last tensor. Finetuning changes a part of the weights, but not the header.
    header = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + header])
    start, end = next(e["data_offsets"] for n, e in entries.items() if "q_proj" in n)
    content[8 + header + (start + end) // 2] ^= 1
    path.write_bytes(content)
    assert fingerprint(folder) != want


def test_a_fingerprint_may_be_of_tensors_that_no_model_has(tmp_path):
    tensors = {"weight": np.ones(8, np.float32), "inv_freq": np.ones(2, np.int64)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path)


# The command


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """`fdjax calibrate` in an empty folder → (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform, "enable_compilation_cache", lambda: None)
    Path("text.txt").write_text("What is the largest ocean? The Pacific Ocean. " * 60)

    def run(*argv):
        try:
            code = main(["calibrate", *map(str, argv)])
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_the_command_writes_beside_the_checkpoint(run, folder):
    path = folder / calibration_file.FILE
    # An unusable file is a reason to run the command, which replaces it.
    path.write_text("damaged")
    code, out, err = run(folder, "--text", "text.txt", "--text", "text.txt", "--context", 50)
    assert code == 0, err
    assert "5 of 5 layers subtract a constant" in out and "docs/performance.md" in out
    assert f"fdjax: written to {path}\n" in err
    data = json.loads(path.read_text())
    assert data["provenance"]["texts"] == ["text.txt"] * 2
    assert data["provenance"]["rows"] > 1000 and data["provenance"]["device_kind"] == "cpu"
    lm = load(folder)
    assert [list(s.phi) for s in lm.config.attention] == [l["phi"] for l in data["layers"]]


@pytest.mark.filterwarnings("default")
def test_the_command_writes_elsewhere_and_draws(run, folder, counted, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(calibrate, "gather", lambda *args, **options: counted)
    argv = folder, "--text", "text.txt", "--output", "new/file.json"
    code, _, err = run(*argv, "--plot", "new/plot.png")
    assert code == 0 and re.search(r"warning: \d+ tokens are few for a reliable choice", err), err
    assert Path("new/file.json").exists() and not (folder / calibration_file.FILE).exists()
    assert Path("new/plot.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run(*argv, "--plot", "plot.xyz")
    assert (code, err.count("\n")) == (1, 1) and "file type must be one of" in err


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model", [[], ["tiny"]])
def test_the_calibration_of_the_embedded_model_is_written_here(run, counted, monkeypatch, model):
    monkeypatch.setattr(calibrate, "gather", lambda *args, **options: counted)
    code, _, err = run(*model, "--text", "text.txt")
    assert code == 0 and Path(calibration_file.FILE).exists(), err
    assert f"written to {calibration_file.FILE}\nfdjax: `load` uses it only as" in err
    assert not (locate("tiny") / calibration_file.FILE).exists()


def test_a_plot_without_matplotlib_is_told_at_once(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fdjax, "load", pytest.fail)
    code, _, err = run("tiny", "--text", "text.txt", "--output", "o.json", "--plot", "p.png")
    assert (code, err.count("\n")) == (1, 1) and "pip install 'fdjax[bench]'" in err


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ([], 2, "--text"),
        (["--text", "missing.txt"], 1, "missing.txt"),
        (["--text", "binary.txt"], 1, "binary.txt: not UTF-8 at byte 0"),
        (["--text", "."], 1, "directory"),
        (["--text", "empty.txt"], 1, "there is no text"),
        (["--text", "text.txt", "--context", "513"], 1, "context must be from 2 to 512, got 513"),
        (["--text", "text.txt", "--context", "0"], 2, "--context"),
        (["--text", "text.txt", "--output", "."], 1, "is a directory"),
        (["--text", "text.txt", "nowhere"], 1, "nowhere: no such folder"),
    ],
)
def test_what_the_command_refuses(run, argv, code, message):
    Path("binary.txt").write_bytes(b"\xff\x00")
    Path("empty.txt").touch()
    got, out, err = run("--output", "o.json", *argv)
    assert (got, out) == (code, "")
    assert err.startswith("fdjax") and err.count("\n") == 1 and message in err
    assert not Path("o.json").exists()
