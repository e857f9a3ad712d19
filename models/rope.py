"""Reads the rotary embedding from a config.json, in either generation of the format.

The old format has `rope_theta`, and `rope_scaling` with `type` or `rope_type`. The new one has
everything in `rope_parameters`, for some families once per kind of layer. A file may have both if
they agree.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence

from fdjax.models.block import BlockSpec
from fdjax.models.config import CheckpointError, ConfigReader, DecoderConfig
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.rope import Dynamic, LinearScaling, Llama3, LongRope, Rope, Scaling, Yarn


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    *,
    theta_key: str = "rope_theta",
    default_theta: float = 10000.0,
    default_partial: float | None = None,
    sections: Sequence[ConfigReader] | None = None,
    aliases: Mapping[str, str] = {},
) -> Rope:
    """Read the rotary embedding of all layers, or of one kind of layer.

    Args:
      reader: reader of the whole file.
      head_dim: D.
      theta_key: field with theta outside the sections.
      default_theta: theta if the file has none.
      default_partial: the share of a head that is rotated, if the file has none; None if the
        family rotates whole heads.
      sections: the objects that describe the scaling; default `rope_parameters` and `rope_scaling`.
      aliases: alias → rope type.

    Raises:
      CheckpointError: the rope type is unknown, a rope key is not used, or two places disagree.
    """
    if sections is None:
        sections = rope_sections(reader, "rope_parameters", "rope_scaling")
    theta = _agreed(
        [(reader, theta_key), *((section, "rope_theta") for section in sections)],
        default_theta,
        float,
    )
    places = [(r, "partial_rotary_factor") for r in (reader, *sections)]
    partial = _agreed(places, default_partial or 1.0, float)
    dim = int(head_dim * min(partial, 1.0))
    if partial > 1 or dim < 2 or dim % 2:
        raise CheckpointError(
            f"{reader.source}: 'head_dim' times 'partial_rotary_factor' must be even, at least 2 "
            f"and at most head_dim, got {head_dim} times {partial}"
        )
    if default_partial is None and partial != 1:
        # transformers ignores it or fails, depending on the rope type.
        raise CheckpointError(
            f"{reader.source}: 'partial_rotary_factor' must be 1, because models of this type "
            f"rotate whole heads, got {partial}"
        )
    ropes = {_read_section(reader, section, dim, theta, aliases) for section in sections}
    if len(ropes) > 1:
        # transformers uses rope_scaling, other programs the newer rope_parameters.
        raise CheckpointError(
            f"{reader.source}: 'rope_parameters' and 'rope_scaling' disagree; remove one"
        )
    if ropes:
        return ropes.pop()
    try:
        return Rope(dim=dim, theta=theta)
    except ValueError as error:
        raise CheckpointError(f"{reader.source}: {error}") from None


def rope_sections(reader: ConfigReader, *keys: str) -> list[ConfigReader]:
    """Readers of the objects under `keys` that are present and not empty."""
    return [
        ConfigReader(section, f"{reader.source}: {key}")
        for key in keys
        if (section := reader.get(key, dict, {}))
    ]


def sections_by_layer_type(
    reader: ConfigReader,
) -> tuple[list[ConfigReader], list[ConfigReader]]:
    """Sections for full and for sliding attention; `rope_scaling` belongs to full attention."""
    full, local = rope_sections(reader, "rope_scaling"), []
    for new in rope_sections(reader, "rope_parameters"):
        full += rope_sections(new, "full_attention")
        local += rope_sections(new, "sliding_attention")
        if unknown := new.unread():
            raise CheckpointError(
                f"{new.source}: unknown keys {', '.join(unknown)}; "
                f"known: {', '.join(sorted(new.known()))}"
            )
    return full, local


def _agreed(places: Sequence[tuple[ConfigReader, str]], default, kind: type):
    """Read a positive number that may be in several places, which must agree."""
    given = [
        reader.positive(key, kind=kind)
        for reader, key in places
        if reader.get(key, kind, None) is not None
    ]
    if len(set(given)) > 1:
        reader, key = places[0]
        raise CheckpointError(
            f"{reader.source}: {reader.name(key)!r} must be the same everywhere, "
            f"got {' and '.join(map(str, given))}"
        )
    return given[0] if given else default


def _read_section(
    reader: ConfigReader,
    section: ConfigReader,
    dim: int,
    theta: float,
    aliases: Mapping[str, str],
) -> Rope:
    names = {section.get(key, str, None) for key in ("rope_type", "type")} - {None}
    names = {aliases.get(name, name) for name in names}
    if len(names) > 1:
        raise CheckpointError(
            f"{section.source}: 'rope_type' and 'type' disagree, got {' and '.join(sorted(names))}"
        )
    kind = names.pop() if names else "default"
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"{section.source}: rope_type {kind!r} is not supported; "
            f"supported: {', '.join(sorted(_SCALINGS))}"
        )
    try:
        rope = Rope(dim=dim, theta=theta, scaling=_SCALINGS[kind](reader, section))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{section.source}: {error}") from None
    unused = section.unread()
    if unused:
        raise CheckpointError(
            f"{section.source}: unknown keys {', '.join(unused)} for rope_type {kind!r}; "
            f"known: {', '.join(sorted(section.known()))}"
        )
    return rope


_ORIGINAL_LENGTH = "original_max_position_embeddings"


def _original_length(reader: ConfigReader, section: ConfigReader) -> int:
    """Read the original length: in the section, or outside in Phi models; default the context."""
    context = reader.positive("max_position_embeddings", 2048)
    return _agreed([(section, _ORIGINAL_LENGTH), (reader, _ORIGINAL_LENGTH)], context, int)


def _linear(reader: ConfigReader, section: ConfigReader) -> LinearScaling:
    return LinearScaling(section.positive("factor", kind=float))


def _dynamic(reader: ConfigReader, section: ConfigReader) -> Dynamic:
    return Dynamic(
        factor=section.positive("factor", kind=float),
        original_max_position=reader.positive("max_position_embeddings", 2048),
    )


def _llama3(reader: ConfigReader, section: ConfigReader) -> Llama3:
    length = _agreed([(section, _ORIGINAL_LENGTH), (reader, _ORIGINAL_LENGTH)], None, int)
    return Llama3(
        factor=section.positive("factor", kind=float),
        low_freq_factor=section.positive("low_freq_factor", kind=float),
        high_freq_factor=section.positive("high_freq_factor", kind=float),
        # Required: transformers would take the context, but all published files have this field.
        original_max_position=length or section.positive(_ORIGINAL_LENGTH),
    )


def _yarn(reader: ConfigReader, section: ConfigReader) -> Yarn:
    factor = section.positive("factor", kind=float)
    mscale, mscale_all_dim = (section.get(key, float, 0.0) for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all_dim:
        attention = _yarn_attention(factor, mscale) / _yarn_attention(factor, mscale_all_dim)
    else:
        attention = _yarn_attention(factor, 1.0)
    return Yarn(
        factor=factor,
        original_max_position=_original_length(reader, section),
        attention_factor=section.positive("attention_factor", attention, float),
        beta_fast=section.positive("beta_fast", 32.0, float),
        beta_slow=section.positive("beta_slow", 1.0, float),
        truncate=section.get("truncate", bool, True),
    )


def _yarn_attention(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(reader: ConfigReader, section: ConfigReader) -> LongRope:
    original = _original_length(reader, section)
    if original < 2:
        raise CheckpointError(
            f"{section.source}: 'original_max_position_embeddings' must exceed 1, got {original}"
        )
    context = reader.positive("max_position_embeddings", 2048)
    factor = section.positive("factor", context / original, float)
    attention = 1.0
    if factor > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(
        short_factors=_numbers(section, "short_factor"),
        long_factors=_numbers(section, "long_factor"),
        original_max_position=original,
        attention_factor=section.positive("attention_factor", attention, float),
    )


def _numbers(section: ConfigReader, key: str) -> tuple[float, ...]:
    values = section.get(key, list)
    if not all(type(v) in (int, float) and 0 < v <= sys.float_info.max for v in values):
        raise CheckpointError(f"{section.source}: {key!r} must be positive numbers")
    return tuple(map(float, values))


_SCALINGS: dict[str, Callable[[ConfigReader, ConfigReader], Scaling | None]] = {
    "default": lambda reader, section: None,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}


def with_spans(config: DecoderConfig) -> DecoderConfig:
    """The config, with RoPE of a part of each head as RoPE of whole heads.

    Kernels rotate whole heads. The dimensions of Q and K are ordered for it when weights are read.
    Norms of Q and K have a weight for each dimension, so their models stay as they are.
    """

    def spread(block: BlockSpec) -> AttentionSpec:
        rope, d = block.attention.rope, block.head_dim
        if rope is None or rope.dim == d or d % 2 or block.qk_norm or block.whole_qk_norm:
            return block.attention
        return dataclasses.replace(block.attention, rope=dataclasses.replace(rope, span=d))

    return config.with_attention(map(spread, config.blocks))
