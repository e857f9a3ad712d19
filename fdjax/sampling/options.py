"""The options of a generation: `GenerationConfig`, and the options of a batch as arrays."""

import dataclasses
import enum
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdjax.models import CheckpointError
from fdjax.sampling.beams import MOST_BEAMS
from fdjax.sampling.processors import MAX_NGRAM
from fdjax.sampling.sampler import MAX_TOP_LOGPROBS, LogitsProcessor, Processors, Sampling

# Function of the tokens generated so far → whether the row ends.
StoppingCriterion = Callable[[Sequence[int]], bool]


class Unset(enum.Enum):
    """The value of a field that is not given, so that the checkpoint's default applies."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET = Unset.UNSET

# The end of a bias that applies to all steps.
_ALWAYS = 2**31 - 1

# Options of transformers that are not supported but may be in generation_config.json, with the
# values that have no effect.
_NOT_HONOURED = {
    "max_time": (),
    "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0),
    "renormalize_logits": (False,),
    "penalty_alpha": (),
    "guidance_scale": (1, 1.0),
    "sequence_bias": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_h": (),
    "watermarking_config": (),
    "min_length": (0,),
    "token_healing": (False,),
    "dola_layers": (),
    "force_words_ids": (),
    "constraints": (),
}


def _plain(value):
    """Convert a NumPy scalar, or an array without dimensions, to a Python scalar."""
    is_array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    is_scalar = isinstance(value, np.generic) or (is_array and value.ndim == 0)
    return value.item() if is_scalar else value


@dataclasses.dataclass(frozen=True)
class Number:
    """A check for numbers.

    Attributes:
      kind: int or float.
      within: the range in words.
      accepts: function that tells whether a number is in the range.
      optional: whether None is allowed as well.
    """

    kind: type
    within: str
    accepts: Callable[[Any], bool]
    optional: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """Check the value of the option `name`, and return it as a Python number.

        Raises:
          ValueError: the value is not a number of this kind in the range.
        """
        value = _plain(value)
        if value is None and self.optional:
            return None
        kinds = int if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not self._has(value):
            raise ValueError(f"generate: {name} must be {self}, got {value!r}")
        return value

    def parse(self, text: str) -> Any:
        """Parse a number.

        Raises:
          ValueError: the text is not a number of this kind in the range.
        """
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if value is None or not self._has(value):
            raise ValueError(f"must be {self}, got {text!r}")
        return value

    def _has(self, value) -> bool:
        try:
            return (self.kind is int or math.isfinite(value)) and self.accepts(value)
        except OverflowError:  # an integer that is too large for a float
            return False

    def __str__(self) -> str:
        return f"{'an integer' if self.kind is int else 'a number'} {self.within}"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A check for one of a few values.

    Attributes:
      values: the values by the words that mean them on the command line.
    """

    values: Mapping[str, Any]

    def __call__(self, name: str, value: Any) -> Any:
        """Check the value of the option `name`.

        Raises:
          ValueError: the value is not allowed.
        """
        value = _plain(value)
        if not any(value is v or (isinstance(v, str) and value == v) for v in self.values.values()):
            allowed = ", ".join(map(repr, self.values.values()))
            raise ValueError(f"generate: {name} must be one of {allowed}, got {value!r}")
        return value

    def parse(self, text: str) -> Any:
        """Parse one of the words.

        Raises:
          ValueError: the text is not one of the words.
        """
        if text not in self.values:
            raise ValueError(f"must be one of {', '.join(self.values)}, got {text!r}")
        return self.values[text]


def _integer(least: int, end: int, within: str) -> Number:
    return Number(int, within, lambda n: least <= n < end)


def _real(within: str, accepts) -> Number:
    return Number(float, within, accepts)


def _flag(name, value):
    value = _plain(value)
    if not isinstance(value, bool):
        raise ValueError(f"generate: {name} must be True or False, got {value!r}")
    return value


