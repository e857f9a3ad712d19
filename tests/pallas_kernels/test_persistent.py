"""Parts of persistent kernels that need no device."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from fdjax.pallas_kernels.hopper.persistent.block import Block
from fdjax.pallas_kernels.hopper.persistent.linear_layers import after_attention, products_memory
from fdjax.pallas_kernels.hopper.persistent.memory import Packing, with_rings


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("counts", [(0, 3), (1, 1), (1, 2), (2, 1), (3, 0), (3, 2)], ids=str)
def test_what_the_other_block_has_sent_is_counted(counts, rank):
    """Each waits for its own tiles of all stages in turn, and its count grows by one each time."""
    # Attention has a barrier of its own, the second product no other block.
    stages = [
        SimpleNamespace(split=split, barrier=barrier, count=count)
        for split, barrier, count in ((2, 0, counts[0]), (1, 0, 3), (2, 1, 2), (2, 0, counts[1]))
    ]
    block = SimpleNamespace(
        stages=stages,
        rank=jnp.int32(rank),
        share=lambda stage: SimpleNamespace(count=jnp.int32(stage.count)),
    )
    seen = {0: 0, 1: 0}
    for layer in range(3):
        for stage in stages:
            for i in range(stage.count) if stage.split > 1 else ():
                if i % 2 == rank:
                    found = Block.handed_over(block, layer, stage, jnp.int32(i))
                    assert found == seen[stage.barrier]
                    seen[stage.barrier] += 1


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(("kind", "group"), [("int4", 128), ("int8", None), ("fp8", 64)])
def test_a_tile_never_waits_for_more_of_x_than_its_ring_has(rows, kind, group):
    padded = -(-rows // 8) * 8
    packing = Packing(kind, group, jnp.dtype("bfloat16"), 48 // padded, rows)
    for k in range(2, 513, 2):
        stages = after_attention(
            width=1024, heads=64 * k, hidden=64 * k, gate="silu", eps=0.0, packing=packing
        )
        memory = products_memory(stages, rows=padded, width=1024, dtype=jnp.dtype("bfloat16"))
        copies = max(stage.copies for stage in stages)
        rings = with_rings(memory, padded, jnp.dtype("bfloat16"), copies, packing)
        ring = rings["coded"].shape[0]
        for stage in stages:
            at_once = stage.slots_at_once(ring)
            assert at_once < ring and (stage.deep // 2) % at_once == 0
