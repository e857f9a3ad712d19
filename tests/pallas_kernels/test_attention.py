"""Attention: the reference and every implementation against the oracle, on the same cases.

Slots at and past `lengths` always hold large finite garbage. Separate tests put NaN and inf there.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    alibi_slopes,
    attention_reference,
    decode_attention,
    merge_attention,
    prefill_attention,
    xla,
)
from fdjax.pallas_kernels.attention.cache import cache_features, dequantised, quantise
from fdjax.pallas_kernels.attention.operands import attention_shape
from fdjax.pallas_kernels.dispatch import NAMES
from fdjax.pallas_kernels.plan import Plan

from . import oracle
from .implementations import ATTENTION, BATCH_INVARIANT, PLATFORMS, across
from .tolerance import assert_attention, assert_same_bits, assert_within, attention_bounds

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

GARBAGE = 300.0
INVARIANT = Plan(batch_invariant=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """The static part of a call; `layer` is None, "static" or "traced".

    `int8`: the cache is quantised, and the oracle sees what it stands for.
    """

    op: str
    t: int = 1
    group: int = 4
    kv_heads: int = 2
    d: int = 64
    s: int = 160
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    layer: str | None = None
    scale: float | None = None
    int8: bool = False

    def __str__(self):
        differ = [f for f in dataclasses.fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.op, *(f"{f.name}={getattr(self, f.name)}" for f in differ)])

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def q_scale(self) -> float:
        return self.d**-0.5 if self.scale is None else self.scale

    @property
    def masks(self) -> dict:
        slopes = alibi_slopes(self.heads) if self.alibi else None
        return dict(window=self.window, soft_cap=self.soft_cap, alibi=slopes)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.q_scale, causal=self.causal, sinks=self.sinks, **self.masks)

    @property
    def sink_values(self) -> np.ndarray | None:
        """[H], some far below and some far above all scores."""
        return np.linspace(-9, 9, self.heads, dtype=np.float32) if self.sinks else None

    @property
    def op_name(self) -> str:
        return f"{self.op}_attention"

    @property
    def request(self) -> tuple[dict[str, int], frozenset[str]]:
        """The request to a plan for this case."""
        q = jax.ShapeDtypeStruct((1, self.t, self.heads, self.d), self.dtype)
        k = jax.ShapeDtypeStruct((1, self.kv_heads, self.s, self.d), self.dtype)
        features = self.spec.features | cache_features("int8" if self.int8 else None)
        return attention_shape(q, k, self.spec), features


quantised = jax.jit(quantise)
Decode = functools.partial(Case, "decode")
Prefill = functools.partial(Case, "prefill", t=24)


@dataclasses.dataclass
class Operands:
    """q [B,T,H,D]; k, v [B,Hkv,S,D]; lengths, offsets [B]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k, self.v, self.lengths, self.offsets

    def rows(self, rows) -> "Operands":
        return Operands(*(array[rows] for array in self.arrays))

    def with_dead_slots(self, value: float) -> "Operands":
        """The same operands with another value at and past `lengths`."""
        dead = np.arange(self.k.shape[2])[None] >= self.lengths[:, None]
        dead = dead[:, None, :, None]
        k, v = (np.where(dead, np.asarray(value, a.dtype), a) for a in (self.k, self.v))
        return dataclasses.replace(self, k=k, v=v)


def _operands(case: Case, lengths, offsets=None, seed: int = 0) -> Operands:
    rng = np.random.default_rng(seed)
    b = len(lengths)

    def normal(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(case.dtype))

    lengths = np.asarray(lengths, np.int32)
    if case.op == "decode":
        offsets = lengths - case.t
    cache = (b, case.kv_heads, case.s, case.d)
    operands = Operands(
        normal(b, case.t, case.heads, case.d),
        normal(*cache),
        normal(*cache),
        lengths,
        np.asarray(np.zeros(b) if offsets is None else offsets, np.int32),
    )
    return operands.with_dead_slots(GARBAGE)


def _attention(q, k, v, lengths, offsets, layer=None, *, implementation, case, plan):
    spec = case.spec
    if implementation == "reference":
        k, v = dequantised(k), dequantised(v)
        return attention_reference(q, k, v, lengths, offsets, spec=spec, sinks=case.sink_values)
    layer = 1 if case.layer == "static" else layer
    keys = dict(layer=layer, return_lse=True, implementation=implementation, plan=plan, spec=spec)
    keys["sinks"] = None if not case.sinks else jnp.asarray(case.sink_values)
    if case.op == "decode":
        return decode_attention(q, k, v, lengths, **keys)
    return prefill_attention(q, k, v, lengths, offsets, **keys)


