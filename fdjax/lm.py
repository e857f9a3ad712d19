"""`load` and `LM`: a checkpoint in, text out."""

import collections
import contextlib
import dataclasses
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdjax import chat, platform, score, step
from fdjax.checkpoint import load_params, locate, read_json
from fdjax.generation import GenerationConfig, per_row
from fdjax.models import DecoderConfig, Model, Params, describe, parse_config
from fdjax.pallas_kernels.plan import Plan
from fdjax.results import PEAK_GB_PER_S, GenerateResult, Stats, step_bytes
from fdjax.sampling import NOT_FINITE, Processors
from fdjax.schedule import PrefillCall, prefill_calls, slots_for
from fdjax.state import LayerCache, abstract_state, init_cache, start
from fdjax.tokenizer import Detokenizer, Tokenizer

# Decode steps per dispatch; a stream shows its text at the end of each.
_STEPS = 32
_STREAM_STEPS = 4

Prompt = str | Sequence[int]


@dataclasses.dataclass
class _Request:
    ids: list[int]
    config: GenerationConfig
    generated: int = 0


@dataclasses.dataclass
class _Chunk:
    """What came back from the device: tokens [B, n], -1 where a row has none."""

    tokens: np.ndarray
    logprobs: np.ndarray | None

    @classmethod
    def read(cls, tokens: jax.Array, logprobs: jax.Array | None) -> "_Chunk":
        return cls(np.asarray(tokens), None if logprobs is None else np.asarray(logprobs))


