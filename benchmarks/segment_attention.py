"""Decode attention of beams over the batch: `python -m benchmarks.segment_attention`.

The beams of a prompt share its pages, and each has pages of its own for its response, whose tokens
come from changing beams (Wu et al. 2024, section 3.3). The op must read each page once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fdjax.bench.suite import Case, main
from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    BeamSlots,
    attention_reference,
    decode_attention,
)

PAGE = 128


class Shape(NamedTuple):
    """Prompts, beams, heads, values of a head, tokens of a prompt and of a response."""

    batch: int
    beams: int = 4
    heads: int = 40
    d: int = 128
    prompt: int = 1024
    response: int = 128

    @property
    def slots(self) -> int:
        """Slots of a row, of which all are in use; prompt and response are whole pages."""
        return self.prompt + self.response


BATCHES = (1, 2, 4, 8, 16, 32, 64)


@functools.partial(jax.jit, static_argnums=1)
def operands(seed, shape):
    """(q, k pool, v pool, pages, source row of each position) of beams that changed places."""
    rows = shape.batch * shape.beams
    of_prompt, of_response = shape.prompt // PAGE, shape.response // PAGE
    count = shape.batch * of_prompt + rows * of_response
    q, k, v, order, source = jax.random.split(jax.random.key(seed), 5)
    q = jax.random.normal(q, (rows, 1, shape.heads, shape.d), jnp.bfloat16)
    pool = count, shape.heads, PAGE, shape.d
    k, v = (jax.random.normal(key, pool, jnp.bfloat16) for key in (k, v))
    order = jax.random.permutation(order, count).astype(jnp.int32)
    shared, own = jnp.split(order, [shape.batch * of_prompt])
    shared = jnp.repeat(shared.reshape(shape.batch, of_prompt), shape.beams, axis=0)
    pages = jnp.concatenate([shared, own.reshape(rows, of_response)], axis=1)
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] // shape.beams * shape.beams
    chosen = jax.random.randint(source, (rows, shape.slots), 0, shape.beams, jnp.int32)
    return q, k, v, pages, first + chosen


def _beams(shape, sources):
    rows = jnp.arange(len(sources), dtype=jnp.int32)
    prompts = jnp.full_like(rows, shape.prompt)
    return BeamSlots(sources, prompts, rows // shape.beams * shape.beams, shape.beams)


def _attend(shape, implementation, q, k, v, pages, sources):
    return decode_attention(
        q,
        k,
        v,
        jnp.full(len(q), shape.slots, jnp.int32),
        pages=pages,
        beams=_beams(shape, sources),
        spec=AttentionSpec(shape.d**-0.5),
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnums=0)
def _reference(shape, q, k, v, pages, sources):
    """One row at a time, with its slots gathered."""
    position = jnp.arange(shape.slots, dtype=jnp.int32)
    lengths = jnp.full(1, shape.slots, jnp.int32)

    def of_row(given):
        row, q, sources = given
        source = jnp.where(position < shape.prompt, row, sources)
        page = pages[source, position // PAGE]  # the response begins on a new page
        keys, values = (a[page, :, position % PAGE].swapaxes(0, 1)[None] for a in (k, v))
        spec = AttentionSpec(shape.d**-0.5)
        return attention_reference(q[None], keys, values, lengths, lengths - 1, spec=spec)[0][0]

    return lax.map(of_row, (jnp.arange(len(q), dtype=jnp.int32), q, sources))


def case(shape: Shape, implementations: dict[str, str]) -> Case:
    """The case of a shape; `implementations`: name in the record → that of `decode_attention`."""
    rows = shape.batch * shape.beams
    tokens = shape.batch * shape.prompt + rows * shape.response
    return Case(
        name=f"BS{shape.batch} W{shape.beams} H{shape.heads} D{shape.d} "
        f"P{shape.prompt} N{shape.response}",
        make_args=lambda seed: operands(seed, shape),
        implementations={
            name: functools.partial(_attend, shape, chosen)
            for name, chosen in implementations.items()
        },
        reference=functools.partial(_reference, shape),
        bytes=2 * tokens * shape.heads * shape.d * 2,
        flops=4 * rows * shape.heads * shape.d * shape.slots,
        tolerance=2e-2,
    )


CASES = [case(Shape(batch), {"mosaic_gpu": "mosaic_gpu", "xla": "xla"}) for batch in BATCHES]

if __name__ == "__main__":
    raise SystemExit(main(CASES))
