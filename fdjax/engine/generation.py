"""`forward` and `generate` as pure functions of `(model, params, ids)`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from fdjax.engine.state import SLOT_MULTIPLE, init_cache, start
from fdjax.engine.step import decode_steps, prefill
from fdjax.models import Model, Params
from fdjax.pallas_kernels.attention import prefill_attention, split_qkv
from fdjax.pallas_kernels.rope import apply_rope
from fdjax.sampling.options import GenerationConfig, per_row


def forward(
    model: Model,
    params: Params,
    ids: Array,
    lengths: Array | None = None,
    *,
    last: int | None = None,
) -> Array:
    """Logits at every position, without a cache. Pure and jittable (`model`, `last` static).

    Args:
      model, params: the model.
      ids: [B, T] int32.
      lengths: [B] int32 valid tokens per row, default T; logits past them mean nothing.
      last: only the logits of this many positions at the end of T.

    Returns:
      [B, T, V] fp32, or [B, last, V].

    Raises:
      ValueError: `ids`, `lengths` or `last` are not of such a shape.
    """
    ids = jnp.asarray(ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"forward: ids must be [B,T] and not empty, got {list(ids.shape)}")
    b, t = ids.shape
    if last is not None and not 0 < last <= t:
        raise ValueError(f"forward: last must be in 1..{t}, got {last}")
    if lengths is None:
        lengths = jnp.full((b,), t, jnp.int32)
    lengths = _checked_lengths("forward", lengths, b)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))

    def attend(spec, kv, qkv):
        q, k, v = split_qkv(qkv)
        if spec.rope is not None:
            q, k = (
                apply_rope(a, positions, spec.rope, prompt=lengths, limit=lengths) for a in (q, k)
            )
        o = prefill_attention(
            q,
            k.transpose(0, 2, 1, 3),
            v.transpose(0, 2, 1, 3),
            lengths,
            spec=spec,
            plan=model.plan,
        )
        return o, kv

    module = model.module(params)
    hidden, _ = module(ids, [None] * model.config.layers, attend, model.plan)
    return module.logits(hidden if last is None else hidden[:, -last:], model.plan)


def generate(
    model: Model,
    params: Params,
    ids: Array,
    config: GenerationConfig,
    lengths: Array | None = None,
) -> Array:
    """Generate from a batch of prompts. Pure and jittable (`model` and `config` static).

    Args:
      model, params: the model.
      ids: [B, P] int32 prompts, padded at the end.
      config: the same for all rows. There is no checkpoint here: a field that is not given has the
        option's own default, and only `eos_token_ids` end a row. Row i draws with seed
        `config.seed + i`, i without one. What ends a row on the host (`stop_strings`,
        `stopping_criteria`) and `num_return_sequences` must be off.
      lengths: [B] int32 tokens of each prompt, at least 1; default P.

    Returns:
      [B, max_new_tokens] int32, -1 after a row has ended; less than that where its logits were not
      finite or all tokens forbidden.

    Raises:
      ValueError: shapes disagree, or an option works on the host only.
    """
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"generate: config must be a GenerationConfig, got {config!r}")
    config = config.filled()
    for name in ("stop_strings", "stopping_criteria"):
        if getattr(config, name):
            raise ValueError(f"generate: {name} must be empty in a jitted function")
    if config.num_return_sequences != 1:
        raise ValueError("generate: num_return_sequences must be 1: repeat the prompts")
    ids = jnp.asarray(ids)
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"generate: ids must be [B,P] and not empty, got {list(ids.shape)}")
    b, p = ids.shape
    if lengths is None:
        lengths = jnp.full((b,), p, jnp.int32)
    lengths = _checked_lengths("generate", lengths, b)
    if config.max_new_tokens == 0:
        return jnp.zeros((b, 0), jnp.int32)
    slots = -(-(p + config.max_new_tokens) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    rows = [dataclasses.replace(config, seed=((config.seed or 0) + i) % 2**32) for i in range(b)]
    state = start(init_cache(model, b, slots))
    state, sampling = jax.tree.map(jnp.asarray, (state, per_row(rows, b)))
    processors = dataclasses.replace(config.processors, logprobs=False)
    zeros = jnp.zeros((b,), jnp.int32)
    final = jnp.ones((b,), bool)
    state, first, _ = prefill(
        model, params, state, sampling, ids, lengths, zeros, final, processors=processors
    )
    n = config.max_new_tokens - 1
    if n == 0:
        return first[:, None]
    _, rest, _ = decode_steps(
        model, params, state, sampling, jnp.int32(n), max_steps=n, processors=processors
    )
    return jnp.concatenate([first[:, None], rest], axis=1)


def _checked_lengths(function: str, lengths: Array, batch: int) -> Array:
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"{function}: lengths must be [{batch}], got {list(lengths.shape)}")
    return lengths
