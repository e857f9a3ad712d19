"""The report of `fdjax info`: size of a model, what fits, which implementations run."""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from fdjax.engine.memory import (
    MOST_ROWS,
    MemoryPlan,
    beam_slots,
    divided_by,
    largest_batch,
    longest_context,
    plan_memory,
    pool_pages,
    reads_pages,
    room_for_pages,
)
from fdjax.engine.state import SLOT_MULTIPLE, cache_bytes, page_tokens
from fdjax.models import Model, chain_features, chain_shape, layers_features, layers_shape
from fdjax.models.sharding import why_tokens_repeat
from fdjax.pallas_kernels.all_reduce import sum_shape
from fdjax.pallas_kernels.dispatch import NO_FEATURES, Features
from fdjax.pallas_kernels.experts import moe_features, moe_key
from fdjax.system.device_memory import device_memory_bytes, gigabytes


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Facts about a model on a device, known without running it.

    If devices share the model, all attributes but `parameters` are for one device.

    Attributes:
      devices: number of devices that share the model.
      family, parameters, dtype: family, number of parameters and dtype of the model.
      active_parameters: number of parameters that one token uses.
      active_bytes: bytes of the parameters that one token uses.
      quantised: formats of the quantised weights.
      weight_bytes: bytes of all parameters.
      kv_dtype: dtype of the cache. In "int8", its bytes include the scales.
      kv_bytes_per_token: bytes of cache that one token takes in all layers. If devices divide the
        tokens of a KV head, its share of one device.
      repeated_heads: which devices have the same KV head, and what they hold of its tokens; None if
        each KV head is on one device.
      device: kind of the device.
      device_bytes: bytes that JAX may use there, None if unknown.
      memory: memory plan for the given number of rows and their length.
      largest_batch: largest number of rows of that length that fits, None if the memory is unknown.
      pool_tokens: tokens of all rows together that the cache holds in pages; None if the memory is
        unknown or rows are in one piece.
      longest_context: largest length of that number of rows that fits, in tokens, None if the
        memory is unknown.
      beam_cache_bytes: bytes of cache for the given number of prompts with beams, which share their
        prompt's cache; None without beams.
      separate_cache_bytes: bytes of cache if the beams shared nothing.
      max_position_embeddings: the model's context, in tokens.
      choices: (op, shape, implementation, source) of the decode step and of prefill. If one launch
        runs all layers of a decode step, the operations that it replaces are left out.
    """

    devices: int
    family: str
    parameters: int
    active_parameters: int
    active_bytes: int
    dtype: str
    quantised: tuple[str, ...]
    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    repeated_heads: str | None
    device: str
    device_bytes: int | None
    memory: MemoryPlan
    largest_batch: int | None
    longest_context: int | None
    pool_tokens: int | None
    beam_cache_bytes: int | None
    separate_cache_bytes: int | None
    max_position_embeddings: int
    choices: tuple[tuple[str, str, str, str], ...]

    def asdict(self) -> dict[str, Any]:
        """The report as a dict of JSON values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """A readable table."""
        lines = [
            f"family        {self.family}",
            f"parameters    {self.parameters:,}{self._active()}",
            f"weights       {gigabytes(self.weight_bytes)} in {', '.join(self._dtypes())}"
            f"{self._active_bytes()}",
            f"KV cache      {self.kv_bytes_per_token:,} bytes per token in {self.kv_dtype}",
            f"context       {self.max_position_embeddings:,} tokens",
            f"device        {self.device}",
        ]
        if self.devices > 1:
            lines.append(f"shared by     {self.devices} devices; these are the numbers of each")
        if self.repeated_heads is not None:
            lines.append(f"KV heads      {self.repeated_heads}")
        if self.device_bytes is not None:
            lines.append(f"memory        {self.device_bytes / 1e9:.1f} GB")
        lines.append(f"needs         {self.memory}")
        if self.device_bytes is not None:
            lines.append(f"fits          {self._fits()}")
        if self.pool_tokens is not None:
            lines.append(f"pool          {self.pool_tokens:,} tokens of all rows together")
        if self.beam_cache_bytes is not None:
            shared, apart = map(gigabytes, (self.beam_cache_bytes, self.separate_cache_bytes))
            lines.append(f"beams         cache {shared}; {apart} if beams shared no prompt")
        lines += ["", f"{'op':18} {'shape':44} {'runs':10} chosen by"]
        lines += [f"{op:18} {shape:44} {run:10} {why}" for op, shape, run, why in self.choices]
        lines += ["", "docs/performance.md explains these operations and implementations."]
        return "\n".join(lines)

    def _active(self) -> str:
        if self.active_parameters == self.parameters:
            return ""
        return f", of which a token uses {self.active_parameters:,}"

    def _active_bytes(self) -> str:
        if self.active_bytes == self.weight_bytes:
            return ""
        return f", of which a token uses {gigabytes(self.active_bytes)}"

    def _dtypes(self) -> tuple[str, ...]:
        return (*self.quantised, self.dtype)

    def _fits(self) -> str:
        if not self.longest_context:
            return f"no, not even one token for {_rows(self.memory.batch)}"
        fits = (
            f"{_rows(self.largest_batch)} of {self.memory.max_len:,} tokens, or "
            f"{_rows(self.memory.batch)} of {self.longest_context:,}"
        )
        too_many = max(self.largest_batch, self.memory.batch) > MOST_ROWS
        return fits + f"; at most {MOST_ROWS} run at once" * too_many


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def model_info(
    model: Model,
    *,
    batch: int = 1,
    slots: int | None = None,
    memory_bytes: int | None = None,
    beams: int = 1,
    new_tokens: int = 128,
) -> ModelInfo:
    """Collect the facts about a model on the device of its plan.

    Args:
      model: the model.
      batch: number of rows.
      slots: tokens of each row; default the model's context.
      memory_bytes: memory of the device in bytes; default the memory of the first local device.
      beams: beams of each prompt.
      new_tokens: number of tokens of each row that belong to the answer; only beams need it.
    """
    memory_bytes = device_memory_bytes() if memory_bytes is None else memory_bytes
    whole, model = model, model.local
    slots = model.config.max_position_embeddings if slots is None else slots
    fits = dict.fromkeys(("largest_batch", "longest_context", "pool_tokens"))
    if memory_bytes is not None:
        fits = {
            "largest_batch": largest_batch(model, max_len=slots, memory_bytes=memory_bytes),
            "longest_context": longest_context(model, batch=batch, memory_bytes=memory_bytes),
            "pool_tokens": _pool_tokens(model, memory_bytes) if reads_pages(model) else None,
        }
    per_token = cache_bytes(model, 1, 1) // divided_by(model)
    beam_cache = separate_cache = None
    if beams > 1:
        prompt = max(1, slots - new_tokens)
        page = SLOT_MULTIPLE * divided_by(model)
        slots_of_beams = beam_slots(prompt, new_tokens, beams=beams, page=page)
        beam_cache = batch * slots_of_beams * per_token
        separate_cache = batch * beams * slots * per_token
    return ModelInfo(
        devices=whole.ranks,
        family=model.config.family,
        parameters=whole.parameter_count,
        active_parameters=whole.active_parameter_count,
        active_bytes=model.weight_bytes - model.idle_expert_bytes(1),
        dtype=model.dtype,
        quantised=tuple(map(str, model.config.weight_formats)),
        weight_bytes=model.weight_bytes,
        kv_dtype=model.kv_dtype or model.dtype,
        kv_bytes_per_token=per_token,
        repeated_heads=_repeated_heads(whole),
        device=model.plan.device_kind,
        device_bytes=memory_bytes,
        memory=plan_memory(model, batch=batch, max_len=slots),
        **fits,
        beam_cache_bytes=beam_cache,
        separate_cache_bytes=separate_cache,
        max_position_embeddings=model.config.max_position_embeddings,
        choices=tuple(dict.fromkeys(_choices(model, batch, slots))),
    )


