"""Draws the papers' figures from the records: `python -m benchmarks.plots`.

FD++ is FlashDecoding++ (Hong et al. 2024), FD++Next FlashDecoding++Next (Dai et al.), Segment KV
the paper of Wu et al. (2024). Each figure is written as PNG and SVG. A figure without a record is
skipped with a message. docs/papers.md lists all of them.
"""

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.table import HEADLINE, Source, points
from fdjax.bench import record as records
from fdjax.bench.record import Measurement, Record

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia_h100_80gb_hbm3"
TABLES = ROOT / "pallas_kernels" / "tables"

# (model, batch, prompt tokens)
ModelPoint = tuple[str, int, int]
# (prompts, tokens of a prompt, new tokens, beams)
Search = tuple[int, int, int, int]

OURS, PEER = "tab:blue", "0.6"
# An implementation has the same colour in every figure.
COLOURS = {
    "fdjax": OURS,
    "mosaic_gpu": OURS,
    "xla": "0.75",
    "cudnn": "tab:olive",
    "synchronised": "tab:cyan",
    "without flat GEMM": "tab:cyan",
    "without launch": "tab:gray",
    "without chain": "tab:brown",
    "without unified maximum": "tab:purple",
    "without fusion": "tab:pink",
    "hf eager": "tab:red",
    "hf static, compiled": "tab:orange",
    "gpt-fast": "tab:green",
    "attention": OURS,
    "GEMM": "tab:cyan",
    "other": "0.75",
    "without attention": "tab:red",
    "naive": "tab:red",
    "segments": OURS,
    "one launch": OURS,
    "one launch, 2 tiles": "tab:cyan",
    "all-reduce kernel": "tab:orange",
    "all-reduce kernel, 2 tiles": "tab:brown",
    "psum": "0.75",
    "psum, 2 tiles": "0.5",
    "transformers": "tab:red",
}


class Results:
    """The records in a folder, sorted by their kind."""

    def __init__(self, folder: Path, tables: Path = TABLES):
        self.end_to_end: list[Record] = []
        self.several_devices: list[Record] = []
        self.kernels: dict[str, Record] = {}
        self.memory: list[dict[str, Any]] = []
        self.calibration: list[dict[str, Any]] = []
        self.default_path: list[Record] = []
        self.runtime: list[dict[str, Any]] = []
        self.serving: dict[str, dict[str, Any]] = {}
        self.segment_cache: list[dict[str, Any]] = []
        # A table is named after its device, and the folder too, in lower case.
        named = [p for p in tables.glob("*.json") if p.stem.lower() == folder.name]
        self.table = json.loads(named[0].read_text()) if named else None
        # The embedded model may have been calibrated on any device, and sizes need none.
        others = [
            path
            for name in ("calibration", "segment_cache")
            for path in folder.parent.glob(f"*/{name}*.json")
        ]
        for path in sorted({*folder.glob("*.json"), *others}):
            try:
                record = records.read(path)
            except ValueError:
                data = json.loads(path.read_text())
                if "peaks" in data:
                    self.memory.append(data)
                elif "scores_99_99" in data:
                    self.calibration.append(data)
                elif "runtime" in data:
                    self.runtime.append(data)
                elif "serving" in data:
                    self.serving[path.stem] = data["serving"]
                elif "segment_cache" in data:
                    self.segment_cache.append(data["segment_cache"])
                continue
            if Source(path, record).is_default:
                # Records of the headline command come last and replace earlier ones.
                place = len(self.default_path) if path.stem.startswith(HEADLINE) else 0
                self.default_path.insert(place, record)
            if "devices" in record.config:
                self.several_devices.append(record)
            elif isinstance(record.config.get("model"), str):
                self.end_to_end.append(record)
            elif "family" not in record.config:
                self.kernels[path.stem] = record

    def by_record(self, case: str) -> Iterator[dict[ModelPoint, dict[str, float]]]:
        """For each record, the medians of a case in ms, by point and implementation."""
        for record in self.end_to_end:
            model = model_of(record.config["model"])
            found: dict[ModelPoint, dict[str, float]] = {}
            for row in record.rows:
                name, batch, prompt = re.fullmatch(r"(.+) B(\d+) P(\d+)", row.case).groups()
                if row.ok and name == case:
                    times = found.setdefault((model, int(batch), int(prompt)), {})
                    times[row.implementation] = row.timing["median_us"] / 1e3
            yield found

    def milliseconds(self, case: str) -> dict[ModelPoint, dict[str, float]]:
        """Medians in ms by point and implementation. Later records replace earlier ones."""
        found: dict[ModelPoint, dict[str, float]] = {}
        for record in self.by_record(case):
            for point, times in record.items():
                found.setdefault(point, {}).update(times)
        return found

    def beams(self) -> dict[str, dict[Search, dict[str, dict[str, float]]]]:
        """Medians of beam searches in ms: model → search → implementation → what was timed."""
        found: dict[str, dict[Search, dict[str, dict[str, float]]]] = {}
        for stem, record in self.kernels.items():
            searches = found.setdefault(model_of(record.config.get("name", stem)), {})
            for row in record.rows:
                match = re.fullmatch(r"(.+) B(\d+) P(\d+) N(\d+) W(\d+)", row.case)
                if match and row.timing:
                    of_search = searches.setdefault(tuple(map(int, match.groups()[1:])), {})
                    ms = of_search.setdefault(row.implementation, {})
                    ms[match[1]] = row.timing["median_us"] / 1e3
        return {model: searches for model, searches in found.items() if searches}


