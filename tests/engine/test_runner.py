"""Any number of sequences on a fake device: none is lost, mixed up or left behind."""

import _thread
import dataclasses
import gc
import itertools
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdjax.engine import runner
from fdjax.engine.pages import PagePool, page_count
from fdjax.engine.runner import Runner
from fdjax.engine.schedule import slots_for
from fdjax.engine.scheduler import StateShape
from fdjax.engine.sequence import Request, RequestState
from fdjax.engine.state import NOBODYS_PAGE
from fdjax.engine.state import SLOT_MULTIPLE as PAGE
from fdjax.engine.task import Call
from fdjax.sampling.options import GenerationConfig
from fdjax.sampling.sampler import NOT_FINITE
from fdjax.system import nccl
from fdjax.text.tokenizer import Tokenizer

EOS = 7
# A prompt with this token gives logits that are not finite. The next token says after how many
# tokens.
DAMAGED = 99


def next_token(ids: list[int], prompt: int) -> int:
    """The next token of a fake model, which depends on every token before."""
    if DAMAGED in ids[:prompt] and len(ids) - prompt >= ids[ids.index(DAMAGED) + 1]:
        return NOT_FINITE
    return (31 * sum(i * (n + 1) for n, i in enumerate(ids)) + len(ids)) % 89


def answer(row: RequestState) -> list[int]:
    """The expected result of a row by itself."""
    ids, config = list(row.request.ids), row.request.config
    while len(ids) - len(row.request.ids) < config.max_new_tokens:
        token = next_token(ids, len(row.request.ids))
        if token == NOT_FINITE:
            break
        ids.append(token)
        if token in config.eos_token_ids:
            break
    return ids[len(row.request.ids) :]


@dataclasses.dataclass
class DeviceRow:
    cached: list[int] = dataclasses.field(default_factory=list)
    last: int = 0
    prompt: int = 0
    finished: bool = True
    row: RequestState | None = None
    tainted: bool = False


