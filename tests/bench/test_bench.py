import dataclasses
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.bench import __main__ as cli
from fdjax.bench import ceiling, record, suite, timing
from fdjax.bench.check import verify
from fdjax.bench.compare import compare
from fdjax.bench.model import summary

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

gpu = pytest.mark.gpu


def _matrix(seed, shape=(64, 64), dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(seed), shape, dtype),)


def _case(**implementations):
    return suite.Case(
        name="square",
        make_args=_matrix,
        implementations=implementations,
        reference=lambda x: np.square(np.asarray(x, np.float64)),
        bytes=2 * 64 * 64 * 4,
        flops=64 * 64,
        tolerance=1e-5,
    )


SMALL = {"ceiling_bytes": 2**16, "matmul_size": 16}


# --- timing


def test_statistics():
    t = timing.Timing.from_samples([[10.0, 11.0, 12.0], [20.0, 21.0, 22.0]], "host")
    assert (t.median_us, t.min_us, t.max_us, t.runs) == (16.0, 10.0, 22.0, 6)
    assert (t.p10_us, t.p90_us) == (10.5, 21.5)
    assert t.spread_us == 11.0
    # Each pass is steady, but the passes disagree. The percentiles of a single pass would miss
    # that.
    t = timing.Timing.from_samples([[10.0] * 99, [30.0]], "host")
    assert (t.p90_us - t.p10_us, t.spread_us) == (0.0, 20.0)
    merged = timing.Timing.merge([t, t])
    assert (merged.runs, len(merged.samples_us)) == (200, 4)


@pytest.mark.parametrize("samples", [[], [0.0], [-1.0], [float("nan")]])
def test_statistics_refuse_bad_samples(samples):
    with pytest.raises(ValueError, match="Timing: samples"):
        timing.Timing.from_samples([samples], "host")


def test_cold_sets_exceed_three_times_l2():
    l2 = timing.l2_bytes(jax.devices()[0])
    for bytes_per_set in (None, 2**15):
        sets = timing.cold_sets(lambda seed: _matrix(seed, (128, 128)), bytes_per_set)
        assert len(sets) * (bytes_per_set or 2**16) > 3 * l2
        assert len({np.asarray(x).tobytes() for (x,) in sets}) == len(sets)
    assert len(timing.cold_sets(lambda seed: _matrix(seed, (8, 8)), limit=5)) == 5


def test_l2_of_an_unknown_gpu_is_not_guessed_low():
    def size(kind):
        return timing.l2_bytes(types.SimpleNamespace(platform="gpu", device_kind=kind))

    assert size("NVIDIA H100 80GB HBM3") == 50 * 2**20
    assert size("NVIDIA B200") == size("a GPU to come") == 128 * 2**20


def test_measure_on_the_host_clock():
    t = timing.measure(jnp.sin, [_matrix(0), _matrix(1)], runs=5)
    assert (t.clock, t.runs, t.cold_l2, t.kernels) == ("host", 5, False, {})
    sets = timing.cold_sets(lambda seed: _matrix(seed, (256, 256)))
    assert timing.measure(jax.jit(jnp.sin), sets, runs=2).cold_l2
    # The same buffers stay in the L2 cache, even if many tuples hold them.
    assert not timing.measure(jnp.sin, [sets[0]] * 100, runs=2).cold_l2
    with pytest.raises(ValueError, match="measure: needs runs"):
        timing.measure(jnp.sin, sets, runs=0)


def test_wall_warms_up_and_waits():
    calls = []
    t = timing.wall(lambda x: calls.append(x) or jnp.sin(x), jnp.ones(4), runs=4)
    assert (len(calls), t.runs, t.clock) == (7, 4, "host")


class _FakeCupti:
    """Reports two kernels per call. The second takes as many milliseconds as the argument says."""

    def __init__(self, stray=0):
        self.stray, self.seen, self.sessions, self.active = stray, [], 0, False

    def call(self, x):
        jax.debug.callback(lambda v: self.active and self.seen.append(float(v)), x)
        return x + 1

    def _cupti_init(self):
        self.seen, self.active = [], True
        self.sessions += 1

    def _cupti_get_timings(self, finalize):
        self.active = False
        jax.effects_barrier()
        kernels = [k for ms in self.seen for k in (("first", 1.0), ("second", ms))]
        # One of several runs has an extra kernel.
        return kernels + [("stray", 1.0)] * (self.stray if len(self.seen) > 1 else 0)