def model_of(config: str) -> str:
    """The name of a model, from that of its config.json such as "opt-6.7b.old.json"."""
    return Path(config).name.removesuffix(".json").removesuffix(".old").removesuffix(".new")


def first_and_each(results: Results) -> Figure | None:
    """FD++ Fig. 1: latency of the first token and of each further token."""
    shown = []
    # All times of a panel come from one run.
    for first, each in zip(*map(results.by_record, ("first token", "decode step")), strict=True):
        for point in each.keys() & first.keys():
            both = {
                name: (first[point][name], ms)
                for name, ms in each[point].items()
                if name in first[point] and not name.startswith("without")
            }
            if len(both) > 1:
                shown.append((point, both))
    if not shown:
        return None
    # Shows the points with the most implementations; of these, small batches and long prompts.
    shown = sorted(shown, key=lambda p: (-len(p[1]), p[0][1], -p[0][2], *p[1]))[:3]
    figure, panels = _panels(len(shown), (3.4, 3.2))
    for axes, (point, both) in zip(panels, shown, strict=True):
        for name, times in both.items():
            axes.scatter(*times, color=COLOURS.get(name), s=40, label=name)
        axes.set(title=_where(*point), xlabel="first token, ms", ylabel="each further token, ms")
        x, y = (1.1 * max(times) for times in zip(*both.values(), strict=True))
        axes.set(xlim=(0, x), ylim=(0, y))
        axes.legend(fontsize=7, loc="lower left")
    return figure


def softmax_inputs(results: Results) -> Figure | None:
    """FD++ Fig. 5: the range of 99.99 % of the softmax inputs in each layer."""
    if not results.calibration:
        return None
    data = results.calibration[-1]
    figure, (axes,) = _panels(1, (6, 3.2))
    for i, (name, (low, high)) in enumerate(data["scores_99_99"].items()):
        ends = [[_extreme(layer, pick) for layer in end] for end, pick in ((low, min), (high, max))]
        layers = range(len(ends[0]))
        heights = [b - a for a, b in zip(*ends, strict=True)]
        places = [layer + 0.35 * i for layer in layers]
        axes.bar(places, heights, 0.3, ends[0], color=(OURS, PEER)[i % 2], label=name)
    axes.set(title=f"{data['model']} model", xlabel="layer", ylabel="input of the softmax")
    axes.set_xticks([layer + 0.175 for layer in layers], [str(layer) for layer in layers])
    axes.legend()
    return figure


def _extreme(values: Any, pick: Callable) -> float:
    return pick(values) if isinstance(values, list) else values


def block_n(results: Results) -> Figure | None:
    """FD++ Fig. 7: a flat GEMM over N and B_N, relative to the best B_N of each N."""
    if "block_n" not in results.kernels:
        return None
    us: dict[int, dict[tuple[int, int], float]] = {}
    for row in results.kernels["block_n"].rows:
        if row.ok:
            k, n = map(int, re.findall(r"\d+", row.case))
            block = int(row.implementation.split("=")[1])
            us.setdefault(k, {})[n, block] = row.timing["median_us"]
    figure, panels = _panels(len(us), (4.2, 2.8))
    for axes, (k, times) in zip(panels, us.items(), strict=True):
        ns, blocks = (sorted({key[i] for key in times}) for i in (0, 1))
        best = {n: min(t for (m, _), t in times.items() if m == n) for n in ns}
        cells = [
            [best[n] / times[n, b] if (n, b) in times else float("nan") for n in ns] for b in blocks
        ]
        _heat_map(axes, cells, [str(n) for n in ns], [str(b) for b in blocks], "{:.2f}", (0.5, 1))
        axes.set(title=f"K = {k}, M = 8", xlabel="N", ylabel="$B_N$")
    return figure


