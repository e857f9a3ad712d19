"""The benchmark of many requests."""

import gc
import json
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import arrivals, beams, prefixes, serving, serving_peer
from benchmarks.dispatch import CONFIG
from benchmarks.serving_bound import bound
from fdjax.engine.results import Stats
from fdjax.engine.state import cache_bytes
from fdjax.models import describe, parse_config

pytestmark = pytest.mark.usefixtures("quick_on_cpu")


def test_requests_are_the_same_every_time_and_within_their_limits():
    prompts, new = serving.requests(500, 100)
    assert (prompts, new) == serving.requests(500, 100)
    lengths = sorted(map(len, prompts))
    assert 330 < lengths[250] < 440 and lengths[-1] <= 2048 and lengths[0] > 0
    assert 140 < sorted(new)[250] < 180 and max(new) <= 768
    assert max(map(max, prompts)) < 100
    others, same = serving.requests(500, 100, seed=1)
    assert list(map(len, others)) == list(map(len, prompts)) and same == new
    assert others[0] != prompts[0]


_SLOW = {"new_tokens_per_s": 1.0}


def model(**changes):
    return describe(parse_config(CONFIG | {"num_hidden_layers": 2} | changes), dtype="float32")


def limits(llama, tokens, bytes_per_s=1e9, flop_per_s=1e12):
    memory = llama.weight_bytes + tokens * cache_bytes(llama, 1, 1)
    return {"memory_bytes": memory, "bytes_per_s": bytes_per_s, "flop_per_s": flop_per_s}


@pytest.mark.parametrize("tied", [False, True])
def test_the_bound_of_one_request_is_that_of_its_parts(tied):
    llama = model(tie_word_embeddings=tied)
    w, f, v, kv = 256, 256, 512, 2 * 64
    matrices = 2 * (w * (w + 2 * kv) + w * w + 3 * w * f)
    norms = 5 * w
    assert llama.parameter_count == matrices + norms + (1 if tied else 2) * v * w
    per_token = 2 * (matrices + norms)
    # Slow arithmetic: FLOPs alone count.
    found = bound(llama, [100], [3], **limits(llama, 1000, bytes_per_s=1e30, flop_per_s=1.0))
    pairs = 100 * 101 // 2
    assert found.prefill_seconds == 100 * per_token + 2 * w * v + 4 * 2 * w * pairs
    assert found.decode_steps == 2  # the first token comes from the prompt
    assert found.decode_seconds == 2 * (per_token + 2 * w * v) + 4 * 2 * w * (101 + 102)
    # Slow memory: weights of each step, without the table that is looked up, and live slots.
    found = bound(llama, [100], [3], **limits(llama, 1000, bytes_per_s=1.0, flop_per_s=1e30))
    weights = 4 * (matrices + norms + v * w)
    assert found.decode_seconds == pytest.approx(2 * weights + (101 + 102) * 2 * 2 * kv * 4)
    assert found.seconds == found.prefill_seconds + found.decode_seconds


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(120, 400),
)
def test_a_bound_takes_all_steps_and_falls_with_memory(pairs, tokens):
    llama = model()
    prompts, new = zip(*pairs, strict=True)
    little, much = (bound(llama, prompts, new, **limits(llama, n)) for n in (tokens, 10**6))
    # A step gives each row that runs a token.
    assert max(new) - 1 <= much.decode_steps <= little.decode_steps <= sum(new) - len(new)
    assert much.decode_seconds <= little.decode_seconds * (1 + 1e-9)
    assert much.prefill_seconds == little.prefill_seconds
    assert little.most_rows <= much.most_rows <= len(pairs)
    one = bound(llama, prompts, new, **limits(llama, 10**6), most_rows=1)
    assert one.decode_steps == sum(new) - len(new) and one.most_rows <= 1


def test_a_request_that_never_fits_has_no_bound():
    llama = model()
    with pytest.raises(ValueError, match="bound: requests must fit into 99 tokens"):
        bound(llama, [50, 90], [1, 11], **limits(llama, 99))
    bound(llama, [50, 90], [1, 10], **limits(llama, 99))


def test_arrivals_are_a_poisson_process():
    times = arrivals.times(20_000, 8.0)
    assert times[0] == 0 and (np.diff(times) > 0).all()
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05) == gaps.std()
    assert np.array_equal(times, arrivals.times(20_000, 8.0))