def _ids(name, value):
    items = (value,) if _is_id(value) else value
    if not isinstance(items, Sequence | np.ndarray) or not all(map(_is_id, items)):
        raise ValueError(f"generate: {name} must be ids in [0, 2**31), got {value!r}")
    return tuple(int(i) for i in items)


def _words(name, value):
    words = _items(name, value)
    if any(map(_is_id, words)):
        raise ValueError(f"generate: {name} must be sequences of ids, got {value!r}")
    words = tuple(_ids(name, word) for word in words)
    if not all(words):
        raise ValueError(f"generate: {name} must hold no empty sequence, got {value!r}")
    return words


def _biases(name, value):
    pairs = value.items() if isinstance(value, Mapping) else _items(name, value)
    biases = {}
    for pair in pairs:
        if len(_items(name, pair)) != 2 or not _is_id(pair[0]):
            raise ValueError(f"generate: {name} must map ids to numbers, got {value!r}")
        biases[int(pair[0])] = float(_bias(f"{name} of {pair[0]}", pair[1]))
    return tuple(sorted(biases.items()))


def _strings(name, value):
    strings = (value,) if isinstance(value, str) else _items(name, value)
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"generate: {name} must be strings that are not empty, got {value!r}")
    return tuple(strings)


def _functions(name, value):
    functions = (value,) if callable(value) else _items(name, value)
    if not all(map(callable, functions)):
        raise ValueError(f"generate: {name} must be functions, got {value!r}")
    return tuple(functions)


def _jitted_functions(name, value):
    functions = _functions(name, value)
    for function in functions:
        if not isinstance(function, Hashable):
            raise ValueError(
                f"generate: {name} must be hashable, because programs are cached by them; "
                f"got {function!r}"
            )
    return functions


def _top(name, value):
    if value is None or value is False:
        return None
    if value is True:
        return 0
    within = f"in [0, {MAX_TOP_LOGPROBS}], True or False"
    return _integer(0, MAX_TOP_LOGPROBS + 1, within)(name, value)


def _items(name, value):
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"generate: {name} must be a sequence, got {value!r}")
    return value


def _is_id(value) -> bool:
    return (
        isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < 2**31
    )


_any_tokens = _integer(0, 2**31, "in [0, 2**31)")
_samples = _integer(1, 2**31, "in [1, 2**31)")
_ngram = _integer(0, MAX_NGRAM + 1, f"in [0, {MAX_NGRAM}]")
_seed = dataclasses.replace(_integer(0, 2**32, "in [0, 2**32)"), optional=True)
# Beyond this range, fp32 would lose the order of scores, and even the -inf of forbidden tokens.
_temperature = _real("in [0, 1e30]", lambda t: 0 <= t <= 1e30)
_mass = _real("in [0, 1]", lambda p: 0 <= p <= 1)
_factor = _real("in [1e-30, 1e30]", lambda r: 1e-30 <= r <= 1e30)
_share = _real("in (0, 1]", lambda p: 0 < p <= 1)
_penalty = _real("in [-2, 2]", lambda x: -2 <= x <= 2)
_beams = _integer(1, MOST_BEAMS + 1, f"in [1, {MOST_BEAMS}]")
_bias = _real("in [-100, 100]", lambda x: -100 <= x <= 100)
_exponent = _real("in [-100, 100]", lambda x: -100 <= x <= 100)
# The values of `early_stopping`. The device gets the position in this list.
_EARLY = {"false": False, "true": True, "never": "never"}


@dataclasses.dataclass(frozen=True)
class Option:
    """The properties of an option. Command line, documentation and programs derive from them.

    Attributes:
      default: the value if neither the caller nor the checkpoint gives one.
      check: (name, value) → the checked value in the form that is stored; raises ValueError.
      role: "draw" for an option that limits what is drawn, which turns sampling on if a caller
        gives it; "edit" for one that changes logits before a token is chosen; "beams" for one of
        beam search; None for others.
      flag: (name of the value, help text) on the command line, or None if there is no flag.
      column: "reals" or "counts" if the rows' values are a column of that array of `Sampling`.
      depth: number of nested sequences in a value. One more level means one value per prompt.
      in_files: whether generation_config.json may contain the option.
      elsewhere: names in other libraries, for the error that suggests this option.
    """

    default: Any
    check: Callable[[str, Any], Any]
    role: str | None = None
    flag: tuple[str, str] | None = None
    column: str | None = None
    depth: int = 0
    in_files: bool = True
    elsewhere: tuple[str, ...] = ()


