"""Lower bound of the time for a list of requests, from a device's memory, bandwidth and arithmetic.

Requests come in order. As many rows run as tokens fit into the memory beside the weights. A prompt
takes the time of its FLOPs at the rate of a matrix product. A decode step takes the time of its
bytes at the read bandwidth, or of its FLOPs if that is longer. Calls, padding and sampling take no
time.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fdjax.engine.results import step_bytes
from fdjax.engine.state import cache_bytes
from fdjax.models import Model


@dataclasses.dataclass(frozen=True)
class Bound:
    """The result of `bound`.

    Attributes:
      seconds: time of prompts and decode steps together.
      prefill_seconds, decode_seconds: time of prompts, time of decode steps.
      decode_steps: number of steps.
      most_rows: largest number of rows that run at once.
    """

    seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    most_rows: int


def bound(
    model: Model,
    prompts: Sequence[int],
    new: Sequence[int],
    *,
    memory_bytes: float,
    bytes_per_s: float,
    flop_per_s: float,
    most_rows: int | None = None,
) -> Bound:
    """Simulate the requests.

    Args:
      model: the model.
      prompts, new: tokens of each prompt and of each answer, at least 1.
      memory_bytes: bytes for weights and cache.
      bytes_per_s, flop_per_s: measured ceilings of the device.
      most_rows: largest number of rows that run at once; default as many as fit.

    Raises:
      ValueError: one request does not fit alone.
    """
    cost = _Cost.of(model)
    capacity = (memory_bytes - model.weight_bytes) // cost.bytes_per_token
    lengths, left = np.array(prompts), np.array(new)
    if (lengths + left - 1 > capacity).any():
        raise ValueError(f"bound: requests must fit into {int(capacity)} tokens of cache")
    prefill = sum(cost.prefill_flops(int(n)) for n in lengths) / flop_per_s
    left -= 1  # the first token of an answer comes from its prompt
    waiting, running = 0, np.array([], int)
    decode, steps, most = 0.0, 0, 0
    while waiting < len(left) or running.size:
        while waiting < len(left) and (most_rows is None or running.size < most_rows):
            if lengths[running].sum() + lengths[waiting] + running.size + 1 > capacity:
                break
            running = np.append(running, waiting)
            waiting += 1
            running = running[left[running] > 0]
        most = max(most, running.size)
        # The latest rows wait while the others need the memory.
        active = running[np.cumsum(lengths[running] + 1) <= capacity]
        if not active.size:
            continue
        lengths[active] += 1
        left[active] -= 1
        tokens = int(lengths[active].sum())
        moved = cost.step_bytes(active.size) + cost.bytes_per_token * tokens
        flops = cost.decode_flops(active.size, tokens)
        decode += max(moved / bytes_per_s, flops / flop_per_s)
        steps += 1
        running = running[left[running] > 0]
    return Bound(prefill + decode, prefill, decode, steps, most)


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Bytes and FLOPs of the parts of a model."""

    model: Model
    table_bytes: int
    bytes_per_token: int
    flops_per_token: int
    head_flops: int
    attention_flops: int

    @classmethod
    def of(cls, model: Model) -> "_Cost":
        c, itemsize = model.config, jnp.dtype(model.dtype).itemsize
        table = c.vocab_size * c.width
        tables = table if c.tie_embeddings else 2 * table
        return cls(
            model,
            table * itemsize,
            cache_bytes(model, 1, 1),
            flops_per_token=2 * (model.active_parameter_count - tables),
            head_flops=2 * table,
            # Two products of each query with each key.
            attention_flops=4 * c.layers * c.heads * c.head_dim,
        )

    def step_bytes(self, rows: int) -> int:
        return step_bytes(self.model, self.model.weight_bytes, self.table_bytes, rows)

    def prefill_flops(self, tokens: int) -> int:
        seen = tokens * (tokens + 1) // 2
        return tokens * self.flops_per_token + self.head_flops + seen * self.attention_flops

    def decode_flops(self, rows: int, tokens: int) -> int:
        return rows * (self.flops_per_token + self.head_flops) + tokens * self.attention_flops