def dataflow(results: Results) -> Figure | None:
    """FD++ Fig. 9: speed-up over XLA by the implementation that runs each linear layer, by M."""
    if results.table is None:
        return None
    by_shape: dict[str, dict[int, float]] = {}
    for entry in results.table["entries"]:
        times = entry.get("microseconds") or {}
        if entry["op"] == "matmul" and times.get("xla"):
            s = entry["shape"]
            ours = times["mosaic_gpu"] if entry["implementation"] == "mosaic_gpu" else times["xla"]
            name = f"[{s['k']},{s['n']}]" + (" fused" if s.get("fused") else "")
            by_shape.setdefault(name, {})[s["m"]] = times["xla"] / ours
    rows = sorted({m for over_m in by_shape.values() for m in over_m})
    figure, (axes,) = _panels(1, (0.52 * len(rows) + 2, 0.3 * len(by_shape) + 1.2))
    cells = [[over_m.get(m, float("nan")) for m in rows] for over_m in by_shape.values()]
    _heat_map(axes, cells, [str(m) for m in rows], list(by_shape), "{:.2f}", (0.7, 1.3))
    axes.set(title="speed of what runs over XLA", xlabel="M", ylabel="[K,N]")
    return figure


def speed_up(results: Results) -> Figure | None:
    """FD++ Fig. 10: speed-up of a decode step over each peer, by batch and prompt length."""
    by_peer: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    # Both times of a ratio come from one run.
    for ms in results.by_record("decode step"):
        for (model, batch, prompt), times in ms.items():
            for peer in times:
                if "fdjax" in times and peer != "fdjax" and not peer.startswith("without"):
                    ratio = times[peer] / times["fdjax"]
                    by_peer.setdefault((model, peer), {})[batch, prompt] = ratio
    if not by_peer:
        return None
    figure, panels = _panels(len(by_peer), (3.4, 3))
    for axes, ((model, peer), ratios) in zip(panels, by_peer.items(), strict=True):
        batches, prompts = (sorted({key[i] for key in ratios}) for i in (0, 1))
        cells = [[ratios.get((b, p), float("nan")) for p in prompts] for b in batches]
        labels = [str(p) for p in prompts], [str(b) for b in batches]
        _heat_map(axes, cells, *labels, "{:.2f}x", (0.5, 1.5))
        axes.set(title=f"{model}\nover {peer}", xlabel="prompt tokens", ylabel="batch")
    return figure


