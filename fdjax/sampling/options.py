"""What can be asked of a generation: `GenerationConfig`, and a batch of them as arrays."""

import dataclasses
import enum
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fdjax.models import CheckpointError
from fdjax.sampling.processors import MAX_NGRAM
from fdjax.sampling.sampler import MAX_TOP_LOGPROBS, LogitsProcessor, Processors, Sampling

# (tokens generated so far) → whether the row ends with them.
StoppingCriterion = Callable[[Sequence[int]], bool]


class Unset(enum.Enum):
    """The value of a field that nobody gave: the checkpoint's default holds."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET = Unset.UNSET

# Where a bias is never lifted.
_ALWAYS = 2**31 - 1

# What transformers would do on finding these in generation_config.json, and fdjax does not, with
# the values that ask for nothing.
_NOT_HONOURED = {
    "max_time": (),
    "num_beam_groups": (1,),
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
    """A scalar of NumPy as Python's."""
    return value.item() if isinstance(value, np.generic) else value


@dataclasses.dataclass(frozen=True)
class Number:
    """A check of a number.

    Attributes:
      kind: int or float.
      within: the range, in words.
      accepts: whether a number is in it.
      optional: None is taken too.
    """

    kind: type
    within: str
    accepts: Callable[[Any], bool]
    optional: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """The value as Python's.

        Raises:
          ValueError: it is no such number.
        """
        value = _plain(value)
        if value is None and self.optional:
            return None
        kinds = int if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not self._has(value):
            raise ValueError(f"generate: {name} must be {self}, got {value!r}")
        return value

    def parse(self, text: str) -> Any:
        """The number that a text says.

        Raises:
          ValueError: it says none, or not one in the range.
        """
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if value is None or not self._has(value):
            raise ValueError(f"must be {self}, got {text!r}")
        return value

    def _has(self, value) -> bool:
        return (self.kind is int or math.isfinite(value)) and self.accepts(value)

    def __str__(self) -> str:
        return f"{'an integer' if self.kind is int else 'a number'} {self.within}"


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
        _real("in [-100, 100]", lambda x: -100 <= x <= 100)(f"{name} of {pair[0]}", pair[1])
        biases[int(pair[0])] = float(pair[1])
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
                f"generate: {name} must be hashable, as programs are kept by them; got {function!r}"
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
# Beyond, fp32 keeps neither the order of scores nor, at its end, what is forbidden.
_temperature = _real("in [0, 1e30]", lambda t: 0 <= t <= 1e30)
_mass = _real("in [0, 1]", lambda p: 0 <= p <= 1)
_factor = _real("in [1e-30, 1e30]", lambda r: 1e-30 <= r <= 1e30)
_share = _real("in (0, 1]", lambda p: 0 < p <= 1)
_penalty = _real("in [-2, 2]", lambda x: -2 <= x <= 2)