@pytest.fixture
def fake_cupti(monkeypatch):
    def install(**options):
        from jax.experimental.mosaic.gpu import profiler

        fake = _FakeCupti(**options)
        library = types.SimpleNamespace(_mosaic_gpu_ext=fake)
        monkeypatch.setattr(profiler, "mosaic_gpu_lib", library)
        return fake

    return install


def test_cupti_runs_rotate_through_the_sets(fake_cupti):
    fake = fake_cupti()
    sets = [(jnp.float32(ms),) for ms in (1, 2, 3, 4)]
    t = timing.measure(fake.call, sets, runs=4, warmup=0, clock="cupti")
    assert t.clock == "cupti"
    # Each run is a full round, on other data than the run before.
    assert sorted(t.samples_us[0]) == [2000.0, 3000.0, 4000.0, 5000.0]
    assert t.kernels == {"first": 1000.0, "second": 2500.0}
    assert (fake.sessions, t.median_us) == (1, 3500.0)
    assert t.wall_us > 0


def test_cupti_falls_back_to_a_session_per_run(fake_cupti):
    fake = fake_cupti(stray=1)
    sets = [(jnp.float32(ms),) for ms in (1, 2, 3)]
    t = timing.measure(fake.call, sets, runs=3, warmup=0, clock="cupti")
    assert fake.sessions == 4
    assert sorted(t.samples_us[0]) == [2000.0, 3000.0, 4000.0]


def test_cupti_that_sees_nothing_is_an_error(fake_cupti):
    fake_cupti()
    with pytest.raises(RuntimeError, match="CUPTI must see a kernel"):
        timing.measure(jnp.sin, [_matrix(0)], runs=2, clock="cupti")


def test_copies_outside_kernels_are_counted():
    hlo = """
%fused_a (p: bf16[8,32]) -> bf16[8,32] {
  ROOT %copy.1 = bf16[8,32]{0,1} copy(%p)
}
ENTRY %main.1 (c.1: bf16[8,32], i.1: s32[]) -> bf16[8,32] {
  %copy.9 = s32[] copy(%i.1)
  %copy.2 = bf16[8,32]{1,0} copy(%c.1)
  %copy.3 = pred[3]{0} copy(%q)
  ROOT %fusion = bf16[8,32]{0,1} fusion(%copy.2), kind=kLoop, calls=%fused_a
}"""
    assert timing._copied_bytes(hlo) == 4 + 512 + 3


# --- check


def test_verify():
    want = {"a": np.arange(1.0, 7.0).reshape(2, 3), "b": np.zeros(3)}
    assert verify(want, want, 0.0) == (0.0, None)
    near = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), want)
    assert verify(near, want, 0.0) == (0.0, None)
    assert verify({**want, "a": want["a"] * 1.01}, want, 0.02)[1] is None
    error, problem = verify({**want, "a": want["a"] * 1.01}, want, 0.001)
    assert error == pytest.approx(0.01) and "above tolerance" in problem
    for bad in (np.nan, np.inf):
        assert verify({**want, "b": np.array([0, 0, bad])}, want, 1e9)[1]
    assert verify(np.array([1e300]), np.array([2e300]), 1e-2)[1]
    assert "shape" in verify({**want, "a": want["a"].T}, want, 1e9)[1]
    assert "structure" in verify([want["a"]], want, 1e9)[1]
    assert verify(np.ones(3), np.full(3, np.nan), 1e9)[1]


def test_verify_sees_one_wrong_row_of_many():
    want = np.random.default_rng(0).normal(size=(10_000, 8))
    got = want.copy()
    got[77] = 0
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02
    assert verify(got, want, 0.02)[1]


# --- suite, record


def test_run_cases_and_record_round_trip(tmp_path):
    def unsupported(x):
        raise NotImplementedError("square: needs a GPU")

    case = _case(xla=jnp.square, product=lambda x: x * x, mosaic_gpu=unsupported)
    result = suite.run_cases([case], runs=3, config={"note": "test"}, commit="abc", **SMALL)
    assert not result.failed
    xla, product, mosaic_gpu = result.rows
    assert xla.ok and product.ok and xla.error < 1e-5
    assert xla.timing["runs"] == 6 and len(xla.timing["samples_us"]) == 2
    assert xla.gb_per_s == pytest.approx(xla.bytes / xla.timing["median_us"] / 1e3)
    assert xla.fraction_of_ceiling > 0
    assert mosaic_gpu.ok is None and mosaic_gpu.timing is None and "GPU" in mosaic_gpu.reason
    assert result.environment["commit"] == "abc" and result.environment["versions"]["jax"]
    assert result.config == {"runs": 3, "passes": 2, "note": "test"}
    assert result.ceiling["before"]["matmul_tflop_per_s"] > 0
    assert list(result.ceiling["after"]["reads"]) == [result.ceiling["before"]["read_kernel"]]

    path = tmp_path / "results" / "r.json"
    record.write(result, path)
    assert record.read(path) == result
    # The saved output of a run is as good as its record.
    (tmp_path / "log").write_text(f"{result.table()}\n{result.json()}\n")
    assert record.read(tmp_path / "log") == result


