"""The programs that the engine runs in a loop: blocks of prompts, first tokens, decode steps.

All are pure functions of the state and more. `Engine` jits them with the state donated.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.engine.state import (
    NOBODYS_PAGE,
    DecodeState,
    LayerCache,
    StackedCache,
    StackedLayer,
    pack_progress,
    restart,
)
from fdjax.models import AttentionSpec, Decoder, Model, Params
from fdjax.pallas_kernels.all_reduce import mailbox
from fdjax.pallas_kernels.attention import (
    BeamSlots,
    SharedPages,
    append_decode_attention,
    append_decode_divided,
    append_prefill_attention,
    append_prefill_divided,
)
from fdjax.pallas_kernels.norm import HeadNorms
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.rope import rotation
from fdjax.sampling import beams as beam_search
from fdjax.sampling.beams import BeamResults
from fdjax.sampling.sampler import (
    MAX_TOP_LOGPROBS,
    Logprobs,
    Processors,
    Sampling,
    next_tokens,
    next_tokens_and_scores,
)


def prefill(
    model: Model,
    params: Params,
    state: DecodeState,
    sampling: Sampling,
    tokens: Array,
    lengths: Array,
    offsets: Array,
    final: Array,
    rows: Array | None = None,
    prompts: Array | None = None,
    restarts: Array | None = None,
    pages: Array | None = None,
    owners: Array | None = None,
    last: Array | None = None,
    *,
    processors: Processors = Processors(),
    layers: dict[str, Array] | None = None,
) -> tuple[DecodeState, Array, Logprobs | None]:
    """Process blocks of some rows' prompts, and choose a first token for each prompt that ends.

    This is `prompt_logits` and `first_tokens`. The engine runs them as two programs: the first
    depends on no options, and the second on no weights.

    Args:
      final: [R] bool, whether the prompt ends with this call.
      The others: see `prompt_logits` and `first_tokens`.
    """
    state, logits = prompt_logits(
        *(model, params, state, tokens, lengths, offsets, rows, prompts, restarts),
        *(sampling.max_new_tokens, pages, owners, last),
        layers=layers,
    )
    final &= lengths > 0 if last is None else last >= 0
    return first_tokens(
        *(state, logits, sampling, final, rows),
        processors=processors,
        plan=model.plan,
    )


def prompt_logits(
    model: Model,
    params: Params,
    state: DecodeState,
    tokens: Array,
    lengths: Array,
    offsets: Array,
    rows: Array | None = None,
    prompts: Array | None = None,
    restarts: Array | None = None,
    max_new_tokens: Array | None = None,
    pages: Array | None = None,
    owners: Array | None = None,
    last: Array | None = None,
    *,
    layers: dict[str, Array] | None = None,
    tiles: int = 1,
) -> tuple[DecodeState, Array]:
    """Process blocks of some rows' prompts.

    Args:
      model, params: the model.
      state: the batch. Other rows do not change, even while they decode.
      tokens: [M, T] int32 blocks of prompt tokens, padded at the end with any tokens of the
        vocabulary. Each row has one block (M = R), unless `owners` are given.
      lengths: [M] int32 tokens of a block that are not padding; 0 leaves its row unchanged.
      offsets: [M] int32 number of prompt tokens before the block, which are in the cache or in
        other blocks of this call; offsets + T <= S.
      rows: [R] int32 distinct rows of the state; default all of them in order (R = B).
      prompts: [R] int32 tokens of each whole prompt, without those of an unfinished answer; default
        offsets + lengths. Only rotary embeddings that depend on a sequence's length use it.
      restarts: [B] int32 argument of `restart`, which is applied first; default no restart.
      max_new_tokens: [R] int32, see `prompts`; default 1.
      pages: [R, N] int32, the pages of each row, if the cache is a pool of pages.
      owners: [M] int32, the entry of `rows` that each block belongs to; needs `pages`, `prompts`
        and offsets that are multiples of T. A row may have any number of blocks, in any order.
      last: [R] int32, the block in which a row's tokens of this call end; -1 leaves a row
        unchanged. Given with `owners`.
      layers: the weights of all layers, [L, ...] by names such as "attention.qkv.weight", to run
        them in a loop, see `Model.loops`; the cache must be stacked too. Default: run layer by
        layer with `params`.
      tiles: number of tiles that the blocks are divided into, see `Model.prompt_tiles`. With
        several, the offsets of all blocks must fall.

    Returns:
      (state, logits [R, V] fp32 after the last token of each row of this call).
    """
    if restarts is not None:
        state = restart(state, restarts)
    module = model.module(params)
    r, t = len(lengths if last is None else last), tokens.shape[1]
    index = jnp.arange(r, dtype=jnp.int32) if rows is None else rows
    if max_new_tokens is None:
        max_new_tokens = jnp.ones((r,), jnp.int32)
    prompts = offsets + lengths if prompts is None else prompts
    block_ends = ends = jnp.where(lengths > 0, offsets + lengths, 0)
    row_of_block, pages_of_block = index, pages
    if owners is not None:
        ends = jnp.where(last >= 0, block_ends[last], 0)
        row_of_block, pages_of_block, prompts, max_new_tokens = (
            a[owners] for a in (index, pages, prompts, max_new_tokens)
        )

    def attend_to(part):
        ends, starts, pages, *lengths = (
            a if a is None or part is None else a[part]
            for a in (block_ends, offsets, pages_of_block, prompts, max_new_tokens)
        )
        rotation_at = _rotation_at(*lengths)
        rope = model.config.attention[0].rope
        if layers is not None and rope is not None:
            # A loop over layers would compute the rotation for each of them.
            rotation_at = _always(rotation_at(_positions(starts, t), rope))
        return functools.partial(
            attend_prefill,
            ends=ends,
            offsets=starts,
            rows=rows if pages is None else None,
            pages=pages,
            rotation_at=rotation_at,
            plan=model.plan,
            token_ranks=1 if pages is None else model.token_ranks,
        )

    last_tokens = jnp.maximum(lengths - 1, 0)
    wanted = {"starts": offsets, "last": last_tokens}
    plan, kv = model.plan, state.kv
    with _sums_of(model, tokens.size // tiles, after=tokens):
        if layers is not None:
            hidden, kv = module.in_loop(tokens, kv, layers, attend_to(None), plan, **wanted)
        elif tiles == 1:
            hidden, kv = module(tokens, kv, attend_to(None), plan, **wanted)
        else:
            size = len(tokens) // tiles
            # The last blocks first: these have the smallest offsets.
            parts = [slice(i * size, (i + 1) * size) for i in reversed(range(tiles))]
            parts = [(part, _before_next(attend_to(part))) for part in parts]
            hidden, kv = module.in_tiles(tokens, kv, parts, plan, **wanted)
    hidden = hidden if owners is None else hidden[last]
    slots = _positions(offsets, t)
    slots = jnp.where(slots < block_ends[:, None], slots, state.slots)
    ids = state.ids.at[row_of_block[:, None], slots].set(tokens, mode="drop", unique_indices=True)

    filled = jnp.where(ends > 0, ends, state.lengths[index])
    progress = state.progress.at[0, index].set(filled)
    state = dataclasses.replace(state, kv=kv, ids=ids, progress=progress)
    return state, module.logits(hidden[:, 0], model.plan)


def first_tokens(
    state: DecodeState,
    logits: Array,
    sampling: Sampling,
    final: Array,
    rows: Array | None = None,
    generated: Array | None = None,
    everyone: Sampling | None = None,
    *,
    processors: Processors = Processors(),
    plan: Plan | None = None,
) -> tuple[DecodeState, Array, Logprobs | None, *tuple[BeamResults, ...]]:
    """Choose a first token for each prompt that has ended.

    Args:
      state: the batch after `prompt_logits`, with or without a cache.
      logits: [R, V] fp32, from `prompt_logits`.
      sampling: the options of each row of the call, [R, ...].
      final: [R] bool, whether a row's prompt has ended.
      rows: [R] int32 distinct rows of the state; default all of them in order (R = B).
      generated: [R] int32 number of tokens at the end that belong to an unfinished answer, if a
        row's cache was computed again; default 0.
      everyone: the options of all rows of the batch, [B, ...]; needed if the state has beams.
      processors: the active processors.
      plan: see `next_tokens`.

    Returns:
      (state, first tokens [R] int32, their log-probabilities or None). A first token is -1 if the
      prompt has not ended, and below -1 if none could be chosen, see `next_tokens`. If the state
      has beams, also their results, for the rows of this call, n = 1.
    """
    r = len(final)
    index, own_ids, progress = jnp.arange(r, dtype=jnp.int32), state.ids, state.progress
    if rows is not None:
        index, own_ids, progress = rows, own_ids[rows], progress[:, rows]
    steps = jnp.zeros((r,), jnp.int32) if generated is None else generated
    ends = progress[0]
    first, logprobs, *scores = _next_tokens(
        state, logits, sampling, own_ids, ends, steps, processors, plan
    )
    finished = _is_final(first, steps + 1, sampling)
    updated = pack_progress(ends, jnp.maximum(first, 0), steps + 1, finished)
    progress = state.progress.at[:, index].set(jnp.where(final, updated, progress))
    state = dataclasses.replace(state, progress=progress)
    if state.beams is None:
        return state, jnp.where(final, first, -1), logprobs
    found = beam_search.candidates(*scores, jnp.zeros((r,), jnp.float32), processors)
    state, tokens, parents = _begin_beams(state, everyone, found, index, final)
    first = jnp.where(beam_search.is_beam(sampling), tokens[index], first)
    results = _beam_results(state, everyone, tokens[:, None], parents[:, None])
    results = jax.tree.map(lambda a: a[index], results)
    return state, jnp.where(final, first, -1), logprobs, results


def _sums_of(model: Model, rows: int, *, after: Array) -> contextlib.AbstractContextManager[None]:
    """Where the layers of several devices sum up to so many rows; 0 if they do not call the op."""
    if model.ranks == 1 or rows == 0:
        return contextlib.nullcontext()
    return mailbox(rows, model.config.width, model.dtype, after=after, plan=model.plan)


def _before_next(attend):
    """Attention whose cache is written again only after it has been read.

    Otherwise XLA would keep a copy of the cache for it.
    """

    def run(*args):
        return lax.optimization_barrier(attend(*args))

    return run


def _begin_beams(state, sampling, found, index, chosen):
    """Begin the beams. Returns (state, their first tokens [B], the beams [B] that they continue).

    `found` are the continuations of the rows `index` [R], and `chosen` [R] whether they begin.
    """
    b = state.batch

    def spread(values):
        return jnp.zeros((b, *values.shape[1:]), values.dtype).at[index].set(values)

    first = beam_search.first_rows(sampling)
    started = spread(chosen)[first]
    step, beams = beam_search.begin(jax.tree.map(spread, found), state.beams, sampling, started)
    begun = pack_progress(
        state.lengths[first], jnp.maximum(step.tokens, 0), jnp.ones_like(first), step.finished
    )
    state = dataclasses.replace(
        state,
        ids=jnp.where(step.moved[:, None], state.ids[first], state.ids),
        progress=jnp.where(step.moved, begun, state.progress),
        beams=beams,
    )
    return state, jnp.where(step.moved, step.tokens, -1), step.parents


def _beam_results(state, sampling, tokens, parents):
    """`BeamResults` from tokens and parents [B, n] of each row."""
    members = beam_search.member_rows(sampling, state.beams.width)
    beams = state.beams
    return BeamResults(tokens[members], parents[members], beams.ended, beams.ends, state.finished)


def decode_steps(
    model: Model,
    params: Params,
    state: DecodeState,
    sampling: Sampling,
    n: Array,
    pages: Array | None = None,
    shared: SharedPages | None = None,
    *,
    max_steps: int,
    rows: int | None = None,
    processors: Processors = Processors(),
    return_reruns: bool = False,
    aligned: bool = False,
    layers: dict[str, Array] | None = None,
) -> tuple[DecodeState, Array, Logprobs | None, *tuple[Array | BeamResults, ...]]:
    """Run at most `n` decode steps in one device loop, fewer if all rows finish.

    The loop checks the rows before each step. The engine asks XLA to capture the loop in a CUDA
    graph. Then the check stays on the device: the call returns at once, and the next call queues
    behind it. On a GPU without such a graph, the host reads each condition.

    Args:
      model, params: the model.
      state: the batch. Finished rows keep their state.
      sampling: the options of each row.
      n: traced number of steps, at most `max_steps`.
      pages: [B, N] int32, the pages of each row, if the cache is a pool of pages. Finished rows
        read and write `NOBODYS_PAGE`, and a row whose first page it is counts as finished.
      shared: rows that share their first pages, read together; excludes `layers` and beams.
      max_steps: static width of the result.
      rows: static number of rows, B: the first of the state; default all. The others do not change.
      processors: the active processors.
      return_reruns: static, see `decode_attention`.
      aligned: static, whether the rows that are not finished are `aligned` beams, see `BeamSlots`.
      layers: the weights of all layers, [L, ...] by names such as "attention.qkv.weight", to run
        them in one launch; the cache must be stacked too. Default: run layer by layer with
        `params`.

    Returns:
      (state, tokens [B, max_steps] int32, their log-probabilities, each [B, max_steps, ...], or
      None), and with `return_reruns` reruns [L] fp32 per layer, summed over the steps. A token is
      -1 if its row was finished, and below -1 if none could be chosen, see `next_tokens`. If the
      state has beams, also their results.
    """
    module = model.module(params)
    whole = state
    if rows is not None:
        state = state.first(rows)
    b = state.batch
    if pages is not None:  # a row without pages: it has ended on the host
        finished = state.finished | (pages[:, 0] == NOBODYS_PAGE)
        state = dataclasses.replace(state, progress=_with_finished(state.progress, finished))
    begun, n = state.steps, jnp.minimum(n, max_steps)

    def step(carry):
        state, tokens, logprobs, parents, *reruns = carry
        state = _with_own_slots(state)
        hidden, kv, *reruns = run_layers(
            *(module, state, sampling, model.plan),
            pages=pages,
            token_ranks=1 if pages is None else model.token_ranks,
            shared=shared,
            aligned=aligned,
            layers=layers,
            reruns=reruns,
        )
        logits = module.logits(hidden[:, 0], model.plan)
        index = jnp.arange(b, dtype=jnp.int32)
        ids = state.ids.at[index, state.lengths].set(state.tokens, mode="drop")
        beams = state.beams
        chosen, chosen_logprobs, *scores = _next_tokens(
            *(state, logits, sampling, ids, state.lengths + 1, state.steps),
            processors,
            model.plan,
        )
        active = ~state.finished
        if beams is not None:
            found = beam_search.candidates(*scores, beams.scores, processors)
            moved = beam_search.is_beam(sampling) & active
            move, beams = beam_search.advance(found, beams, sampling, state.steps, moved)
            chosen = jnp.where(move.moved, move.tokens, chosen)
            ids = ids[move.rows]
        emitted = jnp.where(active, chosen, -1)
        column = jnp.where(active, state.steps - begun, max_steps)
        place = functools.partial(_place, column)
        tokens = place(tokens, chosen)
        if logprobs is not None:
            logprobs = jax.tree.map(place, logprobs, chosen_logprobs)
        if beams is not None:
            parents = place(parents, move.parents)
        # Equal to `active`, but computed from the token, so that one kernel computes all of this.
        advance = (emitted != -1).astype(jnp.int32)
        steps = state.steps + advance
        is_final = _is_final if beams is None else functools.partial(_is_final_of, move)
        finished = state.finished | (active & is_final(emitted, steps, sampling))
        progress = (
            state.lengths + advance,
            jnp.where(emitted >= 0, emitted, state.tokens),
            steps,
            finished.astype(jnp.int32),
        )
        return DecodeState(kv, ids, progress, beams), tokens, logprobs, parents, *reruns

    def goes_on(carry):
        state = carry[0]
        # A single reduction, because each makes a kernel.
        return ~jnp.all(state.finished | (state.steps - begun >= n))

    tokens = jnp.full((b, max_steps), -1, jnp.int32)
    logprobs = None
    if processors.logprobs:
        top = (b, max_steps, min(MAX_TOP_LOGPROBS, model.config.vocab_size))
        logprobs = Logprobs(
            jnp.zeros(top[:2], jnp.float32), jnp.zeros(top, jnp.float32), jnp.zeros(top, jnp.int32)
        )
    reruns = [[jnp.float32(0)] * model.config.layers] if return_reruns else []
    # The loop carries four arrays, because XLA would copy a single one at every step.
    state = dataclasses.replace(state, progress=tuple(state.progress))
    parents = None if state.beams is None else tokens
    carry = state, tokens, logprobs, parents, *reruns
    with _sums_of(model, b if layers is None else 0, after=state.tokens):
        state, tokens, logprobs, parents, *reruns = lax.while_loop(goes_on, step, carry)
    state = dataclasses.replace(state, progress=jnp.stack(state.progress))
    results = map(jnp.stack, reruns)
    if state.beams is not None:
        results = [*results, _beam_results(state, sampling, tokens, parents)]
    if rows is not None:
        state = whole.with_first(state)
    return state, tokens, logprobs, *results


def _next_tokens(state, logits, sampling, ids, lengths, steps, processors, plan):
    """`next_tokens`, or `next_tokens_and_scores` if the state has beams."""
    choose = next_tokens if state.beams is None else next_tokens_and_scores
    return choose(logits, sampling, ids, lengths, steps, processors, plan=plan)


def _with_own_slots(state: DecodeState) -> DecodeState:
    """The state after each beam's next position is set to the beam's own pages."""
    if state.beams is None:
        return state
    own = jnp.arange(state.batch, dtype=jnp.int32)
    sources = state.beams.sources.at[own, state.lengths].set(own, mode="drop")
    return dataclasses.replace(state, beams=dataclasses.replace(state.beams, sources=sources))


def _beam_slots(state: DecodeState, sampling: Sampling, aligned: bool) -> BeamSlots | None:
    """The cache slots of the beams' positions."""
    if state.beams is None:
        return None
    prompts = state.lengths - state.steps + 1
    prompts = jnp.where(beam_search.is_beam(sampling), prompts, state.slots)
    first = beam_search.first_rows(sampling)
    return BeamSlots(state.beams.sources, prompts, first, state.beams.width, aligned=aligned)


