"""Turns the options of a call into one configuration per prompt."""

import difflib
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fdjax.sampling.options import (
    BEAM_OPTIONS,
    OPTIONS,
    SAMPLED_OPTIONS,
    GenerationConfig,
)

# Arguments of other libraries that fdjax lacks, with advice for the error message.
_INSTEAD = {
    "generation_config": "pass the configuration as `config`",
    "sampling_params": "pass a GenerationConfig as `config`",
    "streamer": "use `lm.stream`, which yields the text",
    "stream": "use `lm.stream`, which yields the text",
    "max_time": "it is not supported; end rows with `stopping_criteria`",
    "pad_token_id": "prompts of any lengths need no padding",
    "attention_mask": "prompts of any lengths need no padding",
    "input_ids": "pass the ids as the first argument",
    "skip_special_tokens": "texts have none; the ids are in `result.tokens`",
    "return_dict_in_generate": "the result always has all parts",
}

_NOTHING_GIVEN = GenerationConfig()


def per_prompt(
    defaults: GenerationConfig,
    config: GenerationConfig | None,
    options: Mapping[str, Any],
    count: int,
    entropy: int | None = None,
) -> list[tuple[GenerationConfig, bool]]:
    """The configuration of each prompt of a call.

    Args:
      defaults: the checkpoint's options, used if neither `config` nor `options` gives a value.
      config, options: as in `LM.generate`; `options` wins.
      count: number of prompts.
      entropy: a random number, from which the seeds come that are not given; default a fresh one.

    Returns:
      For each prompt (configuration with a value in every field, whether the caller asks for
      `max_new_tokens`).

    Raises:
      ValueError: an option is out of range or has another number of values than prompts.
      TypeError: there is no such option, or `config` is not a `GenerationConfig`.

    Warns:
      UserWarning: an option of sampling or of beam search is given, but nothing is sampled, or
        there are no beams.
    """
    config = _NOTHING_GIVEN if config is None else config
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"generate: config must be a GenerationConfig, got {config!r}")
    options = _known(options)
    fresh: list[int] = []
    rows, named = [], set(config.given)
    if config.is_filled:
        named = {name for name in OPTIONS if getattr(config, name) != getattr(defaults, name)}
    # A configuration made from the defaults has their number of tokens, but does not ask for it.
    from_defaults = config.is_filled and config.max_new_tokens == defaults.max_new_tokens
    asks = "max_new_tokens" in config.given and not from_defaults
    for i in range(count):
        values = {name: _of_prompt(name, v, i, count) for name, v in options.items()}
        values = {name: value for name, value in values.items() if value is not None}
        named |= values.keys()
        row = config.updated(values).filled(defaults)
        if row.seed is None and row.sampled:
            fresh = fresh or np.random.SeedSequence(entropy).generate_state(count).tolist()
            row = row.updated({"seed": fresh[i]})
        rows.append((row, asks or "max_new_tokens" in values))
    unsampled = sorted(named & {"seed", *SAMPLED_OPTIONS})
    if unsampled and rows and not any(row.do_sample for row, _ in rows):
        warnings.warn(
            f"{', '.join(unsampled)}: no effect, because do_sample is False; set it, or a "
            "temperature",
            stacklevel=4,
        )
    of_beams = sorted(named.intersection(BEAM_OPTIONS) - {"num_beams"})
    if of_beams and rows and all(row.num_beams == 1 for row, _ in rows):
        warnings.warn(f"{', '.join(of_beams)}: no effect, because num_beams is 1", stacklevel=4)
    if len({row.logits_processors for row, _ in rows}) > 1:
        raise ValueError("generate: logits_processors must be the same for all prompts")
    return rows


def in_lists(options: Mapping[str, Any]) -> list[str]:
    """The names of the options that are lists of one value per prompt.

    Raises:
      TypeError: as in `per_prompt`.
    """
    return [name for name, value in _known(options).items() if _is_per_prompt(name, value)]


def _known(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by their names in `OPTIONS`, with lists in place of arrays."""
    options = {
        name: value.tolist() if isinstance(value, np.ndarray | jax.Array) else value
        for name, value in options.items()
    }
    if "eos_token_id" in options:
        if "eos_token_ids" in options:
            raise TypeError("generate: eos_token_id and eos_token_ids are one option, got both")
        eos = options.pop("eos_token_id")
        options["eos_token_ids"] = () if eos is None else eos
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"generate: unknown option {name!r}; {_hint(name)}")
    return options


def _hint(unknown: str) -> str:
    """Advice for a caller who gives an unknown option."""
    if unknown in _INSTEAD:
        return _INSTEAD[unknown]
    for name, option in OPTIONS.items():
        if unknown in option.elsewhere:
            return f"use {name}"
    if close := difflib.get_close_matches(unknown, OPTIONS, n=1):
        return f"did you mean {close[0]}?"
    return "help(fdjax.GenerationConfig) has the options"


def _of_prompt(name: str, value: Any, i: int, count: int) -> Any:
    """The value of an option for prompt `i` of `count`."""
    if _is_per_prompt(name, value):
        if len(value) != count:
            raise ValueError(
                f"generate: {name} must have one value per prompt ({count}), got {len(value)}"
            )
        value = value[i]
    return value.item() if isinstance(value, np.generic) else value


def _is_per_prompt(name: str, value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    if name == "logit_bias":
        return bool(value) and all(v is None or _is_bias(v) for v in value)
    nesting = OPTIONS[name].depth
    if not nesting:
        return isinstance(value, list)
    if nesting > 1 and value and all(isinstance(v, list | tuple) and not v for v in value):
        return True  # the value of one prompt has no empty sequence, so these are empty values
    return _depth(value) > nesting or any(v is None for v in value)


def _is_bias(value: Any) -> bool:
    """Whether a value is a whole `logit_bias`, as {id: bias} or as pairs, and not a single pair."""
    pairs = isinstance(value, list | tuple) and all(isinstance(v, list | tuple) for v in value)
    return pairs or isinstance(value, Mapping)


def _depth(value: Any) -> int:
    if not isinstance(value, list | tuple):
        return 0
    return 1 + max(map(_depth, value), default=0)
