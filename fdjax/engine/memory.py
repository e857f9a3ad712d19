"""Plans how much memory a model takes on a device, before anything is allocated.

Weights and cache are counted exactly. The workspace holds the temporary buffers of the largest
prefill call or of a decode step. It is estimated by a model of XLA's buffers.
`tests/engine/test_memory.py` compares the estimate with the compiler's numbers, and
`benchmarks/memory.py` compares it with measurements on an H100.
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.engine.packed import largest_call
from fdjax.engine.schedule import (
    CHUNKS,
    call_tokens,
    covered_slots,
    most_rows_of_call,
    rows_of_call,
    widest_chunk,
)
from fdjax.engine.state import SLOT_MULTIPLE, cache_bytes, page_bytes, page_tokens
from fdjax.models import Model
from fdjax.pallas_kernels.all_reduce import mailbox_bytes
from fdjax.pallas_kernels.attention import rows_at_once
from fdjax.pallas_kernels.dispatch import Features
from fdjax.system.device_memory import free_memory_bytes, gigabytes

# cuBLAS takes this workspace once a program calls it.
_CUBLAS_BYTES = {(9, 0): 32 * 2**20}
_CUBLAS_BYTES_OTHER_GPU = 4 * 2**20
# fp32 arrays [rows, V] that exist at the same time while a token is chosen with all processors.
_LOGITS = 5.3
# XLA's attention limits its scores to this many bytes. Scores and probabilities together take this
# factor more.
_SCORES_BYTES = 256 * 2**20
_SCORES_AND_P = 1.5
# The largest number of sequences that run at once on a GPU.
MOST_ROWS = 256
# Share of the memory beside weights and workspace that a pool of pages takes.
_POOL_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a batch of rows takes on a device.

    Attributes:
      batch: number of rows.
      max_len: tokens of each row, prompt and answer.
      weight_bytes: bytes of the parameters.
      cache_bytes: bytes of keys, values and token ids.
      workspace_bytes: bytes that a call takes beside these.
    """

    batch: int
    max_len: int
    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """Peak bytes."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    def __str__(self) -> str:
        """A readable line."""
        return (
            f"{gigabytes(self.total_bytes)}: weights {gigabytes(self.weight_bytes)}, cache "
            f"{gigabytes(self.cache_bytes)} for {self.batch} x {self.max_len} tokens, workspace "
            f"{gigabytes(self.workspace_bytes)}"
        )

    def check(self, op: str, memory_bytes: int | None) -> None:
        """Raise MemoryError if the total exceeds `memory_bytes`; None means no limit."""
        if memory_bytes is None or self.total_bytes <= memory_bytes:
            return
        if self.weight_bytes > memory_bytes:
            raise MemoryError(
                f"{op}: weights of {gigabytes(self.weight_bytes)} must fit into "
                f"{gigabytes(memory_bytes)}"
            )
        raise MemoryError(f"{op}: must fit into {gigabytes(memory_bytes)}, takes {self}")


def plan_memory(
    model: Model,
    *,
    batch: int = 1,
    max_len: int,
    prompt_tokens: int | None = None,
    slots: int | None = None,
) -> MemoryPlan:
    """Plan the memory for `batch` rows of `max_len` tokens.

    Args:
      model: the model, with the plan that chooses its implementations.
      batch: number of rows.
      max_len: tokens of each row, prompt and answer.
      prompt_tokens: tokens of the longest prompt; default `max_len`.
      slots: cache slots per row on a device; default as many as prompts of `max_len` tokens need.
        Of a cache in pages, a device then holds the pages that have tokens, or its part of them.

    Raises:
      ValueError: a number is not a positive integer.
    """
    prompt_tokens = max_len if prompt_tokens is None else prompt_tokens
    numbers_of = {"batch": batch, "max_len": max_len, "prompt_tokens": prompt_tokens}
    numbers_of |= {} if slots is None else {"slots": slots}
    for name, value in numbers_of.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"memory: {name} must be a positive integer, got {value!r}")
    held = held_slots(model, max_len) if slots is None else slots
    slots = covered_slots(max_len) if slots is None else slots
    return MemoryPlan(
        batch=batch,
        max_len=max_len,
        weight_bytes=model.weight_bytes,
        cache_bytes=cache_bytes(model, batch, held) + 4 * batch * slots,
        workspace_bytes=workspace_bytes(model, batch, prompt_tokens, slots),
    )


def beam_slots(prompt: int, new: int, *, beams: int, page: int = SLOT_MULTIPLE) -> int:
    """Cache slots of the beams of a prompt (segment KV cache, Wu et al. 2024, section 3.2).

    The prompt's slots are shared. Each beam has its own pages for its `new` tokens.

    Args:
      prompt: tokens of the prompt, P.
      new: tokens of the answer, R.
      beams: number of beams, W.
      page: tokens of a page, S.

    Returns:
      P + W · ⌈R / S⌉ · S.
    """
    return prompt + beams * -(-new // page) * page


def plan_up_to(model: Model, *, batch: int, max_len: int) -> MemoryPlan:
    """Plan the memory for any number of rows up to `batch`, of `max_len` tokens each.

    It differs from `plan_memory` in the workspace. A prefill call may take all of a few rows, but
    only half of many. So fewer rows may need more workspace.
    """
    plan = plan_memory(model, batch=batch, max_len=max_len)
    at_once = min(batch, most_rows_of_call(max_len))
    fewer = plan_memory(model, batch=at_once, max_len=max_len)
    most = max(plan.workspace_bytes, fewer.workspace_bytes)
    return dataclasses.replace(plan, workspace_bytes=most)


def check_load(
    model: Model,
    *,
    max_batch: int | None = None,
    max_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    device: jax.Device | None = None,
    least: Callable[[int], int] = int,
) -> tuple[int | None, int | None]:
    """Check the memory options of `fdjax.load` before it allocates anything.

    Args:
      model, max_batch, max_len, gpu_memory_utilization, device: see `fdjax.load`.
      least: the free bytes of this process → the least of all processes that share the model.

    Returns:
      (max_len, bytes for weights, cache and workspace together); None means no limit.

    Raises:
      ValueError: an argument is out of range.
      MemoryError: the weights do not fit, or not together with the given batch and length.
    """
    max_batch, max_len = check_limits(max_batch=max_batch, max_len=max_len)
    share = gpu_memory_utilization
    is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
    if share is not None and not (is_number and 0 < share <= 1):
        raise ValueError(
            f"load: gpu_memory_utilization must be above 0 and at most 1, got {share!r}"
        )
    memory_bytes = free_memory_bytes(device)
    memory_bytes = None if memory_bytes is None else least(memory_bytes)
    if share is not None and memory_bytes is not None:
        memory_bytes = int(share * memory_bytes)
        if max_len is None:
            longest = longest_context(model, batch=max_batch or 1, memory_bytes=memory_bytes)
            max_len = min(max(longest, 1), model.config.max_position_embeddings)
    plan_up_to(model, batch=max_batch or 1, max_len=max_len or 1).check("load", memory_bytes)
    return max_len, memory_bytes


def check_limits(**limits: Any) -> list[int | None]:
    """The limits as Python integers; raises ValueError if one is neither positive nor None."""
    for name, value in limits.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise ValueError(f"load: {name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"load: {name} must be positive, got {value}")
    return [None if value is None else int(value) for value in limits.values()]


def largest_batch(model: Model, *, max_len: int, memory_bytes: int) -> int:
    """Largest batch of rows of `max_len` tokens that fits into `memory_bytes`; 0 if none does."""

    def fits(batch: int) -> bool:
        return plan_up_to(model, batch=batch, max_len=max_len).total_bytes <= memory_bytes

    return _largest(fits, memory_bytes // cache_bytes(model, 1, held_slots(model, max_len)))


def longest_context(model: Model, *, batch: int = 1, memory_bytes: int) -> int:
    """Largest number of tokens per row, for `batch` rows in `memory_bytes`; 0 if none fits.

    It ignores the model's `max_position_embeddings`, unless the model has learned its positions.
    """

    def fits(multiples: int) -> bool:
        max_len = multiples * SLOT_MULTIPLE
        return plan_up_to(model, batch=batch, max_len=max_len).total_bytes <= memory_bytes

    most = memory_bytes * divided_by(model) // cache_bytes(model, batch, SLOT_MULTIPLE)
    longest = SLOT_MULTIPLE * _largest(fits, most)
    learned = model.config.position_offset is not None
    return min(longest, model.config.max_position_embeddings) if learned else longest


def _largest(fits, most: int) -> int:
    """The largest n in 0..most that fits, by bisection: if n fits, smaller numbers must fit too."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def workspace_bytes(model: Model, batch: int, max_len: int, slots: int) -> int:
    """Bytes that the largest call takes beside weights and cache.

    Args:
      model: the model.
      batch: number of rows.
      max_len: tokens of the longest prompt.
      slots: cache slots per row.
    """
    c, plan = model.config, model.plan
    itemsize = jnp.dtype(model.dtype).itemsize
    tokens = call_tokens(max_len, batch)
    if plan.compute_capability is not None and (c.has_experts or reads_pages(model)):
        tokens = max(tokens, largest_call(max_len, batch, experts=c.has_experts))
    rows = rows_of_call(widest_chunk(max_len), batch)
    values = max(block.mlp_values for block in c.blocks)
    if c.has_experts and plan.compute_capability is not None:
        # Kernels hold the rows of all pairs of a token and an expert, sorted by expert.
        values += max(block.pair_values for block in c.blocks)
    mlp = tokens * values * itemsize
    attention = tokens * max(block.attention_values for block in c.blocks) * itemsize
    # Devices that divide the tokens of a KV head attend with the queries of all.
    heads = c.heads * divided_by(model)
    if heads > c.heads:
        # These queries, and in fp32 the results that are sent and received.
        attention += tokens * heads * c.head_dim * (itemsize + 2 * 4)
    row_bytes = c.kv_heads * slots * c.head_dim * itemsize
    runs = _implementations(model, "prefill_attention", rows, tokens // rows, slots)
    # A copy of the cache of the call's rows, which is gathered, dequantised, or both.
    if model.kv_dtype and plan.compute_capability is not None and reads_pages(model):
        # In pages, each block of a packed call is a row.
        attention += 2 * rows_at_once(max(1, tokens // SLOT_MULTIPLE), slots) * row_bytes
    elif model.kv_dtype or (rows < batch and runs != {"mosaic_gpu"}):
        attention += 2 * rows * row_bytes
    if "xla" in runs:
        scores = 4 * rows * heads * (tokens // rows) * slots
        # The size also counts a copy of the values with dead slots zeroed.
        attention += int(_SCORES_AND_P * min(scores, _SCORES_BYTES)) + rows * row_bytes
    steps = _implementations(model, "decode_attention", batch, 1, slots)
    if model.kv_dtype and steps != {"mosaic_gpu"}:
        # A decode step dequantises the cache of all rows, a layer at a time.
        attention = max(attention, 2 * batch * row_bytes)
    logits = int(_LOGITS * 4 * batch * c.vocab_size)
    if plan.compute_capability is None:
        blas = 0
    else:
        blas = _CUBLAS_BYTES.get(plan.compute_capability, _CUBLAS_BYTES_OTHER_GPU)
    sums = 0
    if model.ranks > 1 and not model.sums_by_xla(tokens):
        sums = mailbox_bytes(tokens, c.width, model.ranks)
    return max(mlp, attention, logits) + blas + sums + _dequantised_bytes(model)


def _dequantised_bytes(model: Model) -> int:
    """Bytes of the largest quantised weight after XLA has dequantised it.

    On a GPU, calls of prompts dequantise all experts of a layer; else, one expert at a time.
    """
    linears = [linear for block in model.config.blocks for linear in block.linears.values()]
    shapes = {linear.shape for linear in linears} | set(model.config.linear_shapes.values())
    sizes = [shape.k * shape.n for shape in shapes if shape.weight]
    for block in set(model.config.blocks):
        if block.experts is None:
            continue
        formats = dict(block.formats)
        parts = (n for name, n in (("gate_up", 2), ("down", 1)) if f"experts.{name}" in formats)
        count = block.experts.experts if model.plan.compute_capability else 1
        sizes.append(count * sum(parts) * block.width * block.mlp_width)
    return max(sizes, default=0) * jnp.dtype(model.dtype).itemsize


def reads_pages(model: Model) -> bool:
    """Whether all attention of a model reads pages without copying them first.

    On a CPU, attention always copies pages, which costs little beside the rest. It counts as
    reading.
    """
    plan, c = model.plan, model.config
    if plan.compute_capability is None:
        return True
    if plan.compute_capability < (9, 0):
        return False
    shape = {"h": c.heads * model.token_ranks, "hkv": c.kv_heads, "d": c.head_dim}
    shape["itemsize"] = jnp.dtype(model.dtype).itemsize
    choices = (
        plan.choose(op, features, b=b, t=t, s=s, masks=masks, **shape)
        for features, masks in _attentions(model)
        for op, t in (("decode_attention", 1), ("prefill_attention", 128))
        for b, s in ((1, 512), (1, 8192), (64, 2048))
    )
    return all(choice.implementation == "mosaic_gpu" for choice in choices)


def divided_by(model: Model) -> int:
    """Number of devices that divide the tokens of each KV head; 1 if rows are not in pages."""
    return model.token_ranks if model.token_ranks > 1 and reads_pages(model) else 1


def held_slots(model: Model, tokens: int) -> int:
    """Slots of a row of `tokens` tokens that a device holds, in pages or padding included."""
    if not reads_pages(model):
        return covered_slots(tokens)
    return SLOT_MULTIPLE * -(-tokens // page_tokens(model))


def room_for_pages(
    model: Model, *, rows: int, context: int, memory_bytes: int, slots: int | None = None
) -> int:
    """Bytes for a pool of pages: a part of the memory beside the weights.

    Args:
      model: the model.
      rows: largest number of rows that run at once.
      context: largest number of tokens of a row.
      memory_bytes: bytes beside the weights.
      slots: slots of a row; default as many as a row of `context` tokens needs.
    """
    slots = covered_slots(context) if slots is None else slots
    # Packed calls are as large for short prompts as for long ones, and they are never halved.
    tokens, rows = max(CHUNKS[-1], context), 2 ** (rows - 1).bit_length()
    workspace = workspace_bytes(model, rows, tokens, slots)
    return int(_POOL_SHARE * (memory_bytes - workspace))


def pool_pages(model: Model, *, rows: int, context: int, pool_bytes: int) -> int:
    """Pages of a pool: as many as fit into memory, but no more than the rows could use."""
    most = 1 + rows * -(-context // page_tokens(model))
    pages = max(0, min(int(pool_bytes / page_bytes(model)), most))
    # Free memory differs a little from process to process. Programs depend on the number.
    step = 2 ** max(0, pages.bit_length() - 5)
    return pages // step * step


def _implementations(model: Model, op: str, rows: int, tokens: int, slots: int) -> set[str]:
    """The implementations that run attention in any layer."""
    c = model.config
    heads = c.heads * divided_by(model)
    shape = {"b": rows, "t": tokens, "h": heads, "hkv": c.kv_heads, "s": slots, "d": c.head_dim}
    shape["itemsize"] = jnp.dtype(model.dtype).itemsize
    choices = (
        model.plan.choose(op, features, **shape, masks=masks)
        for features, masks in _attentions(model)
    )
    return {choice.implementation for choice in choices}


def _attentions(model: Model) -> set[tuple[Features, int]]:
    """Features and masks of the attention of each layer, for `Plan.choose`."""
    features = model.cache_features
    return {(spec.features | features, int(spec.is_masked)) for spec in model.config.attention}