def throughput(results: Results) -> Figure | None:
    """FD++Next Fig. 12: tokens per second by batch; missing points did not fit."""
    lines: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for (model, batch, prompt), times in results.milliseconds("decode step").items():
        for name, t in times.items():
            if not name.startswith("without"):
                by_name = lines.setdefault((model, prompt), {})
                by_name.setdefault(name, {})[batch] = 1e3 * batch / t
    for panel, by_name in lines.items():
        lines[panel] = {name: rates for name, rates in by_name.items() if len(rates) > 1}
    lines = {panel: by_name for panel, by_name in sorted(lines.items()) if len(by_name) > 1}
    if not lines:
        return None
    figure, panels = _panels(len(lines), (3.6, 3))
    for axes, ((model, prompt), by_name) in zip(panels, lines.items(), strict=True):
        for name, by_batch in by_name.items():
            batches = sorted(by_batch)
            rates = [by_batch[b] for b in batches]
            axes.plot(batches, rates, marker="o", color=COLOURS.get(name), label=name)
        axes.set_xscale("log", base=2)
        batches = {b for by_batch in by_name.values() for b in by_batch}
        ticks = sorted(b for b in batches if b.bit_count() == 1)
        axes.set_xticks(ticks, [str(b) for b in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(title=f"{model}, P = {prompt}", xlabel="batch", ylabel="tokens/s")
        axes.legend(fontsize=7)
    return figure


def attention(results: Results) -> Figure | None:
    """FD++Next Figs. 15 and 16: decode and prefill attention compared with peers."""
    found: dict[str, list[Measurement]] = {}
    for name in ("decode_attention", "prefill_attention"):
        # The cases may be in several records.
        matching = [r for stem, r in results.kernels.items() if stem.startswith(name)]
        cases = [row for record in matching for row in record.rows if row.ok]
        rows = [row for row in cases if not row.case.startswith(("recompute", "tokens", "naive"))]
        if rows:
            found[name] = rows
    if not found:
        return None
    figure, panels = _panels(len(found), (5.4, 4.6))
    for axes, (name, rows) in zip(panels, found.items(), strict=True):
        decode = name == "decode_attention"
        rates: dict[str, dict[str, float]] = {}
        for row in rows:
            rate = row.gb_per_s / 1e3 if decode else row.tflop_per_s
            if row.implementation in COLOURS:
                rates.setdefault(row.case, {})[row.implementation] = rate
        _bars(axes, rates, "TB/s of cache" if decode else "TFLOP/s")
        axes.set_title(name.replace("_", " "))
    return figure


def flat_gemm(results: Results) -> Figure | None:
    """FD++Next Fig. 18: speed-up of the linear layers over XLA, with cuBLAS or XLA's kernels."""
    if "matmul" not in results.kernels:
        return None
    us: dict[str, dict[int, dict[str, float]]] = {}
    for row in results.kernels["matmul"].rows:
        name, m = row.case.rsplit(" M=", 1)
        if row.ok:
            us.setdefault(name, {}).setdefault(int(m), {})[row.implementation] = row.timing[
                "median_us"
            ]
    families: dict[str, list[str]] = {}
    for name in us:
        families.setdefault(name.split()[0], []).append(name)
    figure, panels = _panels(len(families), (4.4, 3.2))
    for axes, (family, names) in zip(panels, families.items(), strict=True):
        for name in names:
            over_m = us[name]
            rows = sorted(over_m)
            ratios = [
                over_m[m]["xla"] / over_m[m].get("mosaic_gpu", over_m[m]["xla"]) for m in rows
            ]
            axes.plot(rows, ratios, marker=".", label=name.removeprefix(family).strip())
        axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({m for name in names for m in us[name]} & {2**i for i in range(12)})
        axes.set_xticks(ticks, [str(m) for m in ticks])
        axes.set(title=family, xlabel="M", ylabel="speed over XLA")
        axes.legend(fontsize=7)
    return figure


def memory(results: Results) -> Figure | None:
    """FD++Next Fig. 19: planned memory and the measured peak."""
    bars = [
        (model_of(data["config"]["model"]), row)
        for data in results.memory
        for row in data["peaks"]
        if row["ok"] is not None
    ]
    if not bars:
        return None
    figure, (axes,) = _panels(1, (1.1 * len(bars) + 2, 3.6))
    places = range(len(bars))
    bottom = [0.0] * len(bars)
    parts = {"weights": "0.75", "cache": OURS, "workspace": "tab:orange"}
    for part, colour in parts.items():
        key = "weight" if part == "weights" else part
        heights = [row[f"{key}_bytes"] / 1e9 for _, row in bars]
        axes.bar(places, heights, 0.6, bottom, color=colour, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    peaks = [(i, row["peak_bytes"] / 1e9) for i, (_, row) in enumerate(bars) if row["peak_bytes"]]
    if peaks:
        axes.scatter(*zip(*peaks, strict=True), marker="_", s=500, color="black", label="measured")
    names = [f"{model}\n{row['batch']} x {row['prompt_tokens']}" for model, row in bars]
    axes.set_xticks(places, names, fontsize=7)
    axes.set(ylabel="GB")
    axes.legend()
    return figure


def breakdown(results: Results) -> Figure | None:
    """FD++Next Table II: a decode step by default, and without one kind of kernel or fusion."""
    bars: dict[str, dict[str, float]] = {}
    for ms in results.by_record("decode step"):
        for point, times in ms.items():
            some = {name: t for name, t in times.items() if name.startswith("without")}
            # If a point has several runs, this shows the last of those with the most plans.
            if some and "fdjax" in times and len(some) >= len(bars.get(_where(*point), {})) - 1:
                bars[_where(*point)] = {"fdjax": times["fdjax"], **some}
    if not bars:
        return None
    figure, (axes,) = _panels(1, (7, 1 + 0.9 * len(bars)))
    _bars(axes, bars, "ms per token")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def headline(results: Results) -> Figure | None:
    """Decode step and first token on the default path, beside the peers of the same run."""
    steps: dict[str, dict[str, float]] = {}
    firsts: dict[str, dict[str, float]] = {}
    for record in results.default_path:
        model = model_of(record.config["model"])
        for point, measured in points(record).items():
            for found, rows in ((steps, measured.step), (firsts, measured.first)):
                found[_where(model, *point)] = {
                    name: row.timing["median_us"] / 1e3
                    for name, row in rows.items()
                    if not name.startswith("without")
                }
    if not steps:
        return None
    figure, panels = _panels(2, (5.2, 1 + 0.45 * sum(map(len, steps.values())) ** 0.9))
    for axes, found, label in zip(
        panels, (steps, firsts), ("decode step, ms", "first token, ms"), strict=True
    ):
        _bars(axes, dict(sorted(found.items())), label)
    return figure


def tensor_parallel(results: Results) -> Figure | None:
    """Speed of two devices over one of the same run; FastAttention Figs. 10, 16 and 17: in tiles.

    The paper has eight devices, and compares only prompts with and without tiles.
    """
    speeds: dict[str, dict[tuple[int, ...], dict[str, float]]]
    speeds = {"decode step": {}, "first token": {}}
    for record in sorted(results.several_devices, key=lambda r: r.environment["date"]):
        times: dict[str, dict[str, float]] = {}
        for row in record.rows:
            if row.timing:
                times.setdefault(row.case, {})[row.implementation] = row.timing["median_us"]
        layers, width = (record.config["model"][n] for n in ("num_hidden_layers", "hidden_size"))
        for case, found in times.items():
            what, batch, prompt = case.rsplit(maxsplit=2)
            ratios = {
                name.removeprefix("2 devices, "): found["1 devices"] / time
                for name, time in found.items()
                if "1 devices" in found and name.startswith("2 devices")
            }
            if ratios:
                point = width, layers, int(batch[1:]), int(prompt[1:])
                speeds[what].setdefault(point, {}).update(ratios)
    if not speeds["decode step"]:
        return None
    figure, panels = _panels(2, (5.2, 1 + 0.5 * len(speeds["decode step"])))
    for axes, (what, by_point) in zip(panels, speeds.items(), strict=True):
        groups = {
            _where(f"{layers} layers of {width}\n", *point): ratios
            for (width, layers, *point), ratios in sorted(by_point.items())
        }
        _bars(axes, groups, f"{what}: speed of two devices over one")
        axes.axvline(1, color="0.5", linewidth=0.8)
        axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def softmax_density(results: Results) -> Figure | None:
    """FD++ Fig. 5: the density of the inputs of the softmax, one line per layer."""
    found = [data for data in results.calibration if "score_density" in data]
    if not found:
        return None
    data = found[-1]
    density = data["score_density"]
    figure, (axes,) = _panels(1, (6, 3.2))
    for layer, heights in enumerate(density["layers"]):
        axes.plot(density["centres"], heights, label=f"layer {layer}")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-7)
    axes.set(title=f"{data['model']} model", xlabel="input of the softmax", ylabel="density")
    axes.legend(fontsize=7)
    return figure


def prefill_speed_up(results: Results) -> Figure | None:
    """FD++ Fig. 11: speed-up of the first token over each peer, by the length of a prompt."""
    lines: dict[str, dict[str, dict[int, float]]] = {}
    # Both times of a ratio come from one run. A later run replaces an earlier one.
    for ms in results.by_record("first token"):
        for (model, batch, prompt), times in ms.items():
            for peer, t in times.items():
                if batch == 1 and "fdjax" in times and not peer.startswith(("fdjax", "without")):
                    by_peer = lines.setdefault(model, {})
                    by_peer.setdefault(peer, {})[prompt] = t / times["fdjax"]
    lines = {model: peers for model, peers in lines.items() if max(map(len, peers.values())) > 1}
    if not lines:
        return None
    figure, panels = _panels(len(lines), (5, 3.2))
    for axes, (model, by_peer) in zip(panels, lines.items(), strict=True):
        for peer, ratios in by_peer.items():
            prompts = sorted(ratios)
            speeds = [ratios[p] for p in prompts]
            axes.plot(prompts, speeds, marker="o", color=COLOURS.get(peer), label=peer)
        axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({p for ratios in by_peer.values() for p in ratios})
        axes.set_xticks(ticks, [str(p) for p in ticks], fontsize=7)
        axes.set(title=f"{model}, one prompt", xlabel="prompt tokens", ylabel="speed of prefill")
        axes.legend(fontsize=7)
    return figure


def memory_per_token(results: Results) -> Figure | None:
    """FD++Next Fig. 1, left: latency of a step of one row, and memory that each token adds."""
    latency: dict[str, dict[str, float]] = {}
    for record in results.default_path:
        model = model_of(record.config["model"])
        for (batch, prompt), measured in points(record).items():
            if batch == 1:
                latency[_where(model, batch, prompt)] = {
                    name: row.timing["median_us"] / 1e3
                    for name, row in measured.step.items()
                    if not name.startswith("without")
                }
    added: dict[str, dict[str, float]] = {}
    for data in results.memory:
        model = model_of(data["config"]["model"])
        rows = [r for r in data["peaks"] if r["batch"] == 1 and r.get("peak_bytes")]
        rows.sort(key=lambda r: r["prompt_tokens"])
        for a, b in itertools.pairwise(rows):
            tokens = b["prompt_tokens"] - a["prompt_tokens"]
            parts = {"peak, measured": "peak", "planned": "planned", "cache alone": "cache"}
            added[f"{model}\n{a['prompt_tokens']} to {b['prompt_tokens']} tokens"] = {
                name: (b[f"{key}_bytes"] - a[f"{key}_bytes"]) / tokens / 1e3
                for name, key in parts.items()
            }
    if not latency or not added:
        return None
    figure, panels = _panels(2, (5, 3))
    _bars(panels[0], dict(sorted(latency.items())), "ms per token")
    _bars(panels[1], added, "kB per token of context")
    return figure


def runtime(results: Results) -> Figure | None:
    """FD++Next Fig. 4: shares of attention, GEMM and the rest over the input length."""
    if not results.runtime:
        return None
    figure, panels = _panels(len(results.runtime), (4.4, 3.2))
    for axes, data in zip(panels, results.runtime, strict=True):
        rows = data["runtime"]
        bottom = [0.0] * len(rows)
        for part in ("attention", "GEMM", "other"):
            shares = [row["us"][part] / sum(row["us"].values()) for row in rows]
            axes.bar(range(len(rows)), shares, 0.6, bottom, color=COLOURS[part], label=part)
            bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        axes.set_xticks(range(len(rows)), [str(row["prompt_tokens"]) for row in rows])
        title = f"{data['config']['model'].split('.')[0]}, batch {rows[0]['batch']}"
        axes.set(title=title, xlabel="input tokens", ylabel="share of the run time")
        axes.legend(fontsize=7)
    return figure


def over_naive(results: Results) -> Figure | None:
    """FastAttention Fig. 7: attention over a prompt, relative to attention without fusion."""
    ratios: dict[int, dict[int, float]] = {}
    for name, record in results.kernels.items():
        times: dict[str, dict[str, float]] = {}
        for row in record.rows if name.startswith("prefill_attention") else ():
            if row.timing:
                times.setdefault(row.case, {})[row.implementation] = row.timing["median_us"]
        for case, us in times.items():
            if {"naive", "mosaic_gpu"} <= us.keys():
                s, d = (int(n) for n in re.search(r"S(\d+) D(\d+)", case).groups())
                ratios.setdefault(d, {})[s] = us["naive"] / us["mosaic_gpu"]
    if not ratios:
        return None
    figure, (axes,) = _panels(1, (5, 3.2))
    for d, by_length in sorted(ratios.items()):
        lengths = sorted(by_length)
        axes.plot(lengths, [by_length[s] for s in lengths], marker="o", label=f"D = {d}")
    axes.set_xscale("log", base=2)
    axes.set(title="one prompt", xlabel="tokens", ylabel="speed over naive attention")
    axes.legend()
    return figure


def with_and_without_attention(results: Results) -> Figure | None:
    """FastAttention Table 6: tokens per second at 512 tokens, with our attention and with XLA's."""
    rates: dict[str, dict[str, float]] = {}
    for (model, batch, prompt), times in results.milliseconds("decode step").items():
        if prompt == 512 and {"fdjax", "without attention"} <= times.keys():
            rates[_where(model, batch, prompt)] = {
                name: 1e3 * batch / times[name] for name in ("fdjax", "without attention")
            }
    if not rates:
        return None
    figure, (axes,) = _panels(1, (6, 1 + 0.7 * len(rates)))
    _bars(axes, rates, "tokens/s")
    return figure


def serving_throughput(results: Results) -> Figure | None:
    """Tokens per second of many requests by the number of rows at once, with the device's bound."""
    panels_of = {name: data for name, data in results.serving.items() if data["throughput"]}
    if not panels_of:
        return None
    figure, panels = _panels(len(panels_of), (4.4, 3.2))
    for axes, (name, data) in zip(panels, panels_of.items(), strict=True):
        best = {
            found["state"]["rows"]: max(call["new_tokens_per_s"] for call in found["timed_calls"])
            for found in data["throughput"]
            if found["timed_calls"]
        }
        rows = sorted(best)
        rates = [best[count] for count in rows]
        axes.plot(rows, rates, marker="o", color=COLOURS["fdjax"], label="fdjax")
        limit = data["bound"]["new_tokens_per_s"]
        axes.axhline(limit, color="0.4", linestyle="--", label="bound")
        if peer := data.get("peer", {}).get("new_tokens_per_s"):
            colour = COLOURS["hf static, compiled"]
            axes.axhline(max(peer), color=colour, linestyle=":", label="transformers, continuous")
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(count) for count in rows])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        title = f"{name}, {data['requests']['count']} requests"
        axes.set(title=title, xlabel="rows at once", ylabel="new tokens/s")
        axes.legend(fontsize=7)
    return figure


