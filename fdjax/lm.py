"""`load` and `LM`: a checkpoint in, text out."""

import contextlib
import dataclasses
import gc
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdjax.engine.beams import request_state
from fdjax.engine.engine import Engine
from fdjax.engine.generation import check_params
from fdjax.engine.memory import check_limits, check_load
from fdjax.engine.mesh import Place
from fdjax.engine.results import (
    GenerateResult,
    IndexedGeneration,
    Interrupted,
    TextStream,
    Timer,
    bytes_of_params,
    closed_at_exit,
)
from fdjax.engine.running import RunningRequest
from fdjax.engine.sequence import Request, RequestState
from fdjax.engine.task import STREAM_STEPS, Call
from fdjax.models import DecoderConfig, Model, Params, describe, parse_config
from fdjax.pallas_kernels.plan import Plan
from fdjax.sampling.options import GenerationConfig
from fdjax.sampling.per_prompt import in_lists, per_prompt
from fdjax.system import platform
from fdjax.system import progress as progress_bars
from fdjax.system.process import refuse_forked, transfers_allowed
from fdjax.system.traces import refuse_trace
from fdjax.text.conversation import as_conversations, chat_ids, split_options
from fdjax.text.prompts import Prompt, as_several, token_array
from fdjax.text.tokenizer import Tokenizer
from fdjax.tools import score
from fdjax.weights.calibration import calibrated
from fdjax.weights.checkpoint import (
    CheckpointError,
    fingerprint,
    is_quantised_already,
    load_params,
    locate,
    quantised_config,
    read_json,
    unnamed_dtype,
)
from fdjax.weights.division import divided
from fdjax.weights.quantise import quantised_formats
from fdjax.weights.stacked import LayerStacks

# Decode steps per dispatch.
_STEPS = 32

# Models in use, by (configuration, dtype, plan, number of devices, dtype of the cache).
_loaded: weakref.WeakValueDictionary[Any, Model] = weakref.WeakValueDictionary()