def _repeated_heads(model: Model) -> str | None:
    count = model.ranks // model.config.kv_heads
    if count < 2:
        return None
    if divided_by(model.local) > 1:
        return f"{count} devices have the same one, and divide its tokens"
    why = why_tokens_repeat(model.config) or "rows are in one piece"
    if not model.plan.divide_tokens:
        why = "the plan does not divide them"
    return f"{count} devices have the same one, and each holds all of its tokens: {why}"


def _pool_tokens(model: Model, memory_bytes: int) -> int:
    sizes = {"rows": MOST_ROWS, "context": model.config.max_position_embeddings}
    left = memory_bytes - model.weight_bytes
    room = room_for_pages(model, **sizes, memory_bytes=left)
    pages = pool_pages(model, **sizes, pool_bytes=room)
    return max(0, pages - 1) * page_tokens(model)  # page 0 is never used


def _choices(model: Model, batch: int, slots: int) -> Iterator[tuple[str, str, str, str]]:
    """(op, shape, implementation, its source) for what a decode step and a prompt run."""
    if model.one_launch(batch, slots):
        asked = [*_all_layers(model, batch, slots), *_linears(model, batch, ["head"])]
    else:
        asked = [*_all_layers(model, batch, slots), *_linears(model, batch)]
        asked += [*_experts(model, batch), *_chains(model, batch)]
        asked += _attentions(model, "decode_attention", batch, 1, slots)
        asked += _sums(model, batch)
    asked += _attentions(model, "prefill_attention", batch, 512, slots)
    asked += _sums(model, 512 * batch)
    size = {"b": batch, "v": model.config.vocab_size}
    asked.append(_Asked("truncate", "B={b} V={v} top-k, top-p".format(**size), NO_FEATURES, size))
    for op, label, features, shape in asked:
        choice = model.plan.choose(op, features, **shape)
        yield op, label, choice.implementation, choice.source
    c = model.config
    if c.tie_embeddings:  # no kernel reads a transposed weight
        label = f"head M={batch} [{c.embedding_width or c.width},{c.head_width}]"
        yield "matmul", label, "xla", "only"