def serving_latency(results: Results) -> Figure | None:
    """Time to the first token and time per token, by the rate at which requests arrive.

    Records of the same model share a panel.
    """
    of_model: dict[str, tuple[str, list]] = {}
    for name, data in results.serving.items():
        if data.get("arrivals"):
            model = json.dumps(data["config"], sort_keys=True)
            of_model.setdefault(model, (name, []))[1].extend(data["arrivals"])
    measured = dict(of_model.values())
    if not measured:
        return None
    figure, panels = _panels(2 * len(measured), (4.4, 3.2))
    pairs = zip(panels[::2], panels[1::2], strict=True)
    for (first, gaps), (name, rows) in zip(pairs, measured.items(), strict=True):
        rows = sorted(rows, key=lambda row: row["rate"])
        rates = [row["rate"] for row in rows]
        for axes, key, label in (
            (first, "first_token_ms", "first token, ms"),
            (gaps, "ms_per_token", "ms per token"),
        ):
            for percentile, style in (("p50", "-"), ("p99", "--")):
                values = [row[key] and row[key][percentile] for row in rows]
                axes.plot(rates, values, style, marker="o", color=OURS, label=percentile)
            axes.set_yscale("log")
            axes.set(title=name, xlabel="requests per second", ylabel=label)
        largest = [row["largest_gap_ms"] for row in rows]
        gaps.plot(rates, largest, ":", marker="x", color="tab:red", label="largest gap, undivided")
        first.legend(fontsize=7)
        gaps.legend(fontsize=7)
    return figure


