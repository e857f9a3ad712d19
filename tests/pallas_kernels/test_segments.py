"""Beams as query tokens of one row: the grouping, and the kernel that reads each page once."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.attention import BeamSlots, QuantisedCache, decode_attention
from fdjax.pallas_kernels.attention.cache import quantise
from fdjax.pallas_kernels.attention.hopper.decode import DecodeAttentionConfig, decode_mosaic
from fdjax.pallas_kernels.attention.hopper.decode_kernel import HOLES
from fdjax.pallas_kernels.attention.hopper.segments import decode_segments, groups_of
from fdjax.pallas_kernels.attention.spec import AttentionSpec

from .test_decode_mosaic import INTERPRET

pytestmark = pytest.mark.usefixtures("quick_compiles")

SPEC = AttentionSpec(0.2)


@dataclasses.dataclass(frozen=True)
class Search:
    """Beams of a prompt in rows next to each other; `width` 1 is a row by itself, 0 an empty one.

    `length` are the positions of each beam.
    """

    width: int
    prompt: int
    length: int


def rows_of(searches, *, page, slots, aligned=False, seed=0):
    """(pages [B, N], lengths [B], beams, number of pages) of rows whose beams change places."""
    rng = np.random.default_rng(seed)
    b = sum(max(s.width, 1) for s in searches)
    free = iter(rng.permutation(np.arange(1, b * slots // page + 1)))
    pages = np.zeros((b, slots // page), np.int32)
    lengths, prompts, first = np.zeros((3, b), np.int32)
    sources = np.tile(np.arange(b, dtype=np.int32)[:, None], (1, slots))
    row = 0
    for search in searches:
        rows = slice(row, row + max(search.width, 1))
        first[rows] = row
        prompts[rows] = search.prompt if search.width > 1 else slots
        lengths[rows] = search.length if search.width else 0
        shared = -(-min(search.prompt, search.length) // page) if search.width > 1 else 0
        pages[rows, :shared] = [next(free) for _ in range(shared)]
        own = -(-(search.length - (search.prompt if search.width > 1 else 0)) // page)
        for r in range(row, rows.stop):
            for i in range(own if search.width else 0):
                pages[r, shared + i] = next(free)
        for position in range(search.prompt, search.length if search.width > 1 else 0):
            sources[rows] = sources[rows][rng.integers(0, search.width, search.width)]
            sources[rows, position] = np.arange(row, rows.stop)
        row = rows.stop
    width = max(s.width for s in searches)
    beams = BeamSlots(sources, prompts, first, width, aligned=aligned)
    return pages, lengths, beams, b * slots // page + 1


SEARCHES = [
    Search(4, prompt=19, length=60),
    Search(0, 0, 0),
    Search(1, 0, length=37),
    Search(3, prompt=32, length=33),
    Search(2, prompt=5, length=85),
]


# Rows of 4 beams each, a row of which none has work, and rows that are left over.
ALIGNED = [
    Search(4, prompt=19, length=60),
    *[Search(0, 0, 0)] * 4,
    Search(4, prompt=5, length=85),
    Search(4, prompt=32, length=33),
    *[Search(0, 0, 0)] * 2,
]


@pytest.mark.parametrize(
    ("searches", "aligned", "block"),
    [
        (SEARCHES, False, 8),
        (SEARCHES[::-1], False, 8),
        (SEARCHES[::-1], False, 16),
        (SEARCHES[2:3] * 3, False, 8),
        (ALIGNED, False, 8),
        (ALIGNED, True, 8),
        (ALIGNED, True, 16),
    ],
    ids=["mixed", "reversed", "whole pages", "plain", "general", "aligned", "aligned whole pages"],
)
def test_each_beam_sees_its_own_positions_once(searches, aligned, block):
    page = 16
    pages, lengths, beams, _ = rows_of(searches, page=page, slots=96, aligned=aligned)
    arrays = jax.tree.map(jnp.asarray, beams)
    groups = jax.jit(lambda *rows: groups_of(arrays, *rows, page, block))(pages, lengths)
    members, table, used, visible = map(np.asarray, groups)
    assert len(members) == (len(pages) // 4 if aligned else len(pages))
    at, slot = (
        np.asarray(a) for a in beams.page_and_slot(np.tile(np.arange(96), (len(pages), 1)), page)
    )
    read = np.zeros(len(members), int)
    for row, first in enumerate(beams.first):
        want = set()
        for position in range(lengths[row]):
            source = row if position < beams.prompts[row] else beams.rows[row, position]
            want.add((pages[source, at[row, position]], slot[row, position]))
        i = first // beams.width if aligned else first
        if i == len(members):
            assert not want
            continue
        bit = 1 << (row - members[i, 0])
        seen = np.flatnonzero(visible[i] & bit)
        parts = table[i, seen // block]
        parts = zip(parts * block // page, parts * block % page + seen % block, strict=True)
        assert len(seen) == len(want) and set(parts) == want, row
        assert not (visible[i, used[i] :] & ~HOLES).any()
        new = max(0, lengths[row] - beams.prompts[row])
        read[i] += -(-new // block) * block
        if row == first:
            read[i] += -(-min(lengths[row], beams.prompts[row]) // block) * block
    # Only blocks that a beam needs are read.
    np.testing.assert_array_equal(used, read)
    blocks = visible.reshape(len(members), -1, block)
    holes = (blocks & ~HOLES == 0).any(axis=2, keepdims=True)
    assert ((blocks & HOLES != 0) == holes).all()


def operands(searches, *, group, kv_heads, d, slots, aligned=False, dtype=jnp.bfloat16):
    """q [B, 1, H, D], pools of keys and values with NaN in every slot that no beam sees."""
    page = 128
    pages, lengths, beams, count = rows_of(searches, page=page, slots=slots, aligned=aligned)
    rng = np.random.default_rng(1)
    q = rng.normal(size=(len(pages), 1, group * kv_heads, d))
    pools = rng.normal(size=(2, count, kv_heads, page, d))
    written = np.zeros((count, page), bool)
    positions = np.tile(np.arange(slots), (len(pages), 1))
    at, slot = (np.asarray(a) for a in beams.page_and_slot(positions, page))
    for row, length in enumerate(lengths):
        source = np.where(positions[row] < beams.prompts[row], row, beams.rows[row])[:length]
        written[pages[source, at[row, :length]], slot[row, :length]] = True
    pools = np.where(written[:, None, :, None], pools, np.nan)
    return (*(jnp.asarray(a, dtype) for a in (q, *pools)), lengths), {
        "pages": pages,
        "beams": beams,
    }


FEW = [Search(3, prompt=40, length=50), Search(0, 0, 0), Search(1, 0, length=70)]


def check(
    searches,
    group,
    config,
    *,
    kv_heads=1,
    d=64,
    slots=256,
    aligned=False,
    int8=False,
    interpret=None,
):
    """Compare the kernel with XLA, which gathers the positions of each beam."""
    sizes = {"kv_heads": kv_heads, "d": d, "slots": slots}
    given, options = operands(searches, group=group, aligned=aligned, **sizes)
    if int8:
        q, k, v, lengths = given
        given = q, *map(jax.jit(quantise), (k, v)), lengths
    want, want_lse = decode_attention(*given, **options, spec=SPEC, return_lse=True)
    o, lse, reruns = decode_segments(
        *given, **options, spec=SPEC, config=config, return_reruns=True, interpret=interpret
    )
    assert np.isfinite(np.asarray(o, np.float32)).all()
    np.testing.assert_allclose(np.float32(o), np.float32(want), rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert reruns == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "config"),
    [
        pytest.param(1, DecodeAttentionConfig(splits=1), marks=pytest.mark.soak),
        (4, DecodeAttentionConfig(splits=3, stages=2)),
    ],
)
def test_interpreted(group, config):
    check(FEW, group, config, interpret=INTERPRET)


# Prompts that end in the first and in the second half of a page, and at their ends. Responses that
# fill a part of a block, a block, a block and a slot, and two blocks.
EACH_END = [
    Search(3, prompt=40, length=41),
    *[Search(0, 0, 0)] * 3,
    Search(3, prompt=100, length=100 + 64),
    Search(3, prompt=64, length=64 + 65),
    Search(3, prompt=128, length=128 + 128),
    *[Search(0, 0, 0)] * 2,
]


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("group", "kv_heads", "config"),
    [
        pytest.param(*(1, 2, DecodeAttentionConfig(splits=1, stages=2)), marks=pytest.mark.soak),
        (4, 1, DecodeAttentionConfig(splits=3, stages=1)),
        pytest.param(
            *(1, 2, DecodeAttentionConfig(splits=2, block_kv=128, stages=1)),
            marks=pytest.mark.soak,
        ),
    ],
    ids=["one launch", "splits", "whole pages"],
)
def test_interpreted_at_each_end_of_a_page(group, kv_heads, config, aligned):
    check(EACH_END, group, config, kv_heads=kv_heads, aligned=aligned, interpret=INTERPRET)


@pytest.mark.slow
def test_interpreted_with_an_int8_cache():
    config = DecodeAttentionConfig(splits=2, stages=2)
    check(EACH_END[:5], 1, config, kv_heads=2, aligned=True, int8=True, interpret=INTERPRET)


@pytest.mark.slow
def test_interpreted_with_more_beams_than_rows_of_a_tile():
    config = DecodeAttentionConfig(splits=1, stages=1)
    searches = [Search(9, prompt=70, length=72)]
    check(searches, 1, config, kv_heads=2, aligned=True, interpret=INTERPRET)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_no_logsumexp_unless_asked_for(splits, aligned):
    given, options = operands(EACH_END, group=1, kv_heads=1, d=64, slots=256, aligned=aligned)
    attend = functools.partial(
        decode_segments,
        **jax.tree.map(jnp.asarray, options),
        spec=SPEC,
        config=DecodeAttentionConfig(splits=splits),
        return_lse=False,
    )
    o, lse, reruns = jax.eval_shape(attend, *given)
    assert (o.shape, lse, reruns) == (given[0].shape, None, None)


def test_wrong_operands():
    given, options = operands(FEW[1:2], group=1, kv_heads=1, d=64, slots=128)
    config = DecodeAttentionConfig(splits=1, block_kv=192)
    with pytest.raises(ValueError, match="block_kv must divide the 128 slots of a page, got 192"):
        decode_segments(*given, **options, spec=SPEC, config=config)
    with pytest.raises(ValueError, match="entry_slots must divide the 128 slots of a page and be"):
        decode_mosaic(*given, pages=options["pages"], spec=SPEC, entry_slots=32)
    beams = dataclasses.replace(options["beams"], width=2, aligned=True)
    with pytest.raises(ValueError, match="aligned beams need at least 2 rows, got 1"):
        decode_attention(*given, pages=options["pages"], beams=beams, spec=SPEC)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "config",
    [
        None,
        DecodeAttentionConfig(splits=4, block_kv=128, stages=1, cluster=True),
        DecodeAttentionConfig(splits=3, stages=1),
    ],
)
def test_on_a_gpu(group, d, config):
    searches = [
        Search(4, prompt=700, length=1100),
        *FEW,
        Search(16, prompt=129, length=400),
        Search(2, prompt=128, length=129),
    ]
    check(searches, group, config, kv_heads=3, d=d, slots=1280)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    "config",
    [None, DecodeAttentionConfig(splits=1, stages=4), DecodeAttentionConfig(splits=3, stages=1)],
)
def test_aligned_on_a_gpu(group, config):
    check(EACH_END, group, config, kv_heads=8, d=128, aligned=True)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_an_int8_cache_on_a_gpu(d):
    check(EACH_END, 4, None, kv_heads=2, d=d, int8=True)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("shape", "aligned", "int8"),
    [
        # Both ways for one shape, and each way for another; other combinations are a grid.
        pytest.param(
            *(shape, aligned, int8),
            id=f"{shape}-{'aligned' if aligned else 'general'}{'-int8' if int8 else ''}",
            marks=() if aligned in kept else pytest.mark.soak,
        )
        for shape, kept in (
            ((4, 4, 32, 32), ()),
            ((32, 4, 32, 32), ()),
            ((27, 9, 32, 32), (False, True)),
            ((34, 4, 32, 8), (False,)),
            ((16, 16, 32, 8), (True,)),
        )
        for aligned in (False, True)
        for int8 in (False, True)
        if not int8 or (aligned in kept and shape[3] == 8)
    ],
)
def test_compiles_for_an_h100_without_spills(shape, aligned, int8, monkeypatch, capfd):
    from ..deviceless import compile_for

    b, width, h, kv_heads = shape
    spec = jax.ShapeDtypeStruct
    shape = 200, kv_heads, 128, 128
    pool = QuantisedCache.abstract(shape, "bfloat16") if int8 else spec(shape, jnp.bfloat16)
    rows = spec((b,), jnp.int32)

    def attend(q, k, v, lengths, pages, sources, prompts, first):
        beams = BeamSlots(sources, prompts, first, width, aligned=aligned)
        return decode_segments(q, k, v, lengths, pages=pages, beams=beams, spec=SPEC)

    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    q, pages = spec((b, 1, h, 128), jnp.bfloat16), spec((b, 40), jnp.int32)
    sources = spec((b, 40 * 128), jnp.int32)
    text = compile_for("h100", attend, q, pool, pool, rows, pages, sources, rows, rows).as_text()
    assert "decode_attention" in text
    # Only rows of general groups are gathered; others come and go as they are, if G = 1.
    if aligned and h == kv_heads and b % width == 0:
        assert not re.search(r"bf16\[[^=]* (gather|transpose|copy)\(", text)
    spills = [line for line in capfd.readouterr().out.splitlines() if "spill stores" in line]
    assert spills, "ptxas said nothing"
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
