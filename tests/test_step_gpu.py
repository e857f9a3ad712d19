"""The decode chunk on a real GPU: in place, with the implementations the plan picks there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deviceless import alias_bytes, large_copies
from fdjax.models import describe, parse_config, random_params
from fdjax.options import GenerationConfig, per_row
from fdjax.state import cache_bytes, init_cache, start
from fdjax.step import decode_steps

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "num_hidden_layers": 4,
}


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("batch", [1, 8])
def test_decode_chunk_updates_the_cache_in_place(batch, kv_heads):
    model = describe(parse_config(CONFIG | {"num_key_value_heads": kv_heads}), dtype="bfloat16")
    assert model.plan.choose(
        "decode_attention",
        b=batch,
        t=1,
        h=32,
        hkv=kv_heads,
        s=2048,
        d=128,
        itemsize=2,
        masks=0,
    ).implementation in ("cudnn", "mosaic_gpu")
    requests = [GenerationConfig(max_new_tokens=8)] * batch
    sampling = jax.tree.map(jnp.asarray, per_row(requests, batch))
    state = start(init_cache(model, batch, 2048))
    program = jax.jit(functools.partial(decode_steps, model, max_steps=32), donate_argnums=1)
    compiled = program.lower(random_params(model), state, sampling, np.int32(1)).compile()
    cache = cache_bytes(model, batch, 2048)
    assert alias_bytes(compiled) >= cache
    assert alias_bytes(compiled) < cache * 1.001
    assert not large_copies(compiled, cache // (2 * model.config.layers))