def segment_cache(results: Results) -> Figure | None:
    """Segment KV Fig. 4: bytes of the cache of beams over the number of prompts."""
    if not results.segment_cache:
        return None
    data = results.segment_cache[-1]
    models = list(dict.fromkeys(row["model"] for row in data["rows"]))
    figure, panels = _panels(len(models), (3.4, 3))
    for axes, model in zip(panels, models, strict=True):
        rows = [row for row in data["rows"] if row["model"] == model]
        for i, (key, colour, label) in enumerate(
            (
                ("standard", COLOURS["naive"], "a copy of the prompt for each beam"),
                ("segment", "0.75", "segments of the paper"),
                ("fdjax", OURS, "pages of fdjax"),
            )
        ):
            places = [j + 0.27 * (i - 1) for j in range(len(rows))]
            heights = [row[f"{key}_bytes"] / 1e9 for row in rows]
            axes.bar(places, heights, 0.27, color=colour, label=label)
        axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
        axes.set(title=model, xlabel="prompts", ylabel="GB")
    panels[0].legend(fontsize=7)
    beams, prompt, new = (data[key] for key in ("beams", "prompt", "new"))
    figure.suptitle(f"{beams} beams, {prompt} + {new} tokens, 16 bits", fontsize=9)
    return figure