class Device:
    """A fake `Session`: computes the results of the programs, and refuses misuse."""

    def __init__(self, engine, shape, return_reruns):
        self.engine, self.shape = engine, shape
        self.rows = [DeviceRow() for _ in range(shape.rows)]
        self.options = [None] * shape.rows
        self.restarts = set(range(shape.rows))
        engine.sessions += 1
        self.state = object()
        self.pages = [()] * shape.rows

    def set_options(self, rows):
        self.options = list(rows)

    def set_pages(self, pages):
        assert self.engine.pool is not None and all(
            len(p) * PAGE <= self.shape.slots for p in pages
        )
        self.pages = [list(p) for p in pages]

    def begin_after(self, beginnings):
        self.restart()
        for i, ids in beginnings.items():
            self.rows[i].cached = list(ids)
            if ids.tolist() != self.options[i].ids.tolist():  # it does not follow another sample
                assert len(ids) % PAGE == 0
                self.check_content(i)

    def reshape(self, rows, shape):
        assert shape.slots >= self.shape.slots and shape.pages == self.shape.pages
        self.rows = [self.rows[i] for i in rows]
        self.rows += [DeviceRow() for _ in range(shape.rows - len(rows))]
        self.options, self.pages = [None] * shape.rows, [()] * shape.rows
        self.restarts = set()
        self.engine.reshaped.append((self.shape.rows, shape.rows))
        self.shape = shape

    def restart(self):
        for i in self.restarts:
            self.rows[i] = DeviceRow(tainted=self.rows[i].tainted)
        self.restarts = set()

    def write(self, i, tokens):
        """Append tokens to a row, and put them into its pages.

        They must be its alone, or hold the same tokens for others.
        """
        row = self.rows[i]
        for token in tokens:
            if self.engine.pool is not None:
                at = len(row.cached)
                page = self.pages[i][at // PAGE]
                assert page != NOBODYS_PAGE
                for j, owned in enumerate(self.pages):
                    assert j == i or page not in owned or self.options[j].ids[at] == token
                self.engine.content[page][len(row.cached) % PAGE] = token
            row.cached.append(token)

    def check_content(self, i):
        """The pages of a row hold what it wrote, or what another wrote that began the same."""
        if self.engine.pool is not None:
            found = [t for page in self.pages[i] for t in self.engine.content[page]]
            assert found[: len(self.rows[i].cached)] == self.rows[i].cached

    def end(self, rows):
        self.restarts |= set(rows)

    def prefill(self, call):
        if self.engine.fail_next:
            self.engine.fail_next = False
            raise RuntimeError("the device failed")
        self.restart()
        rows = list(range(len(call.final))) if call.rows is None else call.rows.tolist()
        assert len(set(rows)) == len(rows) and set(rows) <= set(range(self.shape.room))
        owners = range(len(rows)) if call.owners is None else call.owners.tolist()
        out = np.full(len(rows), -1, np.int32)
        ends = [0] * len(rows)
        # All blocks are written before any attends, so their order means nothing.
        for offset, b in sorted(zip(call.offsets.tolist(), range(len(call.tokens)), strict=True)):
            n, r = call.lengths[b], owners[b]
            if not n:
                continue
            row = self.rows[rows[r]]
            if row.cached == self.options[rows[r]].ids.tolist():  # it followed one that has ended
                del row.cached[offset:]
            assert row.finished and offset == len(row.cached)
            if self.engine.pool is None:
                assert call.owners is None
                assert offset + call.tokens.shape[1] <= self.shape.slots
            elif call.tokens.shape[1] % PAGE == 0:
                assert offset % PAGE == 0
            self.write(rows[r], call.tokens[b, :n].tolist())
            ends[r] = len(row.cached)
            if call.last is not None:
                last = call.last[r]
                assert ends[r] <= call.offsets[last] + call.lengths[last] and owners[last] == r
        for i, leader in call.copied.items():
            r, at = rows.index(i), (len(self.rows[i].cached) - 1) // PAGE
            ends[r] = ends[rows.index(leader)]
            source, target = self.pages[leader][at], self.pages[i][at]
            assert sum(target in owned for owned in self.pages) == 1
            self.engine.content[target] = list(self.engine.content[source])
            self.check_content(i)
        for r, i in enumerate(rows):
            if not ends[r]:
                assert not call.final[r] and (call.last is None or call.last[r] == -1)
                continue
            row = self.rows[i]
            row.prompt = int(call.prompts[r])
            if call.last is not None:
                assert ends[r] == call.offsets[call.last[r]] + call.lengths[call.last[r]]
            if call.final[r]:
                assert row.cached == self.options[i].ids[: len(row.cached)].tolist()
                assert len(row.cached) == call.prompts[r] + call.generated[r]
                assert call.generated[r] == len(self.options[i].tokens)
                row.row = self.options[i]
                row.finished = False
                out[r] = self.choose(row)
        return 0.0, (out,)

    def discard(self):
        pass

    def decode(self, steps, most):
        assert 0 < steps <= most
        out = np.full((len(self.rows), most), -1, np.int32)
        for i, row in enumerate(self.rows):
            if self.engine.pool is not None and not row.finished:
                row.finished = not self.pages[i]
            if not row.finished:
                self.check_content(i)
            for step in range(steps):
                if row.finished:
                    break
                self.write(i, [row.last])
                assert len(row.cached) < self.shape.slots
                out[i, step] = self.choose(row)
        return 0.0, (out,)

    def choose(self, row):
        token = next_token(row.cached, row.prompt)
        if row.tainted and token >= 0:  # data that another row left in the cache would show
            token = (token + 1) % 89
        config = row.row.request.config
        steps = len(row.cached) - row.prompt + 1
        row.finished = token < 0 or token in config.eos_token_ids or steps >= config.max_new_tokens
        # Nobody reads of a page what he has not written.
        row.tainted |= token == NOT_FINITE and self.engine.pool is None
        row.last = max(token, 0)
        return token


class Engine:
    """Limits, and where a state is left."""

    short_calls = True
    has_experts = False
    page_tokens = PAGE
    watch = None
    model = types.SimpleNamespace(ranks=1)

    def __init__(self, most_rows=8, most_slots=10_000, pages=0):
        self.most_rows, self.most_slots, self.pages = most_rows, most_slots, pages
        self.sessions, self.left, self.reshaped, self.fail_next = 0, [], [], False
        self.pool = None
        self.leave_state(None, [])
        self.left = []
        self.runner = Runner(self, Device)

    def shape_for(self, rows):
        slots = max(row.slots for row in rows)
        slots = max(slots, slots_for(1, slots, None))
        if slots > self.most_slots:
            raise MemoryError("too long")
        if self.pages and max(page_count(row.most_tokens) for row in rows) >= self.pages:
            raise MemoryError("too long for the pages")
        batch = min(2 ** (len(rows) - 1).bit_length(), self.most_rows)
        most = self.most_rows if self.pages else 0
        limited = batch < len(rows)
        return StateShape(batch, slots, limited=limited, pages=self.pages, most_rows=most)

    def leave_state(self, state, unread):
        self.left.append(state)
        if state is None and self.pages:
            self.pool = PagePool(self.pages)
            self.content = [[None] * PAGE for _ in range(self.pages)]

    def check_pages(self):
        """No page is lost, and none is two rows' unless they share it."""
        if self.pool is not None:
            scheduler = self.runner._scheduler
            assert not any(task.pages for task in scheduler.waiting)
            self.pool.check([task.pages for _, task in scheduler.running])


def make_row(prompt, new=10, **options) -> RequestState:
    options = {"eos_token_ids": (EOS,)} | options
    config = GenerationConfig(max_new_tokens=new, **options).filled()
    return RequestState(Request(np.array(prompt, np.int32), config), Tokenizer())


def make_samples(prompt, count, new=10, **options) -> list[RequestState]:
    row = make_row(prompt, new, **options)
    requests = [dataclasses.replace(row.request, sample=i) for i in range(count)]
    return [RequestState(request, Tokenizer()) for request in requests]


def finish(engine, rows, steps=32):
    for _ in engine.runner.run(rows, steps):
        pass


def check(row):
    expected = answer(row)
    assert row.tokens == expected
    if DAMAGED in row.request.ids and len(expected) < row.request.config.max_new_tokens:
        assert isinstance(row.error, FloatingPointError) or expected[-1:] == [EOS]
    else:
        assert row.error is None and row.finish_reason in ("stop", "length")


def test_more_sequences_than_rows():
    engine = Engine()
    rows = [make_row([i % 50 + 1] * (i % 300 + 1), new=i % 40) for i in range(200)]
    finish(engine, rows)
    for row in rows:
        check(row)
    assert engine.sessions == 1 and len(engine.left) == 1


def test_a_row_that_fails_fails_alone():
    engine = Engine()
    rows = [make_row([i + 1, i + 2], new=30) for i in range(20)]
    rows[3] = make_row([DAMAGED, 0, 5], new=30)
    rows[7] = make_row([DAMAGED, 9, 5], new=30)

    def failing(tokens):
        if len(tokens) == 4:
            raise KeyError("mine")
        return False

    rows[12] = make_row([40, 41], new=30, stopping_criteria=(failing,), eos_token_ids=())
    finish(engine, rows)
    assert isinstance(rows[3].error, FloatingPointError) and "token 0" in str(rows[3].error)
    assert isinstance(rows[7].error, FloatingPointError)
    assert isinstance(rows[12].error, KeyError) and len(rows[12].tokens) == 4
    for i, row in enumerate(rows):
        if i != 12:
            check(row)
    # A cache with values that are not finite is not used again.
    assert engine.left[-1] is None


def test_more_damaged_rows_than_the_state_has():
    engine = Engine(most_rows=2)
    rows = [make_row([DAMAGED, i % 3, i + 1], new=5) for i in range(9)] + [make_row([5], new=5)]
    finish(engine, rows)
    for row in rows:
        check(row)


def test_what_does_not_fit_fails_alone():
    engine = Engine(most_slots=512)
    rows = [make_row([1] * n, new=5) for n in (5, 600, 20, 507)]
    finish(engine, rows)
    assert isinstance(rows[1].error, MemoryError)
    for row in (rows[0], rows[2], rows[3]):
        check(row)


def test_a_longer_prompt_gets_a_larger_state_and_no_one_starves():
    engine = Engine()
    rows = [make_row([i + 1] * n, new=9) for i, n in enumerate([3, 700, 4, 2500, 5] * 4)]
    short = make_row([3, 4], new=400)
    chunks = engine.runner.run([short], 4)
    next(chunks)
    finish(engine, rows)
    for _ in chunks:
        pass
    for row in [short, *rows]:
        check(row)


def test_a_longer_prompt_does_not_wait_for_those_that_run_in_pages():
    """A larger state is opened at once. What runs goes on from its pages."""
    engine = Engine(pages=60)
    first = [make_row([3 + i, 4], new=300, eos_token_ids=()) for i in range(3)]
    chunks = engine.runner.run(first, 4)
    next(chunks), next(chunks)
    longer = make_row([5] * 1500, new=3)
    finish(engine, [longer])
    assert not any(row.ended for row in first) and engine.sessions == 1
    for _ in chunks:
        engine.check_pages()
    for row in [*first, longer]:
        check(row)


def test_newcomers_get_rows_while_others_run():
    engine = Engine()
    first = make_row([3, 4], new=300)
    chunks = engine.runner.run([first], 4)
    next(chunks)
    done = len(first.tokens)
    others = [make_row([i + 5], new=3) for i in range(7)]
    finish(engine, others)
    assert not first.ended and len(first.tokens) > done
    for _ in chunks:
        pass
    for row in [first, *others]:
        check(row)


def test_samples_are_computed_once():
    engine = Engine(pages=200, most_rows=8)
    rows = [
        *make_samples([3] * 300, 3),
        *make_samples([4] * 20, 6),
        make_row([5] * 20),
        *make_samples([6] * 256, 2, new=300),
    ]
    tokens = []
    real = Device.prefill

    def counting(self, call):
        tokens.append(int(call.lengths.sum()))
        return real(self, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "prefill", counting)
        finish(engine, rows)
    for row in rows:
        check(row)
    # Calls and the state have few rows, so the six samples of 20 tokens are computed three times.
    assert sum(tokens) == 300 + 3 * 20 + 20 + 256
    assert [row.cached_tokens for row in rows[:3]] == [0, 256, 256]
    engine.check_pages()


def test_a_sample_that_is_computed_for_others_is_cancelled():
    """Between two calls for its long prompt."""
    engine = Engine(pages=200)
    first = make_row([9], new=300, eos_token_ids=())
    chunks = engine.runner.run([first], 4)
    next(chunks)
    samples = make_samples([3] * 3000, 3)
    calls = [Call([row], 4, lambda chunk: None) for row in samples]
    engine.runner._arrivals.extend(calls)
    next(chunks)
    (prompt,) = engine.runner._prompts._prompts
    assert 0 < prompt.done < 3000 and len(prompt.followers) == 2
    engine.runner.cancel(calls[0])
    assert len(prompt.followers) == 1
    for _ in chunks:
        engine.check_pages()
    finish(engine, [make_row([5])])
    for row in [first, *samples[1:]]:
        check(row)


def test_few_sequences_that_are_left_go_on_in_fewer_rows(monkeypatch):
    monkeypatch.setattr(runner, "_FEWER_ROWS", (1, 4))
    engine = Engine(pages=200)
    new = [5, 900, 9, 300, 7, 11, 250, 3]
    rows = [make_row([i + 1, 4], new=n, eos_token_ids=()) for i, n in enumerate(new)]
    finish(engine, rows)
    for row in rows:
        check(row)
    assert engine.sessions == 1 and engine.reshaped == [(8, 4), (4, 1)]
    engine.check_pages()


def test_newcomers_after_a_state_has_become_smaller(monkeypatch):
    monkeypatch.setattr(runner, "_FEWER_ROWS", (2,))
    engine = Engine(pages=200)
    rows = [make_row([i + 1, 4], new=5 + 600 * (i == 3), eos_token_ids=()) for i in range(8)]
    chunks = engine.runner.run(rows, 32)
    while not engine.reshaped:
        next(chunks)
    others = [make_row([i + 20, 5], new=30) for i in range(7)]
    finish(engine, others)
    assert not rows[3].ended
    for _ in chunks:
        engine.check_pages()
    for row in [*rows, *others]:
        check(row)


def test_a_newcomer_waits_for_no_row_in_pages():
    """One more than the state has rows: it becomes larger, although few of the rows are wanted."""
    engine = Engine(pages=200)
    rows = [make_row([i + 1, 4], new=900, eos_token_ids=()) for i in range(5)]
    chunks = engine.runner.run(rows[:4], 4)
    next(chunks)
    newcomer = engine.runner.run(rows[4:], 4)
    next(newcomer)
    assert rows[4].tokens and engine.sessions == 1 and engine.reshaped == [(4, 8)]
    assert max(len(row.tokens) for row in rows) < 50
    finish(engine, [make_row([9], new=3)])
    newcomer.close(), chunks.close()


def test_streams_go_on_in_fewer_rows_that_decode_steps_have_had():
    """There remain as many free rows as there are in use."""
    engine = Engine(most_rows=16, pages=200)
    first = [make_row([i + 1], new=900 * (i == 0) + 20, eos_token_ids=()) for i in range(4)]
    chunks = engine.runner.run(first, 4)
    next(chunks), next(chunks)
    others = [make_row([i + 10], new=9, eos_token_ids=()) for i in range(5)]
    finish(engine, others, steps=4)
    for _ in chunks:
        engine.check_pages()
    assert engine.reshaped == [(4, 16), (16, 4)] and engine.sessions == 1
    for row in [*first, *others]:
        check(row)


def test_streams_go_on_in_no_number_of_rows_that_must_be_compiled(monkeypatch):
    monkeypatch.setattr(runner, "_FEWER_ROWS", (1, 4))
    engine = Engine(pages=200)
    rows = [make_row([i + 1], new=5 + 600 * (i == 3)) for i in range(8)]
    finish(engine, rows, steps=4)
    assert not engine.reshaped


def test_leaving_early_frees_the_rows():
    engine = Engine(most_rows=2)
    rows = [make_row([i + 1], new=1000, eos_token_ids=()) for i in range(2)]
    for row in rows:
        chunks = engine.runner.run([row], 4)
        next(chunks)
        chunks.close()
    assert len(engine.left) == engine.sessions
    after = make_row([9], new=5)
    finish(engine, [after])
    check(after)


def test_what_the_device_fails_at_is_everybodys_error_and_not_the_next_ones(monkeypatch):
    advised = []
    monkeypatch.setattr(nccl, "advise", advised.append)
    engine = Engine()
    rows = [make_row([i + 1], new=5) for i in range(3)]
    engine.fail_next = True
    finish(engine, rows)
    assert all(isinstance(row.error, RuntimeError) for row in rows)
    assert advised == [rows[0].error]
    after = make_row([9], new=5)
    finish(engine, [after])
    check(after)


@pytest.mark.timeout(20)
def test_what_fails_while_a_state_opens_is_everybodys_error_and_not_the_next_ones(monkeypatch):
    engine = Engine()
    rows = [make_row([1, 2]) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.delattr(Engine, "short_calls")  # read after the session was opened
        finish(engine, rows[:1])
    assert isinstance(rows[0].error, AttributeError)
    assert not engine.runner.busy
    finish(engine, rows[1:])
    check(rows[1])


def test_an_interrupt_ends_its_own_caller_only(monkeypatch):
    engine = Engine()
    mine, other = make_row([3], new=50), make_row([4], new=50)
    theirs = engine.runner.run([other], 4)
    next(theirs)
    real = Device.decode

    def interrupted(self, *args):
        monkeypatch.setattr(Device, "decode", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(Device, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(engine, [mine])
    for _ in theirs:
        pass
    check(other)


def test_an_interrupt_at_any_time_leaves_no_turn_behind(monkeypatch):
    runner = Engine().runner
    monkeypatch.setattr(runner, "_advance", lambda: None)
    interval = sys.getswitchinterval()

    def interrupt(delay, running, caught):
        while not running:
            time.sleep(1e-5)
        time.sleep(delay)
        _thread.interrupt_main()
        while not caught.wait(5):  # an interrupt in a callback is lost
            _thread.interrupt_main()

    def some_turns():
        asked = itertools.count()
        runner._advance_until(lambda: next(asked) > 3)

    # A shell lets its background processes ignore the signal.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setswitchinterval(1e-6)
    gc.disable()  # a callback of the garbage collector would lose an interrupt
    try:
        for i in range(200):
            running, caught = [], threading.Event()
            threading.Thread(target=interrupt, args=(1e-5 * i, running, caught)).start()
            with pytest.raises(KeyboardInterrupt):
                while True:
                    running.append(True)
                    some_turns()
            caught.set()
            other = threading.Thread(target=some_turns, daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive()
    finally:
        gc.enable()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGINT, handler)


def test_threads_share_the_device():
    engine = Engine()
    rows = [[make_row([t + 1, i + 1], new=5 + i) for i in range(20)] for t in range(16)]
    threads = [threading.Thread(target=finish, args=(engine, mine)) for mine in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for mine in rows:
        for row in mine:
            check(row)


def test_what_is_submitted_runs_by_itself():
    engine = Engine()
    calls = [Call([make_row([i + 1], new=20)], 4, lambda chunk: None) for i in range(30)]
    for call in calls:
        engine.runner.submit(call)
    engine.runner.cancel(calls[9])
    engine.runner.join(timeout=60)
    for i, call in enumerate(calls):
        assert call.ended
        if i != 9:
            check(call.rows[0])


@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_a_call_may_be_waited_for_without_end(seconds):
    engine, reached, released = Engine(), threading.Event(), threading.Event()

    def slow(tokens):
        reached.set()
        return not released.wait(60)

    call = Call([make_row([3], new=2, stopping_criteria=(slow,))], 4, lambda chunk: None)
    engine.runner.submit(call)
    assert reached.wait(60)
    threading.Timer(0.05, released.set).start()
    engine.runner.wait(call, timeout=seconds)
    check(call.rows[0])


def test_submitted_calls_that_ended_before_they_ran_are_not_busy():
    engine = Engine()
    cancelled = Call([make_row([1])], 4, lambda chunk: None, cancelled=True)
    empty = Call([make_row([1], new=0)], 4, lambda chunk: None)
    for call in (cancelled, empty):
        engine.runner.submit(call)
    engine.runner.join(timeout=60)
    assert not engine.runner.busy


def test_a_call_gets_its_last_chunk_while_another_row_takes_the_same_results():
    engine = Engine()
    mine = make_row([3], new=20, eos_token_ids=())
    chunks = engine.runner.run([mine], 4)
    received = [next(chunks)]
    reached, released = threading.Event(), threading.Event()

    def slow(tokens):
        if mine.ended:
            reached.set()
            released.wait(60)
        return False

    other = make_row([4], new=50, eos_token_ids=(), stopping_criteria=(slow,))
    engine.runner.submit(Call([other], 4, lambda chunk: None))
    assert reached.wait(60)
    threading.Timer(0.1, released.set).start()
    received += chunks
    assert sum((chunk.tokens >= 0).sum() for chunk in received) == 20
    engine.runner.join(timeout=60)
    check(other)


@pytest.mark.parametrize("ended", [False, True])
def test_submitting_takes_linear_time_and_keeps_few_calls_that_have_ended(monkeypatch, ended):
    asked = itertools.count()

    class Submitted:
        @property
        def ended(self):
            next(asked)
            return ended

    engine = Engine()
    monkeypatch.setattr(engine.runner, "_background", True)  # nothing runs
    for _ in range(5000):
        engine.runner.submit(Submitted())
    assert next(asked) < 3 * 5000
    kept = len(engine.runner._submitted)
    assert kept < 256 if ended else kept == 5000


def test_a_chunk_tells_the_compiling_since_the_chunk_before(monkeypatch):
    """Also of programs whose results are read later, as a clock between two chunks includes it."""
    dispatched = []
    for name in ("prefill", "decode"):

        def compiling(*args, real=getattr(Device, name)):
            dispatched.append(1.0)
            return 1.0, *real(*args)[1:]

        monkeypatch.setattr(Device, name, compiling)
    reported = 0.0
    for chunk in Engine(pages=100).runner.run([make_row([7] * 900, new=99)], 4):
        reported += chunk.compile_seconds
        assert reported == sum(dispatched)
    assert reported > 20


@pytest.fixture
def dispatched(monkeypatch):
    """A list of the dispatched programs: ("prefill", its tokens) or ("decode", its steps)."""
    log = []
    for name in ("prefill", "decode"):

        def logged(self, *args, name=name, real=getattr(Device, name)):
            log.append((name, args[0].size if name == "prefill" else args[0]))
            return real(self, *args)

        monkeypatch.setattr(Device, name, logged)
    return log


def between_chunks(log):
    """Prompt tokens before each chunk of decode steps, up to the last prompt."""
    between, sums = 0, []
    for name, size in log[: max(i for i, (name, _) in enumerate(log) if name == "prefill") + 1]:
        if name == "decode":
            sums.append(between)
            between = 0
        else:
            between += size
    return [*sums, between]


@pytest.mark.parametrize(("steps", "most_tokens", "most_steps"), [(4, 1024, 4), (32, 8192, 8)])
def test_prompts_do_not_hold_up_who_reads_along(dispatched, steps, most_tokens, most_steps):
    """Between two parts of a stream there are at most 1 024 prompt tokens, and 4 steps."""
    engine = Engine(most_rows=32, pages=400)
    engine.short_calls = False
    rows = [make_row([i + 1], new=1200, eos_token_ids=()) for i in range(17)]
    chunks = engine.runner.run(rows, steps)
    next(chunks), next(chunks)
    del dispatched[:]
    others = [make_row([i + 1] * 1900, new=2, eos_token_ids=()) for i in range(15)]
    finish(engine, others)
    for row in others:
        check(row)
    last = max(i for i, (name, _) in enumerate(dispatched) if name == "prefill")
    assert max(size for name, size in dispatched[:last] if name == "decode") <= most_steps
    assert most_tokens // 2 < max(between_chunks(dispatched)) <= most_tokens
    chunks.close()


@pytest.mark.parametrize(
    ("first", "then", "most_tokens"), [(32, 32, 32768), (4, 32, 1024), (32, 4, 1024)]
)
def test_few_rows_wait_for_many_prompts_unless_somebody_streams(
    dispatched, first, then, most_tokens
):
    """A step of two rows takes as long as one of all, so it comes after the prompts."""
    engine = Engine(most_rows=32, pages=400)
    engine.short_calls = False
    shape_for = engine.shape_for
    engine.shape_for = lambda rows: dataclasses.replace(shape_for(rows), rows=32, slots=2048)
    few = engine.runner.run([make_row([i + 1, 2], 300, eos_token_ids=()) for i in range(2)], first)
    next(few), next(few)
    del dispatched[:]
    many = [make_row([i + 1] * 1500, new=20, eos_token_ids=()) for i in range(24)]
    finish(engine, many, then)
    for row in many:
        check(row)
    assert most_tokens // 2 < max(between_chunks(dispatched)) <= most_tokens
    few.close()


def test_who_will_read_along_waits_for_few_steps(monkeypatch):
    log = []
    real = Device.decode
    monkeypatch.setattr(
        Device, "decode", lambda self, steps, most: (log.append(steps), real(self, steps, most))[1]
    )
    engine = Engine(most_rows=2, pages=60)
    chunks = engine.runner.run([make_row([i + 1], new=90, eos_token_ids=()) for i in range(2)], 32)
    next(chunks), next(chunks)
    assert set(log) == {32}
    del log[:]
    stream = make_row([9], new=20, eos_token_ids=())
    first = next(engine.runner.run([stream], 4))
    assert first.is_first and log and max(log) == 4
    for _ in chunks:
        pass


def paged(rows, pages, most_rows=8):
    """Run rows in a pool of pages; returns the engine."""
    engine = Engine(most_rows=most_rows, pages=pages)
    for _ in engine.runner.run(rows, 32):
        engine.check_pages()
    assert engine.pool.used == 0
    for row in rows:
        check(row)
    return engine


def test_too_few_pages_for_all_at_once():
    """Each of the 20 needs 4 pages, of 9; rows give theirs up while they run."""
    paged([make_row([i + 1] * 120, new=300, eos_token_ids=()) for i in range(20)], 10)


def test_a_row_takes_pages_as_it_grows():
    engine = Engine(pages=40)
    row = make_row([3, 4], new=600, eos_token_ids=())
    used = []
    for _ in engine.runner.run([row], 32):
        used.append(engine.pool.used)
    assert used[0] == 1 and used[:-1] == sorted(used[:-1]) and max(used) == page_count(601)
    assert used[-1] == 0
    check(row)


def test_what_does_not_fit_the_pages_fails_alone():
    engine = Engine(pages=4)
    rows = [make_row([1] * n, new=50) for n in (5, 400, 300)]
    finish(engine, rows)
    assert isinstance(rows[1].error, MemoryError)
    check(rows[0]), check(rows[2])


def test_a_newcomer_that_can_never_fit_the_pages_fails_and_does_not_wait():
    engine = Engine(pages=8)
    running = make_row([3, 4], new=700, eos_token_ids=())
    chunks = engine.runner.run([running, make_row([5], new=2)], 4)
    for _ in range(4):
        next(chunks)  # a row becomes free
    newcomer = make_row([1] * 1000, new=20)
    assert newcomer.slots <= 2048 and page_count(newcomer.most_tokens) == 8
    finish(engine, [newcomer])
    assert isinstance(newcomer.error, MemoryError)
    for _ in chunks:
        pass
    check(running)


def test_pages_that_were_never_computed_are_not_shared():
    """A request may be cancelled before its prompt is dispatched."""
    pool, prompt = PagePool(9), [5] * 300
    pages, cached = pool.admit(prompt)
    assert cached == 0
    pool.register(prompt, pages, pending=True)
    assert pool.admit(prompt) is None  # it waits for the first
    pool.release(pages)
    pool.check([])
    again, cached = pool.admit(prompt)
    assert cached == 0
    pool.register(prompt, again, pending=True)
    pool.dispatched()
    shared, cached = pool.admit(prompt)
    assert cached == 256 and shared[:2] == again[:2] and shared[2] != again[2]
    pool.check([again, shared])


def test_prompts_share_the_pages_of_what_they_begin_with(monkeypatch):
    computed = []
    real = Device.prefill
    monkeypatch.setattr(
        Device,
        "prefill",
        lambda self, call: (computed.append(call.lengths.sum()), real(self, call))[1],
    )
    beginning = list(range(1, 81)) * 8  # 640 tokens, 5 pages
    samples = [make_row([*beginning, 9], new=5) for _ in range(6)]
    engine = paged(samples, 60)
    assert sum(computed) == 641 + 5
    computed.clear()
    # A prompt that is one of these and its answer, as in a chat; the last token is always computed.
    again = make_row([*beginning, 9, *samples[0].tokens, 1, 2, 3], new=5)
    finish(engine, [again])
    check(again)
    assert sum(computed) == len(again.request.ids) - 640
    exact = make_row(beginning, new=5)
    computed.clear()
    finish(engine, [exact])
    check(exact)
    assert sum(computed) == 128


def test_what_was_used_last_is_shared_longest():
    engine = Engine(pages=12)
    first, second = ([i] * 300 for i in (5, 6))
    for prompt in (first, second, first, [7] * 1000):
        row = make_row(prompt, new=3)
        finish(engine, [row])
        check(row)
    assert len(engine.pool._find(first)) > len(engine.pool._find(second))


PROMPTS = st.one_of(
    st.lists(st.integers(1, 80), min_size=1, max_size=6),
    st.integers(1, 700).map(lambda n: [n % 60 + 1] * n),
    # Prompts that begin with the same pages.
    st.tuples(st.integers(0, 3), st.integers(1, 200)).map(
        lambda n: list(range(1, 81)) * 5 * n[0] + [n[1] % 60 + 1] * n[1]
    ),
    st.tuples(st.just(DAMAGED), st.integers(0, 20), st.integers(1, 80)).map(list),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            *(st.just("submit"), PROMPTS, st.integers(0, 60), st.sampled_from([4, 32])),
            st.sampled_from([1, 1, 3]),
        ),
        st.tuples(st.just("advance"), st.integers(0, 30)),
        st.tuples(st.just("advance"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.integers(0, 30)),
    ),
    min_size=60,
    max_size=100,
)


def play(events, most_rows, pages):
    """Submit, advance, cancel and fail; returns how many events there were."""
    engine = Engine(most_rows=most_rows, most_slots=2048, pages=pages)
    open_calls, rows, failed = [], [], 0
    for event, *rest in events:
        if event == "submit":
            prompt, new, steps, samples = rest
            for row in make_samples(prompt, samples, new=new):
                rows.append(row)
                open_calls.append((engine.runner.run([row], steps), row))
        elif open_calls and event == "advance":
            next(open_calls[rest[0] % len(open_calls)][0], None)
        elif open_calls and event == "cancel":
            chunks, row = open_calls.pop(rest[0] % len(open_calls))
            chunks.close()
            if not row.ended:
                rows.remove(row)
        elif event == "fail" and rest[0] == 0:
            engine.fail_next = True
            failed += 1
        engine.check_pages()
    for chunks, _ in open_calls:
        for _ in chunks:
            engine.check_pages()
    assert engine.pool is None or engine.pool.used == 0
    errors = 0
    for row in rows:
        if isinstance(row.error, AssertionError):
            raise row.error
        if isinstance(row.error, MemoryError):
            assert page_count(row.most_tokens) >= pages > 0
        elif isinstance(row.error, RuntimeError):
            errors += 1
            assert answer(row)[: len(row.tokens)] == row.tokens
        else:
            check(row)
    assert errors <= failed * most_rows
    # Nothing runs, nothing waits, and every state that was taken was returned or dropped.
    assert len(engine.left) >= engine.sessions
    return len(events)


@pytest.mark.parametrize(
    "examples",
    [30, pytest.param(1500, marks=pytest.mark.soak)],
)
def test_any_order_of_events(examples, monkeypatch):
    monkeypatch.setattr(runner, "_FEWER_ROWS", (1, 2, 4))
    monkeypatch.setattr(runner, "_STEPS_OF_FEWER_ROWS", 3)
    count = 0

    @settings(max_examples=examples, deadline=None)
    @given(EVENTS, st.sampled_from([1, 2, 8]), st.sampled_from([0, 8, 12, 40]))
    def run(events, most_rows, pages):
        nonlocal count
        count += play(events, most_rows, pages)

    run()
    print(f"{count} events")