def _run(implementation, case: Case, operands: Operands, plan: Plan | None = None):
    """Run a case; returns (o, lse)."""
    fn = implementation.jit(_attention, implementation=implementation.name, case=case, plan=plan)
    k, v = operands.k, operands.v
    layer = ()
    if case.layer and not implementation.is_reference:
        k, v = (np.stack([np.full_like(a, np.nan), a, np.full_like(a, np.nan)]) for a in (k, v))
        layer = (np.int32(1),) if case.layer == "traced" else ()
    if case.int8:
        k, v = quantised(k), quantised(v)
    return fn(operands.q, k, v, operands.lengths, operands.offsets, *layer)


def _exact(case: Case, operands: Operands) -> oracle.ExactAttention:
    q, k, v, *live = operands.arrays
    if case.int8:
        k, v = (oracle.dequantised(a.codes, a.scales) for a in map(quantised, (k, v)))
    return oracle.attention(
        *(q, k, v, *live),
        scale=case.q_scale,
        causal=case.causal,
        sinks=case.sink_values,
        **case.masks,
    )


def _check(implementation, case: Case, operands: Operands, plan: Plan | None = None) -> None:
    """The result must be right, or the call must raise if the implementation cannot do it."""
    if implementation.cannot(case):
        with pytest.raises(
            NotImplementedError, match=rf"^{case.op}_attention: {implementation.name}"
        ):
            _run(implementation, case, operands, plan)
        return
    o, lse = _run(implementation, case, operands, plan)
    dtype = implementation.computes_in(case.dtype)
    assert o.dtype == jnp.dtype(dtype)
    assert lse.dtype == np.float32
    exact = _exact(case, operands)
    assert_attention(o, lse, exact, dtype=dtype, d=case.d, s=case.s, quantised=case.int8)
    assert not np.asarray(o)[np.isneginf(exact.lse)].any(), "what sees nothing must be zero"


# Lengths around the tiles of 64 and 128 slots that kernels use; 160 is the full cache.
LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 160)
# (length, offset) of a chunk of 24: empty, from 0, partial, behind a prefix, padding, to the end.
CHUNKS = (
    *((0, 0), (1, 0), (24, 0), (23, 0), (73, 49), (88, 64)),
    *((80, 63), (20, 30), (128, 120), (160, 136)),
)
ROWS = 10


def _typical(case: Case, seed: int = 0) -> Operands:
    if case.op == "decode":
        return _operands(case, LENGTHS, seed=seed)
    return _operands(case, *zip(*CHUNKS, strict=True), seed=seed)


INT8 = [
    Decode(int8=True),
    Decode(int8=True, t=3, d=128, window=65, soft_cap=2.0, layer="traced", dtype="bfloat16"),
    Decode(int8=True, d=80, group=1, dtype="float16", layer="static"),
    Prefill(int8=True, dtype="bfloat16", alibi=True),
]
# The tests below use these cases with `ROWS` rows, so that each case compiles once.
PLAIN = [Decode(), Decode(dtype="bfloat16"), Prefill(), Prefill(dtype="bfloat16")]
MASKED = [
    Decode(t=3, window=5),
    Decode(t=2, window=64, soft_cap=2.0, alibi=True),
    Prefill(group=1, window=7),
    Prefill(group=1, soft_cap=2.0, alibi=True),
]
NOT_CAUSAL = [Prefill(causal=False), Prefill(causal=False, dtype="bfloat16")]
DECODE = [
    *(Decode(d=d, group=g, dtype="bfloat16") for d, g in ((96, 1), (256, 1), (80, 4), (128, 8))),
    *(Decode(t=t, group=g, dtype="bfloat16") for t, g in ((4, 4), (16, 4), (16, 8))),
    *(Decode(t=t, d=d, group=g) for t, d, g in ((1, 128, 8), (4, 80, 1), (2, 256, 4))),
    *(Decode(t=t, d=d, dtype="float16") for t, d in ((1, 96), (3, 64))),
    *(Decode(t=3, window=window) for window in (1, 1000)),
    Decode(window=65, dtype="bfloat16"),
    Decode(soft_cap=2.0),
    Decode(alibi=True, kv_heads=3, group=1, dtype="bfloat16"),
    Decode(layer="static", dtype="bfloat16"),
    Decode(layer="traced", kv_heads=1, t=2),
    Decode(scale=0.3, kv_heads=1, group=1),
    Decode(sinks=True, dtype="bfloat16"),
    Decode(sinks=True, t=3, window=5),
]
PREFILL = [
    *(Prefill(d=d, group=g, dtype="bfloat16") for d, g in ((128, 4), (80, 8), (256, 1))),
    Prefill(t=130, group=1, dtype="bfloat16"),
    Prefill(t=1, dtype="bfloat16"),
    Prefill(t=19, d=80, group=1),
    Prefill(d=96, group=2, dtype="float16"),
    *NOT_CAUSAL,
    Prefill(window=1, group=1),
    Prefill(window=9, causal=False, group=1),
    Prefill(alibi=True, causal=False, group=1, soft_cap=3.0, window=50, dtype="bfloat16"),
    Prefill(layer="static", dtype="bfloat16", group=1),
    Prefill(layer="traced", group=1),
    Prefill(sinks=True, dtype="bfloat16"),
    Prefill(sinks=True, window=9, soft_cap=3.0),
]