def run_layers(
    module: Decoder,
    state: DecodeState,
    sampling: Sampling,
    plan: Plan,
    *,
    pages: Array | None = None,
    token_ranks: int = 1,
    shared: SharedPages | None = None,
    aligned: bool = False,
    layers: dict[str, Array] | None = None,
    reruns: Sequence[list[Array]] = (),
) -> tuple[Array, Any, *tuple[list[Array], ...]]:
    """Run the last chosen token of every row through all layers.

    Args:
      module: the decoder.
      state, sampling, pages, shared, aligned, layers: see `decode_steps`.
      plan: chooses the implementations.
      token_ranks: number of devices that divide the tokens of each KV head.
      reruns: empty, or one list of L sums, to which the reruns of this step are added.

    Returns:
      (hidden states [B, 1, E], the cache, and updated `reruns` if given).
    """
    # Prompt tokens = slots filled - tokens chosen + 1: the last chosen token has no slot yet.
    rotation_at = _rotation_at(state.lengths - state.steps + 1, sampling.max_new_tokens)
    lengths = state.lengths
    # With a single row, the loop ends as soon as the row is finished.
    if pages is not None and state.batch > 1:
        lengths = jnp.where(state.finished, 0, lengths)
        pages = jnp.where(state.finished[:, None], NOBODYS_PAGE, pages)
    if layers is not None:
        rotation_at = functools.partial(rotation_at, state.lengths[:, None])
        kv = state.kv.k, state.kv.v
        hidden, kv = module.in_one_launch(
            state.tokens, kv, layers, lengths, rotation_at, plan, pages=pages
        )
        return hidden, StackedCache(*kv)
    attend = functools.partial(
        attend_decode,
        lengths=lengths,
        positions=state.lengths,
        pages=pages,
        beams=_beam_slots(state, sampling, aligned),
        shared=shared,
        rotation_at=rotation_at,
        plan=plan,
        token_ranks=token_ranks,
    )
    if isinstance(state.kv, StackedCache):
        return _run_stacked(module, state, attend, plan, reruns)
    caches = list(zip(state.kv, *reruns, strict=True))
    hidden, caches = module(
        state.tokens[:, None], caches, attend, plan, starts=state.lengths, live=_live(state)
    )
    return hidden, *map(list, zip(*caches, strict=True))