class _Asked(NamedTuple):
    """A choice that a plan is asked for."""

    op: str
    label: str
    features: Features
    shape: dict[str, int]


def _all_layers(model: Model, batch: int, slots: int) -> Iterator[_Asked]:
    shape = layers_shape(model.config, batch, slots, _itemsize(model))
    features = layers_features(model.config) | model.cache_features
    if model.plan.has_kernel("decode_layers", features, **shape):
        label = f"M={batch} S={slots} all layers of a decode step"
        yield _Asked("decode_layers", label, features, shape)


def _linears(model: Model, batch: int, names: Collection[str] | None = None) -> Iterator[_Asked]:
    for name, linear in model.config.linear_shapes.items():
        if names is not None and name not in names:
            continue
        weight = f" {linear.weight}" if linear.weight else ""
        label = f"{name} M={batch} [{linear.k},{linear.n}]{weight}"
        yield _Asked("matmul", label, linear.features, linear.key(batch, _itemsize(model)))


def _experts(model: Model, batch: int) -> Iterator[_Asked]:
    for block in dict.fromkeys(b for b in model.config.blocks if b.experts):
        routing, own = block.experts, dict(block.formats)
        names = (f"experts.{name}" for name in ("gate_up", "down"))
        formats = tuple(own[name] for name in names if name in own)
        label = (
            f"M={batch} {routing.chosen} of {routing.experts} [{block.width},2,{block.mlp_width}]"
        )
        label += f" {formats[0]}" if formats else ""
        yield _Asked(
            "moe",
            label,
            moe_features(routing, block.activation, biases=block.expert_bias, formats=formats),
            moe_key(batch, block.width, block.mlp_width, routing, _itemsize(model), formats),
        )


def _chains(model: Model, batch: int) -> Iterator[_Asked]:
    shape = chain_shape(model.config, batch, _itemsize(model))
    features = chain_features(model.config)
    if model.plan.has_kernel("linear_chain", features, **shape):
        yield _Asked("linear_chain", f"M={batch} out, gate_up, down, next qkv", features, shape)


def _attentions(model: Model, op: str, batch: int, t: int, slots: int) -> Iterator[_Asked]:
    c, heads = model.config, model.config.heads * divided_by(model)
    label = f"B={batch} T={t} H={heads} Hkv={c.kv_heads} S={slots} D={c.head_dim}"
    shape = {"b": batch, "t": t, "h": heads, "hkv": c.kv_heads, "s": slots, "d": c.head_dim}
    asked = {(int(s.is_masked), s.features - {"phi", "unified"}) for s in c.attention}
    for masks, features in sorted(asked, key=lambda pair: (pair[0], sorted(pair[1]))):
        key = shape | {"itemsize": _itemsize(model), "masks": masks}
        yield _Asked(op, label, features | model.cache_features, key)


def _sums(model: Model, rows: int) -> Iterator[_Asked]:
    if model.ranks > 1:
        width = model.config.width
        label = f"M={rows} [{width}] of {model.ranks} devices"
        shape = sum_shape(rows, width, model.dtype, model.ranks)
        yield _Asked("all_reduce", label, NO_FEATURES, shape)


def _itemsize(model: Model) -> int:
    return jnp.dtype(model.dtype).itemsize