OFTEN, LESS_OFTEN = ((DECODE + PREFILL)[i::2] for i in range(2))


@across(ATTENTION, PLAIN + MASKED, quick=OFTEN + INT8, more=LESS_OFTEN)
def test_against_the_oracle(implementation, case):
    _check(implementation, case, _typical(case))


@pytest.mark.parametrize("implementation", ATTENTION)
def test_prefill_without_offsets_starts_at_zero(implementation):
    """No row has a prefix, so this also runs the branch without one."""
    case = Prefill(dtype="bfloat16")
    operands = _operands(case, np.resize([0, 1, 15, 24], ROWS), np.zeros(ROWS))
    _check(implementation, case, operands)

    def without(q, k, v, lengths):
        return prefill_attention(
            q, k, v, lengths, spec=case.spec, implementation=implementation.name
        )

    o = implementation.jit(without)(operands.q, operands.k, operands.v, operands.lengths)
    exact = _exact(case, operands)
    o_bound, _ = attention_bounds(exact, dtype=case.dtype, d=case.d, s=case.s)
    assert_within(o, exact.o, o_bound)


RAGGED = st.lists(st.integers(0, 160), min_size=ROWS, max_size=ROWS)


@across(ATTENTION, [c for c in PLAIN + MASKED if c.op == "decode"])
@settings(max_examples=10)
@given(lengths=RAGGED, seed=st.integers(0, 2**32 - 1))
def test_decode_of_any_lengths(implementation, case, lengths, seed):
    _check(implementation, case, _operands(case, lengths, seed=seed))


@across(ATTENTION, [c for c in PLAIN + MASKED if c.op == "prefill"])
@settings(max_examples=8)
@given(lengths=RAGGED, offsets=RAGGED, seed=st.integers(0, 2**32 - 1))
def test_prefill_of_any_lengths_and_offsets(implementation, case, lengths, offsets, seed):
    _check(implementation, case, _operands(case, lengths, offsets, seed))


@pytest.mark.soak
@pytest.mark.parametrize("implementation", ATTENTION[:1])
@settings(max_examples=60)
@given(
    case=st.builds(
        Case,
        op=st.sampled_from(["decode", "prefill"]),
        t=st.integers(1, 16),
        group=st.integers(1, 8),
        kv_heads=st.integers(1, 3),
        d=st.sampled_from([1, 8, 40, 64, 80, 96, 128, 256]),
        s=st.integers(1, 70),
        dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
        causal=st.booleans(),
        window=st.none() | st.integers(1, 80),
        soft_cap=st.none() | st.floats(0.5, 50),
        alibi=st.booleans(),
        sinks=st.booleans(),
    ),
    data=st.data(),
    invariant=st.booleans(),
)
def test_any_case(implementation, case, data, invariant):
    if case.op == "decode":
        case = dataclasses.replace(case, causal=True)
    ragged = st.lists(st.integers(0, case.s), min_size=2, max_size=2)
    operands = _operands(case, data.draw(ragged), data.draw(ragged), data.draw(st.integers(0, 99)))
    _check(implementation, case, operands, INVARIANT if invariant else None)


# Every combination of groups and head dimensions, with the numbers of tokens and the dtypes in
# turn; all other combinations are `soak`.
_SWEEP = [
    pytest.param(
        *(group, d, t, dtype),
        marks=pytest.mark.slow if (i % 4 + 1, i % 3) == (t, j) else pytest.mark.soak,
    )
    for i, (group, d) in enumerate(itertools.product((1, 4, 8), (64, 80, 96, 128, 256)))
    for t in (1, 2, 3, 4)
    for j, dtype in enumerate(("float32", "bfloat16", "float16"))
]


@pytest.mark.parametrize(("group", "d", "t", "dtype"), _SWEEP)
@pytest.mark.parametrize("implementation", ATTENTION[:1])
def test_decode_sweep(implementation, group, d, t, dtype):
    case = Decode(group=group, d=d, t=t, dtype=dtype)
    _check(implementation, case, _typical(case))


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ATTENTION[:1])
def test_decode_of_every_length(implementation):
    case = Decode(t=4, group=1, s=131)
    _check(implementation, case, _operands(case, range(132)))


@across([p for p in ATTENTION if p.values[0].name != "cudnn"], PLAIN + MASKED)
def test_dead_slots_do_not_leak(implementation, case):
    """cuDNN needs finite values in dead slots, so it is tested with the other tests' garbage."""
    for value in (np.nan, np.inf, -np.inf):
        _check(implementation, case, _typical(case).with_dead_slots(value))