def _run_stacked(module, state, attend, plan, reruns):
    """`run_layers` for a stacked cache, which passes through the layers as a whole."""
    stack = _CountedStack(state.kv, *reruns)
    hidden, stack = module(
        state.tokens[:, None], stack, attend, plan, starts=state.lengths, live=_live(state)
    )
    return hidden, stack.kv, *([] if stack.reruns is None else [stack.reruns])


def _live(state: DecodeState) -> Array | None:
    """[B] bool, whether a row has not ended; None for a single row, whose end ends the loop."""
    return None if state.batch == 1 else ~state.finished


@dataclasses.dataclass
class _CountedStack:
    """A `StackedCache` with the reruns of each layer, if they are counted."""

    kv: StackedCache
    reruns: list[Array] | None = None

    def layer(self, i):
        kv = self.kv.layer(i)
        return (kv,) if self.reruns is None else (kv, self.reruns[i])

    def updated(self, i, layer):
        kv, *reruns = layer
        if reruns:
            reruns = [self.reruns[:i] + reruns + self.reruns[i + 1 :]]
        return _CountedStack(self.kv.updated(i, kv), *reruns)


def _with_finished(progress, finished):
    return progress.at[3].set(finished.astype(jnp.int32))


def _place(columns, array, values):
    """Write values [B, ...] into a column [B] of each row of an array [B, N, ...], if it exists."""
    # For few columns, a select is one kernel on a GPU. A scatter into one row would be several.
    there = jax.nn.one_hot(columns, array.shape[1], dtype=bool)
    there = there.reshape(there.shape + (1,) * (array.ndim - 2))
    return jnp.where(there, values[:, None], array)


