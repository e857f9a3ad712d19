"""The state of a batch on the device, and the programs that change it."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdjax.engine import step
from fdjax.engine.host_arrays import HostArrays
from fdjax.engine.pages import page_count
from fdjax.engine.schedule import PrefillCall
from fdjax.engine.scheduler import StateShape
from fdjax.engine.sequence import RequestState
from fdjax.engine.state import (
    EMPTY,
    KEEP,
    NOBODYS_PAGE,
    DecodeState,
    StackedCache,
    copy_pages,
    restart,
)
from fdjax.pallas_kernels.attention import SharedPages
from fdjax.sampling.beams import BeamState, are_aligned
from fdjax.sampling.options import GenerationConfig, per_row
from fdjax.sampling.sampler import Processors, Sampling
from fdjax.system.device_memory import free

# Rows of the program that sets tokens which the cache holds already, if there is more than one.
_BEGINNINGS = 16
_NOTHING = GenerationConfig(max_new_tokens=0).filled()


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """The options of rows as host arrays.

    Most are packed at their first use. Prompts need only `max_new_tokens`, so the device computes
    them meanwhile.

    Attributes:
      configs: the configuration of each row; rows after the last are greedy.
      samples: the index of each row among the samples or beams of its prompt.
      shape: the shape of the state.
    """

    configs: Sequence[GenerationConfig]
    samples: Sequence[int]
    shape: StateShape

    @functools.cached_property
    def max_new_tokens(self) -> np.ndarray:
        """The largest number of new tokens of each row [rows] int32; 0 without a request."""
        most = np.zeros(self.shape.rows, np.int32)
        most[: len(self.configs)] = [config.max_new_tokens for config in self.configs]
        return most

    @functools.cached_property
    def sampling(self) -> Sampling:
        """The options of the rows that decode steps run."""
        return per_row(self.configs, self.shape.rows, sample_indices=self.samples)

    @functools.cached_property
    def everyone(self) -> Sampling:
        """The options of all rows for which the state has room."""
        return per_row(self.configs, self.shape.room, sample_indices=self.samples)


class Session:
    """An open state, with the options of its rows and its programs.

    Attributes:
      stacked: the cache is stacked over the layers.
      one_launch: decode steps run all layers in one launch.
    """

    def __init__(self, engine: Any, shape: StateShape, return_reruns: bool):
        self._engine = engine
        self._static = {"return_reruns": True} if return_reruns else {}
        state = engine.take_state(shape, may_stack=not return_reruns)
        self.stacked = isinstance(state.kv, StackedCache)
        self._set_shape(shape)
        self._set_state(state)
        self._restarts = np.full(shape.room, EMPTY, np.int32)
        self._beginnings: dict[int, np.ndarray] = {}
        self._wanted = Processors()
        self._options = RowOptions((), (), shape)
        self._pages: np.ndarray | None = None
        self._shared: SharedPages | None = None
        self._aligned = False
        self._steps_of: dict[int, HostArrays] = {}

    def set_options(self, rows: Sequence[RequestState | None]) -> None:
        """Set the options of each row, for the following calls. Beams of a prompt share a state."""
        configs = [_NOTHING if row is None else row.request.config for row in rows]
        samples = [0 if row is None else row.request.sample for row in rows]
        for i, row in enumerate(rows):
            if row is not None and row.width > 1:
                samples[i] = samples[i - 1] + 1 if i and rows[i - 1] is row else 0
        wanted = functools.reduce(operator.or_, {c.processors for c in configs}, self._wanted)
        if any(wanted.beams) and not any(row is not None and row.width > 1 for row in rows):
            wanted = dataclasses.replace(wanted, beams=(0, 0))
        self._wanted = wanted
        self._set_beams(*wanted.beams)
        self._options = RowOptions(configs, samples, self._shape)
        # Rows only end until the next options. So beams stay aligned, and others do not become
        # aligned, which would compile another program for the last of them.
        beams = self._whole_state.beams
        widths = [0 if row is None else row.width for row in rows]
        self._aligned = beams is not None and are_aligned(widths, samples, beams.width)
        self._steps_of = {}

    def set_pages(self, pages: Sequence[Sequence[int]]) -> None:
        """Set the pages of each row, for the following calls."""
        width = page_count(self._shape.slots, self._engine.page_tokens)
        self._pages = np.full((self._shape.rows, width), NOBODYS_PAGE, np.int32)
        for table, owned in zip(self._pages, pages, strict=True):
            table[: len(owned)] = owned
        # Beams share pages in a way of their own. Shared pages count no reruns.
        alone = self._has_beams or self._static
        self._shared = None if alone else self._engine.shared_pages(self._pages)
        self._steps_of = {}

    def begin_after(self, beginnings: Mapping[int, np.ndarray]) -> None:
        """Set the prompt tokens, by row, that a row's pages hold already."""
        # A row without work since the state was made is not among the restarts.
        self._restarts[list(beginnings)] = EMPTY
        self._beginnings |= beginnings

    def _write_beginnings(self) -> None:
        """Dispatch what `begin_after` has set: before decode steps, but after a prefill call.

        That call does not need it, and its first kernel would begin a millisecond later.
        """
        beginnings, self._beginnings = self._beginnings, {}
        for some in itertools.batched(beginnings.items(), _BEGINNINGS):
            # One or all of them, so that there are two programs. The device drops the other rows.
            count = 1 if len(some) == 1 else _BEGINNINGS
            rows = np.full(count, self._shape.room, np.int32)
            ids = np.zeros((count, self._shape.slots), np.int32)
            lengths = np.zeros(count, np.int32)
            for i, (row, tokens) in enumerate(some):
                rows[i], lengths[i] = row, len(tokens)
                ids[i, : len(tokens)] = tokens
            host = HostArrays.pack((self._restarts, rows, ids, lengths))
            state = self._whole_state
            ids, progress = _restarted(state.ids, state.progress, host)
            self._set_state(dataclasses.replace(state, ids=ids, progress=progress))
            self._restarts = np.full(self._shape.room, KEEP, np.int32)

    def reshape(self, rows: Sequence[int], shape: StateShape) -> None:
        """Go on with another shape. The first rows are these present ones, the others are empty.

        Options and pages must then be set again.
        """
        self._write_beginnings()
        sources = np.zeros(shape.room, np.int32)
        sources[: len(rows)] = rows
        restarts = np.full(shape.room, EMPTY, np.int32)
        restarts[: len(rows)] = KEEP
        state, host = self._whole_state, HostArrays.pack((sources, restarts))
        ids, progress = _reshaped(state.ids, state.progress, host, slots=shape.slots)
        self._set_shape(shape)
        self._set_state(dataclasses.replace(state, ids=ids, progress=progress))
        self._restarts = np.full(shape.room, KEEP, np.int32)

    def end(self, rows: Sequence[int]) -> None:
        """Finish rows. The device finishes them at the next prefill call."""
        self._restarts[list(rows)] = EMPTY
        for row in rows:
            self._beginnings.pop(row, None)

    def prefill(self, call: PrefillCall) -> tuple[float, tuple]:
        """Dispatch a prefill call. Returns (seconds spent compiling, the results)."""
        loops = self.stacked and self._engine.loops(call.tokens.size)
        layout = {"stacked": self.stacked, "stacked_layers": loops, "beams": self._has_beams}
        # Only packed calls sort their blocks.
        tiles = 1 if call.owners is None else self._engine.model.prompt_tiles(*call.tokens.shape)
        static = {"tiles": tiles} if tiles > 1 else {}
        program = self._engine.program(step.prompt_logits, **layout, **static)
        rows = np.arange(self._shape.room) if call.rows is None else call.rows
        # Rows that decode steps leave out have no work, so their options do not matter.
        rows = np.minimum(rows, self._shape.rows - 1)
        pages = None if self._pages is None else self._pages[rows]
        fields = call.tokens, call.lengths, call.offsets, call.rows, call.prompts, self._restarts
        fields = *fields, self._options.max_new_tokens[rows], pages, call.owners, call.last
        params = self._engine.params_of(loops)
        self._restarts = np.full(self._shape.room, KEEP, np.int32)
        self._state, logits = program(params, self._state, HostArrays.pack(fields))
        self._write_beginnings()
        seconds, results = program.compile_seconds, ()
        if call.final.any():
            chosen, results = self._first_tokens(call, logits, self._options.sampling.rows(rows))
            seconds += chosen
        if call.copied:
            self._copy_last_pages(call)
        return seconds, results

    def _first_tokens(
        self, call: PrefillCall, logits: jax.Array, sampling: Sampling
    ) -> tuple[float, tuple]:
        """Dispatch the choice of first tokens; see `prefill`."""
        program = self._engine.choosing(self._wanted.tier, beams=self._has_beams)
        everyone = self._options.everyone if self._has_beams else None
        host = HostArrays.pack((sampling, call.final, call.rows, call.generated, everyone))
        caches = len(jax.tree.leaves(self._whole_state.kv))
        rest, tokens, logprobs, *beams = program(logits, self._state[caches:], host)
        self._state = [*self._state[:caches], *rest]
        logprobs = logprobs if self._wanted.logprobs else None
        return program.compile_seconds, (tokens, logprobs, None, *(beams or [None]))

    def _copy_last_pages(self, call: PrefillCall) -> None:
        """Copy the last pages of prompts for other samples of them."""
        rows = np.arange(self._shape.room) if call.rows is None else call.rows
        tokens = dict(zip(rows.tolist(), call.prompts.tolist(), strict=True))
        sources, targets = np.zeros((2, self._shape.room), np.int32)
        for i, (row, leader) in enumerate(call.copied.items()):
            at = (tokens[row] - 1) // self._engine.page_tokens
            sources[i], targets[i] = self._pages[leader, at], self._pages[row, at]
        host = HostArrays.pack((sources, targets, np.int32(len(call.copied))))
        state = self._whole_state
        self._set_state(dataclasses.replace(state, kv=_with_copies(state.kv, host)))

    def decode(self, steps: int, most: int) -> tuple[float, tuple]:
        """Dispatch up to `steps` decode steps with the program for `most` steps; see `prefill`."""
        self._write_beginnings()
        if steps not in self._steps_of:
            # The device knows when a row has enough tokens, so the same arrays serve every chunk.
            fields = self._options.sampling, np.int32(steps), self._pages, self._shared
            host = HostArrays.pack(fields)
            self._steps_of[steps] = self._engine.place.put(host)
        static = self._static | {"processors": self._wanted.tier, "max_steps": most}
        if self._shape.rows < self._shape.room:
            static["rows"] = self._shape.rows
        if self._aligned:
            static["aligned"] = True
        one_launch = self.one_launch and not self._has_beams and self._shared is None
        layout = {"stacked": self.stacked, "beams": self._has_beams}
        static["stacked_layers"] = one_launch
        program = self._engine.program(step.decode_steps, **layout, **static)
        params = self._engine.params_of(one_launch)
        self._state, tokens, logprobs, *more = program(params, self._state, self._steps_of[steps])
        reruns, beams = (None, *more) if self._has_beams else (*more, None, None)[:2]
        return program.compile_seconds, (tokens, logprobs, reruns, beams)

    def discard(self) -> None:
        """Free the state, see `free`."""
        free(self._state)

    @property
    def state(self) -> DecodeState:
        """The state after all dispatched programs, without the beams."""
        return dataclasses.replace(self._whole_state, beams=None)

    @property
    def _whole_state(self) -> DecodeState:
        return jax.tree.unflatten(self._treedef, self._state)

    def _set_shape(self, shape: StateShape) -> None:
        self._shape = shape
        one_launch = self.stacked and not self._static
        self.one_launch = one_launch and self._engine.stacks(shape.rows, shape.slots)

    def _set_state(self, state: DecodeState) -> None:
        self._state, self._treedef = jax.tree.flatten(state)
        self._has_beams = state.beams is not None

    def _set_beams(self, width: int, _: int) -> None:
        """Make room in the state for up to `width` beams per prompt; 0 removes the beams."""
        if not (width or self._has_beams):
            return
        state = self._whole_state
        if not width:
            beams = None
        elif state.beams is None:
            beams = self._engine.place.put(BeamState.empty(*state.ids.shape, width))
        else:
            beams = state.beams.widened(width)
        if beams is not state.beams:
            self._set_state(dataclasses.replace(state, beams=beams))