def _option(default: Any, check: Callable[[str, Any], Any], role=None, flag=None, **about) -> Any:
    if role and isinstance(check, Number):
        about["column"] = "reals" if check.kind is float else "counts"
    return dataclasses.field(
        default=UNSET, metadata={"option": Option(default, check, role, flag, **about)}
    )


# Metadata of an option that generation_config.json cannot contain.
_OURS = {"in_files": False}


@dataclasses.dataclass(frozen=True, repr=False)
class GenerationConfig:
    """How to choose tokens. Names and meanings are those of transformers, if it has the option.

    A field that is not given is `UNSET`. `LM` then takes it from the checkpoint's generation
    defaults, and `fdjax.generate` takes the default shown here. A field that is given as None also
    has the default shown here, whatever the checkpoint says. So `eos_token_ids=None` disables the
    end of sequence.

    `presence_penalty`, `frequency_penalty` and `logit_bias` have the meaning they have in vLLM.
    Sequences may have any type and are stored as tuples.

    Attributes:
      max_new_tokens: largest number of tokens to generate; the context may allow fewer. In a model
        with LongRoPE, the length of the prompt plus this number decides which factors are used,
        from the first token on.
      min_new_tokens: end-of-sequence ids are not chosen before this many tokens.
      do_sample: draw a token from the distribution instead of choosing the likeliest. If it is not
        given, temperature, top_k, top_p, min_p and typical_p turn it on.
      temperature: divides the logits; 0 means greedy. With a temperature alone, tokens are drawn
        from the whole vocabulary. In transformers they are drawn from the 50 likeliest, because its
        default of `top_k` is 50.
      top_k: draw from the k likeliest tokens; 0 is off, and the default.
      top_p: draw from the likeliest tokens that together have this probability, at least one; 1 is
        off.
      min_p: draw from the tokens that are at least this many times as likely as the likeliest; 0 is
        off.
      typical_p: draw from the tokens with information closest to the entropy that together have
        this probability (Meister et al. 2022); 1 is off.
      repetition_penalty: for each token in the prompt or the response, divides a logit above 0 and
        multiplies one below 0; 1 is off.
      presence_penalty: subtracted from the logits of tokens in the response; -2 to 2.
      frequency_penalty: the same, times the number of occurrences in the response; -2 to 2.
      no_repeat_ngram_size: no sequence of this many tokens occurs twice, prompt included; 0 is off,
        and the largest value is 32.
      bad_words_ids: sequences of ids that must not be generated.
      suppress_tokens: ids that are never chosen.
      begin_suppress_tokens: ids that are not chosen as the first token.
      logit_bias: {id: bias}, added to the logits of these ids; -100 to 100.
      stop_strings: a row ends when its text contains one of these. The text ends before the stop
        string, and the tokens end with the one that completed it. Prompts and special tokens are
        not searched.
      include_stop_str_in_output: the text includes the stop string, as in vLLM.
      stopping_criteria: functions that end a row by returning true. The host calls each one after
        every token, with a new list of the tokens generated so far.
      logits_processors: jittable functions (ids [B,S], lengths [B], scores [B,V]) → scores [B,V],
        the same for the whole batch. They run after all penalties and before the temperature. Each
        set of functions compiles its own program, so pass the same functions again, not new
        lambdas. Values that an object holds at its first call become part of the program.
      num_return_sequences: number of samples or best beams per prompt, side by side in the result.
        A stream has one, whatever the checkpoint's default.
      num_beams: number of beams of beam search; 1 is off. The scores of tokens are then
        log-probabilities, to which penalties and temperature apply. With `do_sample` the
        continuations are drawn without replacement. A stream has one, whatever the checkpoint's
        default.
      length_penalty: the score of a finished beam is the sum of its scores divided by its number of
        new tokens to this power. Above 0 prefers long answers, below 0 short ones.
      early_stopping: when beam search ends. True: when `num_beams` beams are finished. False: when
        the best running beam would not be among the best if it ended now. "never": when it could
        not be among the best at any length.
      seed: seed of the draws; None takes a new seed in each call. A row's tokens depend only on its
        prompt, its seed and its index among the samples of the prompt, not on the batch.
      eos_token_ids: ids that end a row.
      return_logprobs: also return log-probabilities under the raw model. True or 0 returns that of
        each chosen token. A number n, at most 20, also returns those of the n likeliest tokens.
        False or None returns nothing.
      return_reruns: also report in `stats` the share of decode attention that left the range of the
        unified maximum and ran again. If one prompt asks for it, it covers the whole batch.
    """

    max_new_tokens: int = _option(
        128,
        _any_tokens,
        flag=("N", "largest number of tokens to generate; {default}"),
        column="counts",
        elsewhere=("max_tokens", "max_length", "n_predict", "max_completion_tokens"),
    )
    min_new_tokens: int = _option(
        0,
        _any_tokens,
        flag=("N", "do not end before this many tokens"),
        elsewhere=("min_tokens", "min_length"),
    )
    do_sample: bool = _option(False, _flag)
    temperature: float = _option(1.0, _temperature, "draw", ("T", "0 is greedy; above 0 samples"))
    top_k: int = _option(0, _any_tokens, "draw", ("K", "sample from the K likeliest"))
    top_p: float = _option(
        1.0, _mass, "draw", ("P", "sample from the likeliest with total probability P")
    )
    min_p: float = _option(
        0.0, _mass, "draw", ("P", "sample from those at least P times as likely as the likeliest")
    )
    typical_p: float = _option(
        1.0, _share, "draw", ("P", "sample from the most typical with total probability P")
    )
    repetition_penalty: float = _option(
        1.0, _factor, "edit", ("X", "above 1 avoids tokens of the prompt and the answer")
    )
    presence_penalty: float = _option(
        0.0, _penalty, "edit", ("X", "above 0 avoids tokens of the answer"), in_files=False
    )
    frequency_penalty: float = _option(
        0.0, _penalty, "edit", ("X", "the same, times their number of occurrences"), in_files=False
    )
    no_repeat_ngram_size: int = _option(
        0, _ngram, "edit", ("N", "no N tokens in a row occur twice")
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = _option((), _words, "edit", depth=2)
    suppress_tokens: tuple[int, ...] = _option((), _ids, "edit", depth=1)
    begin_suppress_tokens: tuple[int, ...] = _option((), _ids, "edit", depth=1)
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = _option(
        (), _biases, "edit", in_files=False
    )
    stop_strings: str | tuple[str, ...] = _option((), _strings, depth=1, elsewhere=("stop",))
    include_stop_str_in_output: bool = _option(False, _flag, **_OURS)
    stopping_criteria: tuple[StoppingCriterion, ...] = _option((), _functions, **_OURS, depth=1)
    logits_processors: tuple[LogitsProcessor, ...] = _option(
        (), _jitted_functions, **_OURS, depth=1, elsewhere=("logits_processor",)
    )
    num_return_sequences: int = _option(1, _samples, elsewhere=("n", "best_of", "num_samples"))
    num_beams: int = _option(
        1, _beams, "beams", ("N", "beam search with N beams"), elsewhere=("beam_size", "beam_width")
    )
    length_penalty: float = _option(
        1.0, _exponent, "beams", ("X", "with beams: above 0 prefers long answers")
    )
    early_stopping: bool | str = _option(
        False,
        OneOf(_EARLY),
        "beams",
        ("WHEN", "with beams, when to end: false (default), true or never"),
    )
    seed: int | None = _option(None, _seed, flag=("N", "makes samples reproducible"), **_OURS)
    eos_token_ids: tuple[int, ...] = _option(
        (), _ids, **_OURS, depth=1, elsewhere=("stop_token_ids",)
    )
    return_logprobs: bool | int | None = _option(
        None, _top, **_OURS, elsewhere=("logprobs", "top_logprobs", "output_scores")
    )
    return_reruns: bool = _option(False, _flag, **_OURS)

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not UNSET}
        self._set(frozenset(), given)

    def _set(self, present: frozenset[str], values: Mapping[str, Any]) -> None:
        """Check values and set them, beside the fields that are `present`."""
        # Not a field, because it follows from the fields. It is stored because it is read often.
        given = present.union(values)
        vars(self)["_given"] = given
        for name, value in values.items():
            option = OPTIONS[name]
            value = option.default if value is None else option.check(name, value)
            vars(self)[name] = value
        both = {"min_new_tokens", "max_new_tokens"} <= given
        if both and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                "generate: min_new_tokens must be between 0 and max_new_tokens "
                f"({self.max_new_tokens}), got {self.min_new_tokens}"
            )

    def __repr__(self) -> str:
        given = (f"{name}={getattr(self, name)!r}" for name in OPTIONS if name in self.given)
        return f"GenerationConfig({', '.join(given)})"

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that are given."""
        return self._given

    @property
    def is_filled(self) -> bool:
        """Whether every field is given."""
        return len(self._given) == len(OPTIONS)

    def updated(self, values: Mapping[str, Any]) -> "GenerationConfig":
        """A copy with other values.

        Only these are checked. `dataclasses.replace` checks all, which delays the first token.

        Raises:
          ValueError: a value is out of range.
        """
        config = object.__new__(type(self))
        vars(config).update(vars(self))
        config._set(self._given, values)
        return config

    def filled(self, defaults: "GenerationConfig | None" = None) -> "GenerationConfig":
        """A copy with a value in every field.

        Args:
          defaults: values for the fields that are not given here. Fields that it lacks get the
            option's own default. Options of sampling turn it on, unless the same configuration
            gives `do_sample`. If `min_new_tokens` would exceed `max_new_tokens`, the value that
            is given here is used for both.
        """
        if self.is_filled:
            return self
        values = dict(_DEFAULTS)
        for config in (defaults, self):
            if config is None:
                continue
            given = {name: vars(config)[name] for name in config.given}
            if not config.given.isdisjoint(SAMPLED_OPTIONS):
                given.setdefault("do_sample", True)
            values |= given
            if values["min_new_tokens"] > values["max_new_tokens"]:
                wins, yields = "min_new_tokens", "max_new_tokens"
                if yields in given:
                    wins, yields = yields, wins
                values[yields] = values[wins]
        return self._of_checked(values)

    @classmethod
    def _of_checked(cls, values: Mapping[str, Any]) -> "GenerationConfig":
        """A configuration of values for all fields, which other configurations have checked.

        To check them again would delay the first token by a tenth of a millisecond.
        """
        config = object.__new__(cls)
        vars(config).update(values, _given=_ALL_NAMES)
        return config

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn, and not simply the likeliest chosen."""
        config = self.filled()
        return config.do_sample and config.temperature > 0

    @property
    def processors(self) -> Processors:
        """The set of active processors, a static argument of the programs."""
        config = self.filled()
        return Processors(
            edit=bool(config.min_new_tokens and config.eos_token_ids) or config._asks(_EDITS),
            sample=config.sampled,
            truncate=config.sampled and config._asks(set(SAMPLED_OPTIONS) - {"temperature"}),
            logprobs=config.return_logprobs is not None,
            beams=(config.num_beams, config.kept_per_beam) if config.num_beams > 1 else (0, 0),
            custom=config.logits_processors,
        )

    @property
    def kept_per_beam(self) -> int:
        """Candidates per beam in a step of beam search: enough even if all end tokens lead."""
        return max(2, 1 + len(self.filled().eos_token_ids))

    @property
    def conflict(self) -> str | None:
        """A message about options that exclude each other; None if there are none."""
        config = self.filled()
        n, beams = config.num_return_sequences, config.num_beams
        if beams == 1:
            if n > 1 and not config.sampled:
                return (
                    f"num_return_sequences must be 1 if nothing is sampled, got {n}; give a "
                    "temperature or num_beams, or ask for one"
                )
            return None
        if n > beams:
            return f"num_return_sequences must be at most num_beams ({beams}), got {n}"
        if not config.max_new_tokens:
            return f"max_new_tokens must be at least 1 with num_beams {beams}"
        if 0 < config.temperature < _LEAST_OF_BEAMS:
            return f"temperature must be 0 or at least {_LEAST_OF_BEAMS} with num_beams {beams}"
        for name in _NOT_WITH_BEAMS:
            if getattr(config, name) != OPTIONS[name].default:
                return f"{name} cannot be combined with num_beams {beams}; set num_beams=1"
        return None

    def _asks(self, names: Iterable[str]) -> bool:
        """Whether any of these options differs from its default."""
        return any(getattr(self, name) != OPTIONS[name].default for name in names)

    @property
    def named_ids(self) -> dict[str, set[int]]:
        """The ids in options, by option. End-of-sequence ids may be outside the vocabulary."""
        config = self.filled()
        return {
            "bad_words_ids": {i for word in config.bad_words_ids for i in word},
            "suppress_tokens": set(config.suppress_tokens),
            "begin_suppress_tokens": set(config.begin_suppress_tokens),
            "logit_bias": {i for i, _ in config.logit_bias},
        }

    def id_outside(self, vocab_size: int) -> str | None:
        """A message about the first id of `named_ids` outside the vocabulary; None without one."""
        for name, ids in self.named_ids.items():
            if ids and max(ids) >= vocab_size:
                return f"{name} has id {max(ids)}, the vocabulary is 0..{vocab_size - 1}"
        return None

    @property
    def biases(self) -> list[tuple[int, float, int]]:
        """(id, bias of its logit, first step without the bias)."""
        config = self.filled()
        return [
            *((i, bias, _ALWAYS) for i, bias in config.logit_bias),
            *((i, -math.inf, _ALWAYS) for i in config.suppress_tokens),
            *((i, -math.inf, 1) for i in config.begin_suppress_tokens),
            *(
                (i, -math.inf, config.min_new_tokens)
                for i in config.eos_token_ids
                if config.min_new_tokens
            ),
        ]

    @property
    def bad_words(self) -> list[tuple[int, ...]]:
        """`bad_words_ids` without single end-of-sequence ids, as in transformers."""
        config = self.filled()
        ends = {(i,) for i in config.eos_token_ids}
        return [word for word in config.bad_words_ids if word not in ends]

    @classmethod
    def from_files(
        cls, generation: Mapping[str, Any], config: Mapping[str, Any], source: str
    ) -> "GenerationConfig":
        """The defaults of a checkpoint.

        They come from generation_config.json. As in transformers, config.json is used only if there
        is no generation_config.json, as in checkpoints from before 2023. But if
        generation_config.json has no end-of-sequence ids, those of config.json are used.
        `max_length`, which limits prompt and response together, is ignored.

        Args:
          generation: content of generation_config.json, or {}.
          config: content of config.json.
          source: path of generation_config.json, for messages.

        Raises:
          CheckpointError: a field has an impossible value.

        Warns:
          UserWarning: the file contains an option that fdjax does not support.
        """
        eos = generation.get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        eos = [] if eos is None else eos
        try:
            eos = _ids("eos_token_id", eos if isinstance(eos, list) else [eos])
        except ValueError:
            raise CheckpointError(f"{source}: eos_token_id must be ids, got {eos!r}") from None
        if not (generation or Path(source).exists()):
            generation, source = config, str(Path(source).with_name("config.json"))
        names = {name for name, option in OPTIONS.items() if option.in_files}
        known = {n: generation[n] for n in names if generation.get(n) is not None}
        for name, neutral in _NOT_HONOURED.items():
            value = generation.get(name)
            if value not in (None, [], {}, *neutral):
                warnings.warn(
                    f"{source}: {name} {value!r} is not supported and has no effect", stacklevel=3
                )
        if not known.keys().isdisjoint(SAMPLED_OPTIONS):
            # As in transformers, a temperature in a file does not turn sampling on.
            known.setdefault("do_sample", False)
        try:
            return cls(**known, **({"eos_token_ids": eos} if eos else {}))
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}") from None


