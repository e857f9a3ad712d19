"""The engine: compiles the programs, holds the cache and runs batches of rows."""

import collections
import dataclasses
import functools
import math
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fdjax.engine import step
from fdjax.engine.disk_cache import cached_on_disk
from fdjax.engine.host_arrays import HostArrays
from fdjax.engine.memory import MemoryPlan, plan_memory
from fdjax.engine.program import Program
from fdjax.engine.schedule import PrefillCall, covered_slots, prefill_calls, slots_for
from fdjax.engine.sequence import Chunk, Row
from fdjax.engine.state import (
    EMPTY,
    KEEP,
    SLOT_MULTIPLE,
    START,
    DecodeState,
    StackedCache,
    abstract_state,
    init_cache,
    start,
)
from fdjax.models import Model, Params
from fdjax.sampling.options import per_row
from fdjax.sampling.sampler import NOT_FINITE, Logprobs
from fdjax.system.process import refuse_forked, steps_may_transfer
from fdjax.weights.stacked import layer_slices, stack_layers

# XLA options that capture a chunk of decode steps, with its loop, in one CUDA graph. Outside a
# graph, the host reads the condition of each step.
_DECODE_OPTIONS = {
    # XLA's default list, and WHILE.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    # The default is 5 operations. The program has fewer outside the loop.
    "xla_gpu_graph_min_graph_size": 1,
    # The small kernels before and after the layers may then run concurrently. They cannot share
    # memory then, so prefill, whose buffers are large, does not use this: it would need a quarter
    # more memory.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}

# Parameters up to this size are packed with others of the same shape.
_PACKED_BYTES = 2**16


class ReusableState(NamedTuple):
    """The state that a finished batch leaves for the next one.

    Attributes:
      state: the state.
      unread: tokens of steps that were still running when the batch ended.
    """

    state: DecodeState
    unread: list[jax.Array]


class Programs(dict[Any, Program]):
    """Programs by (name, static arguments, device)."""


# The programs of each model, as long as an engine uses them. They hold the model, but no weights.
_shared: weakref.WeakValueDictionary[Any, Programs] = weakref.WeakValueDictionary()


class Engine:
    """A model's compiled programs and its reusable state.

    Attributes:
      tree: the parameters.
      params: the parameters, packed by `ParamPacking`.
      stacked_params: the same with the layers stacked, for decode steps in one launch, or None.
      programs: the programs of the model. Engines with other weights share them.
      reusable: what the last batch left behind, or None.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        max_len: int | None = None,
        max_batch: int | None = None,
        memory_bytes: int | None = None,
    ):
        """Prepare the parameters without compiling anything.

        Args:
          model: the model.
          params: its parameters. `stack_layers` may replace arrays in their containers.
          max_len, max_batch, memory_bytes: see `LM`.
        """
        refuse_forked()
        self.model = model
        self.max_len = max_len
        self.max_batch = max_batch
        self.memory_bytes = memory_bytes
        self._one_launch = functools.cache(model.one_launch)  # looks at every layer
        self.stacked_packing = self.stacked_params = None
        stacked = self.stack(params)
        if stacked is not None:
            whole = params | {"blocks": stacked}
            self.stacked_packing = ParamPacking.of(whole)
            self.stacked_params = self.stacked_packing.pack(whole)
        self.tree = params
        self.packing = ParamPacking.of(params)
        self.params = self.packing.pack(params)
        self.programs = _shared.setdefault((model, self.packing), Programs())
        self.reusable: ReusableState | None = None

    @property
    def context(self) -> int:
        """Largest number of tokens that a row may hold."""
        return self.max_len or self.model.config.max_position_embeddings

    @steps_may_transfer
    def run(self, rows: Sequence[Row], steps: int) -> Iterator[Chunk]:
        """Advance rows until all have ended, and yield each chunk after the rows have taken it.

        The first chunk holds the first tokens. Each chunk of `steps` decode steps is dispatched
        before the previous one is read.
        """
        refuse_forked()
        prompts = [row.request.ids if row.finish_reason is None else [] for row in rows]
        active = [row.request for row in rows if row.finish_reason is None]
        if not active:
            return
        batch = min(2 ** math.ceil(math.log2(len(rows))), self.max_batch or sys.maxsize)
        total = max(len(r.ids) + r.config.max_new_tokens for r in active)
        slots = self._slots(batch, max(map(len, prompts)), total)
        wanted = functools.reduce(operator.or_, (r.config.processors for r in active))
        static = {"processors": wanted.tier, "max_steps": steps}
        if any(r.config.return_reruns for r in active):
            static["return_reruns"] = True
        state = self.take_state(batch, slots, may_stack="return_reruns" not in static)
        stacked = isinstance(state.kv, StackedCache)
        # Prefill runs once per prompt, so processors that no row asked for cost almost nothing.
        prefill = self.program(step.prefill, stacked=stacked, processors=wanted.everything)
        decode = self.program(step.decode_steps, stacked=stacked, **static)
        params = self.stacked_params if stacked else self.params
        sampling = per_row(
            [row.request.config for row in rows],
            batch,
            sample_indices=[row.request.sample for row in rows],
        )
        state, treedef = jax.tree.flatten(state)
        restarts = np.full(batch, EMPTY, np.int32)
        restarts[: len(prompts)] = [START if prompt else EMPTY for prompt in prompts]
        budget = max(r.config.max_new_tokens for r in active) - 1
        sound = False  # a cache with values that are not finite must not be used again
        waiting: collections.deque[tuple] = collections.deque()
        try:
            first, compile_seconds = [], 0.0
            for call in prefill_calls(prompts, batch):
                pieces = (
                    call.tokens,
                    call.lengths,
                    call.offsets,
                    call.final,
                    call.rows,
                    call.prompts,
                    restarts,
                )
                restarts = np.full(batch, KEEP, np.int32)
                host = HostArrays.pack((sampling, *pieces))
                state, tokens, logprobs = prefill(self.params, state, host)
                compile_seconds += prefill.compile_seconds
                first.append((call, tokens, logprobs if wanted.logprobs else None))
            # The arguments of decode steps are transferred while the device is busy with prompts.
            # All chunks share them: rows finish on the device, so no chunk needs its own count.
            every_chunk = jax.device_put(HostArrays.pack((sampling, np.int32(steps))))
            # The first tokens are read before the decode program is compiled, which would delay
            # them.
            chunk = _first_tokens(first, batch, compile_seconds)
            sound = True
            while True:
                sound = sound and _is_finite(chunk.tokens)
                for i, row in enumerate(rows):
                    row.take(chunk, i)
                yield chunk
                going_on = any(row.finish_reason is None for row in rows)
                while going_on and budget > 0 and len(waiting) < 2:
                    budget -= steps
                    state, *out = decode(params, state, every_chunk)
                    waiting.append((decode.compile_seconds, *out))
                if not going_on:
                    break
                chunk = _read(*waiting.popleft())
        except Exception:
            _refuse_trace()
            raise
        finally:
            unread = [tokens for _, tokens, *_ in waiting]
            self.reusable = (
                ReusableState(jax.tree.unflatten(treedef, state), unread) if sound else None
            )

    def fitting_rows(self, op: str, rows: int, plan: Callable[[int], MemoryPlan]) -> int:
        """The largest number of rows that fits into memory: `rows`, or a smaller power of two.

        Drops the reusable state, which memory plans do not count.

        Args:
          op: name of the operation in the error.
          rows: number of rows wanted.
          plan: number of rows → their memory plan.

        Raises:
          MemoryError: not even one row fits.
        """
        self.reusable = None
        if self.memory_bytes is None:
            return rows
        while rows > 1 and plan(rows).total_bytes > self.memory_bytes:
            rows = 2 ** (math.ceil(math.log2(rows)) - 1)
        plan(rows).check(op, self.memory_bytes)
        return rows

    def _slots(self, batch: int, longest_prompt: int, total: int) -> int:
        """Cache slots per row; if memory is short, no more than prompt and `total` tokens need.

        Raises:
          MemoryError: the cache does not fit.
        """
        slots = slots_for(longest_prompt, total, self.max_len)
        if self.memory_bytes is None:
            return slots
        plan = functools.partial(
            plan_memory, self.model, batch=batch, max_len=total, prompt_tokens=longest_prompt
        )
        if plan(slots=slots).total_bytes > self.memory_bytes:
            least = max(covered_slots(longest_prompt), -(-total // SLOT_MULTIPLE) * SLOT_MULTIPLE)
            slots = min(slots, least)
            plan(slots=slots).check("generate", self.memory_bytes)
        return slots

    def stack(self, params: Params) -> dict[str, jax.Array] | None:
        """Stack the layers if a program needs it and memory allows it, see `stack_layers`."""
        return stack_layers(self.model, params, memory_bytes=self.memory_bytes)

    def stacks(self, batch: int, slots: int) -> bool:
        """Whether decode steps of a batch run in one launch, with stacked weights and cache."""
        return self.stacked_params is not None and self._one_launch(batch, slots)

    def take_state(self, batch: int, slots: int, may_stack: bool) -> DecodeState:
        """The reusable state if it fits, else a new state.

        The cache is stacked if `may_stack` and decode steps run in one launch.
        """
        (state, unread), self.reusable = self.reusable or (None, []), None
        fits = state is not None and state.batch == batch and state.slots >= slots
        if fits:
            stacks = may_stack and self.stacks(batch, state.slots)
            fits = isinstance(state.kv, StackedCache) == stacks
        fits = fits and not any(a.is_deleted() for a in jax.tree.leaves(state.kv)[:2])
        if fits and all(map(_is_finite, unread)):
            return state
        del state
        # The programs also return to the host, so their results are committed to a device. A state
        # that is not committed would compile every program once more.
        _refuse_trace()
        (device,) = self.params[0].devices()
        stacks = may_stack and self.stacks(batch, slots)
        return jax.device_put(start(init_cache(self.model, batch, slots, stacks)), device)

    def program(self, function: Callable, *, stacked: bool = False, **static) -> Program:
        """The program of a step, one for each set of processors, whatever their values.

        It takes parameters, state, and the step's other arguments as `HostArrays`. Results other
        than the state are returned in the host's memory.

        Parameters and state are passed as flat lists, because nested containers of a 32-layer model
        cost 0.15 ms of host time per call.

        Args:
          function: `step.prefill` or `step.decode_steps`.
          stacked: the cache is stacked over the layers, and so are the parameters of decode steps.
          **static: static keyword arguments of the function.
        """
        name = function.__name__, *([("stacked", True)] * stacked), *static.items()
        (device,) = self.params[0].devices()
        if (key := (*name, device)) not in self.programs:
            one_launch = stacked and function is step.decode_steps
            model, packing = self.model, self.stacked_packing if one_launch else self.packing
            state_def = jax.tree.structure(abstract_state(model, stacked))

            def run(params, state, host):
                state = jax.tree.unflatten(state_def, state)
                params, args = packing.unpack(params), host.unpack()
                keywords = static
                if one_launch:
                    keywords = static | {"layers": params["blocks"]}
                    params = params | {"blocks": layer_slices(params["blocks"])}
                state, *out = function(model, params, state, *args, **keywords)
                # The program copies results to the host itself. So a prompt's first token arrives
                # 0.6 ms earlier than with a separate copy.
                return jax.tree.leaves(state), *jax.device_put(out, jax.memory.Space.Host)

            def describe(params, state, host):
                state = jax.tree.unflatten(state_def, state)
                if function is step.prefill:
                    what = "prefill of {} x {} tokens".format(*host.abstract[1].shape)
                else:
                    what = f"{static['max_steps']} decode steps"
                return f"{what}, cache of {state.batch} x {state.slots}"

            self.programs[key] = Program(
                run
                if static["processors"].custom
                else cached_on_disk(run, (name, model, packing), device),
                describe,
                donate_argnums=1,
                compiler_options=compiler_options(function),
            )
        return self.programs[key]

    def program_counts(self) -> dict[str, int]:
        """Number of compilations so far, of "prefill" and of "decode_steps"."""
        counts = {"prefill": 0, "decode_steps": 0}
        for (name, *_), program in self.programs.items():
            if name in counts:
                counts[name] += program.compilations
        return counts


@dataclasses.dataclass(frozen=True)
class ParamPacking:
    """Packs a tree of parameters into fewer arrays: each costs the host about 1 µs per call.

    Attributes:
      treedef: structure of the tree.
      groups: for each array, the indices of its leaves: one leaf, or several of one shape, stacked.
    """

    treedef: Any
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Params) -> "ParamPacking":
        """The packing of a tree, which stacks small leaves of equal shape and dtype (norms)."""
        leaves, treedef = jax.tree.flatten(params)
        groups: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            alike = (leaf.shape, leaf.dtype) if leaf.nbytes <= _PACKED_BYTES else i
            groups.setdefault(alike, []).append(i)
        return cls(treedef, tuple(map(tuple, groups.values())))

    def pack(self, params: Params) -> list[jax.Array]:
        """Pack the tree."""
        leaves = jax.tree.leaves(params)
        return [
            leaves[group[0]] if len(group) == 1 else jnp.stack([leaves[i] for i in group])
            for group in self.groups
        ]

    def unpack(self, arrays: Sequence[jax.Array]) -> Params:
        """Unpack the tree, inside a trace."""
        leaves: dict[int, jax.Array] = {}
        for group, array in zip(self.groups, arrays, strict=True):
            leaves |= {group[0]: array} if len(group) == 1 else dict(zip(group, array, strict=True))
        return jax.tree.unflatten(self.treedef, [leaves[i] for i in range(len(leaves))])


def compiler_options(function: Callable) -> dict[str, Any]:
    """XLA options for the program of a step, without those that `XLA_FLAGS` sets."""
    options = _DECODE_OPTIONS if function is step.decode_steps else {}
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def _refuse_trace() -> None:
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError(
            "generate: LM.generate cannot be called inside a JAX trace; use fdjax.generate there"
        ) from None


def _is_finite(tokens: np.ndarray | jax.Array) -> bool:
    """Whether all tokens of a chunk come from finite logits."""
    return not (np.asarray(tokens) == NOT_FINITE).any()


def _read(
    compile_seconds: float,
    tokens: jax.Array,
    logprobs: Logprobs | None,
    reruns: jax.Array | None = None,
) -> Chunk:
    tokens, logprobs, reruns = _numpy((tokens, logprobs, reruns))
    chosen, top = None, None
    if logprobs is not None:
        chosen, top = logprobs.chosen, (logprobs.top, logprobs.top_ids)
    return Chunk(tokens, chosen, top, compile_seconds, reruns)


def _numpy(results: Any) -> Any:
    """Results of a program, which are in the host's memory, as numpy arrays."""
    # Reading without waiting first takes longer than waiting and reading.
    return jax.tree.map(np.asarray, jax.block_until_ready(results))


def _first_tokens(
    calls: Sequence[tuple[PrefillCall, jax.Array, Logprobs | None]],
    batch: int,
    compile_seconds: float,
) -> Chunk:
    """The first token of every row, from the call that ended its prompt."""
    first = None
    for call, *out in calls:
        rows = np.arange(batch) if call.rows is None else call.rows
        out = jax.tree.map(lambda a: a[:, None], _numpy(tuple(out)))
        if first is None:
            first = jax.tree.map(lambda a: np.zeros((batch, *a.shape[1:]), a.dtype), out)
            first[0][:] = -1
        for whole, part in zip(*map(jax.tree.leaves, (first, out)), strict=True):
            whole[rows[call.final]] = part[call.final]
    return _read(compile_seconds, *first)
