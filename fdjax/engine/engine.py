"""The engine: compiles the programs, holds the cache and runs batches of rows."""

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fdjax.engine import step
from fdjax.engine.disk_cache import cached_on_disk
from fdjax.engine.memory import (
    MOST_ROWS,
    MemoryPlan,
    plan_memory,
    pool_pages,
    reads_pages,
    room_for_pages,
)
from fdjax.engine.mesh import Place, is_spec, specs_of, stacked
from fdjax.engine.packed import call_size, call_sizes
from fdjax.engine.pages import PagePool
from fdjax.engine.program import Program
from fdjax.engine.runner import Runner
from fdjax.engine.schedule import slots_for
from fdjax.engine.scheduler import StateShape
from fdjax.engine.sequence import Chunk, RequestState
from fdjax.engine.state import (
    SLOT_MULTIPLE,
    DecodeState,
    StackedCache,
    abstract_state,
    init_cache,
    init_pool,
    page_bytes,
    page_tokens,
    start,
    start_in_pages,
    state_specs,
    without_cache,
)
from fdjax.engine.watch import Watch
from fdjax.models import Model, Params
from fdjax.pallas_kernels.attention import SharedPages, can_share, find_shared, reading_shape
from fdjax.pallas_kernels.ranks import observed
from fdjax.sampling.sampler import NOT_FINITE, Processors
from fdjax.system.device_memory import gigabytes
from fdjax.system.process import refuse_forked
from fdjax.system.traces import refuse_trace
from fdjax.weights.stacked import layer_slices, stack_layers

_CONCURRENT = "xla_gpu_command_buffer_scheduling_mode"
# XLA options that capture a chunk of decode steps, with its loop, in one CUDA graph. Outside a
# graph, the host reads the condition of each step.
_CAPTURED = "xla_gpu_enable_command_buffer"
_DECODE_OPTIONS = {
    # XLA's default list, plus WHILE.
    _CAPTURED: ("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"),
    # The default is 5 operations. The program has fewer outside the loop.
    "xla_gpu_graph_min_graph_size": 1,
    # Lets the small kernels before and after the layers run concurrently. Concurrent kernels cannot
    # share memory. Prefill would need a quarter more memory, so it does not use this option.
    _CONCURRENT: "CONCURRENT",
}
# Several devices also need XLA's collective operations. If one is not captured, the loop is not
# captured either. XLA's own kernels for them have a name since JAX 0.12.
_COLLECTIVES = ["COLLECTIVES"]
if jax.__version_info__ >= (0, 12):
    _COLLECTIVES.append("COLLECTIVES_KERNEL")
# For calls of prompts in tiles, see `Model.prompt_tiles`. By default XLA joins the products and the
# sums of the tiles. With its other estimate of latencies, fewer sums overlap with products.
_TILED_OPTIONS = {
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
}
# In every program, XLA recomputes values if its estimate of memory exceeds this percentage of the
# memory. The estimate is too large: it counts a cache once more for each kernel that updates it in
# place. XLA may also compile its own kernels with Triton to see which is faster. For a sum over a
# vocabulary of 128 256 tokens, that takes six minutes (benchmarks/LOG.md).
_OPTIONS = {
    "xla_gpu_memory_limit_slop_factor": 10_000,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}

logger = logging.getLogger("fdjax")

# The largest number of sequences that run at once on a CPU. More would not be faster.
_MOST_ROWS_ON_CPU = 32
# If the size of memory is unknown, as on a CPU, caches take as much as the weights, or this.
_LEAST_CACHE_BYTES = 2**30
# On a CPU, the system provides memory only when it is written, so a pool begins with this many
# pages.
_FIRST_PAGES = 64