OPTIONS: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(GenerationConfig)
}
_ALL_NAMES = frozenset(OPTIONS)
_DEFAULTS = {name: option.default for name, option in OPTIONS.items()}
# Options that turn sampling on.
SAMPLED_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.role == "draw")
_EDITS = tuple(name for name, option in OPTIONS.items() if option.role == "edit")
# Options of beam search.
BEAM_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.role == "beams")
# The least temperature with beams, whose scores are sums of log-probabilities divided by it.
_LEAST_OF_BEAMS = 1e-5
# Options that follow the tokens of a row. A beam may drop tokens again, so it cannot have them.
_NOT_WITH_BEAMS = ("stop_strings", "stopping_criteria", "return_logprobs", "return_reruns")


def per_row(
    configs: Sequence[GenerationConfig],
    batch: int,
    *,
    sample_indices: Sequence[int] | None = None,
) -> Sampling:
    """Pack the options of a batch as host arrays. Rows without a configuration are greedy.

    Args:
      configs: one configuration per row. Fields that are not given have the option's own default.
      batch: number of rows B, at least as many as configurations.
      sample_indices: index of each row among the samples or beams of its prompt; default 0.
    """
    rows = [config.filled() for config in configs] + [_NOTHING] * (batch - len(configs))
    indices = [0] * len(configs) if sample_indices is None else sample_indices

    # Options of drawing have no effect on a greedy row, so they are off there.
    drawn = [c if c.sampled else _NOTHING for c in rows]

    def column(name, rows):
        return [getattr(c, name) for c in rows]

    columns = {"reals": {}, "counts": {}}
    # Without beams, their columns would only cost time.
    beams = any(c.num_beams > 1 for c in rows)
    for name, option in OPTIONS.items():
        if option.column and (option.role != "beams" or beams):
            columns[option.column][name] = column(name, drawn if option.role == "draw" else rows)
    columns["reals"]["temperature"] = [c.temperature if c.sampled else 0.0 for c in rows]
    columns["counts"] |= {
        "seed": np.array([c.seed or 0 for c in drawn], np.uint32).view(np.int32),
        "sample_index": [*indices, *[0] * (batch - len(indices))],
        "top_logprobs": [c.return_logprobs or 0 for c in rows],
    }
    if beams:
        modes = list(_EARLY.values())
        columns["counts"]["early_stopping"] = [modes.index(c.early_stopping) for c in rows]
    biases = [np.asarray(c.biases, np.float64).reshape(-1, 3).T for c in rows]
    words = [c.bad_words for c in rows]
    length = _width([word for row in words for word in row], 8)
    # Words are padded in front, so that all of them end in the last column of the table.
    words = [[[-1] * (length - len(w)) + list(w) for w in row] for row in words]
    return Sampling.pack(
        **columns,
        stop_tokens=_table([c.eos_token_ids for c in rows], 4, -1, np.int32),
        bias=_table([b[1] for b in biases], 32, 0.0, np.float32),
        bias_ids=_table([b[0] for b in biases], 32, -1, np.int32),
        bias_until=_table([b[2] for b in biases], 32, 0, np.int32),
        bad_words=_table(words, 8, [-1] * length, np.int32),
    )


def _table(rows, least: int, fill, dtype) -> np.ndarray:
    """Pad rows of different lengths to an array [B, width], with the width from `_width`."""
    width = _width(rows, least)
    return np.asarray([[*row, *[fill] * (width - len(row))] for row in rows], dtype)


def _width(rows, least: int) -> int:
    """The length of the longest row, rounded up to `least` · 4^n so that there are few programs."""
    width = least
    while width < max(map(len, rows), default=0):
        width *= 4
    return width


_NOTHING = GenerationConfig(max_new_tokens=0).filled()