def _is_final(tokens, steps, sampling):
    """[B] whether each token, number `steps` of its row, is the row's last."""
    final = (tokens < -1) | (steps >= sampling.max_new_tokens)
    for stop in sampling.stop_tokens.T:  # a loop, because a reduction would be another kernel
        final |= (tokens == stop) & (tokens >= 0)
    return final


def _is_final_of(move, tokens, steps, sampling):
    """`_is_final` for a step with beams. The beams of a prompt end together."""
    return jnp.where(move.moved, move.finished, _is_final(tokens, steps, sampling))


def attend_decode(
    spec: AttentionSpec,
    layer: tuple[LayerCache | StackedLayer, *tuple[Array, ...]],
    qkv: Array,
    sinks: Array | None = None,
    norms: HeadNorms | None = None,
    *,
    lengths: Array,
    rotation_at: Callable,
    plan: Plan,
    positions: Array | None = None,
    pages: Array | None = None,
    beams: BeamSlots | None = None,
    shared: SharedPages | None = None,
    token_ranks: int = 1,
) -> tuple[Array, tuple[LayerCache | StackedLayer, *tuple[Array, ...]]]:
    """Norms, RoPE, append and attention of T new tokens per row.

    A layer has a cache, and maybe reruns.
    `positions` [B] are the positions of the first tokens, default `lengths`.
    With `token_ranks` > 1, devices divide the tokens of each KV head, in pages.
    """
    kv, *reruns = layer
    k, v, *index = kv
    t = qkv.shape[1]
    positions = _positions(lengths if positions is None else positions, t)
    append = functools.partial(append_decode_attention, shared=shared)
    if token_ranks > 1:
        append = functools.partial(append_decode_divided, token_ranks=token_ranks)
    o, k, v, *share = append(
        qkv,
        k,
        v,
        lengths,
        layer=index[0] if index else None,
        pages=pages,
        beams=beams,
        sinks=sinks,
        norms=norms,
        rotation=spec.rope and rotation_at(positions, spec.rope),
        spec=spec,
        return_reruns=bool(reruns),
        plan=plan,
    )
    return o, ((k, v, *index), *map(jnp.add, reruns, share))