@across(ATTENTION, [c for c in PLAIN + MASKED + NOT_CAUSAL if c.op == "prefill"])
def test_padded_queries_do_not_leak(implementation, case):
    if implementation.cannot(case):
        return
    operands = _typical(case)
    clean = _run(implementation, case, operands)
    padding = operands.offsets[:, None] + np.arange(case.t) >= operands.lengths[:, None]
    for value in (np.nan, np.inf):
        operands.q[padding] = value
        o, lse = _run(implementation, case, operands)
        assert not o[padding].any()
        assert np.isneginf(lse[padding]).all()
        assert_same_bits(o, clean[0], "o")
        assert_same_bits(lse, clean[1], "lse")


@across(ATTENTION, PLAIN)
def test_rows_are_independent(implementation, case):
    """NaN in the live part of a row does not reach other rows."""
    if implementation.cannot(case):
        return
    operands = _typical(case)
    clean = _run(implementation, case, operands)
    for array in (operands.q, operands.k, operands.v):
        array[[2, 5]] = np.nan
    others = [0, 1, 3, 4, 6, 7, 8, 9]
    for a, b in zip(_run(implementation, case, operands), clean, strict=True):
        assert_same_bits(a[others], b[others])


@across(ATTENTION, [Decode(t=3, window=5), Decode(t=4, d=80, group=1)])
def test_decode_of_rows_shorter_than_the_new_tokens(implementation, case):
    """Queries before position 0 see no slot, and their content affects nothing."""
    if implementation.cannot(case):
        return
    operands = _operands(case, np.resize(np.arange(case.t + 1), ROWS))
    for row, length in enumerate(operands.lengths):
        operands.q[row, : case.t - length] = np.nan
    o, lse = _run(implementation, case, operands)
    assert_attention(o, lse, _exact(case, operands), dtype=case.dtype, d=case.d, s=case.s)
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[case.t]).all()


