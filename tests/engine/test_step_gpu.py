"""The decode chunk on a real GPU: in place, with the implementations the plan picks there."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deviceless import alias_bytes, large_copies
from fdjax.engine.engine import Engine
from fdjax.engine.host_arrays import HostArrays
from fdjax.engine.state import DecodeState, cache_bytes, init_cache, pack_progress, start
from fdjax.engine.step import decode_steps
from fdjax.lm import LM
from fdjax.models import describe, parse_config, random_params
from fdjax.pallas_kernels.plan import Plan, can_chain
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors

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


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, 32])
def test_layers_in_a_chain_decode_as_one_by_one(batch):
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the chain would not all run at once here, and wait forever")
    config = parse_config(CONFIG | {"num_key_value_heads": 8, "num_hidden_layers": 3})
    slots = 256
    rng = np.random.default_rng(0)
    caches = rng.standard_normal((3, 2, batch, 8, slots, 128), np.float32)
    lengths = jnp.asarray(rng.integers(1, slots - 8, batch), jnp.int32)
    tokens = jnp.asarray(rng.integers(0, 32000, batch), jnp.int32)
    requests = [GenerationConfig(max_new_tokens=8, return_logprobs=20)] * batch
    sampling = jax.tree.map(jnp.asarray, per_row(requests, batch))
    results = []
    for implementation in ("xla", "mosaic_gpu"):
        named = (("linear_chain", implementation),)
        plan = dataclasses.replace(Plan.for_device(), named=named)
        model = describe(config, dtype="bfloat16", plan=plan)
        state = DecodeState(
            [(jnp.asarray(k, "bfloat16"), jnp.asarray(v, "bfloat16")) for k, v in caches],
            jnp.zeros((batch, slots), jnp.int32),
            pack_progress(lengths, tokens, jnp.ones_like(tokens), jnp.zeros_like(tokens)),
        )
        processors = Processors(logprobs=True)
        decode = functools.partial(decode_steps, model, max_steps=4, processors=processors)
        args = random_params(model), state, sampling, np.int32(2)
        lowered = jax.jit(decode, donate_argnums=1).lower(*args)
        assert ("chain_kernel" in lowered.as_text()) == (implementation == "mosaic_gpu")
        _, chosen, logprobs = lowered.compile()(*args)
        results.append(jax.device_get((chosen, logprobs.top)))
    for tokens, _ in results:
        assert (tokens[:, :2] >= 0).all() and (tokens[:, 2:] == -1).all()
    (_, top), (_, chained_top) = results
    # With random weights, the likeliest tokens are almost equally likely, so the choice proves
    # nothing.
    assert (top[:, 0] < 0).all()
    assert np.abs(top[:, 0] - chained_top[:, 0]).mean() < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_layers_in_one_launch_decode_as_one_by_one(batch):
    """From prompts to the second token, the first one for which the launch runs."""
    if not can_chain(jax.devices()[0]):
        pytest.skip("the blocks of the launch would not all run at once here, and wait forever")
    config = parse_config(CONFIG | {"num_key_value_heads": 8, "num_hidden_layers": 3})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 32000, 40 + 97 * i).tolist() for i in range(batch)]
    params, results = None, []
    for implementation in ("xla", "mosaic_gpu"):
        plan = dataclasses.replace(Plan.for_device(), named=(("decode_layers", implementation),))
        model = describe(config, dtype="bfloat16", plan=plan)
        params = params or random_params(model)
        lm = LM(model, params)
        assert lm.engine.stacks(batch, 1024) == (implementation == "mosaic_gpu")
        got = lm.generate(prompts, max_new_tokens=2, return_logprobs=20)
        top = [[[*likeliest.values()] for likeliest in row] for row in got.top_logprobs]
        results.append(np.array(top))
    one_by_one, at_once = results
    # The same kernels and prompts, on a cache in another place.
    np.testing.assert_array_equal(one_by_one[:, 0], at_once[:, 0])
    assert (one_by_one[:, 1] < 0).all()
    assert 0 < np.abs(one_by_one[:, 1] - at_once[:, 1]).mean() < 0.03


@pytest.mark.gpu
def test_a_dispatch_costs_the_host_little_in_one_launch():
    """For a whole chunk of 32 layers that do nothing."""
    plan = dataclasses.replace(Plan.for_device(), named=(("decode_layers", "mosaic_gpu"),))
    config = parse_config(CONFIG | {"hidden_size": 1024, "num_hidden_layers": 32, "head_dim": 128})
    model = describe(config, dtype="bfloat16", plan=plan)
    engine = Engine(model, random_params(model))
    layout = {"stacked": True, "stacked_layers": True}
    program = engine.program(decode_steps, **layout, processors=Processors(), max_steps=32)
    sampling = per_row([GenerationConfig(max_new_tokens=9)], 1)
    host = jax.device_put(HostArrays.pack((sampling, np.int32(0))))
    state, times = jax.tree.leaves(start(init_cache(model, 1, 256, True))), []
    for _ in range(50):
        begin = time.perf_counter()
        state, *out = program(engine.stacked_params, state, host)
        times.append(time.perf_counter() - begin)
        jax.block_until_ready(out)
    assert np.median(times[10:]) < 200e-6, sorted(times)


@pytest.mark.gpu
@pytest.mark.parametrize("everything", [False, True], ids=["greedy", "all-processors"])
@pytest.mark.parametrize("implementation", [None, "cudnn", "xla"])
def test_a_chunk_is_queued_and_not_waited_for(implementation, everything):
    plan = Plan.for_device(implementation=implementation)
    model = describe(parse_config(CONFIG), dtype="bfloat16", plan=plan)
    engine = Engine(model, random_params(model))
    processors = Processors().everything if everything else Processors()
    program = engine.program(decode_steps, processors=processors, max_steps=32)
    sampling = per_row([GenerationConfig(max_new_tokens=10**6)], 1)
    host = jax.device_put(HostArrays.pack((sampling, np.int32(32))))
    state, shares = jax.tree.leaves(start(init_cache(model, 1, 2048))), []
    for _ in range(7):
        begin = time.perf_counter()
        state, tokens, *_ = program(engine.params, state, host)
        returned = time.perf_counter()
        assert (np.asarray(jax.block_until_ready(tokens)) >= 0).all()
        shares.append((returned - begin) / (time.perf_counter() - begin))
    # The first calls record the CUDA graphs, which takes host time.
    assert np.median(shares[3:]) < 0.5, shares
