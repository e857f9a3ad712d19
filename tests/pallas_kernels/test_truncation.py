"""`truncate` against an oracle in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.truncation import TRUNCATE, truncate

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
RULES = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"typical_p": 0.0},
    {"typical_p": 0.7},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 50, "typical_p": 0.6},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
]
IMPLEMENTATIONS = ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def scores_of(rows, v, seed=0):
    """Rows with ties, with forbidden tokens, far from each other, and with one token alone."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(rows, v)).astype(np.float32) * np.linspace(0.1, 9, rows)[:, None]
    scores = scores.astype(np.float32)
    scores[:, v // 3 : v // 3 + 4] = scores[:, v // 3, None]
    scores[::3, 1::2] = -np.inf
    scores[1::4] *= np.float32(1e20)
    scores[rows - 1, 1:] = -np.inf
    return scores - scores.max(axis=1, keepdims=True)


def kept_in_float64(scores, top_k, top_p, min_p, typical_p, tolerance):
    """Which tokens of a row are kept, if limits are multiplied by 1 + `tolerance`."""
    distance = -scores.astype(np.float64)
    kept = np.ones(len(scores), bool)

    def before(distance, weights):
        """What weighs less than each token, by distance."""
        order = np.argsort(distance, kind="stable")
        sums = np.concatenate([[0], np.cumsum(weights[order])])
        return sums[np.searchsorted(distance[order], distance)]

    if top_k > 0:
        kept = before(distance, np.ones_like(distance)) < top_k
    weights = np.where(kept, np.exp(-distance), 0)
    if top_p < 1:
        limit = max(top_p * weights.sum() * (1 + tolerance), np.finfo(np.float32).tiny)
        kept &= before(distance, weights) < limit
    if min_p > 0:
        kept &= distance <= -np.log(min_p) + 1e-6 * np.sign(tolerance)
    if typical_p < 1:
        weights = np.where(kept, np.exp(-distance), 0)
        weights /= weights.sum()
        mean = (weights[weights > 0] * distance[weights > 0]).sum()
        far = np.where(kept, np.abs(distance - mean), np.inf)
        # Distances from a mean are rounded; those that differ by less are alike.
        far = np.round(far, 4)
        limit = max(typical_p * (1 + tolerance), np.finfo(np.float32).tiny)
        kept &= before(far, weights) < limit
    return kept


def run(scores, rules, implementation):
    rows = [OFF | RULES[i % len(RULES)] | rules for i in range(len(scores))]
    values = {
        name: jnp.asarray([row[name] for row in rows], jnp.int32 if name == "top_k" else np.float32)
        for name in OFF
    }
    kept = jax.jit(lambda s, v: truncate(s, **v, implementation=implementation))(scores, values)
    return np.asarray(kept), rows


def check(scores, rules, implementation):
    """Returns how many tokens are kept."""
    found, rows = run(scores, rules, implementation)
    for own, got, row in zip(scores, found, rows, strict=True):
        kept = got > -np.inf
        np.testing.assert_array_equal(got[kept], own[kept])
        least, most = (kept_in_float64(own, **row, tolerance=t) for t in (-1e-5, 1e-5))
        if row["typical_p"] < 1:  # of two tokens at about the same distance, either may be first
            assert abs(int(kept.sum()) - int(most.sum())) <= 2 + (most ^ least).sum(), row
            continue
        allowed = own > -np.inf
        assert not (least & allowed & ~kept).any(), row
        assert not (kept & ~most).any(), row
        assert kept.any()
    return (found > -np.inf).sum()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("v", [1, 5, 1000])
def test_every_rule(implementation, v):
    assert check(scores_of(2 * len(RULES), v), {}, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "v"), [(1, 128256), (3, 50257), (17, 32000), (40, 151936), (133, 4099), (256, 163840)]
)
@pytest.mark.parametrize("rules", [{}, *({"top_k": 40, "top_p": p} for p in (0.3, 0.95))], ids=str)
def test_sizes_of_vocabularies(rows, v, rules):
    scores = scores_of(rows, v)
    found, _ = run(scores, rules, "mosaic_gpu")
    want, _ = run(scores, rules, "xla")
    differing = ((found > -np.inf) != (want > -np.inf)).sum(axis=1)
    assert differing.max() <= 2 and (differing > 0).mean() < 0.1
    same = (found > -np.inf) & (want > -np.inf)
    np.testing.assert_array_equal(found[same], want[same])
    check(scores[:3], rules, "mosaic_gpu")


