"""The two device programs everything is a loop over: a chunk of prompts, a chunk of decode steps.

Both are pure functions of `(params, state, ...)`; `fdjax.lm` jits them with the state donated.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import Array, lax

from fdjax.models import AttentionSpec, Model, Params
from fdjax.pallas_kernels.attention import decode_attention, prefill_attention
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import apply_rope
from fdjax.sampling import NOT_FINITE, Processors, next_tokens
from fdjax.state import DecodeState, LayerCache


def prefill(
    model: Model,
    params: Params,
    state: DecodeState,
    tokens: Array,
    lengths: Array,
    offsets: Array,
    final: Array,
    rows: Array | None = None,
    *,
    processors: Processors = Processors(),
) -> tuple[DecodeState, Array, Array | None]:
    """Process a chunk of some rows' prompts; where it is a prompt's last, choose its first token.

    Args:
      model, params: the model.
      state: the batch; other rows are left as they are, in whatever phase.
      tokens: [R, T] int32 prompt tokens, padded at the end with anything in the vocabulary.
      lengths: [R] int32 tokens of this chunk; 0 leaves a row untouched.
      offsets: [R] int32 tokens of the prompt already in the cache; offsets + T <= S.
      final: [R] bool, the prompt ends with this chunk.
      rows: [R] int32 distinct rows of the state; default all of them in order (R = B).
      processors: the active processors.

    Returns:
      (state, first tokens [R] int32, -1 where not final, `NOT_FINITE` where logits are not; their
      log-probabilities or None).
    """
    module = model.module(params)
    r = tokens.shape[0]
    index = jnp.arange(r, dtype=jnp.int32) if rows is None else rows
    ends = jnp.where(lengths > 0, offsets + lengths, 0)
    attend = functools.partial(
        _attend_prefill, ends=ends, offsets=offsets, rows=rows, plan=model.plan
    )
    hidden, kv = module(tokens, state.kv, attend, model.plan)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    sampling = _take_rows(state.sampling, rows)
    steps = jnp.zeros((r,), jnp.int32)
    first, logprobs = next_tokens(module.logits(hidden, model.plan), sampling, steps, processors)
    chosen = final & (lengths > 0)
    finished = _is_final(first, steps + 1, sampling)

    def put(array, values, where):
        return array.at[index].set(jnp.where(where, values, array[index]))

    state = dataclasses.replace(
        state,
        kv=kv,
        lengths=put(state.lengths, ends, lengths > 0),
        tokens=put(state.tokens, jnp.maximum(first, 0), chosen),
        steps=put(state.steps, steps + 1, chosen),
        finished=put(state.finished, finished, chosen),
    )
    return state, jnp.where(chosen, first, -1), logprobs


def decode_steps(
    model: Model,
    params: Params,
    state: DecodeState,
    n: Array,
    *,
    max_steps: int,
    processors: Processors = Processors(),
) -> tuple[DecodeState, Array, Array | None]:
    """At most `n` decode steps in one device loop, fewer when every row finishes.

    The trip count is static and a step that has nothing to do is skipped by a conditional: on a
    GPU both stay on the device, so the call returns at once and the next one queues behind it. A
    `while` that looks at the rows would be read by the host at every step. A skipped step takes
    0.14 ms on an H100, so `max_steps` should not be much larger than `n`.

    Args:
      model, params: the model.
      state: the batch. Rows that are finished keep their state.
      n: traced number of steps, at most `max_steps`.
      max_steps: static width of the result.
      processors: the active processors.

    Returns:
      (state, tokens [B, max_steps] int32, -1 where a row chose none and `NOT_FINITE` where its
      logits are not, their log-probabilities [B, max_steps] or None).
    """
    module = model.module(params)
    b = state.batch

    def step(i, carry):
        state, tokens, logprobs = carry
        attend = functools.partial(_attend_decode, lengths=state.lengths, plan=model.plan)
        hidden, kv = module(state.tokens[:, None], state.kv, attend, model.plan)
        logits = module.logits(hidden[:, 0], model.plan)
        chosen, chosen_logprobs = next_tokens(logits, state.sampling, state.steps, processors)
        active = ~state.finished
        emitted = jnp.where(active, chosen, -1)
        chosen = jnp.where(emitted >= 0, chosen, state.tokens)
        tokens = lax.dynamic_update_slice(tokens, emitted[:, None], (0, i))
        if logprobs is not None:
            logprobs = lax.dynamic_update_slice(logprobs, chosen_logprobs[:, None], (0, i))
        advance = active.astype(jnp.int32)
        steps = state.steps + advance
        state = dataclasses.replace(
            state,
            kv=kv,
            lengths=state.lengths + advance,
            tokens=chosen,
            steps=steps,
            finished=state.finished | (active & _is_final(emitted, steps, state.sampling)),
        )
        return state, tokens, logprobs

    def step_if_any(i, carry):
        work = (i < n) & ~jnp.all(carry[0].finished)
        return lax.cond(work, functools.partial(step, i), lambda carry: carry, carry)

    tokens = jnp.full((b, max_steps), -1, jnp.int32)
    logprobs = jnp.zeros((b, max_steps), jnp.float32) if processors.logprobs else None
    return lax.fori_loop(0, max_steps, step_if_any, (state, tokens, logprobs))


def _is_final(tokens, steps, sampling):
    """[B] whether these tokens, number `steps` of their rows, are the last ones."""
    stopped = jnp.any(tokens[:, None] == sampling.stop_tokens, axis=-1) | (tokens == NOT_FINITE)
    return stopped | (steps >= sampling.max_new_tokens)


def _take_rows(sampling, rows):
    if rows is None:
        return sampling
    fields = dataclasses.fields(sampling)
    return type(sampling)(**{f.name: getattr(sampling, f.name)[rows] for f in fields})


def _attend_decode(
    spec: AttentionSpec,
    kv: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    lengths: Array,
    plan: Plan,
) -> tuple[Array, LayerCache]:
    """T new tokens of every row: RoPE, append, attention."""
    t = q.shape[1]
    positions = lengths[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    q, k = _rotate(spec, q, k, positions)
    kv = tuple(_append(cache, new, lengths) for cache, new in zip(kv, (k, v), strict=True))
    o = decode_attention(
        q,
        *kv,
        lengths + t,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        alibi=spec.alibi,
        plan=plan,
    )
    return o, kv


def _attend_prefill(
    spec: AttentionSpec,
    kv: LayerCache,
    q: Array,
    k: Array,
    v: Array,
    *,
    ends: Array,
    offsets: Array,
    rows: Array | None,
    plan: Plan,
) -> tuple[Array, LayerCache]:
    """A chunk of some rows' prompts: RoPE, write, attention."""
    r, t = q.shape[:2]
    positions = offsets[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    q, k = _rotate(spec, q, k, positions)
    index = jnp.arange(r, dtype=jnp.int32) if rows is None else rows
    # Padding goes to a slot that does not exist, and is dropped.
    slots = jnp.where(positions < ends[:, None], positions, kv[0].shape[2])
    kv = tuple(_write(cache, new, index, slots) for cache, new in zip(kv, (k, v), strict=True))
    own = kv if rows is None else tuple(cache[rows] for cache in kv)
    o = prefill_attention(
        q,
        *own,
        ends,
        offsets,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        alibi=spec.alibi,
        plan=plan,
    )
    return o, kv


def _rotate(spec, q, k, positions):
    if spec.rope is None:
        return q, k
    return apply_rope(q, positions, spec.rope), apply_rope(k, positions, spec.rope)


def _append(cache: Array, new: Array, lengths: Array) -> Array:
    """Write new [B,T,Hkv,D] into cache [B,Hkv,S,D] from slot lengths[b] on."""
    b, t = new.shape[:2]
    if b == 1:
        return lax.dynamic_update_slice(cache, new.transpose(0, 2, 1, 3), (0, 0, lengths[0], 0))
    slots = lengths[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    return _write(cache, new, jnp.arange(b, dtype=jnp.int32), slots)


def _write(cache: Array, new: Array, rows: Array, slots: Array) -> Array:
    """Write new [R,T,Hkv,D] into cache [B,Hkv,S,D] at rows [R] and slots [R,T], if they exist.

    Every axis but D is indexed: a window over the heads would have XLA transpose the whole cache.
    """
    heads = jnp.arange(cache.shape[1], dtype=jnp.int32)
    at = cache.at[rows[:, None, None], heads[None, :, None], slots[:, None, :]]
    return at.set(new.transpose(0, 2, 1, 3), mode="drop", unique_indices=True)
