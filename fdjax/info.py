"""What `fdjax info` says: size of a model, what fits, which implementations run."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.models import Model
from fdjax.pallas_kernels.plan import Choice


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Static facts of a model on a device.

    Attributes:
      family, parameters, dtype: of the model.
      weight_bytes: all parameters.
      kv_bytes_per_token: over all layers.
      device: kind of the device.
      device_bytes: memory JAX may use there, None if unknown.
      fitting_tokens: cache slots that fit beside the weights, over all rows.
      max_position_embeddings: the model's context.
      choices: (op, shape, implementation, source) of the decode step and of prefill.
    """

    family: str
    parameters: int
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    device: str
    device_bytes: int | None
    fitting_tokens: int | None
    max_position_embeddings: int
    choices: tuple[tuple[str, str, str, str], ...]

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """A table for people."""
        lines = [
            f"family        {self.family}",
            f"parameters    {self.parameters:,}",
            f"weights       {_size(self.weight_bytes)} in {self.dtype}",
            f"KV cache      {self.kv_bytes_per_token:,} bytes per token",
            f"context       {self.max_position_embeddings:,} tokens",
            f"device        {self.device}",
        ]
        if self.device_bytes is not None:
            lines.append(f"memory        {self.device_bytes / 1e9:.1f} GB")
        if self.fitting_tokens is not None:
            fits = f"{self.fitting_tokens:,} tokens of cache beside the weights"
            lines.append(
                f"fits          {fits if self.fitting_tokens else 'no: weights too large'}"
            )
        lines += ["", f"{'op':18} {'shape':44} {'runs':10} chosen by"]
        lines += [f"{op:18} {shape:44} {run:10} {why}" for op, shape, run, why in self.choices]
        return "\n".join(lines)


def model_info(model: Model, *, batch: int = 1, slots: int | None = None) -> ModelInfo:
    """Facts about a model on the plan's device; memory figures are of the first local device."""
    itemsize = jnp.dtype(model.dtype).itemsize
    weight_bytes = model.parameter_count * itemsize
    kv = model.config.kv_bytes_per_token(itemsize)
    memory = device_memory_bytes()
    return ModelInfo(
        family=model.config.family,
        parameters=model.parameter_count,
        dtype=model.dtype,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv,
        device=model.plan.device_kind,
        device_bytes=memory,
        fitting_tokens=None if memory is None else max(0, (memory - weight_bytes) // kv),
        max_position_embeddings=model.config.max_position_embeddings,
        choices=tuple(_choices(model, batch, slots or model.config.max_position_embeddings)),
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def device_memory_bytes(device: jax.Device | None = None) -> int | None:
    """Bytes JAX may allocate on a device: the allocator's limit, or the machine's memory."""
    device = device or jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _choices(model: Model, batch: int, slots: int):
    c = model.config
    itemsize = jnp.dtype(model.dtype).itemsize
    linear = {
        "qkv": (c.width, (c.heads + 2 * c.kv_heads) * c.head_dim),
        "out": (c.heads * c.head_dim, c.width),
        "gate_up": (c.width, 2 * c.mlp_width),
        "down": (c.mlp_width, c.width),
        "head": (c.width, c.vocab_size),
    }

    def row(op: str, label: str, choice: Choice):
        return op, label, choice.implementation, choice.source

    for name, (k, n) in linear.items():
        choice = model.plan.choose("matmul", m=batch, k=k, n=n, itemsize=itemsize)
        yield row("matmul", f"{name} M={batch} [{k},{n}]", choice)
    for op, t in (("decode_attention", 1), ("prefill_attention", 512)):
        for masks in sorted({int(_bends(spec)) for spec in c.attention}):
            choice = model.plan.choose(
                op,
                b=batch,
                t=t,
                h=c.heads,
                hkv=c.kv_heads,
                s=slots,
                d=c.head_dim,
                itemsize=itemsize,
                masks=masks,
            )
            label = f"B={batch} T={t} H={c.heads} Hkv={c.kv_heads} S={slots} D={c.head_dim}"
            yield row(op, label, choice)


def _bends(spec) -> bool:
    return not (spec.window is None and spec.soft_cap is None and spec.alibi is None)