ONLY_ROWS = '{"schema": 1, "rows": [{"case": "a"}]}'


@pytest.mark.parametrize(
    "text",
    ["", "no", "[]", "{}", '{"schema": 0}', '{"schema": "1"}', '{"schema": 1}', ONLY_ROWS],
    ids=repr,
)
def test_foreign_records_are_refused_in_one_line(tmp_path, text, capsys):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"^record: ") as error:
        record.read(tmp_path / "r.json")
    assert "\n" not in str(error.value)
    assert cli.main(["compare", str(tmp_path / "r.json"), str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("wrong", [lambda x: x * 1.01, lambda x: x / 0, lambda x: x[0]])
def test_a_wrong_implementation_gets_no_time_and_fails_the_run(wrong, capsys):
    exit_code = suite.main([_case(right=jnp.square, wrong=wrong)], ["--runs", "2"], **SMALL)
    assert exit_code == 1
    out = capsys.readouterr().out.strip().splitlines()
    right, wrong_row = json.loads(out[-1])["rows"]
    assert right["ok"] and right["timing"]
    assert wrong_row["ok"] is False and wrong_row["timing"] is None and wrong_row["reason"]
    assert any("FAILED" in line for line in out[:-1])


def test_an_implementation_wrong_only_after_timing_fails():
    calls = []

    def flaky(x):
        def host(v):
            calls.append(0)
            return np.square(v) if len(calls) == 1 else v

        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    (row,) = suite.run_cases([_case(flaky=flaky)], runs=2, **SMALL).rows
    assert row.ok is False and row.timing is None


def test_a_crashing_peer_does_not_lose_the_others():
    def crash(x):
        raise RuntimeError("boom\nmore")

    result = suite.run_cases([_case(crash=crash, right=jnp.square)], runs=2, **SMALL)
    assert result.failed
    assert [r.ok for r in result.rows] == [False, True]
    assert result.rows[0].reason == "RuntimeError: boom"


def test_prepare_gives_an_implementation_its_own_layout():
    case = dataclasses.replace(
        _case(rows=jnp.square, columns=lambda x: jnp.square(x).T),
        prepare={"columns": lambda x: (x.T,)},
    )
    assert not suite.run_cases([case], runs=2, **SMALL).failed


def test_a_run_that_is_cut_off_keeps_what_it_has(tmp_path, monkeypatch):
    def interrupted(case, *args):
        if case.name == "second":
            raise KeyboardInterrupt
        return run_case(case, *args)

    run_case = suite._run_case
    monkeypatch.setattr(suite, "_run_case", interrupted)
    cases = [dataclasses.replace(_case(xla=jnp.square), name=name) for name in ("first", "second")]
    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        suite.run_cases(cases, output=path, **SMALL)
    kept = record.read(path)
    assert [row.case for row in kept.rows] == ["first"] and kept.rows[0].gb_per_s > 0


def test_main_succeeds_and_ends_with_the_record(tmp_path, capsys):
    path = tmp_path / "r.json"
    argv = ["--runs", "2", "--commit", "abc", "--only", "squ", "--output", str(path)]
    assert suite.main([_case(xla=jnp.square)], argv, **SMALL) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("device") and "ceiling before" in out
    assert json.loads(out.splitlines()[-1]) == json.loads(path.read_text())
    # No measurement is not a success.
    assert suite.main([_case(xla=jnp.square)], ["--only", "cube"], **SMALL) == 1


def test_doubtful_numbers_carry_notes():
    sample = timing.Timing.from_samples(
        [[10.0]], "cupti", cold_l2=False, uncounted_copy_bytes=10**6
    )
    row = record.Measurement("c", "i", True, timing=dataclasses.asdict(sample), bytes=10**7)
    before = {"read_gb_per_s": 900.0, "matmul_tflop_per_s": None, "trusted": True, "reason": None}
    result = record.Record({}, {}, {"before": before}, [row])
    result.finish({**before, "read_gb_per_s": 500.0})
    assert row.gb_per_s == pytest.approx(1000.0)
    assert row.fraction_of_ceiling == pytest.approx(1000 / 900)
    assert row.notes == ["warm L2", "uncounted copies of 1000000 bytes", "above the ceiling"]
    assert result.ceiling["after"]["trusted"] is False
    for read, options, trusted in (
        (880.0, {}, True),
        (870.0, {}, False),
        (870.0, {"tolerance": 0.04}, True),
        (880.0, {"tolerance": 0.01}, False),
    ):
        result.finish({**before, "read_gb_per_s": read}, **options)
        assert result.ceiling["after"]["trusted"] is trusted


def test_the_ceiling_that_binds_is_the_one_reported():
    sample = dataclasses.asdict(timing.Timing.from_samples([[10.0]], "cupti"))
    row = record.Measurement("c", "i", True, timing=sample, bytes=10**6, flops=10**9)
    before = {"read_gb_per_s": 1000.0, "matmul_tflop_per_s": 200.0, "trusted": True, "reason": None}
    record.Record({}, {}, {"before": before}, [row]).finish()
    assert row.fraction_of_ceiling == pytest.approx(0.5)


def test_slow_ceiling_is_not_trusted(monkeypatch):
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(ceiling._LEAST_GB_PER_S, kind, 1e9)
    slow = ceiling.measure_ceiling(2**16, matmul_size=0)
    assert slow["trusted"] is False and "clock" in slow["reason"]
    monkeypatch.undo()
    assert ceiling.measure_ceiling(2**16, matmul_size=0)["trusted"] is None


def test_environment_outside_a_checkout(monkeypatch):
    monkeypatch.setattr(record, "_output", lambda *command, cwd=None: None)
    found = record.environment()
    assert found["commit"] is None and found["dirty"] is None
    assert found["device_count"] == jax.device_count()


def test_a_command_names_no_folder_of_the_machine(monkeypatch):
    argv = ["/a/bin/fdjax", "bench", "configs/a.json", "--output", "/a/b c/o.json", "--plot=/p/q/"]
    monkeypatch.setattr(sys, "argv", [*argv, "--points", "1x8"])
    text = "fdjax bench configs/a.json --output o.json --plot=q/ --points 1x8"
    assert record.environment("c")["command"] == text


# --- compare


def _record(kind="gpu", **medians):
    rows = []
    for name, samples in medians.items():
        sample = dataclasses.asdict(timing.Timing.from_samples([samples], "cupti"))
        rows.append(record.Measurement("case", name, True, timing=sample, bytes=1))
    return record.Record({"device_kind": kind, "device_count": 1}, {}, {}, rows)


def _statuses(old, new, **options):
    result = compare(old, new, **options)
    return {c.implementation: c.status for c in result.changes}, result.failed


def test_compare_flags_what_moved_beyond_tolerance_and_spread():
    steady, slower = [100.0, 101.0, 99.0], [110.0, 111.0, 109.0]
    noisy, noisier = [100.0, 80.0, 120.0], [110.0, 85.0, 130.0]
    old, new = _record(a=steady, b=noisy, c=steady), _record(a=slower, b=noisier, c=[102.0])
    statuses, failed = _statuses(old, new)
    assert statuses == {"a": "regression", "b": "within spread", "c": "same"} and failed
    statuses, failed = _statuses(new, old)
    assert statuses["a"] == "improvement" and not failed
    assert not _statuses(old, new, tolerance=0.2)[1]


def test_on_a_cpu_only_a_factor_of_two_is_a_change():
    def of_cpu(median):
        made = _record(a=[median])
        made.environment["platform"] = "cpu"
        return made

    for median, status in ((157, "same"), (199, "same"), (201, "regression"), (49, "improvement")):
        assert _statuses(of_cpu(100.0), of_cpu(float(median)))[0] == {"a": status}
    assert _statuses(of_cpu(100.0), of_cpu(157.0), tolerance=0.05)[1]
    assert "factor of 2" in compare(of_cpu(1.0), of_cpu(1.0)).table()


def test_a_summary_is_of_all_rows():
    made = _record(x=[1.0])
    assert summary(made) == ""
    made.config = {"batch": 4}
    made.rows = [
        record.Measurement(f"{case} B4 P8", "fdjax", True, timing={"median_us": us})
        for case, us in (("first token", 12_340.0), ("decode step", 5_000.0))
    ]
    text = "first token after 12.3 ms, then 800.0 tokens/s"
    assert summary(made) == f"{text} (200.0 for each of 4 prompts)"
    made.config = {"batch": 1}
    assert summary(made) == "first token after 12.3 ms, then 200.0 tokens/s"


def test_compare_of_rows_that_do_not_match():
    old, new = _record(a=[1.0], b=[1.0], d=[1.0]), _record(b=[1.0], c=[1.0], d=[1.0])
    statuses, failed = _statuses(old, new)
    assert statuses == {"a": "missing", "b": "same", "c": "new", "d": "same"} and failed
    assert _statuses(old, new, allow_missing=True) == (statuses, False)
    assert not _statuses(_record(b=[1.0], d=[1.0]), new)[1]
    statuses, failed = _statuses(old, _record())  # left by an interrupted run
    assert set(statuses.values()) == {"missing"} and failed
    old.rows[1].bytes, new.rows[0].bytes = 1000, 1009
    assert _statuses(old, new, allow_missing=True)[0]["b"] == "same"
    new.rows[0].bytes = 1011
    statuses, failed = _statuses(old, new, allow_missing=True)
    assert statuses["b"] == "incomparable" and failed
    new = _record(b=[1.0])
    new.rows[0] = record.Measurement("case", "b", False, reason="error")
    statuses, failed = _statuses(old, new, allow_missing=True)
    assert statuses["b"] == "broken" and failed


def test_compare_refuses_another_device_unless_told():
    with pytest.raises(ValueError, match="compare: devices"):
        compare(_record(a=[1.0]), _record("tpu", a=[1.0]))
    result = compare(_record(a=[1.0]), _record("tpu", a=[1.0]), allow_device=True)
    assert not result.failed and "device_kind differs: gpu and tpu" in result.notes


def test_command_line(tmp_path, capsys):
    for name, rows in (("old", {"a": [1.0]}), ("new", {"a": [1.1]}), ("cut off", {})):
        record.write(_record(**rows), tmp_path / name)
    old, new, cut_off = (str(tmp_path / name) for name in ("old", "new", "cut off"))
    assert cli.main(["compare", old, new]) == 1
    assert "regression" in capsys.readouterr().out
    assert cli.main(["compare", old, new, "--tolerance", "0.2"]) == 0
    for impossible in ("nan", "-1"):
        assert cli.main(["compare", old, new, f"--tolerance={impossible}"]) == 2
        assert "tolerance must be at least 0, got" in capsys.readouterr().err
    assert cli.main(["compare", old, cut_off]) == 1
    assert cli.main(["compare", old, cut_off, "--allow-missing"]) == 0
    assert cli.main(["ceiling", "--bytes", "65536", "--matmul-size", "0"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["schema"] == record.SCHEMA


@pytest.mark.slow
def test_importing_starts_no_back_end():
    code = (
        "import fdjax.bench, fdjax.bench.__main__, sys; assert 'jax' not in sys.modules;"
        "import fdjax.bench.suite; from jax._src import xla_bridge;"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


# --- on a GPU


@gpu
def test_gpu_device_time_agrees_with_the_clock_on_the_wall():
    (x,) = _matrix(0, (65536, 4096))
    t = timing.measure(lambda x: x.sum(axis=1), [(x,)])
    assert t.clock == "cupti" and t.cold_l2 and t.kernels
    assert sum(t.kernels.values()) == pytest.approx(t.median_us, rel=0.05)
    assert t.median_us == pytest.approx(t.wall_us, rel=0.2)
    assert t.spread_us < 0.1 * t.median_us


@gpu
def test_gpu_cold_l2_is_slower_than_warm():
    def make_args(seed):
        return _matrix(seed, (2048, 2048))  # 16 MiB, fits in L2

    def read(x):
        return x.sum(axis=1)

    cold = timing.measure(read, timing.cold_sets(make_args))
    warm = timing.measure(read, [make_args(0)])
    assert cold.cold_l2 and not warm.cold_l2
    assert cold.median_us > 1.2 * warm.median_us


@gpu
def test_gpu_memory_copies_are_reported():
    def append(cache, x):
        # The sum gives CUPTI a kernel to see: the update itself may be two memory copies.
        return jax.lax.dynamic_update_slice(cache, x, (0, 0)), x.sum()

    t = timing.measure(append, [(*_matrix(0, (16384, 4096)), *_matrix(1, (1, 4096)))])
    assert t.uncounted_copy_bytes >= 16384 * 4096 * 4
    assert t.wall_us > 2 * t.median_us


@gpu
def test_gpu_ceiling():
    found = ceiling.measure_ceiling()
    assert found["clock"] == "cupti"
    if found["device_kind"] == "NVIDIA H100 80GB HBM3":
        assert found["trusted"] and 2950 < found["read_gb_per_s"] < 3352
        assert 600 < found["matmul_tflop_per_s"] < 990


@gpu
def test_gpu_environment():
    found = record.environment()
    assert found["compute_capability"] and found["allocator_limit_bytes"] > 0
    assert "jax-cuda13-plugin" in found["versions"] or "jax-cuda12-plugin" in found["versions"]