@functools.partial(jax.jit, donate_argnums=0)
def _with_copies(kv: StackedCache, host: HostArrays) -> StackedCache:
    return copy_pages(kv, *host.unpack())


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _restarted(ids: jax.Array, progress: jax.Array, host: HostArrays) -> tuple[jax.Array, ...]:
    """Restart rows of a state, and give some their first tokens. Returns ids and progress.

    More of a row's prompt may have been computed before.
    """
    restarts, rows, beginnings, lengths = host.unpack()
    state = restart(DecodeState(None, ids, progress), restarts)
    # Decode steps of other rows may run before the rest of the prompt. They write a meaningless
    # token after a row's last one.
    progress = state.progress.at[0, rows].max(lengths, mode="drop")
    known = jnp.arange(ids.shape[1])[None] < lengths[:, None]
    beginnings = jnp.where(known, beginnings, state.ids[rows])
    return state.ids.at[rows].set(beginnings, mode="drop"), progress


@functools.partial(jax.jit, static_argnames="slots")
def _reshaped(
    ids: jax.Array, progress: jax.Array, host: HostArrays, *, slots: int
) -> tuple[jax.Array, ...]:
    """Rows of a state, some of which restart, with more slots. Returns ids and progress."""
    sources, restarts = host.unpack()
    state = restart(DecodeState(None, ids[sources], progress[:, sources]), restarts)
    return jnp.pad(state.ids, ((0, 0), (0, slots - ids.shape[1]))), state.progress
