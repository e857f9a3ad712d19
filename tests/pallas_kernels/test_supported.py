"""Compares what every implementation supports with a committed list, `supported.json`.

`python tests/pallas_kernels/test_supported.py` rewrites the list. Cases may be added to it, but
none may be removed.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from fdjax.pallas_kernels.attention import AttentionSpec, alibi_slopes
from fdjax.pallas_kernels.attention.cache import cache_features
from fdjax.pallas_kernels.experts import Routing, moe_features, moe_key
from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS
from fdjax.pallas_kernels.quantised import BITS, BRICKS, PLAIN, WeightFormat

FILE = Path(__file__).with_name("supported.json")

SPECS = {
    "plain": AttentionSpec(1.0),
    "window": AttentionSpec(1.0, window=5),
    "soft cap": AttentionSpec(1.0, soft_cap=2.0),
    "alibi": AttentionSpec(1.0, alibi=alibi_slopes(8)),
    "not causal": AttentionSpec(1.0, causal=False),
    "sinks": AttentionSpec(1.0, sinks=True),
    "phi, not unified": AttentionSpec(1.0, phi=(1.0,) * 8, unified=False),
}
MODELS = {
    "7B": dict(k=4096, width=4096, hidden=11008, n=12288, hkv=32, d=128),
    "8B": dict(k=4096, width=4096, hidden=14336, n=6144, hkv=8, d=128),
    "13B": dict(k=5120, width=5120, hidden=13824, n=15360, hkv=40, d=128),
    "3B": dict(k=3072, width=3072, hidden=8192, n=5120, hkv=8, d=128),
    "D64": dict(k=2048, width=2048, hidden=8192, n=3072, hkv=8, d=64),
    "odd": dict(k=4096, width=3200, hidden=8640, n=12288, hkv=32, d=128),
}


def attention_cases(op: str) -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    specs = {name: (spec, spec.features) for name, spec in SPECS.items()}
    specs["int8 cache"] = SPECS["plain"], cache_features("int8")
    if op == "decode_attention":
        for name in ("plain", "window"):
            specs[f"{name} beams"] = SPECS[name], SPECS[name].features | {"beams"}
    sizes = itertools.product(
        (1, 2, 16) if op == "decode_attention" else (1, 24, 130),
        (8, 60, 64, 80, 96, 128, 256, 264),
        (63, 64, 160),
        (2, 4),
        specs.items(),
    )
    for t, d, s, itemsize, (name, (spec, features)) in sizes:
        if op == "decode_attention" and not spec.causal:
            continue
        shape = dict(b=2, t=t, h=8, hkv=2, s=s, d=d, itemsize=itemsize, masks=int(spec.is_masked))
        yield f"{name} T{t} D{d} S{s} {8 * itemsize} bit", shape, features


def matmul_cases() -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    fusions = [(), ("norm",), ("bias",), ("residual",), ("norm", "gate")]
    fusions += [("layer_norm",), ("layer_norm", "bias", "activation")]
    sizes = itertools.product((1, 5, 64, 128, 512), (63, 64, 4096), (65, 64, 512), (2, 4), fusions)
    for m, k, n, itemsize, fused in sizes:
        gate = int("gate" in fused)
        shape = dict(m=m, k=k, n=n * (1 + gate), itemsize=itemsize, gate=gate)
        name = f"M{m} K{k} N{n} {8 * itemsize} bit {' '.join(fused)}".strip()
        yield name, shape | {"fused": int(bool(fused))}, frozenset(fused)


def quantised_cases() -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    sizes = itertools.product(
        (1, 128, 129), (32, 64, 128, 192, 256, 512), (2, 4), BITS, (False, True), (PLAIN, BRICKS)
    )
    for m, group, itemsize, kind, zeros, layout in sizes:
        if zeros and kind in ("fp8", "fp4"):
            continue
        weight = WeightFormat(kind, group, zeros, layout=layout)
        shape = dict(m=m, k=512, n=128, itemsize=itemsize, gate=0, fused=0)
        name = f"M{m} {8 * itemsize} bit {weight}{' zeros' * zeros} {layout}"
        yield name, shape | weight.key, weight.features


def layers_cases(op: str) -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    slots = (None,) if op == "linear_chain" else (100, 1024)
    for (name, model), m, s, itemsize in itertools.product(
        MODELS.items(), (1, 7, 32, 33), slots, (2, 4)
    ):
        shape = model | {"m": m, "itemsize": itemsize}
        if s is None:
            shape = {key: size for key, size in shape.items() if key not in ("hkv", "d")}
            yield f"{name} M{m} {8 * itemsize} bit", shape, frozenset()
        else:
            features = frozenset({"attention.rope"})
            yield f"{name} M{m} S{s} {8 * itemsize} bit", shape | {"s": s}, features
    if op == "linear_chain":
        return
    shape = MODELS["7B"] | {"s": 1024, "itemsize": 2}
    for m, kind, group in itertools.product((1, 16, 17), BITS, (0, 32, 64, 128, 256)):
        features = WeightFormat(kind, 64, layout=BRICKS).features | {"attention.rope"}
        key = shape | {"m": m, kind: group}
        yield f"7B M{m} {kind} by {group or 'all'}", key, features


def experts_cases() -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    rules = {
        "plain": Routing(8, 2),
        "normalised": Routing(8, 2, normalised=True),
        "sigmoid": Routing(8, 2, sigmoid=True, biased=True, groups=2, scale=2.0),
    }
    for m, itemsize, (name, routing) in itertools.product((1, 128), (2, 4), rules.items()):
        shape = moe_key(m, 4096, 14336, routing, itemsize)
        yield f"{name} M{m} {8 * itemsize} bit", shape, routing.features
    for kind, layout in itertools.product(BITS, (PLAIN, BRICKS)):
        formats = (WeightFormat(kind, 32, layout=layout),) * 2
        shape = moe_key(1, 4096, 14336, Routing(8, 2), 2, formats)
        features = moe_features(Routing(8, 2), "silu", biases=False, formats=formats)
        yield f"{kind} {layout}", shape, features
    for gate in ("silu", "clamped_swiglu"):
        features = moe_features(Routing(8, 2), gate, biases=True)
        yield f"biases {gate}", moe_key(1, 4096, 14336, Routing(8, 2), 2), features


def all_reduce_cases() -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    sizes = itertools.product((1, 32, 64, 128), (4096, 4097, 8192), (2, 8, 16), (2, 4))
    for m, width, ranks, itemsize in sizes:
        shape = dict(m=m, width=width, ranks=ranks, itemsize=itemsize)
        yield f"M{m} E{width} {ranks} devices {8 * itemsize} bit", shape, frozenset()


def truncate_cases() -> Iterator[tuple[str, dict[str, int], frozenset[str]]]:
    sizes = itertools.product((1, 256), (5, 128256, 151936, 163841), (False, True))
    for b, v, least in sizes:
        features = frozenset(["least"] if least else [])
        yield f"B{b} V{v}{' least' * least}", dict(b=b, v=v), features


def supported() -> dict[str, list[str]]:
    """Supported cases by op, implementation and the first compute capability that runs them."""
    found: dict[str, list[str]] = {}
    for i in IMPLEMENTATIONS:
        if "attention" in i.op:
            cases = list(attention_cases(i.op))
        elif i.op == "matmul":
            cases = [*matmul_cases(), *quantised_cases()]
        elif i.op == "moe":
            cases = list(experts_cases())
        elif i.op == "all_reduce":
            cases = list(all_reduce_cases())
        elif i.op == "truncate":
            cases = list(truncate_cases())
        elif i.op == "shared_pages":
            continue
        else:
            cases = list(layers_cases(i.op))
        where = "any device" if i.capabilities is None else "sm_{}{}".format(*i.capabilities[0])
        names = [name for name, shape, features in cases if i.supports(shape, features)]
        # Several kernels may share a name.
        found.setdefault(f"{i.op} {i.name} {where}", []).extend(names)
    return found


def test_every_case_that_was_supported_still_is():
    assert supported() == json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(json.dumps(supported(), indent=0) + "\n", encoding="utf-8")
