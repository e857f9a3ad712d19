"""Attention to a cache that devices divide by tokens: on fake CPU devices, beside float64."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    append_decode_divided,
    append_prefill_divided,
)
from fdjax.pallas_kernels.ranks import AXIS

from ..engine.test_tensor_parallel import report


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "options"),
    [
        pytest.param(4, 2, {"soft_cap": 5.0, "sinks": True, "phi": True}, marks=pytest.mark.slow),
        pytest.param(4, 1, {"block": 16}, marks=pytest.mark.soak),
        pytest.param(8, 2, {"sinks": True}, marks=pytest.mark.soak),
        pytest.param(8, 4, {"quantised": True}, marks=pytest.mark.slow),
    ],
)
def test_parts_of_all_devices_are_the_whole(ranks, kv_heads, options):
    """Rows of any length, so that some devices have none of a row; unused slots are NaN."""
    found = report("divided_attention", ranks, kv_heads, **options)
    bar = 0.05 if "quantised" in options else 2e-6
    assert found["prompts"] < bar and found["steps"] < bar
    assert found["cache"]  # each token is on one device of its KV head, and nowhere else


@pytest.mark.parametrize(
    ("op", "shape", "changes", "error", "says"),
    [
        ("decode", (2, 1, 1, 4, 16), {"window": 5}, NotImplementedError, "cannot do window"),
        ("decode", (2, 1, 1, 4, 16), {"alibi": (0.5,) * 8}, NotImplementedError, "do alibi"),
        ("decode", (2, 2, 1, 4, 16), {}, ValueError, "T must be 1, got 2"),
        ("decode", (2, 1, 2, 4, 16), {}, ValueError, "must have one KV head, got 2"),
        ("prefill", (2, 96, 1, 4, 16), {}, ValueError, "T must divide the 128 slots of a page"),
        ("prefill", (2, 128, 1, 4, 16), {"ranks": 3}, ValueError, "must divide the 4 devices"),
    ],
)
def test_what_cannot_be_divided_is_refused(op, shape, changes, error, says):
    ops = {"decode": append_decode_divided, "prefill": append_prefill_divided}
    changes = {"ranks": 2} | changes
    run = functools.partial(
        ops[op],
        token_ranks=changes.pop("ranks"),
        spec=AttentionSpec(1.0, **changes),
        pages=jnp.zeros((2, 1), jnp.int32),
    )
    cache, lengths = jnp.zeros((3, shape[2], 128, 16)), jnp.zeros(2, jnp.int32)
    args = jnp.zeros(shape), cache, cache, *[lengths] * (1 + (op == "prefill"))
    mesh = AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    with pytest.raises(error, match=says):
        jax.eval_shape(
            jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False), *args
        )
