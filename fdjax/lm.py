"""`load` and `LM`: a checkpoint in, text out."""

import contextlib
import dataclasses
import itertools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fdjax.engine.engine import Engine
from fdjax.engine.memory import check_load
from fdjax.engine.results import Answer, GenerateResult, TextStream, Timer
from fdjax.engine.running import RunningRequest
from fdjax.engine.sequence import Request, Row
from fdjax.models import DecoderConfig, Model, Params, describe, parse_config
from fdjax.pallas_kernels.plan import Plan
from fdjax.sampling.options import GenerationConfig
from fdjax.sampling.per_prompt import per_prompt
from fdjax.system import platform
from fdjax.system.process import refuse_forked, transfers_allowed
from fdjax.text.conversation import as_conversations, chat_ids, split_options
from fdjax.text.prompts import Prompt, as_several, token_ids
from fdjax.text.tokenizer import Tokenizer
from fdjax.tools import score
from fdjax.weights.calibration import calibrated
from fdjax.weights.checkpoint import CheckpointError, load_params, locate, read_json, unnamed_dtype
from fdjax.weights.stacked import stack_layers

# Decode steps per dispatch; a stream shows its text at the end of each.
_STEPS = 32
_STREAM_STEPS = 4

# Models in use, by configuration, dtype and plan.
_loaded: weakref.WeakValueDictionary[Any, Model] = weakref.WeakValueDictionary()