@pytest.mark.gpu
def test_a_row_does_not_depend_on_others_and_nan_stays_in_its_row():
    scores = scores_of(28, 9000)
    all_rows, _ = run(scores, {"top_p": 0.9}, "mosaic_gpu")
    damaged = scores.copy()
    damaged[5] = np.nan
    damaged[6] = -np.inf
    found, _ = run(damaged, {"top_p": 0.9}, "mosaic_gpu")
    for row in sorted({*range(28)} - {5, 6}):
        np.testing.assert_array_equal(found[row], all_rows[row])


@pytest.mark.parametrize("name", ["xla", "mosaic_gpu"])
def test_at_least_so_many_tokens_are_kept(name):
    scores, least = scores_of(4, 50), np.int32([2, 3, 1, 5])
    values = {k: jnp.full(4, v, jnp.int32 if k == "top_k" else jnp.float32) for k, v in OFF.items()}
    values |= {"top_k": jnp.ones(4, jnp.int32)}
    if name == "mosaic_gpu":
        with pytest.raises(NotImplementedError, match="truncate: mosaic_gpu cannot do least"):
            truncate(scores, **values, least=least, implementation=name)
        return
    kept = np.asarray(truncate(jnp.asarray(scores), **values, least=least)) > -np.inf
    assert (kept.sum(axis=1)[:3] >= least[:3]).all()


def test_what_is_refused():
    values = {k: jnp.full(2, v, jnp.int32 if k == "top_k" else jnp.float32) for k, v in OFF.items()}
    with pytest.raises(ValueError, match=r"scores must be fp32 \[B,V\], got bfloat16\[2, 5\]"):
        truncate(jnp.zeros((2, 5), jnp.bfloat16), **values)
    with pytest.raises(ValueError, match=r"top_k must be int32\[3\], got int32\[2\]"):
        truncate(jnp.zeros((3, 5)), **values)
    for least in (jnp.ones(2), jnp.ones(1, jnp.int32)):
        with pytest.raises(ValueError, match=r"least must be int32\[2\], got (float|int)32\["):
            truncate(jnp.zeros((2, 5)), **values, least=least)
    with pytest.raises(ValueError, match=r"min_p must be float32\[2\], got int32\[2\]"):
        truncate(jnp.zeros((2, 5)), **values | {"min_p": jnp.zeros(2, jnp.int32)})
    with pytest.raises(
        NotImplementedError, match="takes at most 163840 tokens in a row, got 163841"
    ):
        truncate(jnp.zeros((2, 163841)), **values, implementation="mosaic_gpu")


def test_hopper_takes_the_kernel_but_for_beams_and_the_largest_vocabularies():
    plan = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
    assert plan.choose("truncate", b=1, v=128256).implementation == "mosaic_gpu"
    assert plan.choose("truncate", b=1, v=262144).implementation == "xla"
    assert plan.choose("truncate", frozenset(["least"]), b=1, v=99).implementation == "xla"
    ampere = Plan.for_kind("NVIDIA A100-SXM4-80GB", (8, 0))
    assert ampere.choose("truncate", b=1, v=99).implementation == "xla"


@pytest.mark.parametrize(("b", "v"), [(1, 32000), (64, 128256)])
@pytest.mark.deviceless
def test_compiles_for_hopper(b, v):
    from deviceless import compile_for

    shapes = [jax.ShapeDtypeStruct((b,), dtype) for dtype in (jnp.int32, *[jnp.float32] * 3)]

    def run(*args):
        return truncate(*args, implementation="mosaic_gpu")

    compiled = compile_for("h100", run, jax.ShapeDtypeStruct((b, v), jnp.float32), *shapes)
    assert compiled.as_text().count("mosaic_gpu") > 0


def test_the_first_implementation_is_the_kernel():
    assert [i.name for i in TRUNCATE] == ["mosaic_gpu", "xla"]