def segment_attention(results: Results) -> Figure | None:
    """Segment KV Fig. 6: bandwidth of decode attention of beams over the number of prompts."""
    rates: dict[str, dict[int, float]] = {}
    ceilings: list[float] = []
    for name, record in results.kernels.items():
        for row in record.rows if name.startswith("segment_attention") else ():
            if row.timing is None:
                continue
            batch = int(re.match(r"BS(\d+) ", row.case)[1])
            kernels = [us for name, us in row.timing["kernels"].items() if "attention" in name]
            for label, us in (
                (row.implementation, row.timing["median_us"]),
                ("kernel", sum(kernels)),
            ):
                if us and (label != "kernel" or row.implementation == "mosaic_gpu"):
                    rates.setdefault(label, {})[batch] = row.bytes / us / 1e3
            ceilings.append(record.ceiling["before"]["read_gb_per_s"])
    if not rates:
        return None
    figure, (axes,) = _panels(1, (5, 3.2))
    for label, by_batch in rates.items():
        batches = sorted(by_batch)
        style = (
            {"linestyle": "--", "color": OURS} if label == "kernel" else {"color": COLOURS[label]}
        )
        shown = "its kernel alone" if label == "kernel" else label
        axes.plot(batches, [by_batch[b] for b in batches], marker="o", label=shown, **style)
    axes.axhline(max(ceilings), color="0.4", linestyle=":", label="ceiling")
    _batches(axes, sorted({batch for by_batch in rates.values() for batch in by_batch}))
    axes.set(title="4 beams, H = 40, D = 128", ylabel="GB/s")
    return figure