@dataclasses.dataclass(frozen=True)
class Option:
    """What is known of an option beside its name. Everything else derives from it.

    Attributes:
      default: what holds where neither the caller nor the checkpoint gives a value.
      check: (name, value) → the value as it is kept; raises ValueError.
      role: "draw": it says what to draw from, and naming it turns sampling on; "edit": it changes
        logits before a token is chosen.
      flag: what the command line calls its value, and its help; None where it has no flag.
      column: "reals" or "counts" where each row has its value on the device, see `Sampling`.
      depth: of the sequences that it is itself; one level more is a value for each prompt.
      in_files: generation_config.json may have it.
      elsewhere: what other libraries call it, for the error that names the option here.
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


# Not options of transformers, or not its defaults'.
_OURS = {"in_files": False}


@dataclasses.dataclass(frozen=True, repr=False)
class GenerationConfig:
    """How to choose tokens; names and meanings of transformers where it has the option.

    A field that is not given is `UNSET`. `LM` takes it from the checkpoint's generation defaults,
    `fdjax.generate` takes the default that stands here. A field that is given as None is at that
    default, whatever the checkpoint says: `eos_token_ids=None` disables the end of sequence.

    `presence_penalty`, `frequency_penalty` and `logit_bias` mean what they mean in vLLM. Sequences
    may be given in any form and are kept as tuples.

    Attributes:
      max_new_tokens: tokens to generate at most; fewer where the context ends. Of a model with
        LongRoPE it decides, together with the prompt's tokens, which factors are used, from the
        first token on.
      min_new_tokens: end-of-sequence ids are not chosen before this many tokens.
      do_sample: draw from the distribution instead of taking its maximum.
      temperature: divides the logits; 0 means greedy. A temperature alone draws from all tokens
        here, and from the 50 likeliest in transformers, where `top_k` is 50 unless it is given.
      top_k: draw from the k likeliest tokens; 0 is off, and the default.
      top_p: draw from the likeliest tokens that together hold this mass, at least one; 1 is off.
      min_p: draw from the tokens at least this likely, relative to the likeliest; 0 is off.
      typical_p: draw from the tokens whose information is nearest to the entropy and that together
        hold this mass (Meister et al. 2022); 1 is off.
      repetition_penalty: divides logits above 0, and multiplies those below, of tokens in the
        prompt or the response; 1 is off.
      presence_penalty: subtracted from the logits of tokens in the response; -2 to 2.
      frequency_penalty: the same, times how often they are in it; -2 to 2.
      no_repeat_ngram_size: no sequence of this many tokens occurs twice, prompt included; 0 is off,
        32 the most.
      bad_words_ids: sequences of ids that must not come about.
      suppress_tokens: ids that are never chosen.
      begin_suppress_tokens: ids that are not chosen first.
      logit_bias: added to the logits of these ids, {id: bias}; -100 to 100.
      stop_strings: end a row where its text has one of these. The text ends before it; the tokens
        end with the one that completed it. Prompts and special tokens are not searched.
      include_stop_str_in_output: the text ends after the stop string instead, as in vLLM.
      stopping_criteria: functions of the tokens generated so far that end a row by returning true,
        called on the host with every token, each with a list of its own.
      logits_processors: jittable functions (ids [B,S], lengths [B], scores [B,V]) → scores [B,V],
        the same for the whole batch. They act after all penalties and before the temperature. Each
        set of them is a program of its own, so pass the same functions again, not new lambdas. What
        an object held when it was first called is part of the program.
      num_return_sequences: samples of each prompt, side by side in the result. A stream has one,
        whatever the checkpoint's default.
      seed: of the draws; None is another one in every call. Rows with the same prompt, seed and
        place among the samples of their prompt draw the same tokens, whatever else is in the batch.
      eos_token_ids: ids that end a row.
      return_logprobs: also return each token's log-probability under the raw model. True or 0: of
        the chosen token alone; n: also of the n likeliest, at most 20; False or None: none.
      return_reruns: `stats` also says how much of decode attention left the range of the unified
        maximum and ran again, for the whole batch where one prompt asks for it.
    """

    max_new_tokens: int = _option(
        128,
        _any_tokens,
        flag=("N", "tokens to generate at most; {default}"),
        column="counts",
        elsewhere=("max_tokens", "max_length", "n_predict", "max_completion_tokens"),
    )
    min_new_tokens: int = _option(
        0,
        _any_tokens,
        flag=("N", "not to end before this many tokens"),
        elsewhere=("min_tokens", "min_length"),
    )
    do_sample: bool = _option(False, _flag)
    temperature: float = _option(1.0, _temperature, "draw", ("T", "above 0 samples; 0 is greedy"))
    top_k: int = _option(0, _any_tokens, "draw", ("K", "sample from the K likeliest"))
    top_p: float = _option(
        1.0, _mass, "draw", ("P", "sample from the likeliest that hold the mass P")
    )
    min_p: float = _option(
        0.0, _mass, "draw", ("P", "sample from those at least P times as likely as the likeliest")
    )
    typical_p: float = _option(
        1.0, _share, "draw", ("P", "sample from the most typical that hold the mass P")
    )
    repetition_penalty: float = _option(
        1.0, _factor, "edit", ("X", "above 1 avoids what was there before")
    )
    presence_penalty: float = _option(
        0.0, _penalty, "edit", ("X", "above 0 avoids what is in the answer"), in_files=False
    )
    frequency_penalty: float = _option(
        0.0, _penalty, "edit", ("X", "the same, times how often it is in there"), in_files=False
    )
    no_repeat_ngram_size: int = _option(0, _ngram, "edit", ("N", "no N tokens in a row come twice"))
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
    seed: int | None = _option(None, _seed, flag=("N", "makes samples reproducible"), **_OURS)
    eos_token_ids: tuple[int, ...] = _option(
        (), _ids, **_OURS, depth=1, elsewhere=("stop_token_ids",)
    )
    return_logprobs: bool | int | None = _option(
        None, _top, **_OURS, elsewhere=("logprobs", "top_logprobs", "output_scores")
    )
    return_reruns: bool = _option(False, _flag, **_OURS)

    def __post_init__(self):
        given = frozenset(name for name in OPTIONS if getattr(self, name) is not UNSET)
        # No field, as it follows from them; kept, as each row of a batch asks for it many times.
        object.__setattr__(self, "_given", given)
        for name in given:
            option, value = OPTIONS[name], getattr(self, name)
            value = option.default if value is None else option.check(name, value)
            object.__setattr__(self, name, value)
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
        """The names of the fields that have a value."""
        return self._given

    def filled(self, defaults: "GenerationConfig | None" = None) -> "GenerationConfig":
        """The same with a value in every field.

        Args:
          defaults: what gives the fields that are not given here, as far as it has them. Of
            `min_new_tokens` and `max_new_tokens`, the one that is given here wins.
        """
        if len(self._given) == len(OPTIONS):
            return self
        values = {name: option.default for name, option in OPTIONS.items()}
        for config in (defaults, self):
            if config is None:
                continue
            given = {name: getattr(config, name) for name in config.given}
            values |= given
            if values["min_new_tokens"] > values["max_new_tokens"]:
                wins, yields = "min_new_tokens", "max_new_tokens"
                if yields in given:
                    wins, yields = yields, wins
                values[yields] = values[wins]
        return GenerationConfig(**values)

    @property
    def sampled(self) -> bool:
        """Tokens are drawn, not the likeliest."""
        config = self.filled()
        return config.do_sample and config.temperature > 0

    @property
    def processors(self) -> Processors:
        """The static set of active processors."""
        config = self.filled()
        return Processors(
            edit=bool(config.min_new_tokens and config.eos_token_ids) or config._asks(_EDITS),
            sample=config.sampled,
            truncate=config.sampled and config._asks(set(SAMPLED_OPTIONS) - {"temperature"}),
            logprobs=config.return_logprobs is not None,
            custom=config.logits_processors,
        )

    def _asks(self, names: Iterable[str]) -> bool:
        """Whether any of these options is not at its default."""
        return any(getattr(self, name) != OPTIONS[name].default for name in names)

    @property
    def named_ids(self) -> dict[str, set[int]]:
        """The ids that options name, by option; end-of-sequence ids may lie anywhere."""
        config = self.filled()
        return {
            "bad_words_ids": {i for word in config.bad_words_ids for i in word},
            "suppress_tokens": set(config.suppress_tokens),
            "begin_suppress_tokens": set(config.begin_suppress_tokens),
            "logit_bias": {i for i, _ in config.logit_bias},
        }

    def id_outside(self, vocab_size: int) -> str | None:
        """What of `named_ids` is in no vocabulary of that size, in words."""
        for name, ids in self.named_ids.items():
            if ids and max(ids) >= vocab_size:
                return f"{name} has id {max(ids)}, the vocabulary is 0..{vocab_size - 1}"
        return None

    @property
    def biases(self) -> list[tuple[int, float, int]]:
        """(id, what is added to its logit, the step from which on it is not)."""
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
        """As in transformers, an end-of-sequence id alone is no bad word."""
        config = self.filled()
        ends = {(i,) for i in config.eos_token_ids}
        return [word for word in config.bad_words_ids if word not in ends]

    @classmethod
    def from_files(
        cls, generation: Mapping[str, Any], config: Mapping[str, Any], source: str
    ) -> "GenerationConfig":
        """Defaults of a checkpoint: generation_config.json, and config.json where that is silent.

        As in transformers, of options other than end-of-sequence ids config.json is asked only
        where there is no generation_config.json, as in checkpoints of before 2023. What it asks for
        and fdjax does not do is warned of. A length of prompt and response together (`max_length`)
        is not taken over.

        Raises:
          CheckpointError: a field has a value that cannot be meant.
        """
        eos = generation.get("eos_token_id")
        eos = config.get("eos_token_id") if eos is None else eos
        eos = [] if eos is None else eos
        try:
            eos = _ids("eos_token_id", eos if isinstance(eos, list) else [eos])
        except ValueError:
            raise CheckpointError(f"{source}: eos_token_id must be ids, got {eos!r}") from None
        if not generation:
            generation, source = config, str(Path(source).with_name("config.json"))
        names = {name for name, option in OPTIONS.items() if option.in_files}
        known = {n: generation[n] for n in names if generation.get(n) is not None}
        if (beams := generation.get("num_beams")) not in (None, 1):
            warnings.warn(
                f"{source}: num_beams {beams!r} asks for beam search, which fdjax does not do; "
                "it decodes greedily, or samples where do_sample is true",
                stacklevel=3,
            )
        for name, neutral in _NOT_HONOURED.items():
            value = generation.get(name)
            if value not in (None, [], {}, *neutral):
                warnings.warn(
                    f"{source}: {name} {value!r} is not supported and has no effect", stacklevel=3
                )
        try:
            return cls(**known, **({"eos_token_ids": eos} if eos else {}))
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}") from None


OPTIONS: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(GenerationConfig)
}
# Options that say what to draw from.
SAMPLED_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.role == "draw")
_EDITS = tuple(name for name, option in OPTIONS.items() if option.role == "edit")


def per_row(
    configs: Sequence[GenerationConfig],
    batch: int,
    *,
    sample_indices: Sequence[int] | None = None,
) -> Sampling:
    """The requests of a batch as host arrays; rows without a request are greedy.

    Args:
      configs: one per row; fields that are not given are at the option's own default.
      batch: B, at least as many.
      sample_indices: which sample of its prompt each row is; default the first.
    """
    rows = [config.filled() for config in configs] + [_NOTHING] * (batch - len(configs))
    indices = [0] * len(configs) if sample_indices is None else sample_indices

    # A greedy row draws from nothing.
    drawn = [c if c.sampled else _NOTHING for c in rows]

    def column(name, rows):
        return [getattr(c, name) for c in rows]

    columns = {"reals": {}, "counts": {}}
    for name, option in OPTIONS.items():
        if option.column:
            columns[option.column][name] = column(name, drawn if option.role == "draw" else rows)
    columns["reals"]["temperature"] = [c.temperature if c.sampled else 0.0 for c in rows]
    columns["counts"] |= {
        "seed": np.array([c.seed or 0 for c in drawn], np.uint32).view(np.int32),
        "sample_index": [*indices, *[0] * (batch - len(indices))],
        "top_logprobs": [c.return_logprobs or 0 for c in rows],
    }
    biases = [np.asarray(c.biases, np.float64).reshape(-1, 3).T for c in rows]
    words = [c.bad_words for c in rows]
    length = _width([word for row in words for word in row], 8)
    # Padded in front, a word ends where its table ends.
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
    """Rows of different lengths as an array [B, width], one of few widths."""
    width = _width(rows, least)
    return np.asarray([[*row, *[fill] * (width - len(row))] for row in rows], dtype)


def _width(rows, least: int) -> int:
    """The longest row, rounded up to one of few widths: each is a program of its own."""
    width = least
    while width < max(map(len, rows), default=0):
        width *= 4
    return width


_NOTHING = GenerationConfig(max_new_tokens=0).filled()