@across(ATTENTION, PLAIN + MASKED)
def test_huge_scores(implementation, case):
    """Scores up to ±10 000, where exp overflows or vanishes unless the maximum is subtracted."""
    operands = _typical(case)
    # Products are exact in every dtype and sums are exact in fp32: 64 · 32 · 39 / 8 = 9984.
    operands.q, operands.k = (
        np.asarray(size * np.sign(a.astype(np.float32)), a.dtype)
        for size, a in ((32, operands.q), (39, operands.k))
    )
    rows = np.arange(ROWS)
    along = np.sign(operands.q[:, -1, :: case.group].astype(np.float32)) * 39
    operands.k[rows, :, operands.lengths // 2] = along
    operands.k[rows, :, operands.lengths // 3] = -along
    _check(implementation, case, operands.with_dead_slots(GARBAGE))


@pytest.mark.parametrize("sign", [1, -1])
@across(ATTENTION, PLAIN)
def test_scores_all_huge_and_alike(implementation, case, sign):
    """All scores are ±9984. Only with the row's maximum is the result the mean of the values."""
    operands = _typical(case)
    operands.q[:], operands.k[:] = 32 * sign, 39
    _check(implementation, case, operands.with_dead_slots(GARBAGE))


@across(ATTENTION, PLAIN + [Decode(d=96, dtype="float16"), Prefill(d=96, group=2, dtype="float16")])
def test_a_dominating_key_gives_its_value_exactly(implementation, case):
    if implementation.cannot(case):
        return
    rows, chosen = np.arange(ROWS), np.resize([0, 17, 63, 64, 100], ROWS)
    lengths = chosen + case.t + 20
    operands = _operands(case, lengths, lengths - case.t)
    operands.q[:], operands.k[:] = 4, -4
    operands.k[rows, :, chosen] = 4
    o, _ = _run(implementation, case, operands.with_dead_slots(4.0))
    values = np.repeat(operands.v[rows, :, chosen], case.group, axis=1)[:, None]
    assert_same_bits(o, np.broadcast_to(values, o.shape).astype(o.dtype))


@across(ATTENTION, PLAIN + [Decode(d=96, dtype="float16"), Prefill(d=96, group=2, dtype="float16")])
def test_equal_scores_give_the_mean(implementation, case):
    if implementation.cannot(case):
        return
    operands = _typical(case)
    operands.q[:] = 0
    _check(implementation, case, operands)
    _, lse = _run(implementation, case, operands)
    seen = operands.offsets[:, None] + np.arange(1, case.t + 1)
    live = (seen > 0) & (seen <= operands.lengths[:, None])
    expected = np.repeat(np.log(seen[live])[:, None], case.heads, axis=1)
    assert_within(lse[live], expected, 1e-6 * 5)


@across(ATTENTION, PLAIN + MASKED)
def test_reruns_are_bitwise_equal(implementation, case):
    if implementation.cannot(case):
        return
    first = _run(implementation, case, _typical(case))
    _run(implementation, case, _typical(case, seed=1))
    for a, b in zip(_run(implementation, case, _typical(case)), first, strict=True):
        assert_same_bits(a, b)


@across(
    ATTENTION,
    [
        Decode(),
        Decode(dtype="bfloat16"),
        Decode(t=4, dtype="bfloat16"),
        Decode(t=3, window=5),
    ],
)
def test_decode_is_the_end_of_prefill(implementation, case):
    prefill = dataclasses.replace(case, op="prefill", t=24)
    if implementation.cannot(prefill) or implementation.cannot(case):
        return
    lengths = np.resize([24, 25, 64, 129, 160], ROWS)
    operands = _operands(prefill, lengths, lengths - prefill.t)
    last = dataclasses.replace(
        operands, q=operands.q[:, -case.t :], offsets=operands.lengths - np.int32(case.t)
    )
    o_prefill, lse_prefill = _run(implementation, prefill, operands)
    o_decode, lse_decode = _run(implementation, case, last)
    o_bound, lse_bound = attention_bounds(
        _exact(case, last),
        dtype=implementation.computes_in(case.dtype),
        d=case.d,
        s=case.s,
    )
    assert_within(o_decode, o_prefill[:, -case.t :], 2 * o_bound, "o")
    assert_within(lse_decode, lse_prefill[:, -case.t :], 2 * lse_bound, "lse")


@pytest.mark.parametrize("case", [PLAIN[1], PLAIN[3]], ids=str)
@pytest.mark.parametrize(
    "implementation", [p for p in ATTENTION if p.values[0].name != "mosaic_gpu"]
)
def test_phi_never_changes_the_result(implementation, case):
    """Only "mosaic_gpu" uses φ, and there it may change roundings."""
    operands = _typical(case)

    def with_phi(q, k, v, lengths, offsets):
        spec = dataclasses.replace(case.spec, phi=(7.0,) * case.heads)
        keys = dict(spec=spec, return_lse=True)
        keys |= dict(implementation=implementation.name)
        if case.op == "decode":
            return decode_attention(q, k, v, lengths, **keys)
        return prefill_attention(q, k, v, lengths, offsets, **keys)

    for a, b in zip(
        implementation.jit(with_phi)(*operands.arrays),
        _run(implementation, case, operands),
        strict=True,
    ):
        assert_same_bits(a, b)


@pytest.mark.parametrize("case", [PLAIN[1], PLAIN[3]], ids=str)
@pytest.mark.parametrize("implementation", ATTENTION)
def test_without_lse_the_result_is_the_same(implementation, case):
    operands = _typical(case)

    def without(q, k, v, lengths, offsets):
        keys = dict(spec=case.spec, implementation=implementation.name)
        if case.op == "decode":
            return decode_attention(q, k, v, lengths, **keys)
        return prefill_attention(q, k, v, lengths, offsets, **keys)

    o = implementation.jit(without)(*operands.arrays)
    exact = _exact(case, operands)
    o_bound, _ = attention_bounds(exact, dtype=case.dtype, d=case.d, s=case.s)
    assert_within(o, exact.o, o_bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_queries(monkeypatch, dtype):
    """Long chunks are cut to limit the scores, here to 8 query rows."""
    case = Prefill(dtype=dtype, t=19 if dtype == "float32" else 24, window=60, alibi=True)
    operands = _typical(case)
    monkeypatch.setattr(xla, "_SCORES_BYTES", 4 * ROWS * case.heads * case.s * 8)

    def blocked(q, k, v, lengths, offsets):  # a new function, so that it is traced now
        return _attention(
            q, k, v, lengths, offsets, implementation="xla", case=case, plan=None
        )  # fmt: skip

    lowered = jax.jit(blocked).lower(*operands.arrays)
    assert "stablehlo.while" in lowered.as_text()
    o, lse = jax.device_get(lowered.compile()(*operands.arrays))
    assert_attention(o, lse, _exact(case, operands), dtype=dtype, d=case.d, s=case.s)


@pytest.mark.parametrize("implementation", BATCH_INVARIANT)
@pytest.mark.usefixtures("full_compiles")
class TestBatchInvariant:
    """A row's bits do not depend on what else is in the batch or in the chunk."""

    @pytest.mark.parametrize(
        "case",
        [
            pytest.param(Decode(dtype="bfloat16"), marks=pytest.mark.slow),
            pytest.param(Decode(group=1), marks=pytest.mark.slow),
            pytest.param(Decode(t=3, window=50, alibi=True), marks=pytest.mark.slow),
            Prefill(dtype="bfloat16", soft_cap=4.0, d=80),
        ],
        ids=str,
    )
    def test_rows_of_a_batch(self, implementation, case):
        operands = _typical(case)
        full = _run(implementation, case, operands, INVARIANT)
        order = np.random.default_rng(0).permutation(ROWS)
        for picked in ([9], [4], [5, 6, 3], order):
            part = _run(implementation, case, operands.rows(picked), INVARIANT)
            for name, a, b in zip(("o", "lse"), part, full, strict=True):
                assert_same_bits(a, b[picked], f"{name} of rows {picked}")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("width", "dtype", "masks"),
        [
            (128, "float32", {}),
            (16, "float32", dict(soft_cap=4.0)),
            (128, "bfloat16", {}),
            (128, "bfloat16", dict(window=100, alibi=True)),
        ],
    )
    def test_chunks_of_a_prompt(self, implementation, width, dtype, masks):
        """Chunks give the same as 512 tokens at once; the last chunk is partly padding."""
        case = Prefill(t=512, s=640, group=2, kv_heads=1, dtype=dtype, **masks)
        operands = _operands(case, (600, 530), (70, 128))
        full = _run(implementation, case, operands, INVARIANT)
        for start in range(0, 512, width):
            chunk = dataclasses.replace(
                operands,
                q=operands.q[:, start : start + width],
                offsets=operands.offsets + np.int32(start),
            )
            part = _run(implementation, dataclasses.replace(case, t=width), chunk, INVARIANT)
            for name, a, b in zip(("o", "lse"), part, full, strict=True):
                assert_same_bits(a, b[:, start : start + width], f"{name} from {start}")

    def test_against_the_oracle(self, implementation):
        case = Prefill(t=256, s=300, group=2, kv_heads=1, window=90)
        _check(implementation, case, _operands(case, (256, 250), (0, 20)), INVARIANT)
        case = Decode(t=2, dtype="bfloat16")
        _check(implementation, case, _operands(case, LENGTHS), INVARIANT)


def _merge(platform, *sides):
    return platform.jit(merge_attention)(*sides)


@across(ATTENTION, [Prefill(t=1, causal=False, dtype=t) for t in ("float32", "bfloat16")])
def test_merged_halves_are_the_whole(implementation, case):
    """The halves are the slots below 80 and from 80 on. Either may be empty."""
    if implementation.cannot(case):
        return
    whole = _operands(case, LENGTHS, np.zeros(ROWS))
    half = dataclasses.replace(case, s=80)
    sides = []
    for first in (0, 80):
        slots = slice(first, first + 80)
        lengths = np.clip(whole.lengths - first, 0, 80)
        sides += _run(
            implementation,
            half,
            Operands(whole.q, whole.k[:, :, slots], whole.v[:, :, slots], lengths, whole.offsets),
        )
    o, lse = _merge(implementation, *sides)
    dtype = implementation.computes_in(case.dtype)
    assert o.dtype == jnp.dtype(dtype)
    assert_attention(o, lse, _exact(case, whole), dtype=dtype, d=case.d, s=case.s)
    # Merging with an empty half changes nothing.
    short = whole.lengths <= 80
    assert_same_bits(o[short], sides[0][short])
    assert_same_bits(lse[short], sides[1][short])


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("base", [0.0, 1e4, -1e4, 3e38, -3e38])
def test_merge_at_any_size_of_scores(platform, base):
    rng = np.random.default_rng(0)
    o1, o2 = rng.normal(size=(2, 5, 3, 64)).astype(np.float32)
    lse1, lse2 = (base + rng.normal(size=(2, 5, 3))).astype(np.float32)
    w = 1 / (1 + np.exp(lse2.astype(np.float64) - lse1))[..., None]
    o, lse = _merge(platform, o1, lse1, o2, lse2)
    assert_within(o, w * o1 + (1 - w) * o2, 2.0**-20 * (np.abs(o1) + np.abs(o2)))
    assert_within(lse, np.logaddexp(lse1, lse2, dtype=np.float64), 1e-6 + abs(base) * 2.0**-23)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_merge_of_empty_sides(platform):
    o, lse = np.ones((2, 64), np.float32), np.array([3.0, -2.0], np.float32)
    nothing, never = np.zeros_like(o), np.full_like(lse, -np.inf)
    for sides in ((o, lse, nothing, never), (nothing, never, o, lse)):
        merged = _merge(platform, *sides)
        assert_same_bits(merged[0], o)
        assert_same_bits(merged[1], lse)
    merged = _merge(platform, nothing, never, nothing, never)
    assert_same_bits(merged[0], nothing)
    assert_same_bits(merged[1], never)


def test_merge_of_shapes_that_disagree():
    o, lse = jnp.ones((2, 3, 4)), jnp.ones((2, 3))
    for sides in ((o, lse, o[:1], lse), (o, lse, o, lse[:1]), (o, lse[..., 0], o, lse[..., 0])):
        with pytest.raises(ValueError, match=r"^merge_attention: o must be \[...,D\] and lse"):
            merge_attention(*sides)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [*(2.0**-i for i in range(1, 9)), *(2.0**-i for i in (0.5, 1.5, 2.5, 3.5))]),
        (16, [2.0 ** (-i / 2) for i in range(1, 17)]),
    ],
)
def test_alibi_slopes(heads, expected):
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-12)


