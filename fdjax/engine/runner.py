"""Runs sequences on the device, as the scheduler decides.

A thread that waits for a sequence advances all sequences. When its own has the result, another
waiting thread continues. A background thread advances the submitted ones.
"""

import atexit
import collections
import contextlib
import dataclasses
import math
import numbers
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fdjax.engine.packed import PackedPrompts
from fdjax.engine.schedule import PrefillCall, PromptsOfRows
from fdjax.engine.scheduler import Scheduler, StateShape
from fdjax.engine.sequence import Chunk, RequestState
from fdjax.engine.session import Session
from fdjax.engine.task import Call, InFlight, Task
from fdjax.engine.watch import waiting
from fdjax.sampling.sampler import NOT_FINITE, Logprobs
from fdjax.system import nccl
from fdjax.system.process import refuse_forked, transfers_allowed
from fdjax.system.traces import refuse_trace

# Decode steps of a chunk while requests wait for a row. An ended request keeps its row until then.
_STEPS_WHILE_OTHERS_WAIT = 8
# Prompt tokens between two chunks of decode steps, normally and while a caller streams an answer.
# The latter take 25 to 30 ms on an H100 for a model of 7B, as long as 4 decode steps. A call counts
# for more tokens than it has, because it reads all weights.
_PROMPT_TOKENS_BETWEEN_CHUNKS, _PROMPT_TOKENS_OF_STREAMS = 8192, 1152
_TOKENS_OF_A_CALL = 128
# The same while more rows wait for their prompts than decode, and nobody streams. A step of few
# rows takes almost as long as one of many.
_PROMPT_TOKENS_BEFORE_FEW_ROWS = 32768
# Submitted calls that have ended are left out when there are at least this many calls, and twice as
# many as after the last time. So submitting takes linear time.
_LEAST_TO_PRUNE = 256
# A state shrinks to one of these numbers of rows if that at least halves it, if all sequences fit,
# and if one of them needs at least this many more steps. Each number of rows needs a program.
_FEWER_ROWS, _STEPS_OF_FEWER_ROWS = (32, 128), 64


_runners: weakref.WeakSet["Runner"] = weakref.WeakSet()


# Seconds to wait for steps of calls that have been cancelled. They may be compiling.
_LONGEST_STEPS_S = 30


@atexit.register
def _stop_all() -> None:
    """Stop all threads at exit, because one that is inside of XLA then ends the process."""
    for runner in list(_runners):
        with contextlib.suppress(Exception):
            runner.stop(timeout=10)