class LM:
    """A loaded model.

    Attributes:
      model: static description; a jit static argument of `fdjax.forward` and `fdjax.generate`.
      params: the weights, a tree of plain dicts.
      tokenizer: false when the checkpoint has none; ids work without.
      defaults: the checkpoint's `GenerationConfig`.
      max_len: slots of cache per row, or None to size it by need.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        defaults: GenerationConfig = GenerationConfig(),
        max_len: int | None = None,
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
        self.params = params
        self._param_leaves = jax.tree.leaves(params)
        self.tokenizer = Tokenizer() if tokenizer is None else tokenizer
        self.defaults = defaults
        self.max_len = max_len
        self._idle_cache: list[LayerCache] | None = None
        self._programs: dict[Any, Any] = {}

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
        """Generate from one prompt or many.

        Args:
          prompts: a text, a sequence of token ids, or a sequence of either.
          config: defaults to the checkpoint's generation_config.json.
          **options: fields of `GenerationConfig`, over `config`. A list gives one value per prompt.
            Naming a temperature, top_k or top_p turns sampling on unless `do_sample` says
            otherwise. Without a seed, each call draws its own.

        Returns:
          A `GenerateResult` with one entry per prompt; an empty list of prompts gives empty lists.

        Raises:
          ValueError: a prompt is empty, too long for the cache or has ids outside the vocabulary;
            an option is out of range.
          FloatingPointError: a row's logits are not finite; the message names the prompt.
        """
        requests = self._requests(prompts, config, options)
        rows = [_Row(self, request) for request in requests]
        timer = _Timer(self)
        with contextlib.closing(self._run(requests, _STEPS, timer)) as chunks:
            for chunk in chunks:
                for i, row in enumerate(rows):
                    row.take(chunk, i)
        texts = None
        if self.tokenizer:
            texts = [self.tokenizer.decode(row.tokens) for row in rows]
        with_logprobs = any(request.config.return_logprobs for request in requests)
        return GenerateResult(
            tokens=[row.tokens for row in rows],
            texts=texts,
            finish_reasons=[row.finish_reason for row in rows],
            logprobs=[row.logprobs for row in rows] if with_logprobs else None,
            stats=timer.stats(requests, rows),
        )

    def stream(
        self, prompt: Prompt, config: GenerationConfig | None = None, **options
    ) -> Iterator[str]:
        """Yield the text of one prompt as it comes; joined, it is what `generate` returns.

        A piece never ends inside a character. Leaving the loop early is fine.

        Args:
          prompt: a text or a sequence of token ids.
          config, **options: as in `generate`.

        Raises:
          ValueError: as in `generate`, at the call, before anything is yielded.
          MissingTokenizerError: the checkpoint has no tokenizer.
        """
        if not isinstance(prompt, str) and not (len(prompt) and all(map(_is_id, prompt))):
            raise ValueError("stream: takes one prompt, a text or token ids")
        requests = self._requests(prompt, config, options)
        self.tokenizer.decode([])
        return self._stream(requests)

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
        return chat.chat(self, messages, config, **options)

    def stream_chat(
        self, messages, config: GenerationConfig | None = None, **options
    ) -> Iterator[str]:
        """Yield the answer to one conversation as it comes; arguments are those of `chat`."""
        return chat.stream_chat(self, messages, config, **options)

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
          batch_size: texts that run together at most.

        Raises:
          ValueError: a text is empty, too long or has ids outside the vocabulary.
          FloatingPointError: logits are not finite; the message names the text.
        """
        return score.score(self, texts, stride=stride, batch_size=batch_size)

    def _stream(self, requests):
        detokenizer = Detokenizer(self.tokenizer)
        row = _Row(self, requests[0])
        with contextlib.closing(self._run(requests, _STREAM_STEPS, _Timer(self))) as chunks:
            for chunk in chunks:
                if piece := detokenizer.push(row.take(chunk, 0)):
                    yield piece
        if piece := detokenizer.push([], last=True):
            yield piece

    def _requests(self, prompts, config, options) -> list[_Request]:
        if isinstance(prompts, str) or (len(prompts) and all(_is_id(i) for i in prompts)):
            prompts = [prompts]
        configs = self._configs(config, options, len(prompts))
        requests = []
        for i, (prompt, row_config) in enumerate(zip(prompts, configs, strict=True)):
            ids = self._ids(prompt, i)
            total = len(ids) + row_config.max_new_tokens
            if self.max_len is not None and total > self.max_len:
                raise ValueError(
                    f"generate: prompt {i} has {len(ids)} tokens and may grow by "
                    f"{row_config.max_new_tokens}, more than max_len {self.max_len}"
                )
            limit = self.config.max_position_embeddings
            if self.max_len is None and total > limit:
                if len(ids) >= limit:
                    raise ValueError(
                        f"generate: prompt {i} has {len(ids)} tokens, the model's context is "
                        f"{limit}; shorten it, or load(..., max_len=...) to exceed that"
                    )
                row_config = dataclasses.replace(
                    row_config,
                    max_new_tokens=limit - len(ids),
                    min_new_tokens=min(row_config.min_new_tokens, limit - len(ids)),
                )
            requests.append(_Request(ids, row_config))
        return requests

    def _configs(self, config, options, count) -> list[GenerationConfig]:
        base = self.defaults if config is None else config
        fields = {f.name for f in dataclasses.fields(GenerationConfig)}
        if "eos_token_id" in options:
            eos = options.pop("eos_token_id")
            eos = () if eos is None else eos
            options["eos_token_ids"] = tuple(eos) if isinstance(eos, Sequence) else (eos,)
        for name in options:
            if name not in fields:
                raise TypeError(
                    f"generate: unknown option {name!r}; known: {', '.join(sorted(fields))}"
                )
        samples = any(options.get(n) is not None for n in ("temperature", "top_k", "top_p"))
        if samples and options.get("do_sample") is None:
            options["do_sample"] = True
        if config is None and options.get("seed") is None:
            fresh = np.random.SeedSequence().generate_state(max(count, 1))
            options["seed"] = [int(seed) for seed in fresh[:count]]
        rows = []
        for i in range(count):
            row = {}
            for name, value in options.items():
                if isinstance(value, list) or (
                    isinstance(value, np.ndarray | jax.Array) and value.ndim
                ):
                    if len(value) != count:
                        raise ValueError(
                            f"generate: {name} must have one value per prompt ({count}), "
                            f"got {len(value)}"
                        )
                    value = value[i]
                if value is not None:
                    row[name] = value.item() if hasattr(value, "item") else value
            rows.append(dataclasses.replace(base, **row))
        return rows

    def _ids(self, prompt: Prompt, i: int) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(t) if _is_id(t) else t for t in prompt]
        vocab = self.config.vocab_size
        for t in ids:
            if not _is_id(t) or not 0 <= t < vocab:
                raise ValueError(
                    f"generate: prompt {i} has id {t!r}, the vocabulary is 0..{vocab - 1}"
                )
        if not ids:
            raise ValueError(f"generate: prompt {i} is empty; give at least one token")
        return ids

    def _run(self, requests: list[_Request], steps: int, timer: "_Timer") -> Iterator[_Chunk]:
        """Chunks as they come back, the first tokens first.

        Each chunk of decode steps is dispatched before the one before it is read.
        """
        prompts = [r.ids if r.config.max_new_tokens else [] for r in requests]
        active = [r for r in requests if r.config.max_new_tokens]
        if not active:
            return
        batch = 2 ** math.ceil(math.log2(len(requests)))
        total = max(len(r.ids) + r.config.max_new_tokens for r in active)
        slots = slots_for(max(map(len, prompts)), total, self.max_len)
        processors = _union(r.config.processors for r in active)
        prefill = self._program(step.prefill, processors=processors)
        decode = self._program(step.decode_steps, processors=processors, max_steps=steps)
        used = np.array([bool(p) for p in prompts] + [False] * (batch - len(prompts)))
        sampling = per_row([r.config for r in requests], batch)
        state, treedef = jax.tree.flatten(start(self._take_cache(batch, slots), sampling, used))
        open_rows = {i: r for i, r in enumerate(requests) if prompts[i]}
        budget = max(r.config.max_new_tokens for r in active) - 1
        sound = True
        try:
            first = []
            for call in prefill_calls(prompts, batch):
                state, tokens, logprobs = prefill(
                    self._param_leaves,
                    state,
                    call.tokens,
                    call.lengths,
                    call.offsets,
                    call.final,
                    call.rows,
                )
                first.append((call, tokens, logprobs))
            # Read before anything else is dispatched: compiling must not delay the first token.
            chunk = _first_tokens(first, batch)
            waiting: collections.deque[tuple] = collections.deque()
            while True:
                timer.chunk(chunk)
                sound = not (chunk.tokens == NOT_FINITE).any()
                _close_rows(open_rows, chunk)
                yield chunk
                while open_rows and budget > 0 and len(waiting) < 2:
                    n = min(steps, budget)
                    budget -= n
                    state, *out = decode(self._param_leaves, state, np.int32(n))
                    waiting.append(out)
                if not open_rows:
                    break
                chunk = _Chunk.read(*waiting.popleft())
        finally:
            # What is not finite in a cache may outlive its row: such a cache is dropped.
            self._idle_cache = jax.tree.unflatten(treedef, state).kv if sound else None

    def _take_cache(self, batch: int, slots: int) -> list[LayerCache]:
        """The idle cache if it fits, else a new one in its place."""
        cache, self._idle_cache = self._idle_cache, None
        if cache is not None and not any(a.is_deleted() for a in cache[0]):
            b, _, s, _ = cache[0][0].shape
            if b == batch and s >= slots:
                return cache
        del cache
        return init_cache(self.model, batch, slots)

    def _program(self, function: Callable, **static):
        """The jitted program of a step: one per set of processors, whatever the values.

        Parameters and state go in and out as flat lists: nested containers of a 32-layer model cost
        0.15 ms of host time a call.
        """
        key = function.__name__, *static.items()
        if key not in self._programs:
            params_def = jax.tree.structure(self.params)
            state_def = jax.tree.structure(abstract_state(self.model))

            def run(params, state, *args):
                params = jax.tree.unflatten(params_def, params)
                state = jax.tree.unflatten(state_def, state)
                state, *out = function(self.model, params, state, *args, **static)
                return jax.tree.leaves(state), *out

            self._programs[key] = jax.jit(run, donate_argnums=1)
        return self._programs[key]

    def program_counts(self) -> dict[str, int]:
        """Compiled programs so far: of "prefill" and of "decode_steps"."""
        counts = {"prefill": 0, "decode_steps": 0}
        for (name, *_), program in self._programs.items():
            counts[name] += program._cache_size()
        return counts