# B 2, T 3, H 4, Hkv 2, S 8, D 16
FITTING = dict(
    q=jnp.ones((2, 3, 4, 16)),
    k=jnp.ones((2, 2, 8, 16)),
    v=jnp.ones((2, 2, 8, 16)),
    lengths=jnp.array([3, 8], jnp.int32),
    scale=0.25,
)
STACKED = jnp.ones((2, 2, 2, 8, 16))
UNFIT = [
    (dict(q=jnp.ones((2, 4, 16))), "q must be [B,T,H,D], got [2, 4, 16]"),
    (
        dict(k=STACKED, v=STACKED),
        "k and v must both be [B,Hkv,S,D], got [2, 2, 2, 8, 16] and [2, 2, 2, 8, 16]",
    ),
    (
        dict(v=jnp.ones((2, 2, 7, 16))),
        "k and v must both be [B,Hkv,S,D], got [2, 2, 8, 16] and [2, 2, 7, 16]",
    ),
    (
        dict(layer=0),
        "k and v must both be [L,B,Hkv,S,D], got [2, 2, 8, 16] and [2, 2, 8, 16]",
    ),
    (dict(k=STACKED, v=STACKED, layer=2), "layer must be in 0..1, got 2"),
    (dict(k=STACKED, v=STACKED, layer=np.int64(-1)), "layer must be in 0..1, got -1"),
    (
        dict(q=jnp.ones((3, 3, 4, 16))),
        "q [3, 3, 4, 16] and k [2, 2, 8, 16] disagree on B or D",
    ),
    (
        dict(q=jnp.ones((2, 3, 4, 32))),
        "q [2, 3, 4, 32] and k [2, 2, 8, 16] disagree on B or D",
    ),
    (
        dict(q=jnp.ones((2, 3, 4, 8)), k=STACKED, v=STACKED, layer=0),
        "q [2, 3, 4, 8] and k [2, 2, 2, 8, 16] disagree on B or D",
    ),
    (dict(q=jnp.ones((2, 3, 5, 16))), "H must be a multiple of Hkv, got 5 and 2"),
    (
        dict(q=jnp.ones((2, 3, 4, 16), jnp.bfloat16)),
        "q, k, v must share a dtype, got bfloat16, float32, float32",
    ),
    (
        {name: FITTING[name].astype(jnp.int32) for name in ("q", "k", "v")},
        "q, k, v must be floating point, got int32",
    ),
    (dict(lengths=jnp.ones((3,), jnp.int32)), "lengths must be [2], got [3]"),
    (dict(lengths=jnp.ones((2, 1), jnp.int32)), "lengths must be [2], got [2, 1]"),
    (dict(q=jnp.ones((2, 0, 4, 16))), "T must be at least 1, got 0"),
    (dict(q=jnp.ones((2, 3, 0, 16))), "H must be at least 1, got 0"),
    (dict(k=jnp.ones((2, 2, 0, 16)), v=jnp.ones((2, 2, 0, 16))), "S must be at least 1, got 0"),
    (dict(scale=0.0), "scale must be positive, got 0.0"),
    (dict(scale=-1.0), "scale must be positive, got -1.0"),
    (dict(scale=float("nan")), "scale must be positive, got nan"),
    (dict(window=0), "window must be from 1 to 2^31 - 1, got 0"),
    (dict(window=2**31), "window must be from 1 to 2^31 - 1, got 2147483648"),
    (dict(soft_cap=0.0), "soft_cap must be positive, got 0.0"),
    (dict(alibi=(0.5, 0.25)), "alibi must have 4 slopes, got 2"),
    (dict(phi=(1.0,) * 3), "phi must have 4 values, got 3"),
    (dict(sinks=True), "sinks must be [4], got None"),
]