def test_what_readers_wait_for():
    """Three requests, whose chunks bring 4 and 2 tokens; two of them wait at the same time."""
    stats = [
        Stats(prefill_seconds=0.5, chunk_ms_per_token=(10.0, 30.0), chunk_steps=(4, 2)),
        Stats(prefill_seconds=0.1, chunk_ms_per_token=(20.0,), chunk_steps=(4,)),
        Stats(prefill_seconds=0.101, chunk_ms_per_token=(19.0,), chunk_steps=(4,)),
    ]
    given = iter(stats)

    class Fake:
        def submit(self, ids, **options):
            assert options["max_new_tokens"] == len(ids)
            return self

        def result(self):
            gc.collect()
            return types.SimpleNamespace(stats=next(given))

    callbacks = list(gc.callbacks)
    found = arrivals.measure(Fake(), [[1] * 7, [2] * 5, [3] * 5], [7, 5, 5], rate=1e6)
    assert found["first_token_ms"]["p50"] == pytest.approx(101)
    assert found["ms_per_token"]["p50"] == 19.5 and found["largest_gap_ms"] == 80
    assert found["compile_seconds"] == 0
    # The second request's only gap, from 0.1 s on, with which the third one's ends, then the first
    # one's two of 40 and 60 ms.
    largest, *_, last = found["largest_gaps"]
    assert (largest["ms"], largest["request"]) == (80, 1) and len(found["largest_gaps"]) == 3
    assert largest["end"] == pytest.approx(0.18, abs=1e-3)
    assert (last["ms"], last["end"]) == (40, pytest.approx(0.54))
    assert len(found["collections_ms"]) >= 2 and gc.callbacks == callbacks


class Manager:
    """Of transformers: answers requests in any order, some of them wrongly."""

    def __init__(self, lose=(), cut=()):
        self.requests, self.lose, self.cut = [], lose, cut

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stopped = True

    def is_running(self):
        return bool(self.requests)

    def add_request(self, ids, *, max_new_tokens, eos_token_id):
        assert eos_token_id == -1
        name = f"req_{sum(ids)}"
        self.requests.append((name, max_new_tokens))
        return name

    def get_result(self, timeout):
        self.requests = [r for r in self.requests if r[0] not in self.lose]
        if not self.requests:
            return None
        name, count = self.requests.pop()
        tokens = [1] * (count - (name in self.cut))
        return types.SimpleNamespace(
            request_id=name, generated_tokens=tokens, error=None, is_finished=lambda: True
        )


def test_a_peer_that_loses_or_cuts_an_answer_is_refused(monkeypatch):
    fake = types.ModuleType("transformers")
    fake.GenerationConfig = dict
    monkeypatch.setitem(sys.modules, "transformers", fake)

    def run(manager):
        peer = types.SimpleNamespace(
            continuous_batching_context_manager=lambda generation_config: manager
        )
        try:
            return serving_peer.run(peer, [[1, 2], [3, 4], [5]], [4, 2, 9])
        finally:
            assert manager.stopped

    assert run(Manager()) >= 0
    with pytest.raises(RuntimeError, match="1 requests have no answer"):
        run(Manager(lose=["req_7"]))
    with pytest.raises(RuntimeError, match="must generate 9 tokens, got 8"):
        run(Manager(cut=["req_5"]))


@pytest.mark.slow
def test_a_small_run(tmp_path, monkeypatch):
    sizes = []

    def measure_ceiling(**size):
        sizes.append(size)
        return {"matmul_tflop_per_s": 7.0, "read_gb_per_s": 50.0}

    monkeypatch.setattr(serving, "measure_ceiling", measure_ceiling)
    monkeypatch.setattr(prefixes, "_ROWS", (2,))
    monkeypatch.setattr(prefixes, "_SHARED", (1024,))
    config, output = tmp_path / "config.json", tmp_path / "record.json"
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    arguments = [str(config), "--requests", "6", "--scale", "0.03", "--max-batch", "2"]
    arguments += ["--arrivals", "20", "--prefix", "--matmul-rate", "0.1"]
    assert serving.main([*arguments, "--runs", "1", "--output", str(output)]) == 0
    record = json.loads(output.read_text())["serving"]
    assert [found["state"]["rows"] for found in record["throughput"]] == [2]
    for found in record["throughput"]:
        assert found["timed_calls"][0]["compile_seconds"] == 0
        assert found["timed_calls"][0]["cached_tokens"] == 0
        seconds = found["timed_calls"][0]["seconds"]
        assert found["share_of_bound"] == record["bound"]["seconds"] / seconds
    assert record["requests"]["count"] == 6 and len(sizes) == 1
    assert (record["bound"]["tflop_per_s"], record["bound"]["gb_per_s"]) == (0.1, 50)
    (arrived,) = record["arrivals"]
    assert arrived["rate"] == 20 and arrived["compile_seconds"] == 0
    assert 0 < arrived["first_token_ms"]["p50"] <= arrived["first_token_ms"]["p99"]
    assert set(record["prefix"]["ratios"]) == {"first_token", "samples", "without_hits", "step"}
    assert set(record["prefix"]["ratios"]["step"]) == {"2x1024"}