class Runner:
    """Runs the sequences of all callers of one engine.

    Attributes:
      aborted: whether a call has failed as a whole, or was interrupted.
    """

    def __init__(self, engine: Any, open_session: Callable[..., Any] = Session):
        """Prepare a runner without calls.

        Args:
          engine: an `Engine`, which has programs, state and limits.
          open_session: function of (engine, shape, return_reruns) that returns a `Session`, or a
            substitute in tests.
        """
        self._engine = engine
        self._open_session = open_session
        self._scheduler: Scheduler[Task] = Scheduler()
        self._session: Session | None = None
        self._arrivals: collections.deque[Call] = collections.deque()
        self._prompts: PackedPrompts | PromptsOfRows | tuple = ()
        self._flight: collections.deque[InFlight] = collections.deque()
        self._compile_seconds = 0.0  # seconds of compilation since the last results were read
        self._undivided = 0  # prompt tokens since the last decode steps, and `_TOKENS_OF_A_CALL`
        # Numbers of rows that decode steps of this session had, so they need not be compiled.
        self._rows_before: set[int] = set()
        # Ctrl-C may come inside the `with` of a condition, which then stays locked, but not inside
        # that of its lock.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._table_is_old = False
        self._advancing: int | None = None  # the thread that advances the sequences
        self._submitted: collections.deque[Call] = collections.deque()
        self._prune_at = _LEAST_TO_PRUNE
        self._background = False
        self._stopped = False
        self.aborted = False
        _runners.add(self)

    @property
    def busy(self) -> bool:
        """Whether any call runs or waits."""
        # Calls that ended before anyone took them stay among the arrivals until the next call.
        arrived = any(not call.ended for call in list(self._arrivals))
        return self._session is not None or arrived or bool(self._scheduler.waiting)

    def run(self, rows: Sequence[RequestState], steps: int) -> Iterator[Chunk]:
        """Advance rows until all have ended, and yield each chunk after the rows took their parts.

        A row that fails has an `error`; the others continue.

        Args:
          rows: the sequences to run, together with those of other callers.
          steps: largest number of decode steps in a chunk.
        """
        chunks: collections.deque[Chunk] = collections.deque()
        call = Call(rows, steps, chunks.append)
        self._arrivals.append(call)
        try:
            while self.wait(call, lambda: chunks):
                yield chunks.popleft()
        finally:
            self.cancel(call)

    def submit(self, call: Call) -> None:
        """Run a call in the background."""
        self._arrivals.append(call)
        with self._lock:
            self._submitted.append(call)
            if len(self._submitted) >= self._prune_at:
                self._submitted = collections.deque(c for c in self._submitted if not c.ended)
                self._prune_at = max(_LEAST_TO_PRUNE, 2 * len(self._submitted))
            if not self._background:
                self._background = True
                threading.Thread(target=self._run_submitted, name="fdjax", daemon=True).start()

    def wait(
        self, call: Call, ready: Callable[[], Any] = lambda: False, timeout: float | None = None
    ) -> bool:
        """Advance all sequences until a call is ready or has ended; returns whether it is ready.

        Args:
          call: a call of `run` or `submit`.
          ready: function that returns whether to stop waiting.
          timeout: seconds after which to raise TimeoutError.

        Raises:
          ValueError: `timeout` is not a number.
        """
        until = None
        if timeout is not None:
            is_real = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
            if not is_real or not -math.inf <= timeout <= math.inf:  # NaN
                raise ValueError(f"result: timeout must be a number of seconds, got {timeout!r}")
            until = time.monotonic() + float(min(max(timeout, 0), threading.TIMEOUT_MAX))
        self._advance_until(lambda: call.ended or ready(), until)
        return bool(ready())

    def cancel(self, call: Call) -> None:
        """End the sequences of a call."""
        call.cancelled = True
        with self._lock:
            if self._advancing is None:
                self._settle()
            self._condition.notify_all()

    def settle(self) -> None:
        """Wait until steps end that run for calls that have been cancelled, and free their rows."""
        with self._lock:
            idle = self._advancing is None
            # Other calls may take long, and a callback would wait for itself.
            if not idle and self._advancing != threading.get_ident() and self._is_cancelled():
                idle = self._condition.wait_for(lambda: self._advancing is None, _LONGEST_STEPS_S)
            if idle:
                self._settle()

    def _is_cancelled(self) -> bool:
        return self._background and all(call.ended for call in self._submitted)

    def stop(self, timeout: float) -> None:
        """End submitted calls, and let only the main thread advance the others.

        Args:
          timeout: largest number of seconds to wait for the background thread, and for another.
        """
        refuse_forked()
        with self._lock:
            for call in list(self._submitted):
                self.cancel(call)
        self.join(timeout)
        with self._lock:
            self._stopped = True
            self._condition.wait_for(lambda: self._advancing is None, timeout)

    def join(self, timeout: float) -> None:
        """Wait for the background thread, for at most `timeout` seconds."""
        with self._lock:
            self._condition.wait_for(lambda: not self._background, timeout)

    def _run_submitted(self) -> None:
        """Advance until all submitted calls have ended; the background thread runs this."""
        left = True
        try:
            while left:
                self._advance_until(self._all_submitted_ended)
                with self._lock:
                    left = self._background = not self._all_submitted_ended()
        finally:
            with self._lock:
                self._background = False
                self._condition.notify_all()

    def _all_submitted_ended(self) -> bool:
        while self._submitted and self._submitted[0].ended:
            self._submitted.popleft()
        return not self._submitted

    def _advance_until(self, ready: Callable[[], Any], until: float | None = None) -> None:
        """Advance all sequences, in turns with other threads, until `ready` or the time `until`."""
        refuse_forked()
        nested = self._advancing == threading.get_ident()
        if not nested:  # inside a trace, the programs of all callers would fail
            refuse_trace()
        try:
            while self._takes_turn(ready, until):
                try:
                    with transfers_allowed():
                        self._advance()
                except Exception as error:
                    nccl.advise(error)
                    self._abort(error)
                except BaseException:
                    self._abort(None)
                    raise
                self._end_turn()
        finally:
            # Ctrl-C may come between any two statements. A nested call has no turn of its own.
            if not nested:
                self._end_turn()

    def _takes_turn(self, ready: Callable[[], Any], until: float | None) -> bool:
        """Wait until this thread may advance. Returns False if `ready` is true by then."""
        with self._lock:
            if self._advancing == threading.get_ident() and not ready():
                raise RuntimeError(
                    "generate: a logits processor or stopping criterion must not generate with "
                    "the model that calls it; load a second model"
                )
            left = None
            if until is not None:
                left = min(until - time.monotonic(), threading.TIMEOUT_MAX)
            self._condition.wait_for(lambda: ready() or self._is_free(), left)
            if ready():
                return False
            if until is not None and time.monotonic() >= until:
                raise TimeoutError("generate: no result within the time allowed")
            self._advancing = threading.get_ident()
            return True

    def _is_free(self) -> bool:
        """Whether this thread may advance."""
        stopped = self._stopped and threading.current_thread() is not threading.main_thread()
        return self._advancing is None and not stopped

    def _end_turn(self) -> None:
        """Let another thread advance, unless this one did not."""
        with self._lock:
            if self._advancing == threading.get_ident():
                self._advancing = None
                self._condition.notify_all()

    def _advance(self) -> None:
        """Dispatch as much as possible, and read the oldest results."""
        scheduler = self._scheduler
        self._take_arrivals()
        self._settle()
        if scheduler.shape is not None and scheduler.should_reopen():
            larger = self._larger_shape()
            if larger is None:
                if self._flight:
                    self._read()
                    return
                self._close()
            elif not self._prompts:
                self._reshape(larger)
        if scheduler.shape is None and not self._open():
            return
        self._shrink()
        self._admit()
        self._dispatch()
        if self._flight:
            self._read()
        self._settle()

    def _take_arrivals(self) -> None:
        while self._arrivals:
            call = self._arrivals.popleft()
            self._scheduler.add([Task(row, call) for row in call.rows if not row.ended])

    def _settle(self) -> None:
        """Free the rows of tasks that have ended, and the state if none is left."""
        scheduler = self._scheduler
        scheduler.skip_ended()
        if scheduler.shape is None:
            return
        if not scheduler.waiting and all(task.ended for _, task in scheduler.running):
            self._close()
            return
        # Results that have not been read may say that a row's cache is damaged.
        unread = {task for flying in self._flight for task in flying.owners}
        for i, task in list(scheduler.running):
            known = task not in unread or task.row.ended_on_device
            if task.ended and (known or scheduler.pool is not None):
                self._release(i)

    def _release(self, row: int, *, quarantine: bool = False) -> None:
        """Free a row, and stop dispatching its prompt."""
        task = self._scheduler.rows[row]
        self._leave(row)
        if not quarantine:
            self._share(task)
        self._scheduler.release(row, quarantine=quarantine)

    def _leave(self, row: int) -> None:
        """Stop dispatching a row's prompt and decode steps."""
        task = self._scheduler.rows[row]
        if task is not None and task.budget is None:
            self._prompts.leave_out(row)
        self._session.end(range(row, row + (1 if task is None else task.width)))
        self._table_is_old = True

    def _share(self, task: Task | None) -> None:
        """Let other prompts share the full pages of a task."""
        pool = self._scheduler.pool
        if pool is not None and task is not None and task.budget is not None:
            # The last token has no slot.
            pool.register(task.ids[:-1], task.pages)

    def _preempt(self, row: int) -> None:
        """Take a row's pages away. Its task will continue after the tokens that were read."""
        task = self._scheduler.rows[row]
        self._leave(row)
        self._share(task)
        self._scheduler.preempt(row)
        task.budget = None

    def _quarantine(self, row: int) -> None:
        """Stop using a row. A task that has got the row since then waits again."""
        task = self._scheduler.rows[row]
        if task is not None:
            self._scheduler.waiting.appendleft(task)
            self._flight = collections.deque(flying.without(task) for flying in self._flight)
        self._release(row, quarantine=True)
        if task is not None:
            task.budget = None

    def _open(self) -> bool:
        """Open a state for the next tasks; returns False if no task waits."""
        while candidates := self._scheduler.candidates():
            rows = [task.row for task in candidates]
            try:
                shape = self._engine.shape_for(rows)
            except MemoryError as error:
                self._drop_too_large(candidates, error)
                continue
            return_reruns = any(row.request.config.return_reruns for row in rows)
            session = self._open_session(self._engine, shape, return_reruns)
            self._prompts = self._no_prompts(shape)
            self._rows_before = set()
            # Last, because `_abort` fails the waiting tasks only if nothing is open.
            self._session = session
            self._scheduler.open(shape, self._engine.pool if shape.pages else None)
            return True
        return False

    def _no_prompts(self, shape: StateShape) -> PackedPrompts | PromptsOfRows:
        short = self._engine.short_calls
        if not shape.pages:
            return PromptsOfRows(shape.rows, shape.slots, short=short)
        return PackedPrompts(
            shape.room,
            on_cpu=short,
            experts=self._engine.has_experts,
            page_tokens=self._engine.page_tokens,
        )

    @property
    def _can_reshape(self) -> bool:
        """Whether sequences can move to other rows: rows in one piece and beams cannot."""
        scheduler = self._scheduler
        return scheduler.pool is not None and all(s.width == 1 for _, s in scheduler.running)

    def _larger_shape(self) -> StateShape | None:
        """The shape of a state for those that run and wait, if the running ones can move to it."""
        scheduler = self._scheduler
        if not self._can_reshape or scheduler.idle:
            return None
        tasks = [task for _, task in scheduler.running]
        tasks += [task for task in scheduler.candidates() if task.group == tasks[0].group]
        try:
            shape = self._engine.shape_for([task.row for task in tasks])
        except MemoryError:
            return None
        old = scheduler.shape
        if shape.pages != old.pages or shape.rows < old.rows:
            return None
        slots, most = max(shape.slots, old.slots), min(shape.most_rows, old.most_rows)
        return dataclasses.replace(shape, slots=slots, most_rows=most)

    def _shrink(self) -> None:
        """Go on with fewer rows when most sequences have ended and nobody waits.

        A step of few rows takes less time.
        """
        scheduler = self._scheduler
        if not self._can_reshape or scheduler.waiting or self._prompts:
            return
        running = [task for _, task in scheduler.running]
        rows = scheduler.shape.rows
        if any(task.streams for task in running):
            # A program that must be compiled would hold up the streams. Others will come: they find
            # as many free rows as there are in use.
            numbers, needed = sorted(self._rows_before), 2 * len(running)
        else:
            numbers, needed = _FEWER_ROWS, len(running)
            if max((task.budget for task in running), default=0) < _STEPS_OF_FEWER_ROWS:
                return
        count = next((n for n in numbers if needed <= n and 2 * n <= rows), None)
        if count is None:
            return
        self._reshape(dataclasses.replace(scheduler.shape, rows=count, limited=False))

    def _reshape(self, shape: StateShape) -> None:
        """Go on with another number of rows or slots. Pages stay where they are."""
        self._session.reshape(self._scheduler.reshape(shape), shape)
        self._session.set_options([task and task.row for task in self._scheduler.rows])
        self._prompts = self._no_prompts(shape)
        self._table_is_old = True

    def _drop_too_large(self, candidates: Sequence[Task], error: MemoryError) -> None:
        """Fail the tasks that do not fit alone; if all do, fail the one with the most tokens."""
        dropped = False
        for task in candidates:
            try:
                self._engine.shape_for([task.row])
            except MemoryError as own:
                task.row.error = own
                self._scheduler.drop(task)
                dropped = True
        if not dropped:
            largest = max(candidates, key=lambda task: task.tokens)
            largest.row.error = error
            self._scheduler.drop(largest)

    def _close(self) -> None:
        """Leave the state to the next session, unless it has values that are not finite.

        Tasks that still run wait again.
        """
        for _, task in self._scheduler.running:
            self._share(task)
        unread = [flying.results[0] for flying in self._flight]
        pending = bool(self._prompts) and self._scheduler.pool is None
        sound = not self._scheduler.quarantined and not pending
        self._engine.leave_state(self._session.state if sound else None, unread)
        self._forget()

    def _abort(self, error: Exception | None) -> None:
        """Close after a failure. Running tasks fail with `error`; if it is None, they run again."""
        self.aborted = True
        for _, task in self._scheduler.running:
            if error is not None and not task.ended:
                task.row.error = error
        if self._scheduler.shape is None and error is not None:
            for task in self._scheduler.waiting:
                task.row.error = error
        if self._session is not None:
            self._session.discard()
        self._engine.leave_state(None, [])
        self._forget()

    def _forget(self) -> None:
        for _, task in self._scheduler.running:
            task.budget = None
        self._scheduler.close()
        self._session = None
        self._prompts = ()
        self._flight.clear()

    def _admit(self) -> None:
        """Give free rows to waiting tasks, and plan the calls for their prompts."""
        scheduler = self._scheduler
        admitted = scheduler.admit()
        if not admitted:
            return
        tasks = {i: scheduler.rows[i] for i in admitted}
        members = scheduler.members()
        self._session.set_options([member and member[0].row for member in members])
        self._table_is_old = True
        self._set_pages()
        for task in tasks.values():
            task.row.begin()
            if not task.row.tokens:
                task.row.cached_tokens = task.cached
        leaders = {i: leader for i, leader in admitted.items() if leader is not None}
        own = {i: task for i, task in tasks.items() if i not in leaders}
        beginnings = {i: task.ids[: task.cached] for i, task in own.items() if task.cached}
        # A row that follows another gets no tokens from blocks.
        prompts = {leader: scheduler.rows[leader].ids for leader in leaders.values()}
        beginnings |= {i: prompts[leader] for i, leader in leaders.items()}
        if beginnings:
            self._session.begin_after(beginnings)
        self._prompts.add(
            {i: task.ids for i, task in own.items()},
            cached={i: task.cached for i, task in own.items()},
            generated={i: len(task.row.tokens) for i, task in own.items()},
        )
        for row, leader in leaders.items():
            self._prompts.follow(row, leader)

    def _set_pages(self) -> None:
        """Give the session the current table of pages, before the next call."""
        if self._table_is_old and self._scheduler.pool is not None:
            members = self._scheduler.members()
            self._session.set_pages([(member and _table(*member)) or () for member in members])
        self._table_is_old = False

    def _dispatch(self) -> None:
        """Dispatch a limited number of prompt tokens, and decode steps for rows that need them."""
        starts = not self._flight and not any(task.budget for _, task in self._scheduler.running)
        most = self._most_prompt_tokens(starts)
        if starts:
            self._undivided = 0
        while self._prompts and self._undivided < most:
            call = self._prompts.take(most - self._undivided)
            self._set_pages()
            seconds, results = self._session.prefill(call)
            self._undivided += call.size + _TOKENS_OF_A_CALL
            self._compile_seconds += seconds
            if call.final.any():
                owners = self._first_owners(call)
                self._flight.append(InFlight(owners, results, True))
        if not self._prompts and self._scheduler.pool is not None:
            self._scheduler.pool.dispatched()
        # First tokens are read before anything else is dispatched, because compilation would delay
        # them.
        if not (starts and self._flight):
            self._dispatch_steps()

    def _most_prompt_tokens(self, starts: bool) -> float:
        """Prompt tokens that may be dispatched now."""
        running = [task for _, task in self._scheduler.running]
        if any(task.streams for task in running):
            return _PROMPT_TOKENS_OF_STREAMS
        if starts:
            return math.inf
        decoding = sum(task.width for task in running if task.budget)
        prompts = sum(task.width for task in running if task.budget is None)
        if prompts > decoding and not any(task.streams for task in self._scheduler.waiting):
            return _PROMPT_TOKENS_BEFORE_FEW_ROWS
        return _PROMPT_TOKENS_BETWEEN_CHUNKS

    def _first_owners(self, call: PrefillCall) -> tuple[Task | None, ...]:
        """The task of each row whose first token comes from this call."""
        rows = range(len(call.final)) if call.rows is None else call.rows.tolist()
        owners = [
            self._scheduler.rows[i] if final else None
            for i, final in zip(rows, call.final.tolist(), strict=True)
        ]
        for task in owners:
            if task is not None:
                config = task.row.request.config
                task.budget = config.max_new_tokens - len(task.row.tokens) - 1
        return tuple(owners)

    def _dispatch_steps(self) -> None:
        """Keep two chunks of decode steps in flight."""
        while sum(not flying.is_first for flying in self._flight) < 2:
            active = [task for _, task in self._scheduler.running if task.budget]
            if not active:
                return
            most = max(task.call.steps for task in active)
            steps = min(task.call.steps for task in active)
            waiting = self._scheduler.waiting
            if waiting or self._prompts:
                steps = min(steps, _STEPS_WHILE_OTHERS_WAIT)
            if waiting:
                steps = min(steps, waiting[0].call.steps)
            if not self._grow(active, steps):
                return
            self._set_pages()
            owners = tuple(
                task if task is not None and task.budget is not None else None
                for task in self._scheduler.rows
            )
            for task in active:
                task.budget = max(task.budget - steps, 0)
            seconds, results = self._session.decode(steps, most)
            self._rows_before.add(self._scheduler.shape.rows)
            self._compile_seconds += seconds
            self._flight.append(InFlight(owners, results, False))
            self._undivided = 0

    def _grow(self, active: Sequence[Task], steps: int) -> bool:
        """Take the pages for more steps. Returns False if results must be read first.

        If nothing is in flight, the youngest task gives up its pages. The oldest task never does.
        Alone, it fits, so it always ends.
        """
        scheduler = self._scheduler
        for task in sorted(active, key=lambda task: task.arrival):
            owned = len(task.pages)
            while task in scheduler.rows and not scheduler.grow(task, task.tokens_after(steps)):
                if self._flight:
                    return False
                self._preempt(scheduler.youngest)
            self._table_is_old |= len(task.pages) > owned
        return all(task in scheduler.rows for task in active)

    def _read(self) -> None:
        """Wait for the oldest results and hand them to their owners and calls."""
        flying = self._flight.popleft()
        what = "first tokens" if flying.is_first else "tokens of decode steps"
        with waiting(self._engine.watch, what, self._engine.model.ranks):
            chunk = _chunk(flying, self._compile_seconds)
        calls = {task.call for task in flying.owners if task is not None}
        try:
            # A stopping criterion may take long. Meanwhile other threads ask if their calls ended.
            for call in calls:
                call.taking = True
            self._hand_over(chunk, flying)
        finally:
            for call in calls:
                call.taking = False

    def _hand_over(self, chunk: Chunk, flying: InFlight) -> None:
        """Give each row its part of a chunk, and then each call."""
        parts: dict[Call, list[int]] = {}
        damaged = (chunk.tokens == NOT_FINITE).any(axis=1)
        for i, task in enumerate(flying.owners):
            if task is None:
                # The device does not know that a row has ended on the host, so it continues until
                # the row's next prompt.
                if damaged[i] and not flying.is_first and self._scheduler.pool is None:
                    self._quarantine(i)
                continue
            if damaged[i] and task in self._scheduler.rows:
                self._release(self._scheduler.rows.index(task), quarantine=True)
            if task.ended:
                continue
            try:
                task.row.take(chunk, i)
            except Exception as error:
                task.row.error = error
            parts.setdefault(task.call, []).append(i)
        if parts:
            self._compile_seconds = 0.0
        for call, rows in parts.items():
            call.receive(chunk.rows(rows))


def _table(task: Task, beam: int) -> list[int]:
    """The pages of a row of a task."""
    return task.row.table(task.pages, beam)


def _chunk(flying: InFlight, compile_seconds: float) -> Chunk:
    tokens, logprobs, reruns, beams = (*_numpy(flying.results), None, None, None)[:4]
    if flying.is_first:  # a call with prompts gives one step
        tokens, logprobs = jax.tree.map(lambda a: a[:, None], (tokens, logprobs))
    chosen, top = None, None
    if isinstance(logprobs, Logprobs):
        chosen, top = logprobs.chosen, (logprobs.top, logprobs.top_ids)
    return Chunk(tokens, chosen, top, compile_seconds, reruns, flying.is_first, beams)


def _numpy(results: Any) -> Any:
    """The results of a program as NumPy arrays. They are in host memory."""
    # Reading results without waiting for them first takes longer than both.
    return jax.tree.map(np.asarray, jax.block_until_ready(results))