def _call(op, keys: dict):
    keys = FITTING | keys
    arrays = [keys.pop(name) for name in ("q", "k", "v", "lengths")]
    fields = {field.name for field in dataclasses.fields(AttentionSpec)}
    spec = AttentionSpec(**{name: keys.pop(name) for name in list(keys) if name in fields})
    return op(*arrays, spec=spec, **keys)


@pytest.mark.parametrize("op", [decode_attention, prefill_attention])
@pytest.mark.parametrize(("keys", "message"), UNFIT)
def test_operands_that_do_not_fit(op, keys, message):
    with pytest.raises(ValueError) as error:
        _call(op, keys)
    assert str(error.value) == f"{op.__name__}: {message}"


@pytest.mark.parametrize("keys", [*({"implementation": i} for i in NAMES), {}], ids=str)
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("op", [decode_attention, prefill_attention])
def test_no_rows(op, t, keys):
    keys = keys or {"plan": INVARIANT}
    cache = jnp.ones((0, 2, 8, 64), jnp.bfloat16)
    q = jnp.ones((0, t, 4, 64), jnp.bfloat16)
    empty = dict(q=q, k=cache, v=cache, lengths=jnp.ones(0, jnp.int32))
    o, lse = _call(op, empty | keys | {"return_lse": True})
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], jnp.float32)
    assert _call(op, empty | keys).shape == q.shape