class _Row:
    """Tokens of one request, gathered from chunks."""

    def __init__(self, lm: LM, request: _Request):
        self._stops = frozenset(request.config.eos_token_ids)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    @property
    def finish_reason(self) -> str:
        return "stop" if self.tokens and self.tokens[-1] in self._stops else "length"

    def take(self, chunk: _Chunk, row: int) -> list[int]:
        new = chunk.tokens[row]
        live = new >= 0
        new = new[live].tolist()
        self.tokens += new
        if chunk.logprobs is not None:
            self.logprobs += chunk.logprobs[row][live].tolist()
        return new


class _Timer:
    """Host clock around a call, and the bytes its decode steps had to read."""

    def __init__(self, lm: LM):
        self._lm = lm
        self._start = time.perf_counter()
        self._first = self._last = self._start
        self._steps = -1

    def chunk(self, chunk: _Chunk):
        """Note the arrival of a chunk; the first holds the first tokens."""
        self._last = time.perf_counter()
        if self._steps < 0:
            self._first, self._steps = self._last, 0
        else:
            self._steps += int((chunk.tokens >= 0).any(axis=0).sum())

    def stats(self, requests, rows) -> Stats:
        model, params = self._lm.model, self._lm.params
        weights = step_bytes(
            model, sum(leaf.nbytes for leaf in jax.tree.leaves(params)), params["embed"].nbytes
        )
        per_token = model.config.kv_bytes_per_token(jnp.dtype(model.dtype).itemsize)
        slots = 0
        for request, row in zip(requests, rows, strict=True):
            n = max(len(row.tokens) - 1, 0)
            slots += n * len(request.ids) + n * (n + 1) // 2
        return Stats(
            prompt_tokens=sum(len(r.ids) for r in requests),
            decode_tokens=sum(len(row.tokens) for row in rows),
            prefill_seconds=self._first - self._start,
            decode_seconds=self._last - self._first,
            decode_bytes=max(self._steps, 0) * weights + slots * per_token,
            decode_steps=max(self._steps, 0),
            peak_gb_per_s=PEAK_GB_PER_S.get(model.plan.device_kind),
        )