@pytest.mark.slow
def test_one_part_of_the_prefix_cache_alone(tmp_path, monkeypatch):
    config, output = tmp_path / "config.json", tmp_path / "record.json"
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    times = {"one": [2.0, 4.0, 3.0], "all": [6.0, 3.0, 5.0]}
    monkeypatch.setattr(prefixes, "_samples", lambda lm, args: times)
    arguments = [str(config), "--requests", "0", "--prefix", "samples", "--output", str(output)]
    assert serving.main(arguments) == 0
    record = json.loads(output.read_text())["serving"]
    assert record["throughput"] == [] and "bound" not in record
    assert record["prefix"] == {"samples_ms": times, "ratios": {"samples": 5 / 3}}
    with pytest.raises(SystemExit):
        serving.main([*arguments, "--arrivals", "1"])


def test_figures_over_concurrency_and_arrival_rate(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    def arrived(rate):
        percentiles = {"p50": 10.0 * rate, "p90": 20.0 * rate, "p99": 30.0 * rate}
        names = ("first_token_ms", "ms_per_token")
        return dict.fromkeys(names, percentiles) | {"rate": rate, "largest_gap_ms": 99.0}

    record = {
        "config": {"model_type": "llama"},
        "requests": {"count": 6},
        "bound": {"new_tokens_per_s": 900.0},
        "peer": {"new_tokens_per_s": [50.0, 60.0]},
        "throughput": [
            {"state": {"rows": n}, "timed_calls": [{"new_tokens_per_s": 100.0 * n}, _SLOW]}
            for n in (4, 1)
        ],
        "arrivals": [arrived(2.0)],
    }
    (tmp_path / "serving_7b.json").write_text(json.dumps({"serving": record}))
    more = record | {"throughput": [], "arrivals": [arrived(1.0)]}
    (tmp_path / "serving_7b_more.json").write_text(json.dumps({"serving": more}))
    results = plots.Results(tmp_path, tmp_path)
    (axes,) = plots.serving_throughput(results).axes
    ours, limit, peer = axes.lines
    assert ours.get_xydata().tolist() == [[1, 100], [4, 400]]
    assert limit.get_ydata()[0] == 900 and peer.get_ydata()[0] == 60
    first, gaps = plots.serving_latency(results).axes
    assert first.lines[0].get_xydata().tolist() == [[1, 10], [2, 20]]
    assert gaps.lines[1].get_ydata().tolist() == [30, 60]
    assert gaps.lines[2].get_ydata().tolist() == [99, 99]
    del record["arrivals"]
    (tmp_path / "serving_7b_more.json").unlink()
    (tmp_path / "serving_7b.json").write_text(json.dumps({"serving": record}))
    assert plots.serving_latency(plots.Results(tmp_path, tmp_path)) is None


def test_a_case_of_beams_is_read_and_steps_count_only_while_all_rows_run():
    case = beams.Search.parse("8x1024+512x4")
    assert case == (8, 1024, 512, 4) and str(case) == "B8 P1024 N512 W4"
    # The last row begins two steps after the first.
    stats = Stats(decode_steps=11, chunk_steps=(4, 4, 3), chunk_ms_per_token=(1.0, 2.0, 4.0))
    assert beams.ms_with_all_rows(stats, new=10) == pytest.approx((2 * 1 + 4 * 2 + 1 * 4) / 7)
    with pytest.raises(RuntimeError, match="they need more than 6 new tokens"):
        beams.ms_with_all_rows(stats, new=6)