def test_no_row_runs_again():
    """With no rows there are no blocks, and the share of reruns is 0."""
    empty = {name: FITTING[name][:0] for name in ("q", "k", "v", "lengths")}
    _, reruns = _call(decode_attention, empty | {"return_reruns": True})
    assert (reruns.shape, reruns.dtype, float(reruns)) == ((), jnp.float32, 0.0)


def test_too_many_query_tokens_for_decode():
    with pytest.raises(ValueError, match=r"^decode_attention: T must be at most 16, got 17$"):
        _call(decode_attention, dict(q=jnp.ones((2, 17, 4, 16))))


@pytest.mark.parametrize("offsets", [jnp.zeros(3, jnp.int32), jnp.zeros(2)], ids=["3", "float"])
def test_offsets_that_do_not_fit(offsets):
    got = re.escape(f"{offsets.dtype} {list(offsets.shape)}")
    wanted = r"^prefill_attention: offsets must be signed integers \[2\], got "
    with pytest.raises(ValueError, match=f"{wanted}{got}$"):
        _call(prefill_attention, dict(offsets=offsets))


def test_scale_has_no_default():
    for op in (decode_attention, prefill_attention):
        with pytest.raises(TypeError, match="spec"):
            op(*(FITTING[name] for name in ("q", "k", "v", "lengths")))
    with pytest.raises(TypeError, match="scale"):
        AttentionSpec()


@pytest.mark.parametrize("op", [decode_attention, prefill_attention])
def test_an_unknown_implementation(op):
    with pytest.raises(ValueError) as error:
        _call(op, dict(implementation="triton"))
    names = "xla, cudnn, mosaic_gpu"
    assert str(error.value) == (
        f"{op.__name__}: implementation must be one of {names}, got 'triton'"
    )


def _shapes(dtype: str = "bfloat16", t: int = 1, d: int = 64) -> dict:
    """Operands that only need tracing."""
    cache = jax.ShapeDtypeStruct((2, 2, 8, d), dtype)
    q = jax.ShapeDtypeStruct((2, t, 4, d), dtype)
    return dict(q=q, k=cache, v=cache, lengths=jax.ShapeDtypeStruct((2,), "int32"))


def _refused(op, implementation: str, how: str, shapes: dict, **fields) -> str:
    """The error message of a named implementation that cannot do a call."""
    static = {"spec": AttentionSpec(0.25, **fields)}
    if how == "argument":
        static["implementation"] = implementation
    else:
        static["plan"] = Plan(named=((op.__name__, implementation),))
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(functools.partial(op, **static), *shapes.values())
    return str(error.value)


@pytest.mark.parametrize("how", ["argument", "plan"])
@pytest.mark.parametrize(
    ("op", "implementation", "shapes", "static", "message"),
    [
        (op, *rest)
        for op in (decode_attention, prefill_attention)
        for rest in (
            ("cudnn", _shapes("float32"), {}, "cudnn needs bfloat16 or float16, got float32"),
            (
                "cudnn", _shapes(d=60), {},
                "cudnn needs D to be a multiple of 8 up to 256, got 60",
            ),
            (
                "cudnn", _shapes(d=264), {},
                "cudnn needs D to be a multiple of 8 up to 256, got 264",
            ),
            ("cudnn", _shapes(), dict(window=4), "cudnn cannot do window"),
            ("cudnn", _shapes(), dict(soft_cap=4.0), "cudnn cannot do soft_cap"),
            (
                "cudnn", _shapes(), dict(alibi=(0.5,) * 4, window=3),
                "cudnn cannot do alibi, window",
            ),
        )
    ]
    + [(decode_attention, "cudnn", _shapes(t=2), {}, "cudnn needs T = 1, got 2")],
)  # fmt: skip
def test_a_named_implementation_never_falls_back(op, implementation, shapes, static, message, how):
    assert _refused(op, implementation, how, shapes, **static) == f"{op.__name__}: {message}"


@pytest.mark.parametrize("how", ["argument", "plan"])
@pytest.mark.parametrize("op", [decode_attention, prefill_attention])
@pytest.mark.parametrize("shapes", [_shapes("float32"), _shapes(d=60)], ids=["float32", "D=60"])
def test_mosaic_gpu_never_falls_back(op, shapes, how):
    """It refuses these in every op. Its own tests check the messages."""
    assert re.match(rf"{op.__name__}: .*mosaic_gpu", _refused(op, "mosaic_gpu", how, shapes))