class LM:
    """A loaded model.

    Attributes:
      model: static description; a jit static argument of `fdjax.forward` and `fdjax.generate`.
      params: the weights, a tree of plain dicts.
      tokenizer: false when the checkpoint has none; ids work without.
      defaults: the checkpoint's `GenerationConfig`, for what a call does not give.
      max_len: slots of cache per row, or None to size it by need.
      max_batch: rows that may run at once, or None for as many as fit.
      prefix_cache: prompts share the cache of what they begin with.
      engine: what runs it.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        defaults: GenerationConfig = GenerationConfig(),
        max_len: int | None = None,
        max_batch: int | None = None,
        memory_bytes: int | None = None,
        prefix_cache: bool = True,
        make_engine: Callable[..., Engine] = Engine,
    ):
        limit = model.config.max_position_embeddings
        if max_len is not None and max_len < 1:
            raise ValueError(f"load: max_len must be positive, got {max_len}")
        if max_len is not None and max_len > limit:
            warnings.warn(
                f"max_len {max_len} exceeds the model's max_position_embeddings {limit}: "
                "quality degrades past it",
                stacklevel=3,
            )
        self.model = model
        self.tokenizer = Tokenizer() if tokenizer is None else tokenizer
        self.defaults = defaults.filled()
        self.max_len = max_len
        self.max_batch = max_batch
        self._memory_bytes = memory_bytes
        self.prefix_cache = prefix_cache
        self._make_engine = make_engine
        self.params = params

    @property
    def params(self) -> Params:
        """The weights. Others of the same shapes may be assigned; nothing is compiled anew.

        Assigned as a whole: the containers are copies.

        Raises:
          ValueError: those assigned are not of this model; the first that is not is named.
        """
        return jax.tree.map(lambda leaf: leaf, self._params)

    @params.setter
    @transfers_allowed()
    def params(self, params: Params) -> None:
        params = jax.tree.map(
            lambda leaf: leaf if hasattr(leaf, "devices") else jnp.asarray(leaf), params
        )
        _check_params(params, self.model.abstract_params)
        limits = self.max_len, self.max_batch, self._memory_bytes
        engine = self._make_engine(self.model, params, *limits, self.prefix_cache)
        self._params, self.engine = params, engine

    def __getstate__(self) -> dict[str, Any]:
        # Programs and caches are neither copied nor pickled.
        return {name: value for name, value in vars(self).items() if name != "engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, model=_in_use(state["model"]))
        self.params = self._params

    @property
    def config(self) -> DecoderConfig:
        """The architecture."""
        return self.model.config

    def __repr__(self) -> str:
        return (
            f"LM({self.config.family}, {self.model.parameter_count:,} parameters, "
            f"{self.model.dtype}, {self.model.plan.device_kind})"
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], config: GenerationConfig | None = None, **options
    ) -> GenerateResult:
        """Generate from one prompt or any number of them.

        As many rows as fit run at once. A row that has ended goes to the next prompt. The first
        prompt that fails ends the call; `generate_iter` keeps the other answers.

        Args:
          prompts: a text, a sequence of token ids, or a sequence of either.
          config: fields that it does not give come from `defaults`, those of the checkpoint's
            generation_config.json.
          **options: fields of `GenerationConfig`, over `config`. A list gives one value per prompt;
            for options that are sequences themselves, a list of sequences does. None is as if not
            given, but for `eos_token_id`, another name of `eos_token_ids`: of it None is no end.
            Naming a temperature, top_k, top_p, min_p or typical_p turns sampling on unless
            `do_sample` says otherwise. Without a seed, each call draws its own.

        Returns:
          A `GenerateResult` with one entry per prompt, or `num_return_sequences` for each; an empty
          list of prompts gives empty lists.

        Raises:
          ValueError: a prompt is empty, too long for the cache or has ids outside the vocabulary;
            an option is out of range; the options forbid every token.
          TypeError: there is no such option, or `eos_token_id` and `eos_token_ids` are both named.
          MissingTokenizerError: text or a stop string is given and there is no tokenizer.
          FloatingPointError: a row's logits are not finite; the message names the prompt.
          MemoryError: the cache of one row does not fit beside the weights.

        Warns:
          UserWarning: an option has no effect, as nothing is sampled.
        """
        timer = Timer(self.model, self._params)
        requests = self._requests(prompts, config, options, self.defaults)
        rows = self._run(requests, timer, _STEPS)
        return GenerateResult.of(rows, timer, with_text=bool(self.tokenizer))

    def _run(self, requests: list[Request], timer: Timer, steps: int) -> list[Row]:
        """Rows that have come to their end."""
        rows = [Row(request, self.tokenizer) for request in requests]
        with contextlib.closing(self.engine.run(rows, steps)) as chunks:
            for chunk in chunks:
                timer.chunk(chunk)
        return rows

    def warmup(
        self,
        config: GenerationConfig | None = None,
        *,
        batch: int = 1,
        prompt_tokens: int = 1,
        streamed: bool = False,
        **options,
    ) -> float:
        """Compile what a call needs before it comes, or load it from disk.

        A call of about these sizes with these options then compiles nothing. Prompts of other
        lengths, other numbers of new tokens and of prompts may need other programs.

        Args:
          config, **options: those of the call, as in `generate`.
          batch: how many prompts it has.
          prompt_tokens: tokens of its longest prompt.
          streamed: whether it is one of `stream` or `stream_chat`.

        Returns:
          The seconds that compiling took.

        Raises:
          ValueError: a size is not positive; or as in `generate`.
        """
        for name, size in (("batch", batch), ("prompt_tokens", prompt_tokens)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"warmup: {name} must be a positive integer, got {size!r}")
        timer = Timer(self.model, self._params)
        requests = [
            dataclasses.replace(request, config=self._of_two_tokens(request.config))
            for request in self._requests(
                [[0] * prompt_tokens] * batch, config, options, self.defaults
            )
        ]
        rows = self._run(requests, timer, _STREAM_STEPS if streamed else _STEPS)
        return timer.stats(rows).compile_seconds

    def _of_two_tokens(self, config: GenerationConfig) -> GenerationConfig:
        """A configuration for the same programs whose rows end after the first decode step."""
        never = range(self.config.vocab_size, self.config.vocab_size + len(config.eos_token_ids))
        return dataclasses.replace(
            config,
            eos_token_ids=tuple(never),
            stop_strings=(),
            stopping_criteria=(lambda tokens: len(tokens) > 1,),
        )

    def generate_iter(
        self, prompts: Iterable[Prompt], config: GenerationConfig | None = None, **options
    ) -> Iterator[Answer]:
        """Generate from any number of prompts; yields each answer as soon as it is there.

        A prompt that is refused or fails does not end the others: its answer has an `error`.
        Leaving the loop early is fine.

        Args:
          prompts: texts or sequences of token ids.
          config, **options: as in `generate`.

        Raises:
          ValueError: an option is out of range, as in `generate`, or these are no prompts; at the
            call.
        """
        refused: dict[int, Exception] = {}
        given, _ = as_several(prompts, "generate: prompts")
        requests = self._requests(given, config, options, self.defaults, refused) if given else []
        rows = [Row(request, self.tokenizer) for request in requests]
        for i, error in refused.items():
            rows.append(Row(Request([], self.defaults, i), self.tokenizer))
            rows[-1].error = error
        return self._answers(rows)

    def _answers(self, rows: list[Row]) -> Iterator[Answer]:
        left = dict(enumerate(rows))
        with contextlib.closing(self.engine.runner.run(rows, _STEPS)) as chunks:
            for _ in itertools.chain([None], chunks, [None]):
                for i in [i for i, row in left.items() if row.ended]:
                    yield Answer.of(left.pop(i), with_text=bool(self.tokenizer))

    def submit(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options
    ) -> RunningRequest:
        """Generate from one prompt in the background, together with whatever else runs.

        Thread-safe. Callbacks, such as stopping criteria, may run in any thread.

        Args:
          prompt: a text or a sequence of token ids.
          config, **options: as in `generate`.

        Returns:
          A `RunningRequest`: iterate over it for text as it comes; `result()` waits for the whole.

        Raises:
          ValueError: as in `generate`, at the call.
        """
        if not as_several(prompt, "submit: prompt")[1]:
            raise ValueError("submit: takes one prompt, a text or token ids")
        timer = Timer(self.model, self._params)
        requests = self._requests(prompt, config, options, self.defaults)
        has_text = bool(self.tokenizer)
        rows = [Row(request, self.tokenizer, streamed=has_text) for request in requests]
        return RunningRequest(self.engine.runner, rows, _STREAM_STEPS, timer, with_text=has_text)

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options
    ) -> TextStream:
        """The text of one prompt as it comes; joined, it is what `generate` returns.

        A piece never ends inside a character or in what may become a stop string. Leaving the loop
        early is fine.

        Args:
          prompt: a text or a sequence of token ids.
          config, **options: as in `generate`.

        Returns:
          An iterator over pieces of text, with `result` and `stats`.

        Raises:
          ValueError: as in `generate`, at the call, before anything is yielded.
          MissingTokenizerError: the checkpoint has no tokenizer.
        """
        if not as_several(prompt, "stream: prompt")[1]:
            raise ValueError("stream: takes one prompt, a text or token ids")
        timer = Timer(self.model, self._params)
        one = dataclasses.replace(self.defaults, num_return_sequences=1)
        requests = self._requests(prompt, config, options, one)
        if len(requests) > 1:
            raise ValueError("stream: num_return_sequences must be 1")
        self.tokenizer.decode([])
        row = Row(requests[0], self.tokenizer, streamed=True)
        timer.pause()
        return TextStream(self._pieces(row, timer), row, timer)

    def _pieces(self, row: Row, timer: Timer) -> Iterator[str]:
        timer.resume()
        with contextlib.closing(self.engine.run([row], _STREAM_STEPS)) as chunks:
            for chunk in chunks:
                timer.chunk(chunk)
                if piece := row.new_text():
                    timer.pause()
                    yield piece
                    timer.resume()

    def chat(self, messages, config: GenerationConfig | None = None, **options) -> GenerateResult:
        """Answer a conversation, or each of a list of them, through the checkpoint's chat template.

        Args:
          messages: dicts with "role" and "content", or a list of such lists.
          config: as in `generate`.
          **options: as in `generate`; and `tools`, `documents`, `chat_template` (a name or Jinja
            source), `chat_template_kwargs` (what else the template reads) and
            `continue_final_message`, with the meaning they have in transformers. Unless ends are
            named, the `eos_token` of tokenizer_config.json is one of them.

        Raises:
          ValueError: as in `generate`; there is no template, or it refuses these messages.
        """
        template, options = split_options(self.tokenizer, self.defaults, config, options)
        conversations = as_conversations(messages)
        prompts = [chat_ids(self.tokenizer, one, **template) for one in conversations]
        return self.generate(prompts, config, **options)

    def stream_chat(
        self, messages, config: GenerationConfig | None = None, **options
    ) -> TextStream:
        """The answer to one conversation as it comes: arguments of `chat`, result of `stream`."""
        template, options = split_options(self.tokenizer, self.defaults, config, options)
        return self.stream(chat_ids(self.tokenizer, messages, **template), config, **options)

    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        stride: int | None = None,
        batch_size: int = 16,
    ) -> score.ScoreResult:
        """Log-probabilities of the tokens of texts, and perplexity.

        A text gets the special tokens that the tokenizer adds, as a prompt does. The first token,
        the beginning of the text where the tokenizer marks it, is not scored.

        Args:
          texts: a text, a sequence of token ids, or a sequence of either.
          stride: a text longer than the context is seen through a window of that size, which moves
            on by so many tokens; every token is scored once, with what its first window holds
            before it. Default: such a text is an error.
          batch_size: texts that run together at most; no more than `max_batch`, or than fit.

        Raises:
          ValueError: a text is empty, too long or has ids outside the vocabulary.
          FloatingPointError: logits are not finite; the message names the text.
          MemoryError: the cache that a text needs does not fit beside the weights.
        """
        return score.score(self.engine, self.tokenizer, texts, stride=stride, batch_size=batch_size)

    def _requests(
        self, prompts, config, options, defaults, refused: dict[int, Exception] | None = None
    ) -> list[Request]:
        """What `generate` is asked for; where `refused` is given, it gets the errors of prompts."""
        prompts, _ = as_several(prompts, "generate: prompts")
        vocab_size = self.config.vocab_size
        configs = per_prompt(defaults, config, options, len(prompts))
        requests = []
        for i, (prompt, (row_config, asked)) in enumerate(zip(prompts, configs, strict=True)):
            self._check(row_config, i)
            try:
                ids = token_ids(prompt, self.tokenizer, vocab_size, f"generate: prompt {i}")
                row_config = self._within_context(row_config, ids, i, asked)
            except ValueError as error:
                if refused is None:
                    raise
                refused[i] = error
                continue
            samples = range(row_config.num_return_sequences)
            requests += [Request(ids, row_config, i, sample) for sample in samples]
        if any(request.config.return_reruns for request in requests):
            # `stats` are those of all rows, and so one program runs them.
            for i, request in enumerate(requests):
                config = dataclasses.replace(request.config, return_reruns=True)
                requests[i] = dataclasses.replace(request, config=config)
        return requests

    def _check(self, config: GenerationConfig, i: int) -> None:
        """Whether this model can do what is asked."""
        if wrong := config.id_outside(self.config.vocab_size):
            raise ValueError(f"generate: {wrong}")
        if config.stop_strings:
            self.tokenizer.decode([])
        if config.num_return_sequences > 1 and not config.sampled:
            raise ValueError(
                "generate: num_return_sequences must be 1 where nothing is sampled, got "
                f"{config.num_return_sequences} for prompt {i}; give a temperature, or ask for one"
            )

    def _within_context(
        self, config: GenerationConfig, ids: list[int], i: int, asked: bool
    ) -> GenerationConfig:
        """The configuration with as many new tokens as there is room for.

        Args:
          config, ids: of prompt `i`.
          asked: whether the caller gave the number of new tokens.
        """
        limit = self.max_len or self.config.max_position_embeddings
        if len(ids) + config.max_new_tokens <= limit:
            return config
        if self.max_len is not None and (asked or len(ids) >= limit):
            raise ValueError(
                f"generate: prompt {i} has {len(ids)} tokens and may grow by "
                f"{config.max_new_tokens}, more than max_len {self.max_len}; lower max_new_tokens"
            )
        if len(ids) >= limit:
            raise ValueError(
                f"generate: prompt {i} has {len(ids)} tokens, the model's context is "
                f"{limit}; shorten it, or load(..., max_len=...) to exceed that"
            )
        room = limit - len(ids)
        return dataclasses.replace(
            config, max_new_tokens=room, min_new_tokens=min(config.min_new_tokens, room)
        )

    def program_counts(self) -> dict[str, int]:
        """Programs compiled so far for this model: of "prefill" and of "decode_steps"."""
        return self.engine.program_counts()


def _check_params(params: Params, wanted: Params) -> None:
    """Raise ValueError where parameters are not of the structure, shapes and dtypes wanted."""
    given, want = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{[*leaf.shape]}"
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        for tree in (params, wanted)
    )
    for name in {**want, **given}:
        if given.get(name) != want.get(name):
            raise ValueError(
                f"params: {name} must be {want.get(name, 'absent')}, "
                f"got {given.get(name, 'nothing')}"
            )
    if jax.tree.structure(params) != jax.tree.structure(wanted):
        raise ValueError("params: must be nested dicts, as those of `LM.params`")


def load(
    model: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_batch: int | None = None,
    max_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    prefix_cache: bool = True,
    plan: Plan | None = None,
    device: jax.Device | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    calibration: bool = True,
    compilation_cache: bool | None = None,
    progress: bool | None = None,
) -> LM:
    """Load a Hugging Face checkpoint.

    Args:
      model: a local folder or a hub id; "tiny" is the embedded model.
      dtype: "bfloat16" | "float16" | "float32"; default that of the checkpoint.
      max_batch: rows that may run at once. Default: as many as fit.
      max_len: slots of cache per row. Default: sized by need, in a few steps, up to the model's
        max_position_embeddings. A number of new tokens that the caller does not give is cut to it.
      gpu_memory_utilization: the share of the memory that JAX may still allocate that this model
        takes at most, weights, cache and workspace together; without `max_len`, that becomes the
        longest context that fits for `max_batch` rows (default 1). Default: all of it, by need.
      prefix_cache: compute what prompts have in common once, at their beginnings, while the cache
        has room for it. It changes no result by more than rounding.
      plan: which implementations run; default that of the device.
      device: where the weights go and everything runs, as of `jax.devices()`; default the first
        local one. Weights that are assigned later run where they are.
      revision: branch, tag or commit of a hub id.
      token: for a hub id that asks for one; True and None take the one of `hf auth login`, False
        takes none.
      calibration: use what `fdjax calibrate` wrote beside the checkpoint, if it did. It changes the
        speed, never a result.
      compilation_cache: keep compiled programs on disk between runs. Default: on, unless JAX is
        already configured; False declines.
      progress: show a progress bar; default when standard error is a terminal.

    Raises:
      CheckpointError: the checkpoint or its calibration is damaged or not supported; one line says
        what and where.
      ValueError: an argument is out of range.
      MemoryError: the weights, or `max_batch` rows of `max_len` tokens beside them, do not fit;
        nothing has been allocated.
    """
    if dtype is not None and dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"load: dtype must be bfloat16, float16 or float32, got {dtype!r}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"load: plan must be a Plan, as of Plan.for_device, got {plan!r}")
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f"load: device must be one of jax.devices(), got {device!r}")
    refuse_forked()
    platform.warn_of_idle_gpu()
    if compilation_cache is not False:
        platform.enable_compilation_cache()
    folder = locate(model, revision=revision, token=token)
    data = read_json(folder / "config.json")
    config = parse_config(data, str(folder / "config.json"))
    if calibration:
        config = calibrated(config, folder)
    plan = Plan.for_device(device) if plan is None else plan
    description = describe(config, dtype=dtype or unnamed_dtype(folder, data), plan=plan)
    description = _in_use(description)
    longest, memory_bytes = check_load(
        description,
        max_batch=max_batch,
        max_len=max_len,
        gpu_memory_utilization=gpu_memory_utilization,
        device=device,
    )
    generation = read_json(folder / "generation_config.json", required=False)
    defaults = GenerationConfig.from_files(generation, data, str(folder / "generation_config.json"))
    if wrong := defaults.id_outside(config.vocab_size):
        raise CheckpointError(f"{folder}: {wrong}")
    tokenizer = Tokenizer(folder)
    with transfers_allowed(), _progress_bar(progress, folder.name) as update:
        params = load_params(folder, description, device=device, progress=update)
        # Here, as nobody else holds them yet, and held until the engine has them.
        _stacked = stack_layers(description, params, owned=True, memory_bytes=memory_bytes)
    return LM(
        description,
        params,
        tokenizer,
        defaults=defaults,
        # Where memory does not limit the context, nobody does.
        max_len=longest if max_len or longest != config.max_position_embeddings else None,
        max_batch=max_batch,
        memory_bytes=memory_bytes,
        prefix_cache=prefix_cache,
    )


def _in_use(model: Model) -> Model:
    """The equal model that is in use, if there is one: its programs are not compiled anew."""
    return _loaded.setdefault((model.config, model.dtype, model.plan), model)


@contextlib.contextmanager
def _progress_bar(show, name):
    if show is None:
        show = sys.stderr is not None and sys.stderr.isatty()
    if not show:
        yield lambda done, total: None
        return
    from tqdm import tqdm

    with tqdm(desc=name, unit="B", unit_scale=True, leave=False) as bar:

        def update(done, total):
            bar.total = total
            bar.update(done - bar.n)

        yield update
