"""`forward` and `generate` as pure functions of `(model, params, ids)`, and their configuration."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fdjax.models import CheckpointError, Model, Params
from fdjax.pallas_kernels.attention import prefill_attention
from fdjax.pallas_kernels.rope import apply_rope
from fdjax.sampling import Processors, Sampling
from fdjax.state import SLOT_MULTIPLE, init_cache, start
from fdjax.step import decode_steps, prefill


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How to choose tokens; names and meanings of transformers.

    Attributes:
      max_new_tokens: tokens to generate at most.
      min_new_tokens: end-of-sequence ids are not chosen before this many tokens.
      do_sample: draw from the distribution instead of taking its maximum.
      temperature: divides the logits; 0 means greedy.
      top_k: draw from the k likeliest tokens; 0 is off.
      top_p: draw from the likeliest tokens that together hold this mass; 1 is off.
      seed: of the draws; rows with the same prompt and seed draw the same tokens.
      eos_token_ids: ids that end a row.
      return_logprobs: also return each token's log-probability under the raw model.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    return_logprobs: bool = False

    def __post_init__(self):
        for name, kind in (
            ("max_new_tokens", int),
            ("min_new_tokens", int),
            ("top_k", int),
            ("seed", int),
            ("temperature", (int, float)),
            ("top_p", (int, float)),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"generate: {name} must be a number, got {value!r}")
        if not 0 <= self.max_new_tokens < 2**31:
            raise ValueError(
                f"generate: max_new_tokens must be in [0, 2**31), got {self.max_new_tokens}"
            )
        if not 0 <= self.min_new_tokens <= max(self.max_new_tokens, 0):
            raise ValueError(
                "generate: min_new_tokens must be between 0 and max_new_tokens "
                f"({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"generate: temperature must be finite, >= 0, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"generate: top_k must be in [0, 2**31), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"generate: top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"generate: seed must be in [0, 2**32), got {self.seed}")

    @property
    def sampled(self) -> bool:
        """Tokens are drawn, not the likeliest."""
        return self.do_sample and self.temperature > 0

    @property
    def processors(self) -> Processors:
        """The static set of active processors."""
        return Processors(
            sample=self.sampled,
            top_k=self.sampled and self.top_k > 0,
            top_p=self.sampled and self.top_p < 1,
            min_new_tokens=self.min_new_tokens > 0 and bool(self.eos_token_ids),
            logprobs=self.return_logprobs,
        )

    @classmethod
    def from_files(
        cls, generation: Mapping[str, Any], config: Mapping[str, Any], source: str
    ) -> "GenerationConfig":
        """Defaults of a checkpoint: generation_config.json over config.json.

        Raises:
          CheckpointError: a field has a value that cannot be meant.
        """
        eos = generation.get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        eos = [] if eos is None else eos
        eos = eos if isinstance(eos, list) else [eos]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in eos):
            raise CheckpointError(f"{source}: eos_token_id must be ids, got {eos!r}")
        known = {"eos_token_ids": tuple(eos)}
        for name in ("max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_p"):
            if generation.get(name) is not None:
                known[name] = generation[name]
        if generation.get("top_k") is not None:
            known["top_k"] = generation["top_k"]
        try:
            return cls(**known)
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}") from None


def per_row(configs: list[GenerationConfig], batch: int) -> Sampling:
    """The requests of a batch as arrays, rows without a request filled with zeros."""

    def column(values, dtype):
        values = list(values)
        return np.asarray(values + [0] * (batch - len(values)), dtype)

    width = max((len(c.eos_token_ids) for c in configs), default=0)
    width = max(4, width)
    stops = [list(c.eos_token_ids) + [-1] * (width - len(c.eos_token_ids)) for c in configs]
    stops += [[-1] * width] * (batch - len(configs))
    return Sampling(
        temperature=column((c.temperature if c.sampled else 0 for c in configs), np.float32),
        top_k=column((c.top_k for c in configs), np.int32),
        top_p=column((c.top_p for c in configs), np.float32),
        seed=column((c.seed for c in configs), np.uint32),
        sample_index=column((0 for _ in configs), np.int32),
        max_new_tokens=column((c.max_new_tokens for c in configs), np.int32),
        min_new_tokens=column((c.min_new_tokens for c in configs), np.int32),
        stop_tokens=np.asarray(stops, np.int32),
    )


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
    """
    b, t = ids.shape
    if lengths is None:
        lengths = jnp.full((b,), t, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))

    def attend(spec, kv, q, k, v):
        if spec.rope is not None:
            q, k = (apply_rope(a, positions, spec.rope) for a in (q, k))
        o = prefill_attention(
            q,
            k.transpose(0, 2, 1, 3),
            v.transpose(0, 2, 1, 3),
            lengths,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            alibi=spec.alibi,
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
      config: the same for all rows; row i draws with seed `config.seed + i`.
      lengths: [B] int32 tokens of each prompt, at least 1; default P.

    Returns:
      [B, max_new_tokens] int32, -1 after a row has ended.

    Raises:
      ValueError: shapes disagree.
    """
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"generate: ids must be [B,P] and not empty, got {list(ids.shape)}")
    b, p = ids.shape
    if lengths is None:
        lengths = jnp.full((b,), p, jnp.int32)
    if lengths.shape != (b,):
        raise ValueError(f"generate: lengths must be [{b}], got {list(lengths.shape)}")
    if config.max_new_tokens == 0:
        return jnp.zeros((b, 0), jnp.int32)
    slots = -(-(p + config.max_new_tokens) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    rows = [dataclasses.replace(config, seed=(config.seed + i) % 2**32) for i in range(b)]
    state = start(init_cache(model, b, slots), per_row(rows, b), np.ones(b, bool))
    state = jax.tree.map(jnp.asarray, state)
    processors = dataclasses.replace(config.processors, logprobs=False)
    zeros = jnp.zeros((b,), jnp.int32)
    state, first, _ = prefill(
        model, params, state, ids, lengths, zeros, jnp.ones((b,), bool), processors=processors
    )
    n = config.max_new_tokens - 1
    if n == 0:
        return first[:, None]
    _, rest, _ = decode_steps(
        model, params, state, jnp.int32(n), max_steps=n, processors=processors
    )
    return jnp.concatenate([first[:, None], rest], axis=1)