class LM:
    """A loaded model.

    Attributes:
      model: static description; a jit static argument of `fdjax.forward` and `fdjax.generate`.
      params: the weights, a tree of plain dicts. If devices share the model, each holds its part.
        Assigned weights of a single device are divided among them.
      tokenizer: the tokenizer, which is false if the checkpoint has none. Token ids work without.
      defaults: the checkpoint's `GenerationConfig`, for options that a call does not give.
      max_len: cache slots per row, or None to size the cache by the prompts.
      max_batch: largest number of rows that run at once, or None for as many as fit.
      prefix_cache: whether prompts share the cache of a common beginning.
      engine: the engine that runs the model.
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
        """Wrap a model and its weights. `load` does so for a checkpoint.

        Args:
          model, params, tokenizer, defaults, max_len, max_batch, prefix_cache: see the attributes.
          memory_bytes: limit for weights, cache and workspace together. By default, the cache takes
            at most as much as the weights, or 1 GiB; `load` gives all free memory.
          make_engine: function of (model, params, max_len, max_batch, memory_bytes, prefix_cache)
            that returns the engine.

        Raises:
          ValueError: `max_len`, `max_batch` or `memory_bytes` is not a positive integer, `max_len`
            exceeds a learned table of positions, or the parameters do not belong to the model.
          TypeError: `defaults` is not a `GenerationConfig`.

        Warns:
          UserWarning: `max_len` exceeds the model's max_position_embeddings.
        """
        limit = model.config.max_position_embeddings
        max_batch, max_len, memory_bytes = check_limits(
            max_batch=max_batch, max_len=max_len, memory_bytes=memory_bytes
        )
        if max_len is not None and max_len > limit:
            if model.config.position_offset is not None:
                raise ValueError(
                    f"load: max_len must be at most {limit}, the positions that the model has "
                    f"learned, got {max_len}"
                )
            warnings.warn(
                f"max_len {max_len} exceeds the model's max_position_embeddings {limit}: "
                "quality degrades past it",
                stacklevel=3,
            )
        self.model = model
        self.tokenizer = tokenizer
        self.defaults = defaults
        self._max_len = max_len
        self._max_batch = max_batch
        self._memory_bytes = memory_bytes
        self._prefix_cache = prefix_cache
        self._make_engine = make_engine
        self.params = params

    @property
    def params(self) -> Params:
        """The weights. You may assign other weights of the same shapes; nothing is recompiled.

        Reading returns new containers, so changing one of them changes nothing here: assign the
        whole tree.

        Raises:
          ValueError: assigned weights do not belong to this model. The message names the first
            wrong one.
          RuntimeError: weights are assigned inside a JAX trace.
        """
        return jax.tree.map(lambda leaf: leaf, self._params)

    @params.setter
    @transfers_allowed()
    def params(self, params: Params) -> None:
        refuse_trace("params")
        params = jax.tree.map_with_path(_as_numbers, params)
        if self.model.ranks > 1 and (leaves := jax.tree.leaves(params)):
            place = Place.of(leaves[0])
            if len(place.devices) != self.model.ranks:
                place = Place.for_ranks(self.model.ranks)
            params = divided(self.model, params, place.devices)
        check_params(params, self.model.abstract_params)
        limits = self._max_len, self._max_batch, self._memory_bytes
        engine = self._make_engine(self.model, params, *limits, self._prefix_cache)
        self._params, self.engine = params, engine
        self._params_bytes = bytes_of_params(params)

    @property
    def max_len(self) -> int | None:
        """Cache slots per row, or None to size the cache by the prompts. It cannot be changed."""
        return self._max_len

    @property
    def max_batch(self) -> int | None:
        """Largest number of rows that run at once, or None. It cannot be changed."""
        return self._max_batch

    @property
    def prefix_cache(self) -> bool:
        """Whether prompts share the cache of a common beginning. It cannot be changed."""
        return self._prefix_cache

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. It is false if there is none, also after None is assigned."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = Tokenizer() if tokenizer is None else tokenizer

    @property
    def defaults(self) -> GenerationConfig:
        """The checkpoint's options. Fields that an assigned one lacks get the option's default.

        Raises:
          TypeError: something else than a `GenerationConfig` is assigned.
        """
        return self._defaults

    @defaults.setter
    def defaults(self, defaults: GenerationConfig) -> None:
        if not isinstance(defaults, GenerationConfig):
            raise TypeError(f"defaults: must be a GenerationConfig, got {defaults!r}")
        self._defaults = defaults.filled()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles have neither programs nor caches.
        return {name: value for name, value in vars(self).items() if name != "engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, model=_in_use(state["model"]))
        self.params = self._params

    @property
    def config(self) -> DecoderConfig:
        """The architecture."""
        return self.model.config

    def __repr__(self) -> str:
        ranks = f"{self.model.ranks} x " if self.model.ranks > 1 else ""
        return (
            f"LM({self.config.family}, {self.model.parameter_count:,} parameters, "
            f"{self.model.dtype}, {ranks}{self.model.plan.device_kind})"
        )

    def generate(
        self, prompts: Prompt | Sequence[Prompt], config: GenerationConfig | None = None, **options
    ) -> GenerateResult:
        """Generate from one prompt or any number of them.

        As many rows as fit run at once. When a row ends, the next prompt takes its place. The first
        prompt that fails ends the call; `generate_iter` keeps the other answers.

        Args:
          prompts: a text, a sequence of token ids, or a sequence of either.
          config: the options of this call. Fields that it leaves out come from `defaults`, which
            holds those of generation_config.json.
          **options: fields of `GenerationConfig` that override `config`. A list gives one value per
            prompt. If the option is itself a sequence, a list of sequences does so. None means not
            given. `eos_token_id` is another name of `eos_token_ids`, and `eos_token_id=None`
            disables the end token. A temperature, top_k, top_p, min_p or typical_p turns sampling
            on unless `do_sample` is given. Without a seed, each call draws a new one.

        Returns:
          A `GenerateResult` with one entry per prompt, or `num_return_sequences` for each; an empty
          list of prompts gives empty lists.

        Raises:
          ValueError: a prompt has no tokens, is too long for the cache or has ids outside the
            vocabulary; an option is out of range; the options forbid every token.
          TypeError: there is no such option, or both `eos_token_id` and `eos_token_ids` are given.
          MissingTokenizerError: a text or a stop string is given, but there is no tokenizer.
          FloatingPointError: a row's logits are not finite; the message names the prompt.
          MemoryError: the cache of one row does not fit beside the weights.
          Interrupted: Ctrl-C. It is a KeyboardInterrupt whose `answers` has the complete answers.

        Warns:
          UserWarning: an option has no effect because nothing is sampled.
        """
        timer = Timer(self.model, self._params_bytes)
        requests = self._requests(prompts, config, options, self.defaults)
        rows = self._run(requests, timer, _STEPS)
        return GenerateResult.of(rows, timer, with_text=bool(self.tokenizer))

    def _states(self, requests: list[Request], *, streamed: bool = False) -> list[RequestState]:
        """The state of each request."""
        options = {"streamed": streamed, "page_tokens": self.engine.page_tokens}
        return [request_state(request, self.tokenizer, **options) for request in requests]

    def _run(self, requests: list[Request], timer: Timer, steps: int) -> list[RequestState]:
        """Run the requests to their end and return their rows, one per request."""
        rows = self._states(requests)
        run = contextlib.closing(self.engine.run(rows, steps))
        try:
            with run as chunks, progress_bars.answers(len(rows)) as update:
                for chunk in chunks:
                    timer.chunk(chunk)
                    if update is not None:
                        _show(rows, update)
        except KeyboardInterrupt as error:
            self.engine.runner.aborted = True
            complete = [row for row in _answers(rows) if row.finish_reason is not None]
            has_text = bool(self.tokenizer)
            raise Interrupted(
                [IndexedGeneration.of(row, with_text=has_text) for row in complete]
            ) from error
        return rows

    def warmup(
        self,
        config: GenerationConfig | None = None,
        *,
        batch: int = 1,
        prompt_tokens: int = 1,
        streamed: bool = False,
        smaller: bool = False,
        **options,
    ) -> float:
        """Compile the programs of a later call now, or load them from disk.

        A later call of about these sizes with these options then compiles nothing. Other lengths of
        prompts, numbers of new tokens or numbers of prompts may need other programs, and so may
        prompts whose beginning is in the cache.

        A server calls it once with `smaller`, and sets `max_len`, so that all rows have the same
        number of slots, on which the programs depend. The call then also runs requests that arrive
        one after another until `batch` of them run, as on a server. At its end, Python's garbage
        collector stops searching the objects that exist (`gc.freeze`). Searching them takes a tenth
        of a second.

        Args:
          config, **options: as in `generate`, the options of the later call.
          batch: number of prompts of the later call.
          prompt_tokens: tokens in its longest prompt.
          streamed: whether it is a call of `stream`, `stream_chat` or `submit`.
          smaller: compile the programs for fewer and shorter prompts as well, so that requests may
            come and go at any time, up to `batch` at once.

        Returns:
          The seconds spent compiling.

        Raises:
          ValueError: a size is not a positive integer, prompts have no room, or `smaller` is True
            and an option has one value per prompt; or as in `generate`.
        """
        for name, size in (("batch", batch), ("prompt_tokens", prompt_tokens)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"warmup: {name} must be a positive integer, got {size!r}")
        most = self.engine.max_len or self.config.max_position_embeddings
        if prompt_tokens >= most:
            raise ValueError(f"warmup: prompt_tokens must be less than {most}, got {prompt_tokens}")
        # More prompts than run at once take the same calls again and again.
        batches = [[prompt_tokens] * min(batch, 4 * self.engine.most_rows)]
        if smaller and batch > 1 and (names := in_lists(options)):
            raise ValueError(
                f"warmup: {names[0]} must have one value for all prompts if smaller is True, got "
                "one value per prompt"
            )
        if smaller:
            batches = self.engine.batches_up_to(batch, prompt_tokens)
        # Random prompts, so that none begins with tokens that another has in the cache.
        rng = np.random.default_rng(0)
        seconds, steps = 0.0, STREAM_STEPS if streamed else _STEPS
        for lengths in batches:
            prompts = [rng.integers(0, self.config.vocab_size, n).tolist() for n in lengths]
            timer = Timer(self.model, self._params_bytes)
            requests = [
                dataclasses.replace(request, config=self._of_two_tokens(request.config))
                for request in self._requests(prompts, config, options, self.defaults)
            ]
            rows = self._run(requests, timer, steps)
            seconds += timer.stats(rows).compile_seconds
        if smaller:
            ids = np.resize(requests[0].ids, min(self.engine.page_tokens + 1, prompt_tokens))
            request = dataclasses.replace(requests[0], ids=ids)
            self._let_requests_come(request, min(batch, self.engine.most_rows), steps)
            gc.collect()
            gc.freeze()
        return seconds

    def _let_requests_come(self, request: Request, count: int, steps: int) -> None:
        """Run requests that arrive in waves, to compile how a state grows.

        Each wave doubles the requests, up to `count`. Two that arrive together and one alone
        follow, because their states grow by other programs. Requests also begin with pages of
        others. Whenever a program is loaded, XLA drops the CUDA graphs of all others and makes them
        again when they next run. So the waves are repeated at the end.
        """
        if request.config.num_beams > 1 or self.engine.place.spans_processes:
            return
        most = self.engine.max_len or self.config.max_position_embeddings
        new = max(1, min(1024, most - len(request.ids)))
        config = dataclasses.replace(request.config, stopping_criteria=(), max_new_tokens=new)
        request = dataclasses.replace(request, config=config)
        runner, timer = self.engine.runner, Timer(self.model, self._params_bytes)
        waves = [1]
        while (came := sum(waves)) < count:
            waves.append(min(came, count - came))
        for arrivals in (waves, [min(count, 2)], [1], waves):
            calls = []
            try:
                for at_once in arrivals:
                    rows = self._states([request] * at_once)
                    calls.append(Call(rows, steps, timer.chunk))
                    runner.submit(calls[-1])
                    # The first chunk after a program was loaded runs without a graph.
                    least = min(2 * steps + 1, new)
                    runner.wait(
                        calls[-1],
                        lambda rows=rows, n=least: all(len(row.tokens) > n for row in rows),
                    )
            finally:
                for call in calls:
                    runner.cancel(call)
            for call in calls:
                runner.wait(call)

    def _of_two_tokens(self, config: GenerationConfig) -> GenerationConfig:
        """A configuration with the same programs whose rows end after the first decode step."""
        never = range(self.config.vocab_size, self.config.vocab_size + len(config.eos_token_ids))
        return dataclasses.replace(
            config,
            eos_token_ids=tuple(never),
            stop_strings=(),
            stopping_criteria=(lambda tokens: len(tokens) > 1,),
        )

    def generate_iter(
        self, prompts: Iterable[Prompt], config: GenerationConfig | None = None, **options
    ) -> Iterator[IndexedGeneration]:
        """Generate from any number of prompts, and yield each answer as soon as it is complete.

        A prompt that is refused or fails does not end the others: its answer has an `error`. You
        may leave the loop early.

        Args:
          prompts: texts or sequences of token ids.
          config, **options: as in `generate`.

        Raises:
          ValueError: an option is out of range, as in `generate`, or the argument does not hold
            prompts; raised by the call itself.
        """
        refused: dict[int, Exception] = {}
        given, _ = as_several(prompts, "generate: prompts")
        requests = self._requests(given, config, options, self.defaults, refused)
        rows = self._states(requests)
        for i, error in refused.items():
            nothing = Request(np.zeros(0, np.int32), self.defaults, i)
            rows.append(RequestState(nothing, self.tokenizer))
            rows[-1].error = error
        return closed_at_exit(self._answers(rows))

    def _answers(self, rows: list[RequestState]) -> Iterator[IndexedGeneration]:
        left = dict(enumerate(rows))
        with contextlib.closing(self.engine.runner.run(rows, _STEPS)) as chunks:
            for _ in itertools.chain([None], chunks, [None]):
                for i in [i for i, row in left.items() if row.ended]:
                    for answer in left.pop(i).answers:
                        yield IndexedGeneration.of(answer, with_text=bool(self.tokenizer))

    def submit(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options
    ) -> RunningRequest:
        """Generate from one prompt in the background, together with other calls.

        The method is thread-safe. Callbacks such as stopping criteria may run in any thread.

        Args:
          prompt: a text or a sequence of token ids.
          config, **options: as in `generate`.

        Returns:
          A `RunningRequest`. Iterate over it for the text as it comes, or call `result()` to wait
          for the whole answer. An answer of several samples or of beams, also by the checkpoint's
          defaults, cannot be iterated over.

        Raises:
          ValueError: as in `generate`; raised by the call itself.
          NotImplementedError: the model spans several processes.
        """
        prompts, is_one = as_several(prompt, "submit: prompt")
        if not is_one:
            raise ValueError("submit: takes one prompt, a text or token ids")
        if self.engine.place.spans_processes:
            raise NotImplementedError(
                "submit: a model that spans processes runs nothing in the background; call "
                "generate in each process"
            )
        timer = Timer(self.model, self._params_bytes)
        requests = self._requests(prompts, config, options, self.defaults)
        has_text = bool(self.tokenizer)
        rows = self._states(requests, streamed=has_text)
        return RunningRequest(self.engine.runner, rows, STREAM_STEPS, timer, with_text=has_text)

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options
    ) -> TextStream:
        """Generate from one prompt and return the text in pieces, as they come.

        The joined pieces are the text that `generate` returns. A piece never ends inside a
        character, nor inside the beginning of a stop string. You may leave the loop early.

        Args:
          prompt: a text or a sequence of token ids.
          config, **options: as in `generate`.

        Returns:
          An iterator over the pieces, with `result` and `stats`.

        Raises:
          ValueError: as in `generate`; raised by the call itself, before the first piece.
          MissingTokenizerError: the checkpoint has no tokenizer.
        """
        prompts, is_one = as_several(prompt, "stream: prompt")
        if not is_one:
            raise ValueError("stream: takes one prompt, a text or token ids")
        timer = Timer(self.model, self._params_bytes)
        one = dataclasses.replace(self.defaults, num_return_sequences=1, num_beams=1)
        requests = self._requests(prompts, config, options, one)
        if requests[0].config.num_beams > 1:
            raise ValueError(
                "stream: num_beams must be 1, because the text of a search is known at its end"
            )
        if len(requests) > 1:
            raise ValueError("stream: num_return_sequences must be 1")
        self.tokenizer.decode([])
        (row,) = self._states(requests, streamed=True)
        timer.pause()
        return TextStream(self._pieces(row, timer), row, timer)

    def _pieces(self, row: RequestState, timer: Timer) -> Iterator[str]:
        timer.resume()
        with contextlib.closing(self.engine.run([row], STREAM_STEPS)) as chunks:
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
          **options: as in `generate`, and five options with the meaning they have in transformers:
            `tools`, `documents`, `chat_template` (a name or Jinja source), `chat_template_kwargs`
            (further variables of the template) and `continue_final_message`. If no end token is
            given, the `eos_token` of tokenizer_config.json also ends an answer.

        Returns:
          A `GenerateResult`, as `generate` returns for the rendered prompts.

        Raises:
          ValueError: as in `generate`; there is no template, or it refuses these messages.
          MissingTokenizerError: the checkpoint has no tokenizer.
        """
        template, options = split_options(self.tokenizer, self.defaults, config, options)
        conversations = as_conversations(messages)
        prompts = [chat_ids(self.tokenizer, one, **template) for one in conversations]
        return self.generate(prompts, config, **options)

    def stream_chat(
        self, messages, config: GenerationConfig | None = None, **options
    ) -> TextStream:
        """Answer one conversation in pieces: arguments as in `chat`, result as in `stream`."""
        template, options = split_options(self.tokenizer, self.defaults, config, options)
        return self.stream(chat_ids(self.tokenizer, messages, **template), config, **options)

    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        stride: int | None = None,
        batch_size: int = 16,
    ) -> score.ScoreResult:
        """Compute the log-probability of each token of texts, and their perplexity.

        As in a prompt, the tokenizer adds its special tokens to a text. The first token is not
        scored; it is often the one that marks the beginning of the text.

        Args:
          texts: a text, a sequence of token ids, or a sequence of either.
          stride: tokens by which a window moves over a text that is longer than the context. The
            window is as long as the context. Each token is scored once, in the first window that
            holds it. Default: a text longer than the context is an error.
          batch_size: largest number of texts that run together. `max_batch` and the memory may
            lower it.

        Returns:
          A `ScoreResult` with one entry per text.

        Raises:
          ValueError: a text has no tokens, is too long or has ids outside the vocabulary; `stride`
            or `batch_size` is out of range.
          MissingTokenizerError: a text is given, but there is no tokenizer.
          FloatingPointError: logits are not finite; the message names the text.
          MemoryError: the cache that a text needs does not fit beside the weights.
        """
        return score.score(self.engine, self.tokenizer, texts, stride=stride, batch_size=batch_size)

    def _requests(
        self, prompts, config, options, defaults, refused: dict[int, Exception] | None = None
    ) -> list[Request]:
        """The requests of a call. If `refused` is given, errors of single prompts are put there."""
        prompts, _ = as_several(prompts, "generate: prompts")
        vocab_size = self.config.vocab_size
        entropy = self.engine.agree("generate", len(prompts))
        configs = per_prompt(defaults, config, options, len(prompts), entropy)
        requests = []
        for i, (prompt, (row_config, asked)) in enumerate(zip(prompts, configs, strict=True)):
            self._check(row_config, i)
            try:
                ids = token_array(prompt, self.tokenizer, vocab_size, f"generate: prompt {i}")
                row_config = self._within_context(row_config, ids, i, asked)
            except ValueError as error:
                if refused is None:
                    raise
                refused[i] = error
                continue
            # One search gives all answers to a prompt.
            beams = row_config.num_beams > 1
            samples = range(1 if beams else row_config.num_return_sequences)
            requests += [Request(ids, row_config, i, sample) for sample in samples]
        if any(request.config.return_reruns for request in requests):
            # `stats.reruns` covers all rows, so all rows run in the same program.
            for i, request in enumerate(requests):
                config = dataclasses.replace(request.config, return_reruns=True)
                requests[i] = dataclasses.replace(request, config=config)
        self.engine.agree("generate", requests)
        return requests

    def _check(self, config: GenerationConfig, i: int) -> None:
        """Raise ValueError or MissingTokenizerError if this model cannot do prompt `i`."""
        if wrong := config.id_outside(self.config.vocab_size):
            raise ValueError(f"generate: {wrong}")
        if config.stop_strings:
            self.tokenizer.decode([])
        if conflict := config.conflict:
            raise ValueError(f"generate: prompt {i}: {conflict}")
        if config.num_beams > 1:
            self._check_beams(config.num_beams, i)

    def _check_beams(self, beams: int, i: int) -> None:
        """Raise an error if prompt `i` cannot have this many beams."""
        limits = {"rows that run at once": self.engine.most_rows}
        limits["tokens of the vocabulary"] = self.config.vocab_size
        for what, most in limits.items():
            if beams > most:
                raise ValueError(
                    f"generate: prompt {i}: num_beams {beams} must be at most the {most} {what}"
                )
        if not self.engine.paged:
            raise NotImplementedError(
                "generate: num_beams must be 1 here, because the attention kernels that this "
                "device runs for this model read no pages"
            )

    def _within_context(
        self, config: GenerationConfig, ids: np.ndarray, i: int, asked: bool
    ) -> GenerationConfig:
        """The configuration, with the number of new tokens limited to the rest of the context.

        Args:
          config, ids: configuration and token ids of prompt `i`.
          i: index of the prompt, for errors.
          asked: whether the caller gave the number of new tokens.

        Raises:
          ValueError: the prompt does not fit, or `max_len` is set and the caller asked for more.
        """
        limit = self.max_len or self.config.max_position_embeddings
        if len(ids) + config.max_new_tokens <= limit:
            return config
        if self.max_len is not None and len(ids) >= limit:
            raise ValueError(
                f"generate: prompt {i} has {len(ids)} tokens and no room to grow in max_len "
                f"{limit}; shorten it, or load with a larger max_len"
            )
        if self.max_len is not None and asked:
            raise ValueError(
                f"generate: prompt {i} has {len(ids)} tokens and may grow by "
                f"{config.max_new_tokens}, more than max_len {limit}; lower max_new_tokens"
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

    def release(self) -> None:
        """Free the cache. The next call allocates it again; compiled programs stay.

        Raises:
          RuntimeError: requests are running.
        """
        self.engine.release()

    def program_counts(self) -> dict[str, int]:
        """Number of programs compiled so far: "prefill", "first_tokens" and "decode_steps"."""
        return self.engine.program_counts()


def _answers(rows: Sequence[RequestState]) -> list[RequestState]:
    """The requests that hold the results: themselves, or the answers of beam searches."""
    return [answer for row in rows for answer in row.answers]


def _show(rows: Sequence[RequestState], update: Callable[..., None]) -> None:
    """Update a progress bar."""
    done = sum(row.ended for row in rows)
    running = sum(row.has_begun and not row.ended for row in rows)
    text = f"{running} running, {len(rows) - done - running} waiting"
    update(done, sum(len(answer.tokens) for answer in _answers(rows)), text)


def _as_numbers(path: tuple[Any, ...], leaf: Any) -> jax.Array:
    """A leaf of parameters as an array of JAX; raises ValueError if it has no numbers."""
    # `jax.grad` and `jax.vmap` replace arrays by tracers outside of a trace.
    if not isinstance(leaf, jax.core.Tracer):
        if hasattr(leaf, "devices"):
            return leaf
        with contextlib.suppress(TypeError, ValueError):
            return jnp.asarray(leaf)
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    raise ValueError(f"params: {name} must be an array of numbers, got {type(leaf).__name__}")


def load(
    model: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    rounded_activations: bool = True,
    kv_dtype: str | None = None,
    max_batch: int | None = None,
    max_len: int | None = None,
    gpu_memory_utilization: float | None = None,
    prefix_cache: bool = True,
    plan: Plan | None = None,
    device: jax.Device | None = None,
    tensor_parallel: int = 1,
    revision: str | None = None,
    token: str | bool | None = None,
    calibration: bool = True,
    compilation_cache: bool | None = None,
    progress: bool | None = None,
) -> LM:
    """Load a Hugging Face checkpoint.

    Args:
      model: a local folder or a hub id; "tiny" is the embedded model.
      dtype: "bfloat16" | "float16" | "float32"; default the checkpoint's.
      quantize: "int4" | "int8" | "fp8" | "w8a8" quantises the weights of linear layers while they
        are loaded, see docs/quantised.md. The experts of gpt-oss stay in MXFP4. Default: weights
        keep the format of the checkpoint, quantised or not.
      rounded_activations: round the activations of prompts to fp8 or int8, if `quantize` is "fp8"
        or "w8a8", or the checkpoint asks for it. Only Hopper GPUs do so, for 65 tokens at once or
        more.
      kv_dtype: dtype of keys and values in the cache: "int8", or by default the dtype of the
        activations. An int8 cache holds almost twice as many tokens, see docs/quantised.md.
      max_batch: largest number of rows that run at once. Default: as many as fit. More than 256,
        or 32 on a CPU, never do.
      max_len: cache slots per row, for prompt and new tokens. Default: the cache is sized by the
        prompts, in a few steps, up to the model's max_position_embeddings. If a call does not give
        the number of new tokens, it is limited to the slots after the prompt.
      gpu_memory_utilization: share of JAX's free memory that this model may take for weights, cache
        and workspace together, above 0 and at most 1. If `max_len` is not given, it becomes the
        longest context that fits for `max_batch` rows (default 1). Default: all free memory.
        On a GPU whose kernels read pages, the cache is allocated in full at the first use.
      prefix_cache: compute a common beginning of prompts once, as long as the cache has room for
        it. Results may differ by rounding.
      plan: the plan that chooses implementations; default the device's.
      device: one of `jax.devices()`, which holds the weights and runs everything; default the first
        local one. Weights that are assigned later run on the device that holds them.
      tensor_parallel: number of devices that share the model; the first local devices are used. If
        there are fewer, all processes of `jax.distributed` share it, see docs/performance.md.
        Each holds a part of the weights and of the cache, and all run every step together. The
        number must divide the query heads and the width of the MLP. It must divide the KV heads or
        be a multiple of them; KV heads are then repeated. Memory options and plans are for one
        device.
      revision: branch, tag or commit of a hub id.
      token: access token for a hub id that needs one. True and None use the one of `hf auth login`,
        False uses none.
      calibration: use the file that `fdjax calibrate` wrote beside the checkpoint, if there is one.
        It changes the speed, never a result.
      compilation_cache: turn on the cache that keeps compiled programs on disk between runs.
        Default: yes, unless JAX's cache is configured already, or processes share the model. All
        models of a process share the cache, so False does not turn it off for others.
      progress: show a progress bar; default only if standard error is a terminal.

    Raises:
      CheckpointError: the checkpoint or its calibration is damaged or not supported. The message,
        one line, names the file and the problem.
      ValueError: an argument is out of range, or processes that share the model load different
        models or options.
      TypeError: `model` is not a path, `plan` is not a `Plan`, `device` is not a JAX device, or a
        switch is neither True nor False.
      MemoryError: the weights, or `max_batch` rows of `max_len` tokens beside them, do not fit;
        nothing has been allocated.
      RuntimeError: it is called inside a JAX trace.
    """
    if dtype is not None and dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"load: dtype must be bfloat16, float16 or float32, got {dtype!r}")
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"load: model must be a folder or a hub id, got {model!r}")
    if quantize not in (None, "int4", "int8", "fp8", "w8a8"):
        raise ValueError(f"load: quantize must be int4, int8, fp8 or w8a8, got {quantize!r}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"load: plan must be a Plan, such as Plan.for_device(), got {plan!r}")
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(f"load: device must be one of jax.devices(), got {device!r}")
    for name, value, default in (
        ("rounded_activations", rounded_activations, True),
        ("prefix_cache", prefix_cache, True),
        ("calibration", calibration, True),
        ("compilation_cache", compilation_cache, None),
        ("progress", progress, None),
    ):
        if value is not default and not isinstance(value, bool):
            raise TypeError(f"load: {name} must be True or False, got {value!r}")
    place = _place(tensor_parallel, device)
    refuse_forked()
    refuse_trace("load")
    platform.warn_of_idle_gpu()
    platform.log_memory_share()
    if compilation_cache is None:
        compilation_cache = not place.spans_processes
    if compilation_cache:
        platform.enable_compilation_cache()
    folder = locate(model, revision=revision, token=token)
    data = read_json(folder / "config.json")
    config = parse_config(data, str(folder / "config.json"))
    config = quantised_config(folder, config, data, rounded_activations=rounded_activations)
    dtype = dtype or unnamed_dtype(folder, data) or config.dtype
    if quantize is not None:
        if is_quantised_already(folder, config):
            raise ValueError(f"load: {folder} is quantised already, so quantize must be None")
        config = quantised_formats(config, quantize, dtype, rounded_activations=rounded_activations)
    if calibration:
        config = calibrated(config, folder)
    plan = Plan.for_device(device) if plan is None else plan
    if place.spans_processes:
        # These kernels write to the memory of other devices.
        plan = plan.with_xla("decode_layers").with_xla("all_reduce")
    description = describe(
        config, dtype=dtype, plan=plan, tensor_parallel=tensor_parallel, kv_dtype=kv_dtype
    )
    description = _in_use(description)
    longest, memory_bytes = check_load(
        description.local,
        max_batch=max_batch,
        max_len=max_len,
        gpu_memory_utilization=gpu_memory_utilization,
        device=device,
        least=place.least,
    )
    if place.spans_processes:
        options = max_batch, max_len, longest, memory_bytes, prefix_cache
        place.agree("load", (config, dtype, plan, kv_dtype, options, fingerprint(folder)))
    generation = read_json(folder / "generation_config.json", required=False)
    defaults = GenerationConfig.from_files(generation, data, str(folder / "generation_config.json"))
    if wrong := defaults.id_outside(config.vocab_size):
        raise CheckpointError(f"{folder}: {wrong}")
    tokenizer = Tokenizer(folder)
    with transfers_allowed(), progress_bars.loading(folder.name, progress) as update:
        devices = (device,) if tensor_parallel == 1 else place.devices
        stacks = LayerStacks(description)
        params = load_params(
            folder, description, devices=devices, progress=update, take=stacks.take
        )
        params = stacks.views(params)
    return LM(
        description,
        params,
        tokenizer,
        defaults=defaults,
        # Set only if the caller or the memory limits the context.
        max_len=longest if max_len or longest != config.max_position_embeddings else None,
        max_batch=max_batch,
        memory_bytes=memory_bytes,
        prefix_cache=prefix_cache,
    )


def _place(tensor_parallel: int, device: jax.Device | None) -> Place:
    """The devices of a model, see `load`."""
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int):
        raise ValueError(f"load: tensor_parallel must be an integer, got {tensor_parallel!r}")
    if tensor_parallel < 1:
        raise ValueError(f"load: tensor_parallel must be positive, got {tensor_parallel}")
    if tensor_parallel > 1 and device is not None:
        raise ValueError("load: device must be None with tensor_parallel, which takes the first")
    return Place.for_ranks(tensor_parallel, device)


def _in_use(model: Model) -> Model:
    """An equal model that is in use, so that its programs can be used again, or else this model."""
    key = model.config, model.dtype, model.plan, model.ranks, model.kv_dtype
    return _loaded.setdefault(key, model)