def _first_tokens(calls: list[tuple[PrefillCall, jax.Array, jax.Array | None]], batch: int):
    """The first token of every row, from the calls that ended its prompt."""
    first = _Chunk(np.full((batch, 1), -1, np.int32), np.zeros((batch, 1), np.float32))
    for call, tokens, logprobs in calls:
        rows = np.arange(batch) if call.rows is None else call.rows
        first.tokens[rows[call.final], 0] = np.asarray(tokens)[call.final]
        if logprobs is not None:
            first.logprobs[rows[call.final], 0] = np.asarray(logprobs)[call.final]
    return first


def _close_rows(open_rows: dict[int, _Request], chunk: _Chunk) -> None:
    """Forget the rows that ended in this chunk."""
    for i, request in list(open_rows.items()):
        new = chunk.tokens[i][chunk.tokens[i] >= 0]
        request.generated += len(new)
        if NOT_FINITE in chunk.tokens[i]:
            raise FloatingPointError(
                f"generate: prompt {i}: logits are not finite at token {request.generated}; "
                "the weights are damaged, or the dtype is too narrow (try dtype='float32')"
            )
        ended = request.generated >= request.config.max_new_tokens
        if ended or np.isin(new, request.config.eos_token_ids).any():
            del open_rows[i]


def _is_id(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _union(processors) -> Processors:
    active = [dataclasses.asdict(p) for p in processors]
    return Processors(**{name: any(p[name] for p in active) for name in active[0]})


def load(
    model: str,
    *,
    dtype: str | None = None,
    max_len: int | None = None,
    plan: Plan | None = None,
    compilation_cache: bool | None = None,
    progress: bool | None = None,
) -> LM:
    """Load a Hugging Face checkpoint.

    Args:
      model: a local folder or a hub id; "tiny" is the embedded model.
      dtype: "bfloat16" | "float16" | "float32"; default that of the checkpoint.
      max_len: slots of cache per row. Default: sized by need, in a few steps, up to the model's
        max_position_embeddings.
      plan: which implementations run; default that of the first local device.
      compilation_cache: keep compiled programs on disk between runs. Default: on, unless JAX is
        already configured; False declines.
      progress: show a progress bar; default when standard error is a terminal.

    Raises:
      CheckpointError: the checkpoint is damaged or not supported; one line says what and where.
      ValueError: an argument is out of range.
    """
    if dtype is not None and dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"load: dtype must be bfloat16, float16 or float32, got {dtype!r}")
    platform.warn_of_idle_gpu()
    if compilation_cache is not False:
        platform.enable_compilation_cache()
    folder = locate(model)
    data = read_json(folder / "config.json")
    config = parse_config(data, str(folder / "config.json"))
    description = describe(config, dtype=dtype, plan=plan)
    generation = read_json(folder / "generation_config.json", required=False)
    defaults = GenerationConfig.from_files(generation, data, str(folder / "generation_config.json"))
    tokenizer = Tokenizer(folder)
    with _progress_bar(progress, folder.name) as update:
        params = load_params(folder, description, progress=update)
    return LM(description, params, tokenizer, defaults=defaults, max_len=max_len)


@contextlib.contextmanager
def _progress_bar(show, name):
    if show is None:
        show = sys.stderr.isatty()
    if not show:
        yield lambda done, total: None
        return
    from tqdm import tqdm

    with tqdm(desc=name, unit="B", unit_scale=True, leave=False) as bar:

        def update(done, total):
            bar.total = total
            bar.update(done - bar.n)

        yield update