def beams_over_prompt(results: Results) -> Figure | None:
    """Segment KV Fig. 7: first and next token of a search over the tokens of its prompt."""
    measured = {
        model: {search: ms for search, ms in searches.items() if search[::2] == (1, 32)}
        for model, searches in results.beams().items()
    }
    measured = {model: s for model, s in measured.items() if len({n for _, n, _, _ in s}) > 1}
    if not measured:
        return None
    figure, panels = _panels(2 * len(measured), (4.4, 3.2))
    for i, (model, searches) in enumerate(measured.items()):
        beams = max(width for *_, width in searches)
        for axes, what in zip(panels[2 * i :], ("first token", "decode step"), strict=False):
            for name in ("fdjax", "segments", "transformers"):
                ms = {
                    prompt: times[name][what]
                    for (_, prompt, _, width), times in searches.items()
                    if width == beams and what in times.get(name, {})
                }
                if ms:
                    lengths = sorted(ms)
                    values = [ms[n] for n in lengths]
                    axes.plot(lengths, values, marker="o", color=COLOURS[name], label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            title = f"{model}, {beams} beams, {what}"
            axes.set(title=title, xlabel="tokens of the prompt", ylabel="ms")
            axes.legend(fontsize=7)
    return figure


def beams_by_model(results: Results) -> Figure | None:
    """Segment KV Fig. 8: first and next token of one prompt of 1 024 tokens, with 1 and 4 beams."""
    bars: dict[str, dict[str, dict[str, float]]] = {"first token": {}, "decode step": {}}
    for model, searches in results.beams().items():
        for (batch, prompt, new, beams), times in sorted(searches.items()):
            if (batch, prompt, new) != (1, 1024, 128):
                continue
            for what, groups in bars.items():
                groups[f"{model}\n{beams} beam{'s'[: beams > 1]}"] = {
                    name: ms[what] for name, ms in times.items() if what in ms
                }
    if not bars["decode step"]:
        return None
    figure, panels = _panels(2, (5, 1.4 + 0.5 * len(bars["decode step"])))
    for axes, (what, groups) in zip(panels, bars.items(), strict=True):
        _bars(axes, groups, f"{what}, ms")
    return figure


def beams_throughput(results: Results) -> Figure | None:
    """Segment KV Fig. 9: prompts · new tokens / latency, by the number of prompts.

    The paper shows only the largest number that fits.
    """
    rates: dict[tuple[str, int], dict[str, dict[int, float]]] = {}
    for model, searches in results.beams().items():
        for (batch, prompt, new, beams), times in searches.items():
            for name, ms in times.items():
                if (prompt, new) == (1024, 128) and "call" in ms:
                    of_case = rates.setdefault((model, beams), {})
                    of_case.setdefault(name, {})[batch] = 1e3 * batch * new / ms["call"]
    rates = {k: v for k, v in rates.items() if any(len(found) > 1 for found in v.values())}
    if not rates:
        return None
    figure, panels = _panels(len(rates), (4.4, 3.2))
    for axes, ((model, beams), of_case) in zip(panels, sorted(rates.items()), strict=True):
        for name, by_batch in of_case.items():
            batches = sorted(by_batch)
            values = [by_batch[b] for b in batches]
            axes.plot(batches, values, marker="o", color=COLOURS.get(name), label=name)
        _batches(axes, sorted({batch for found in of_case.values() for batch in found}))
        axes.set(title=f"{model}, {beams} beam{'s'[: beams > 1]}", ylabel="new tokens/s")
    return figure


def _batches(axes: Axes, batches: list[int]) -> None:
    """An axis of numbers of prompts, and another that begins at 0."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts")
    axes.legend(fontsize=7)


FIGURES: dict[str, Callable[[Results], Figure | None]] = {
    function.__name__: function
    for function in (
        headline,
        tensor_parallel,
        first_and_each,
        softmax_inputs,
        block_n,
        dataflow,
        speed_up,
        throughput,
        attention,
        flat_gemm,
        memory,
        breakdown,
        softmax_density,
        prefill_speed_up,
        memory_per_token,
        runtime,
        over_naive,
        with_and_without_attention,
        serving_throughput,
        serving_latency,
        segment_cache,
        segment_attention,
        beams_over_prompt,
        beams_by_model,
        beams_throughput,
    )
}


def _panels(count: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, up to three in a row, each of `size` in inches."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained", dpi=150)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def _heat_map(
    axes: Axes,
    cells: list[list[float]],
    columns: list[str],
    rows: list[str],
    form: str,
    limits: tuple[float, float],
) -> None:
    axes.imshow(cells, cmap="RdYlGn", vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    for y, line in enumerate(cells):
        for x, value in enumerate(line):
            if not math.isnan(value):
                place = (value - limits[0]) / (limits[1] - limits[0])
                colour = "black" if 0.15 < place < 0.85 else "white"
                style = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
                axes.text(x, y, form.format(value), **style)


def _bars(axes: Axes, values: dict[str, dict[str, float]], label: str) -> None:
    """A group of horizontal bars for each case."""
    names = list(dict.fromkeys(name for case in values.values() for name in case))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [
            j + (i + 0.5) * height - 0.4 for j, case in enumerate(values.values()) if name in case
        ]
        lengths = [case[name] for case in values.values() if name in case]
        bars = axes.barh(places, lengths, height, color=COLOURS.get(name), label=name)
        axes.bar_label(
            bars,
            fmt=lambda value: f"{value:.0f}" if value >= 100 else f"{value:.3g}",
            fontsize=6,
            padding=2,
        )
    axes.set_yticks(range(len(values)), list(values), fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    axes.legend(fontsize=7)


def _where(model: str, batch: int, prompt: int) -> str:
    return f"{model} B{batch} P{prompt}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of records")
    parser.add_argument(
        "--output", type=Path, default=Path("figures"), help="folder; default: %(default)s, here"
    )
    parser.add_argument("--only", choices=FIGURES, nargs="+", default=list(FIGURES))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    results = Results(args.results)
    folder = args.output
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        figure = FIGURES[name](results)
        if figure is None:
            print(f"{name}: no record yet")
            continue
        # With a fixed salt and no date, the same records give the same bytes.
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png")
        print(f"{name}: {folder / name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