# A state in pages has at most this many token ids in rows that decode steps leave out.
_SPARE_IDS = 2**21

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
      model: the model.
      local: the model that each device runs, with its own shapes; the same on a single device.
      place: the devices.
      tree: the parameters.
      params: the parameters, packed by `ParamPacking`.
      stacked_params: the packed parameters with stacked layers, for decode steps in one launch, or
        None.
      programs: the programs of the model. Engines with other weights share them.
      paged: whether the cache is a pool of pages; otherwise each row is in one piece.
      pool: knows which pages are in use, or None before the first use.
      reusable: the state of the last batch, or None.
      runner: runs the sequences of all callers.
      watch: reports if one of several devices stalls, or None. Set it while nothing runs.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        max_len: int | None = None,
        max_batch: int | None = None,
        memory_bytes: int | None = None,
        prefix_cache: bool = True,
    ):
        """Prepare the parameters without compiling anything.

        Args:
          model: the model.
          params: its parameters. `stack_layers` may replace arrays in their containers.
          max_len, max_batch, memory_bytes, prefix_cache: see `LM`.
        """
        refuse_forked()
        self.model, self.local = model, model.local
        self.max_len = max_len
        self.max_batch = max_batch
        self.memory_bytes = memory_bytes
        # These look at every layer.
        self._one_launch = functools.cache(model.one_launch)
        self._loops = functools.cache(model.loops)
        self.place = Place.of(jax.tree.leaves(params)[0])
        if self.place.spans_processes and model.one_launch_possible:
            raise NotImplementedError("load: one launch of all layers cannot span processes")
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
        self.paged = reads_pages(self.local)
        # If the rotation depends on the length of the prompt, so do keys and values.
        regular = not any(s.rope and s.rope.depends_on_length for s in model.config.attention)
        self._prefix_cache = prefix_cache and regular
        self.pool: PagePool | None = None
        self._pages_of: dict[int, int] = {}
        self.reusable: ReusableState | None = None
        self.runner = Runner(self)
        self.watch: Watch | None = None
        self._thread: int | None = None

    @property
    def context(self) -> int:
        """Largest number of tokens that a row may hold."""
        return self.max_len or self.model.config.max_position_embeddings

    def agree(self, op: str, call: Any) -> int | None:
        """Check that all processes that share the model make the same call, see `Place.agree`.

        Raises:
          ValueError: another process makes another call.
          RuntimeError: a call failed or was interrupted, so the others may be inside of another.
          NotImplementedError: another thread has made calls, or there is a `watch`.
        """
        if self.place.spans_processes:
            if self.watch is not None:
                raise NotImplementedError(f"{op}: a watch sees the devices of one process only")
            self._thread = self._thread or threading.get_ident()
            if self._thread != threading.get_ident():
                raise NotImplementedError(
                    f"{op}: a model that spans processes takes the calls of one thread only"
                )
            if self.runner.aborted:
                raise RuntimeError(
                    f"{op}: an earlier call failed or was interrupted, and other processes may "
                    "still run it; end all processes that share the model"
                )
        return self.place.agree(op, call)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the cache, on all devices that divide the tokens of a KV head."""
        return page_tokens(self.local)

    def run(self, rows: Sequence[RequestState], steps: int) -> Iterator[Chunk]:
        """Advance rows until all have ended, and yield each chunk after the rows have taken it.

        Raises:
          Exception: the exception of the first row that failed; the others are not finished.
        """
        with contextlib.closing(self.runner.run(rows, steps)) as chunks:
            for chunk in chunks:
                _raise_failure(rows)
                yield chunk
        _raise_failure(rows)

    def shape_for(self, rows: Sequence[RequestState]) -> StateShape:
        """The shape of a state for these rows, or for as many of them as fit into memory.

        Raises:
          MemoryError: not even one row fits.
        """
        prompt = max(len(row.ids) for row in rows)
        total = max(row.most_tokens for row in rows)
        least = max(row.slots for row in rows)
        slots = max(least, slots_for(prompt, total, self.max_len))
        wanted, most = sum(row.width for row in rows), self.most_rows
        if max(row.width for row in rows) > most:
            raise MemoryError(f"generate: more beams than the {most} rows that run at once")
        batch = min(2 ** math.ceil(math.log2(wanted)), most)
        if self.paged:
            return self._shape_in_pages(rows, batch, slots)
        plan = functools.partial(plan_memory, self.local, max_len=total, prompt_tokens=prompt)
        if self.memory_bytes is None:
            cache = max(self.local.weight_bytes, _LEAST_CACHE_BYTES)
            while batch > 1 and plan(batch=batch, slots=slots).cache_bytes > cache:
                batch = 2 ** (math.ceil(math.log2(batch)) - 1)
        elif plan(batch=batch, slots=slots).total_bytes > self.memory_bytes:
            slots = least
            while batch > 1 and plan(batch=batch, slots=slots).total_bytes > self.memory_bytes:
                batch = 2 ** (math.ceil(math.log2(batch)) - 1)
            plan(batch=batch, slots=slots).check("generate", self.memory_bytes)
        return StateShape(batch, slots, limited=batch < len(rows))

    def _shape_in_pages(self, rows: Sequence[RequestState], batch: int, slots: int) -> StateShape:
        needs = [row.pages_for(row.most_tokens) for row in rows]
        wanted = sum(row.width for row in rows)
        known = self.memory_bytes is not None and self.model.plan.compute_capability is not None
        if known and self.pool is None:
            # The pool takes all free memory at once. So programs are not compiled for other sizes.
            self._open_pool(self._most_pages(slots))
        pages = 0 if self.pool is None else self.pool.count
        limit = pages if known else self._most_pages(slots)
        # One page more, because page 0 is never handed out.
        if max(needs) >= limit:
            longest = max(needs) * self.page_tokens
            plan_memory(self.local, max_len=longest).check("generate", self.memory_bytes)
            pages = max(0, limit - 1)
            raise MemoryError(
                f"generate: {longest} tokens of cache must fit into {pages} pages of "
                f"{self.page_tokens}, {gigabytes(pages * page_bytes(self.local))}, which weights, "
                f"other arrays and the workspace of {self._planned_rows} rows leave of the memory; "
                "give a smaller max_batch or max_len"
            )
        # Rows without pages would only cost time. Half of a row's largest need is enough for most
        # rows, because many end early and some share pages.
        per_row = max(1, sum(needs) // (2 * wanted))
        batch = min(batch, 2 ** math.floor(math.log2(max(1, (limit - 1) // per_row))))
        batch = max(batch, *(row.width for row in rows))
        useful = min(1 + sum(sorted(needs)[-batch:]), limit)
        while pages < useful:
            pages = min(max(4 * pages, _FIRST_PAGES), limit)
        most = min(self.most_rows, _SPARE_IDS // slots)
        return StateShape(batch, slots, limited=batch < wanted, pages=pages, most_rows=most)

    def _most_pages(self, slots: int) -> int:
        """Largest number of pages that fits into memory and that a batch could use."""
        if self.model.plan.compute_capability is not None:  # free memory changes
            return self._planned_pages(slots)
        if slots not in self._pages_of:  # counting takes a third of the host's time for a call
            self._pages_of[slots] = self._planned_pages(slots)
        return self._pages_of[slots]

    def _planned_pages(self, slots: int) -> int:
        context = max(slots, self.max_len or self.model.config.max_position_embeddings)
        sizes = {"rows": self._planned_rows, "context": context}
        if self.memory_bytes is None:
            room = max(self.local.weight_bytes, _LEAST_CACHE_BYTES)
        else:
            room = self.memory_bytes - self.local.weight_bytes
            if self.pool is None and self.model.plan.compute_capability is not None:
                # Other programs may have taken memory since.
                room = min(room, self.place.free_memory_bytes())
            room = room_for_pages(self.local, **sizes, memory_bytes=room, slots=slots)
        return pool_pages(self.local, **sizes, pool_bytes=room)

    @property
    def _planned_rows(self) -> int:
        """The number of rows for which a pool of pages is planned."""
        return min(self.max_batch or MOST_ROWS, MOST_ROWS)

    @property
    def most_rows(self) -> int:
        """The largest number of rows that run at once."""
        most = _MOST_ROWS_ON_CPU if self.model.plan.compute_capability is None else MOST_ROWS
        return min(self.max_batch or most, most)

    def batches_up_to(self, batch: int, prompt_tokens: int) -> list[list[int]]:
        """Batches that together compile every program that batches up to these sizes may need.

        A batch is a list of prompt lengths. Its rows must always have the same number of slots. If
        rows are in one piece, programs for longer prompts of several rows are left out.

        Args:
          batch: largest number of rows.
          prompt_tokens: tokens of the longest prompt.
        """
        batch = min(batch, self.most_rows)
        numbers = [2**n for n in range(math.ceil(math.log2(batch)))]
        calls = [[1] * rows for rows in [*numbers, batch]]
        # A single row has its own programs for prompts, all other numbers share theirs.
        for rows in {1, batch}:
            room = 1 if rows == 1 else self.most_rows
            sizes = call_sizes(room, on_cpu=self.short_calls, experts=self.has_experts)
            # The least number of blocks that has a call of each size.
            least: dict[int, int] = {}
            most = min(rows * -(-prompt_tokens // SLOT_MULTIPLE), sizes[-1])
            for blocks in range(1, most + 1):
                size = call_size(blocks, sizes, experts=self.has_experts)
                least.setdefault(size, blocks)
            # Of several rows, a call of one block is the rest after another call.
            for blocks in least.values() if rows == 1 else (*least.values(), sizes[1] + 1):
                each = -(-blocks // rows)
                lengths = [each] * (blocks // each) + [blocks % each] * (blocks % each > 0)
                if max(lengths) * SLOT_MULTIPLE < prompt_tokens + SLOT_MULTIPLE:
                    calls.append([min(n * SLOT_MULTIPLE, prompt_tokens) for n in lengths])
        return calls

    def shared_pages(self, pages: np.ndarray, together: bool | None = None) -> SharedPages | None:
        """Find the rows whose shared pages decode steps read together; None if that does not pay.

        Args:
          pages: [B, W] int32, the pages of each row, and `NOBODYS_PAGE` where it has none.
          together: whether that pays; by default, the plan decides.
        """
        config, plan = self.local.config, self.model.plan
        impossible = len(pages) < 2 or self.local.token_ranks > 1
        if impossible or plan.batch_invariant or not any(map(can_share, config.attention)):
            return None
        shared = find_shared(pages, config.heads // config.kv_heads)
        if shared is None or together:
            return shared
        itemsize = jnp.dtype(self.local.kv_dtype or self.local.dtype).itemsize
        heads = config.kv_heads, config.head_dim, itemsize
        shape = reading_shape(shared, *heads, SLOT_MULTIPLE)
        return shared if plan.choose("shared_pages", **shape).implementation == "together" else None

    @property
    def has_experts(self) -> bool:
        """Whether a call of prompts reads the experts of a mixture."""
        return self.model.config.has_experts

    @property
    def short_calls(self) -> bool:
        """Whether short prompts have a program of their own."""
        return self.model.plan.compute_capability is None

    def release(self) -> None:
        """Free the cache.

        Raises:
          RuntimeError: requests are running.
        """
        self.runner.settle()
        if self.runner.busy:
            raise RuntimeError("release: requests are running; end or cancel them first")
        self.reusable = self.pool = None

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

    def stack(self, params: Params) -> dict[str, jax.Array] | None:
        """Stack the layers if a program needs it and memory allows it, see `stack_layers`."""
        return stack_layers(self.model, params, memory_bytes=self.memory_bytes)

    def stacks(self, batch: int, slots: int) -> bool:
        """Whether decode steps of a batch run in one launch, with stacked weights and cache."""
        return self.stacked_params is not None and self._one_launch(batch, slots)

    def loops(self, tokens: int) -> bool:
        """Whether a call of prompts with this many tokens runs the layers in a loop.

        Devices that share the model do not: their sums were not measured in a loop.
        """
        return self.stacked_params is not None and self.model.ranks == 1 and self._loops(tokens)

    def params_of(self, stacked_layers: bool) -> list[jax.Array]:
        """The parameters that `program` takes."""
        return self.stacked_params if stacked_layers else self.params

    def take_state(self, shape: StateShape, may_stack: bool) -> DecodeState:
        """The reusable state if it is large enough, else a new state.

        A cache of rows is stacked if `may_stack` and decode steps run in one launch.
        """
        refuse_trace()
        if shape.pages:
            return self._take_pages(shape)
        batch, slots = shape.rows, shape.slots
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
        stacks = may_stack and self.stacks(batch, slots)
        kv = init_cache(self.local, batch, slots, stacks, self.place.zeros)
        return self._on_devices(start(kv))

    def _on_devices(self, state: DecodeState) -> DecodeState:
        """A state whose cache is on the devices already."""
        ids, progress = self.place.put((state.ids, state.progress))
        return dataclasses.replace(state, ids=ids, progress=progress)

    def leave_state(self, state: DecodeState | None, unread: list[jax.Array]) -> None:
        """Keep a state for the next batch.

        Args:
          state: a state whose rows may all be restarted, or None to keep none.
          unread: tokens of the steps that still run.
        """
        self.reusable = None if state is None else ReusableState(state, unread)

    def _take_pages(self, shape: StateShape) -> DecodeState:
        """A state whose cache is the pool. The pool keeps its content if possible."""
        # `fitting_rows` may drop the reusable state at any time, in another thread.
        (state, _), self.reusable = self.reusable or (None, []), None
        pool = None if state is None else jax.tree.leaves(state.kv)[0]
        if state is None or pool.shape[1] != shape.pages or pool.is_deleted():
            state = pool = None  # frees the old pool
            state = self._open_pool(shape.pages)
            self.reusable = None
        if (state.batch, state.slots) == (shape.room, shape.slots):
            return state
        return self._on_devices(start_in_pages(state.kv, shape.room, shape.slots))

    def _open_pool(self, pages: int) -> DecodeState:
        """Allocate a pool of this many pages, or of fewer if the free memory is fragmented.

        Returns:
          A state with this pool. It is also the reusable state.
        """
        self.reusable = None
        while True:
            fits = True
            try:
                kv = init_pool(self.local, pages, self.place.zeros)
                jax.block_until_ready(kv)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or pages < _FIRST_PAGES:
                    raise
                fits = False
            if self.place.least(int(fits)):
                break
            pages = pages * 3 // 4
            kv = None
            gc.collect()  # the error may keep arrays alive that were allocated before it
        size = self.page_tokens
        logger.info("cache of %d pages of %d tokens", pages, size)
        self.pool = PagePool(pages, size=size, prefix_cache=self._prefix_cache)
        state = start_in_pages(kv, 1, SLOT_MULTIPLE)
        self.reusable = ReusableState(state, [])
        return state

    def program(
        self,
        function: Callable,
        *,
        stacked: bool = False,
        stacked_layers: bool = False,
        beams: bool = False,
        **static,
    ) -> Program:
        """The program of a step, one for each set of processors, whatever their values.

        It takes parameters, state, and the step's other arguments as `HostArrays`. Results of
        decode steps are returned in the host's memory.

        Parameters and state are passed as flat lists, because nested containers of a 32-layer model
        cost 0.15 ms of host time per call.

        Args:
          function: `step.prompt_logits` or `step.decode_steps`.
          stacked: the cache is stacked over the layers.
          stacked_layers: the layers are stacked, and the function takes them as `layers`.
          beams: the state has beams.
          **static: static keyword arguments of the function.
        """
        layout = {"stacked": stacked, "stacked_layers": stacked_layers, "beams": beams}
        name = function.__name__, *(item for item in layout.items() if item[1]), *static.items()
        if (key := (*name, self.place, self.watch)) not in self.programs:
            model = self.local
            packing = self.stacked_packing if stacked_layers else self.packing
            state_def = jax.tree.structure(abstract_state(model, stacked, beams))
            place, whole = self.place, PartitionSpec()
            observer = None if self.watch is None else self.watch.arrive

            def run_local(params, state, host):
                state = jax.tree.unflatten(state_def, state)
                params, args = packing.unpack(params), host.unpack()
                keywords = static
                if stacked_layers:
                    keywords = static | {"layers": params["blocks"]}
                    params = params | {"blocks": layer_slices(params["blocks"])}
                with observed(observer):
                    state, *out = function(model, params, state, *args, **keywords)
                return jax.tree.leaves(state), out

            specs = (
                specs_of(self.params_of(stacked_layers)),
                jax.tree.leaves(state_specs(model, stacked, beams), is_leaf=is_spec),
            )
            run_on_all = place.over(run_local, (*specs, whole), (specs[1], whole))
            is_prefill = function is step.prompt_logits

            def run(params, state, host):
                state, out = run_on_all(params, state, host)
                # A running maximum has no reruns, and XLA places no constant in the host's memory.
                kept = out[2:] if static.get("return_reruns") else []
                out = out[: len(out) - len(kept)]
                return state, *(out if is_prefill else _on_host(out)), *kept

            def describe(params, state, host):
                state = jax.tree.unflatten(state_def, state)
                if is_prefill:
                    what = "prefill of {} x {} tokens".format(*host.abstract[0].shape)
                else:
                    what = f"{static['max_steps']} decode steps"
                rows = static.get("rows", state.batch)
                return f"{what}, cache of {rows} x {state.slots}"

            self.programs[key] = self._compiled(
                run,
                describe,
                (name, model, packing),
                compiler_options(function, model, tiled=static.get("tiles", 1) > 1),
                stored=not _has_custom(static) and observer is None,
            )
        return self.programs[key]

    def choosing(self, processors: Processors, *, beams: bool = False) -> Program:
        """The program of `step.first_tokens`.

        It takes the logits, the state without its cache, and the other arguments as `HostArrays`.
        Results other than the state are returned in the host's memory.
        """
        name, plan = ("first_tokens", processors, beams), self.model.plan
        if (key := (*name, self.place)) not in self.programs:
            state_def = jax.tree.structure(without_cache(abstract_state(self.local, beams=beams)))
            static = {"processors": processors, "plan": plan}

            def run_local(logits, state, host):
                state = jax.tree.unflatten(state_def, state)
                state, *out = step.first_tokens(state, logits, *host.unpack(), **static)
                return jax.tree.leaves(state), out

            whole = PartitionSpec()
            run_on_all = self.place.over(run_local, whole, whole)

            def run(logits, state, host):
                state, out = run_on_all(logits, state, host)
                return state, *_on_host(out)

            def describe(logits, state, host):
                return "first tokens of {} rows, vocabulary of {}".format(*logits.shape)

            self.programs[key] = self._compiled(
                run,
                describe,
                (name, plan, self.model.ranks),
                compiler_options(step.first_tokens),
                stored=not processors.custom,
            )
        return self.programs[key]

    def _compiled(
        self, run: Callable, describe: Callable, description: Any, options: Any, stored: bool
    ) -> Program:
        """The program of a function of (parameters or logits, state, other arguments)."""
        if stored:
            run = cached_on_disk(run, description, self.place.devices[0])
        return Program(run, describe, donate_argnums=1, compiler_options=options)

    def program_counts(self) -> dict[str, int]:
        """Number of compilations so far, of "prefill", "first_tokens" and "decode_steps"."""
        names = {"prompt_logits": "prefill"}
        counts = {"prefill": 0, "first_tokens": 0, "decode_steps": 0}
        for (name, *_), program in self.programs.items():
            if (name := names.get(name, name)) in counts:
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
            alike = i
            if leaf.nbytes <= _PACKED_BYTES:
                alike = leaf.shape, leaf.dtype, getattr(leaf.sharding, "spec", None)
            groups.setdefault(alike, []).append(i)
        return cls(treedef, tuple(map(tuple, groups.values())))

    def pack(self, params: Params) -> list[jax.Array]:
        """Pack the leaves of the tree into arrays."""
        leaves = jax.tree.leaves(params)
        return [
            leaves[group[0]] if len(group) == 1 else stacked([leaves[i] for i in group])
            for group in self.groups
        ]

    def unpack(self, arrays: Sequence[jax.Array]) -> Params:
        """Unpack the tree, inside a trace."""
        leaves: dict[int, jax.Array] = {}
        for group, array in zip(self.groups, arrays, strict=True):
            leaves |= {group[0]: array} if len(group) == 1 else dict(zip(group, array, strict=True))
        return jax.tree.unflatten(self.treedef, [leaves[i] for i in range(len(leaves))])


def compiler_options(
    function: Callable, model: Model | None = None, *, tiled: bool = False
) -> dict[str, Any]:
    """XLA options for the program of a step, except options that `XLA_FLAGS` sets.

    `tiled` is for calls of prompts in tiles.
    """
    options = _OPTIONS | (_DECODE_OPTIONS if function is step.decode_steps else {})
    if model is not None and model.config.weight_formats:
        # Dequantised weights must share memory, or all of them would exist at the same time.
        options.pop(_CONCURRENT, None)
    if model is not None and model.ranks > 1 and (captured := options.get(_CAPTURED)):
        options[_CAPTURED] = ",".join([captured, *_COLLECTIVES])
    if tiled:
        options |= _TILED_OPTIONS
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in flags}


def _has_custom(static: Mapping[str, Any]) -> bool:
    return "processors" in static and bool(static["processors"].custom)


def _on_host(out: Any) -> Any:
    """Results that a program copies to the host itself.

    So a prompt's first token arrives 0.6 ms earlier than with a separate copy.
    """
    return jax.device_put(out, jax.memory.Space.Host)


def _is_finite(tokens: np.ndarray | jax.Array) -> bool:
    """Whether all tokens of a chunk come from finite logits."""
    return not (np.asarray(tokens) == NOT_FINITE).any()


def _raise_failure(rows: Sequence[RequestState]) -> None:
    for row in rows:
        if row.error is not None:
            refuse_trace()
            raise row.error