def attend_prefill(
    spec: AttentionSpec,
    kv: LayerCache | StackedLayer,
    qkv: Array,
    sinks: Array | None = None,
    norms: HeadNorms | None = None,
    *,
    ends: Array,
    offsets: Array,
    rows: Array | None,
    rotation_at: Callable,
    plan: Plan,
    pages: Array | None = None,
    token_ranks: int = 1,
) -> tuple[Array, LayerCache | StackedLayer]:
    """Norms, RoPE, append and attention of a chunk of some rows' prompts.

    With `token_ranks` > 1, devices divide the tokens of each KV head, in pages.
    """
    t = qkv.shape[1]
    k, v, *index = kv
    append = functools.partial(append_prefill_attention, rows=rows)
    if token_ranks > 1:
        append = functools.partial(append_prefill_divided, token_ranks=token_ranks)
    o, k, v = append(
        qkv,
        k,
        v,
        ends,
        offsets,
        rotation=spec.rope and rotation_at(_positions(offsets, t), spec.rope),
        layer=index[0] if index else None,
        pages=pages,
        sinks=sinks,
        norms=norms,
        spec=spec,
        plan=plan,
    )
    return o, (k, v, *index)


def _positions(first: Array, count: int) -> Array:
    """[B, count] int32, consecutive positions from `first` [B] on."""
    return first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]


def _always(value: Any) -> Callable:
    """The function that returns a value, whatever its arguments are."""
    return lambda *_: value


def _rotation_at(prompts: Array, max_new_tokens: Array) -> Callable:
    """`rotation` for rows of up to `prompts` [R] plus `max_new_tokens` [R] tokens."""
    # The last chosen token is never rotated.
    limits = prompts + max_new_tokens - 1

    def at(positions, rope):
        return rotation(positions, rope, prompt=prompts, limit=limits)

    return at
