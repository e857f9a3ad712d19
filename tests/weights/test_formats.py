"""Quantised checkpoints: the same weights as their own tools read, and one line for any damage.

The fixtures come from `tests/fixtures/make_quantised_fixtures.py`. Other checkpoints are written
here, packed by loops over codes.
"""

import hashlib
import json
import re
import shutil
import struct
import warnings
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import fdjax
from fdjax.models import CheckpointError, describe, parse_config, weight_map
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import WeightFormat, dequantise, is_quantised
from fdjax.weights.checkpoint import load_params, quantised_config, read_json
from fdjax.weights.formats.compressed_tensors import Group
from fdjax.weights.formats.layer import StoredLinear, fused_format
from fdjax.weights.formats.scheme import scheme_of
from fdjax.weights.stored import stored_tensors
from marks import slow_unless_fast

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantised"
CASES = sorted(path.name for path in FIXTURES.iterdir())
DENSE = {"bnb_nf4", "bnb_nf4_nested", "bnb_fp4", "gptq_order"}
KINDS = {
    "awq": "int4",
    "ct_fp8": "fp8",
    "ct_int4": "int4",
    "ct_int8": "int8",
    "ct_mxfp4": "fp4",
    "fp8": "fp8",
    "gptq_int8": "int8",
    "gptq": "int4",
}
CODES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


def described(folder: Path, dtype="float32"):
    config = parse_config(read_json(folder / "config.json"))
    return describe(quantised_config(folder, config), dtype=dtype, plan=Plan())


def weights_of(folder: Path, dtype="float32") -> dict[str, np.ndarray]:
    """The weights [N,K] of linear layers, dequantised and split as in the checkpoint."""
    model = described(folder, dtype)
    params = load_params(folder, model)
    found = {}
    for path, weight in weight_map(model.config).items():
        if path[0] != "blocks" or path[-1] != "weight":
            continue
        leaf = params
        for key in path:
            leaf = leaf[key]
        leaf = dequantise(leaf, dtype) if is_quantised(leaf) else leaf
        leaf = leaf.reshape(model_shape(model, path))
        parts = weight.layout.split(leaf)
        for (name, shape), part in zip(weight.sources, parts, strict=True):
            found[name.removesuffix(".weight")] = np.asarray(part).reshape(shape)
    return found


def model_shape(model, path) -> tuple[int, ...]:
    """The shape of an unquantised parameter."""
    plain = describe(model.config.with_formats({}), dtype="float32", plan=Plan()).abstract_params
    for key in path:
        plain = plain[key]
    return plain.shape


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_unless_fast(CASES, CASES[::3]))
def test_weights_are_those_of_the_formats_own_tool(case):
    expected = json.loads((FIXTURES / case / "expected.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if case in DENSE else "error")
        weights = weights_of(FIXTURES / case)
    for name, digest in expected["sha256"].items():
        weight = weights[name].astype(np.dtype(expected["dtype"][name])).astype(np.float32)
        assert hashlib.sha256(np.ascontiguousarray(weight).tobytes()).hexdigest() == digest, name


@pytest.mark.parametrize("case", CASES)
def test_weights_stay_quantised(case):
    config = described(FIXTURES / case).config
    kinds = {weight.kind for weight in config.weight_formats}
    if case in DENSE:
        assert not kinds
    elif case == "ct_mixed":
        named = dict(config.blocks[0].formats)
        assert {name: weight.kind for name, weight in named.items()} == {
            **dict.fromkeys(("qkv", "out"), "int8"),
            "gate_up": "int4",
        }
    else:
        prefix = max((p for p in KINDS if case.startswith(p)), key=len)
        assert kinds == {KINDS[prefix]}
        assert len(config.blocks[0].formats) == 4


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(
    ("case", "asks"),
    [
        *((case, True) for case in ("ct_fp8_block", "ct_fp8_channel", "fp8_block")),
        *(("ct_int8", True), ("ct_int8_tensor", True), ("ct_int8_channel", False)),
        ("ct_int8_naive_asymmetric", False),
    ],
)
def test_a_checkpoint_asks_for_rounded_activations(case, asks, allowed):
    config = parse_config(read_json(FIXTURES / case / "config.json"))
    config = quantised_config(FIXTURES / case, config, rounded_activations=allowed)
    model = describe(config, dtype="float32", plan=Plan())
    want = allowed and asks
    assert {weight.rounded_activations for weight in config.weight_formats} == {want}
    leaves = jax.tree.leaves(load_params(FIXTURES / case, model), is_leaf=is_quantised)
    assert {leaf.rounded_activations for leaf in leaves if is_quantised(leaf)} == {want}


@pytest.mark.parametrize(
    ("case", "change", "want"),
    [
        ("fp8_block", {"activation_scheme": "static"}, True),
        ("fp8_block", {"activation_scheme": "none"}, False),
        ("ct_fp8_channel", None, False),
        ("ct_fp8_channel", {"num_bits": 8, "type": "float", "dynamic": False}, True),
        ("ct_fp8_channel", {"num_bits": 8, "type": "int", "dynamic": True}, False),
        ("ct_int8", None, False),
        ("ct_int8", {"num_bits": 8}, True),
        ("ct_int8", {"num_bits": 4, "type": "int"}, False),
        ("ct_int8", {"num_bits": 8, "type": "float"}, False),
    ],
)
def test_activations_are_rounded_only_as_the_checkpoint_says(case, change, want):
    data = read_json(FIXTURES / case / "config.json")
    described = data["quantization_config"]
    if case == "fp8_block":
        described |= change
    else:
        for group in described["config_groups"].values():
            group["input_activations"] = change
    config = quantised_config(FIXTURES / case, parse_config(data), data)
    assert {weight.rounded_activations for weight in config.weight_formats} == {want}


@pytest.mark.parametrize(
    ("strategy", "want"), [("channel", True), ("tensor", True), ("group", False)]
)
def test_activations_in_int8_need_one_scale_for_each_column(strategy, want):
    weights = {"num_bits": 8, "type": "int", "strategy": strategy, "group_size": 64}
    activations = {"num_bits": 8, "type": "int", "dynamic": True}
    data = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    assert Group.parse(data, "config.json").rounded_activations is want


def test_layers_that_fuse_round_activations_only_if_all_of_them_do():
    forms = [
        WeightFormat("fp8", 64, rounded_activations=allowed) for allowed in (True, True, False)
    ]
    linears = [StoredLinear((64, 64), (), form, None) for form in forms]
    assert fused_format(linears[:2]) == forms[0]
    assert fused_format(linears) == forms[2]


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [True, False])
def test_load_says_whether_activations_may_be_rounded(allowed):
    options = {"compilation_cache": False, "progress": False, "rounded_activations": allowed}
    lm = fdjax.load(FIXTURES / "ct_fp8_channel", **options)
    assert {weight.rounded_activations for weight in lm.config.weight_formats} == {allowed}


def test_load_takes_no_other_answer():
    with pytest.raises(TypeError, match="rounded_activations must be True or False, got 'no'"):
        fdjax.load(FIXTURES / "ct_fp8_channel", rounded_activations="no")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("ct_mixed", marks=slow),
        *(pytest.param(case, marks=pytest.mark.soak) for case in ("awq", "ct_mxfp4", "gptq")),
    ],
)
def test_logits_are_those_of_transformers(case):
    expected = json.loads((FIXTURES / case / "expected.json").read_text())
    lm = fdjax.load(str(FIXTURES / case), dtype="float32")
    got = np.asarray(fdjax.forward(lm.model, lm.params, np.array([expected["ids"]])))[0]
    want = np.array(expected["logits"])
    # The tools round dequantised weights to two bytes, fdjax here to four.
    assert np.abs(got - want).max() < 0.01 * np.abs(want).max()
    assert lm.generate([expected["ids"]], max_new_tokens=3).tokens[0]


@pytest.mark.slow
def test_a_model_may_hold_the_weights_dequantised():
    folder = FIXTURES / "ct_int4_group"
    config = parse_config(read_json(folder / "config.json"))
    plain = describe(config, dtype="float32", plan=Plan())
    with pytest.warns(UserWarning, match="7 of 7 quantised weights are dequantised"):
        params = load_params(folder, plain)
    assert not any(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised)))
    quantised = described(folder)
    ids = np.array([[1, 2, 3]])
    np.testing.assert_allclose(
        fdjax.forward(plain, params, ids),
        fdjax.forward(quantised, load_params(folder, quantised), ids),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("case", sorted(DENSE))
def test_what_is_dequantised_is_told(case):
    reason = "the order of activations" if case == "gptq_order" else "bitsandbytes"
    with pytest.warns(UserWarning, match=f"7 of 7 quantised weights are dequantised.*{reason}"):
        load_params(FIXTURES / case, described(FIXTURES / case))


# Checkpoints that are written here.

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
LINEARS = {
    **{f"model.layers.0.self_attn.{name}_proj": (64, 64) for name in "qo"},
    **{f"model.layers.0.self_attn.{name}_proj": (32, 64) for name in "kv"},
    **{f"model.layers.0.mlp.{name}_proj": (96, 64) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj": (64, 96),
}
Q = "model.layers.0.self_attn.q_proj"


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    entries, data = {}, b""
    for name, a in tensors.items():
        raw = np.ascontiguousarray(a).tobytes()
        span = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": CODES[a.dtype.name], "shape": a.shape, "data_offsets": span}
        data += raw
    head = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def plain_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(ml_dtypes.bfloat16)

    norms = {
        f"model.layers.0.{name}_layernorm.weight": np.ones(64, ml_dtypes.bfloat16)
        for name in ("input", "post_attention")
    }
    return norms | {
        "model.embed_tokens.weight": normal(16, 64),
        "model.norm.weight": np.ones(64, ml_dtypes.bfloat16),
    }


def write(folder: Path, quantisation: dict | None, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    described = {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(SIZES | described))
    save(folder / "model.safetensors", plain_tensors() | tensors)
    return folder


def packed(codes: np.ndarray, bits: int, axis: int, order=None) -> np.ndarray:
    """Pack codes along an axis, code by code; `order` is the place of each in its word."""
    codes = np.moveaxis(codes, axis, 0)
    per_word = 32 // bits
    words = np.zeros((-(-len(codes) // per_word), *codes.shape[1:]), np.uint64)
    for i, code in enumerate(codes):
        place = i % per_word if order is None else order[i % per_word]
        words[i // per_word] |= code.astype(np.uint64) << np.uint64(bits * place)
    return np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32)


def random_codes(n, k, bits, group, *, zeros=True, seed=0):
    """Codes [N,K], scales and zeros [N,G]; zeros 0 and the largest code occur."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (n, k))
    scales = rng.uniform(0.01, 0.1, (n, k // group)).astype(np.float16)
    z = np.full((n, k // group), 2 ** (bits - 1))
    if zeros:
        z = rng.choice([0, 1, 2 ** (bits - 1), 2**bits - 1], z.shape)
    spread = [np.repeat(a.astype(np.float64), group, axis=1) for a in (scales, z)]
    return codes, scales, z, (codes - spread[1]) * spread[0]


def compressed(module, shape, bits, group, zeros, seed):
    codes, scales, z, dense = random_codes(*shape, bits, group, zeros=zeros, seed=seed)
    tensors = {
        f"{module}.weight_packed": packed(codes, bits, 1),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": np.array(shape, np.int64),
    }
    if zeros:
        tensors[f"{module}.weight_zero_point"] = packed(z, bits, 0)
    return tensors, dense


def awq(module, shape, bits, group, zeros, seed):
    codes, scales, z, dense = random_codes(*shape, 4, group, seed=seed)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    return {
        f"{module}.qweight": packed(codes.T, 4, 1, order),
        f"{module}.qzeros": packed(z.T, 4, 1, order),
        f"{module}.scales": np.ascontiguousarray(scales.T),
    }, dense


def gptq(module, shape, bits, group, zeros, seed, less=1):
    codes, scales, z, dense = random_codes(*shape, bits, group, zeros=zeros, seed=seed)
    stored = packed(z.T, bits, 1).view(np.uint32)
    ones = sum(less << place for place in range(0, 32, bits))
    return {
        f"{module}.qweight": packed(codes.T, bits, 0),
        f"{module}.qzeros": (stored - np.uint32(ones)).view(np.int32),
        f"{module}.scales": np.ascontiguousarray(scales.T),
        f"{module}.g_idx": (np.arange(shape[1]) // group).astype(np.int32),
    }, dense


def ct_config(bits, group, zeros, **change):
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros} | (
        {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    )
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors"} | fields | change


def awq_config(bits, group, zeros):
    return {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True}


def gptq_config(bits, group, zeros, **change):
    fields = {"bits": bits, "group_size": group or -1, "sym": not zeros, "desc_act": False}
    return {"quant_method": "gptq"} | fields | change


WRITERS = {
    "compressed": (compressed, ct_config),
    "awq": (awq, awq_config),
    "gptq": (gptq, gptq_config),
}


def checkpoint(folder, name, bits=4, group=32, zeros=True):
    """Write a checkpoint in a format; returns the exact weights by module."""
    writer, config = WRITERS[name]
    tensors, dense = {}, {}
    for i, (module, shape) in enumerate(LINEARS.items()):
        written, dense[module] = writer(module, shape, bits, group or shape[1], zeros, i)
        tensors |= written
    write(folder, config(bits, group, zeros), tensors)
    return dense


@pytest.mark.parametrize(
    ("name", "bits", "group", "zeros"),
    [
        *(("compressed", bits, group, True) for bits in (4, 8) for group in (32, None)),
        ("compressed", 4, 16, False),
        ("awq", 4, 32, True),
        ("awq", 4, None, True),
        *(("gptq", bits, group, True) for bits in (4, 8) for group in (32, None)),
        ("gptq", 4, 32, False),
    ],
)
def test_weights_are_those_that_were_packed(tmp_path, name, bits, group, zeros):
    dense = checkpoint(tmp_path, name, bits, group, zeros)
    got = weights_of(tmp_path)
    assert got.keys() == dense.keys()
    for module, weight in dense.items():
        np.testing.assert_array_equal(got[module], weight.astype(np.float32), module)


def test_version_2_of_gptq_stores_zeros_as_they_are(tmp_path):
    first = checkpoint(tmp_path / "v1", "gptq")
    written = {}
    for i, (module, shape) in enumerate(LINEARS.items()):
        written |= gptq(module, shape, 4, 32, True, i, less=0)[0]
    write(tmp_path / "v2", gptq_config(4, 32, True, checkpoint_format="gptq_v2"), written)
    np.testing.assert_array_equal(weights_of(tmp_path / "v2")[Q], first[Q].astype(np.float32))


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("block", [(32, 32), (40, 48), (128, 128)])
def test_blocks_of_fp8_may_be_ragged(tmp_path, block, scale):
    rng = np.random.default_rng(0)
    tensors, dense = {}, {}
    for module, (n, k) in LINEARS.items():
        codes = rng.normal(size=(n, k)).astype(ml_dtypes.float8_e4m3fn)
        scales = 2.0 ** rng.integers(-3, 3, (-(-n // block[0]), -(-k // block[1])))
        if scale != "float8_e8m0fnu":
            scales = scales * rng.uniform(1, 2, scales.shape)
        scales = scales.astype(np.dtype(scale))
        tensors |= {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}
        dense[module] = np.zeros((n, k))
        for i in range(n):
            for j in range(k):
                factor = float(scales[i // block[0], j // block[1]])
                dense[module][i, j] = float(codes[i, j]) * factor
    write(tmp_path, {"quant_method": "fp8", "weight_block_size": list(block)}, tensors)
    got = weights_of(tmp_path)
    for module, weight in dense.items():
        np.testing.assert_array_equal(got[module], weight.astype(np.float32), module)
    assert {weight.kind for weight in described(tmp_path).config.weight_formats} == {"fp8"}


def test_layers_that_fuse_may_have_other_groups_and_other_scales(tmp_path):
    """q by 32 without zeros, k by 16 with float32 scales, v by channel: one group of 16."""
    tensors, dense = {}, {}
    chosen = {"q": (32, False), "k": (16, True), "v": (64, True)}
    groups = {}
    for i, (module, shape) in enumerate(LINEARS.items()):
        name = module.split(".")[-1][0]
        group, zeros = chosen.get(name, (32, False)) if "attn" in module else (32, False)
        written, dense[module] = compressed(module, shape, 4, group, zeros, i)
        if name == "k":
            written[f"{module}.weight_scale"] = written[f"{module}.weight_scale"].astype(np.float32)
        tensors |= written
        weights = {"num_bits": 4, "symmetric": not zeros, "group_size": group}
        groups[f"group_{i}"] = {"targets": [f"re:{module}$"], "weights": weights}
    write(tmp_path, ct_config(4, 32, False, config_groups=groups), tensors)
    formats = dict(described(tmp_path).config.blocks[0].formats)
    qkv = formats["qkv"]
    assert (qkv.group, qkv.zeros, qkv.scales) == (16, True, "float32")
    assert (formats["gate_up"].group, formats["gate_up"].zeros) == (32, False)
    for module, weight in dense.items():
        np.testing.assert_array_equal(weights_of(tmp_path)[module], weight.astype(np.float32))


@pytest.mark.parametrize("other", ["plain", "int8"])
def test_layers_that_cannot_fuse_are_dequantised(tmp_path, other):
    dense = checkpoint(tmp_path, "compressed", zeros=False)
    tensors = tensors_of(tmp_path)
    for name in [name for name in tensors if name.startswith(Q)]:
        del tensors[name]
    groups = ct_config(4, 32, False)["config_groups"]
    if other == "plain":
        tensors[f"{Q}.weight"] = dense[Q].astype(ml_dtypes.bfloat16)
        dense[Q] = tensors[f"{Q}.weight"].astype(np.float64)
    else:
        written, dense[Q] = compressed(Q, (64, 64), 8, 64, False, 9)
        tensors |= written
        weights = {"num_bits": 8, "strategy": "channel"}
        groups["group_1"] = {"targets": [Q], "weights": weights}
    write(tmp_path, ct_config(4, 32, False, config_groups=groups), tensors)
    assert dict(described(tmp_path).config.blocks[0].formats).keys() == {"out", "gate_up", "down"}
    with pytest.warns(UserWarning, match="layers that fuse with it have other formats"):
        got = weights_of(tmp_path)
    for module, weight in dense.items():
        np.testing.assert_array_equal(got[module], weight.astype(np.float32), module)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    from fdjax.weights.stored import stored_tensors

    return {name: np.array(t.view()) for name, t in stored_tensors(folder).items()}


def test_a_quantised_head(tmp_path):
    dense = checkpoint(tmp_path, "gptq")
    tensors = tensors_of(tmp_path)
    written, head = gptq("lm_head", (16, 64), 4, 32, True, 5)
    write(tmp_path, gptq_config(4, 32, True), tensors | written)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    model = described(tmp_path)
    assert str(model.config.head_format) == "int4 by 32"
    weight = load_params(tmp_path, model)["head"]["weight"]
    np.testing.assert_array_equal(dequantise(weight, "float32"), head.T.astype(np.float32))
    np.testing.assert_array_equal(weights_of(tmp_path)[Q], dense[Q].astype(np.float32))


def test_scales_of_activations_and_biases_of_zeros_are_ignored(tmp_path):
    checkpoint(tmp_path, "gptq")
    more = {f"{Q}.bias": np.zeros(64, np.float16), f"{Q}.input_scale": np.ones((), np.float32)}
    write(tmp_path, gptq_config(4, 32, True), tensors_of(tmp_path) | more)
    assert weights_of(tmp_path)[Q].shape == (64, 64)


# Damage: (format, change of the tensors, change of quantization_config, text of the error).
def drop(name):
    return lambda t: t.pop(f"{Q}.{name}")


def put(name, change):
    return lambda t: t.update({f"{Q}.{name}": change(t[f"{Q}.{name}"])})


def nothing(t):
    pass


def nan(a):
    a = a.copy()
    a[1, 1] = np.nan
    return a


FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
DAMAGE = {
    "no scales": ("compressed", drop("weight_scale"), {}, f"{Q}.weight_scale' is missing"),
    "no zeros": ("compressed", drop("weight_zero_point"), {}, "weight_zero_point' is missing"),
    "no shape": ("compressed", drop("weight_shape"), {}, "weight_shape' is missing"),
    "no weights": ("compressed", drop("weight_packed"), {}, "weight_packed' is missing"),
    "pack factor": (
        "compressed",
        put("weight_packed", lambda a: np.repeat(a, 2, axis=1)),
        {},
        r"weight_packed' must have shape \[64, 8\] for 4 bits, got \[64, 16\]",
    ),
    "scales of another group": (
        "compressed",
        put("weight_scale", lambda a: np.repeat(a, 2, axis=1)),
        {},
        r"weight_scale' must have shape \[64, 2\], got \[64, 4\]",
    ),
    "another shape": (
        "compressed",
        put("weight_shape", lambda a: a[::-1] + 1),
        {},
        r"weight_shape' must hold \[64, 64\] by config.json, got \[65, 65\]",
    ),
    "float words": (
        "compressed",
        put("weight_packed", lambda a: a.astype(np.float32)),
        {},
        "weight_packed' has dtype F32, supported here: I32",
    ),
    "NaN scales": ("compressed", put("weight_scale", nan), {}, "weight_scale' has values that"),
    "infinite scales": (
        "gptq",
        put("scales", lambda a: np.full_like(a, np.inf)),
        {},
        "scales' has values that are not finite",
    ),
    "group that does not divide K": (
        "awq",
        nothing,
        {"group_size": 48},
        "'group_size' 48 must divide the 64 inputs of",
    ),
    "group 0": ("gptq", nothing, {"group_size": 0}, "'group_size' must be positive"),
    "group text": ("gptq", nothing, {"group_size": "32"}, "'group_size' must be int"),
    "AWQ zeros": ("awq", drop("qzeros"), {}, "qzeros' is missing"),
    "AWQ packed along K": (
        "awq",
        put("qweight", lambda a: a.reshape(8, 64)),
        {},
        r"qweight' must have shape \[64, 8\] for 4 bits, got \[8, 64\]",
    ),
    "AWQ gemv": ("awq", nothing, {"version": "gemv"}, "version 'gemv' is not supported"),
    "AWQ 3 bits": ("awq", nothing, {"bits": 3}, "bits '3' is not supported"),
    "GPTQ bits": ("gptq", nothing, {"bits": 8}, r"qweight' must have shape .* for 8 bits"),
    "GPTQ 3 bits": ("gptq", nothing, {"bits": 3}, "GPTQ with 3 bits is not supported"),
    "GPTQ bits text": ("gptq", nothing, {"bits": "4"}, "'bits' must be int"),
    "GPTQ marlin": (
        "gptq",
        nothing,
        {"checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2",
    ),
    "GPTQ not symmetric": ("gptq", nothing, {"sym": True}, "qzeros' must hold the middle code"),
    "GPTQ order": (
        "gptq",
        put("g_idx", lambda a: a + 7),
        {},
        r"g_idx' must be in 0\.\.1",
    ),
    "GPTQ dynamic": ("gptq", nothing, {"dynamic": {"+:[": {}}}, "'dynamic' has a malformed entry"),
    "GPTQ left out": (
        "gptq",
        nothing,
        {"dynamic": {r"-:.*q_proj": {}}},
        "is quantised, but 'dynamic' leaves it out",
    ),
    "no group": (
        "compressed",
        nothing,
        {"ignore": ["lm_head", f"re:.*{Q}"]},
        "no config group of .* is for",
    ),
    "malformed target": (
        "compressed",
        nothing,
        {"config_groups": {"a": {"targets": ["re:["], "weights": {"num_bits": 4}}}},
        "is malformed",
    ),
    "no groups": ("compressed", nothing, {"config_groups": None}, "'config_groups' is missing"),
    "2 bits": (
        "compressed",
        nothing,
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 2}}}},
        "type 'int' with 2 bits are not supported",
    ),
    "fp4 by 16": (
        "compressed",
        nothing,
        {"config_groups": {"a": {"targets": ["Linear"], "weights": FP4 | {"group_size": 16}}}},
        "float with 4 bits must have strategy 'group' and group_size 32.*'group' and 16",
    ),
    "fp4 of integers": (
        "compressed",
        nothing,
        {"config_groups": {"a": {"targets": ["Linear"], "weights": FP4}}},
        "weight_packed' has dtype I32, supported here: U8",
    ),
    "nvfp4": (
        "compressed",
        nothing,
        {"format": "nvfp4-pack-quantized"},
        "format 'nvfp4-pack-quantized' is not supported; supported: pack-quantized",
    ),
    "sparse": ("compressed", nothing, {"sparsity_config": {"format": "sparse-24"}}, "sparse"),
    "rotated": (
        "compressed",
        nothing,
        {"transform_config": {"config_groups": {"u": {}}}},
        "'transform_config' is not supported",
    ),
    "a tensor more": (
        "compressed",
        lambda t: t.update({f"{Q}.qzeros": np.zeros(1, np.int32)}),
        {},
        "qzeros' belongs to quantised weights, which config.json does not describe",
    ),
    **{
        method: (
            "gptq",
            nothing,
            {"quant_method": method},
            f"{method}' is not supported; supported",
        )
        for method in ("torchao", "gguf", "hqq", "nvfp4", "aqlm", "quark")
    },
    "no method": ("gptq", nothing, {"quant_method": None}, "None is not supported; supported"),
    "another method": (
        "gptq",
        nothing,
        {"quant_method": "awq"},
        "'model.layers.0.*must have shape",
    ),
    "8 bits of bitsandbytes": (
        "gptq",
        nothing,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes with 8 bits is not supported",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_error_names_the_file_and_the_place(tmp_path, name):
    form, spoil, change, says = DAMAGE[name]
    checkpoint(tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    tensors = tensors_of(tmp_path)
    spoil(tensors)
    write(tmp_path, config | change, tensors)
    with pytest.raises(CheckpointError, match=says) as caught:
        fdjax.load(str(tmp_path), calibration=False)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert re.search(r"(config\.json|model\.safetensors)", message)


@pytest.mark.parametrize("scale", [(), (1,), (1, 1), (64,), (64, 1)])
def test_fp8_without_blocks_has_a_scale_of_the_tensor_or_of_channels(tmp_path, scale):
    rng = np.random.default_rng(0)
    tensors = {}
    for module, (n, k) in LINEARS.items():
        own = (n, *scale[1:]) if scale[:1] == (64,) else scale
        tensors[f"{module}.weight"] = rng.normal(size=(n, k)).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = rng.uniform(1, 2, own).astype(np.float32)
    write(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, tensors)
    want = tensors[f"{Q}.weight"].astype(np.float32)
    want *= tensors[f"{Q}.weight_scale"].reshape(-1, 1)
    np.testing.assert_array_equal(weights_of(tmp_path)[Q], want)


WRONG_VALUES = (None, True, 0, -1, 3.5, "x", "re:(", [], [1], {}, {"a": 1}, [[2, 2]], 2**40)


def keys_of(data, path=()):
    """Paths of all values in nested objects and lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from keys_of(value, (*path, key))


@pytest.mark.parametrize(
    "case", ["awq", "bnb_nf4", "ct_fp8_block", "ct_mixed", "fp8_block", "gptq"]
)
def test_a_wrong_value_is_an_error_or_makes_no_difference(case):
    """Every value of `quantization_config` in turn: a `CheckpointError`, or the same formats."""
    folder = FIXTURES / case
    data = json.loads((folder / "config.json").read_text())
    config = parse_config(data)
    right = quantised_config(folder, config, data)
    for path in keys_of(data["quantization_config"]):
        for wrong in WRONG_VALUES:
            changed = json.loads(json.dumps(data))
            node = changed["quantization_config"]
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = wrong
            try:
                found = quantised_config(folder, config, changed)
            except CheckpointError as error:
                assert "\n" not in str(error)
                continue
            formats = {(w.kind, w.group) for w in found.weight_formats}
            assert formats <= {(w.kind, w.group) for w in right.weight_formats}, (path, wrong)


@pytest.mark.parametrize(
    ("case", "where", "change", "says"),
    [
        (
            *("ct_fp8_channel", "weights", {"block_structure": [128, 128]}),
            "'block_structure' is for strategy 'block', which is 'channel'",
        ),
        (
            *("ct_fp8_channel", "input_activations", {"strategy": "foo"}),
            "strategy 'foo' of activations is not supported",
        ),
        ("ct_fp8_channel", "input_activations", {"num_bits": "8"}, "num_bits"),
    ],
)
def test_what_is_known_must_be_right(case, where, change, says):
    folder = FIXTURES / case
    data = json.loads((folder / "config.json").read_text())
    (group,) = data["quantization_config"]["config_groups"].values()
    group[where] = (group[where] or {}) | change
    with pytest.raises(CheckpointError, match=says):
        quantised_config(folder, parse_config(data), data)


@pytest.mark.parametrize("activations", [None, {"num_bits": 8, "type": "int"}])
def test_packed_int8_may_have_rounded_activations(activations):
    folder = FIXTURES / "ct_int8_channel"
    data = json.loads((folder / "config.json").read_text())
    (group,) = data["quantization_config"]["config_groups"].values()
    group["input_activations"] = activations
    found = quantised_config(folder, parse_config(data), data)
    assert {w.rounded_activations for w in found.weight_formats} == {activations is not None}


def test_a_description_without_quantised_weights_is_refused(tmp_path):
    dense = {f"{m}.weight": np.zeros(s, ml_dtypes.bfloat16) for m, s in LINEARS.items()}
    write(tmp_path, gptq_config(4, 32, True), dense)
    with pytest.raises(CheckpointError, match=r"'quantization_config'.*no weight is quantised"):
        fdjax.load(str(tmp_path))


def test_fp8_without_scales_is_refused(tmp_path):
    tensors = {f"{m}.weight": np.ones(s, ml_dtypes.float8_e4m3fn) for m, s in LINEARS.items()}
    write(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]}, tensors)
    with pytest.raises(CheckpointError, match="weight_scale_inv' is missing"):
        fdjax.load(str(tmp_path))
    write(tmp_path, None, tensors)
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3, supported: F32"):
        fdjax.load(str(tmp_path))


@pytest.mark.parametrize(
    "state", [b"", b"{", b"[]", b'{"shape": [64, 64]}', b'{"blocksize": 0, "shape": [64, 64]}']
)
def test_a_damaged_description_of_nf4_is_refused(tmp_path, state):
    folder = FIXTURES / "bnb_nf4"
    tensors = tensors_of(folder)
    name = "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4"
    tensors[name] = np.frombuffer(state, np.uint8)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="does not describe a weight of shape"):
        fdjax.load(str(tmp_path))


@pytest.mark.filterwarnings("ignore:.*are dequantised:UserWarning")
@pytest.mark.parametrize("name", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_nf4_with_values_that_are_not_finite_is_refused(tmp_path, name):
    folder = FIXTURES / ("bnb_nf4_nested" if name.startswith("nested") else "bnb_nf4")
    tensors = tensors_of(folder)
    name = f"model.layers.0.self_attn.q_proj.weight.{name}"
    tensors[name] = np.full_like(tensors[name], np.nan)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"{name}' has values that are not finite"):
        fdjax.load(str(tmp_path))


def test_zeros_of_channels_may_have_one_axis(tmp_path):
    """As the scales may."""
    source = FIXTURES / "ct_int8_naive_asymmetric"
    tensors = {name: t.view() for name, t in stored_tensors(source).items()}
    flat = {
        name: value.reshape(-1) if name.endswith(("_scale", "_zero_point")) else value
        for name, value in tensors.items()
    }
    save_file(flat, tmp_path / "model.safetensors")
    shutil.copyfile(source / "config.json", tmp_path / "config.json")
    ours, theirs = weights_of(tmp_path), weights_of(source)
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[name], weight)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "mxfp4", "compressed-tensors"])
def test_a_format_without_a_description_is_refused(method):
    with pytest.raises(CheckpointError, match="'quantization_config' must be an object"):
        scheme_of({"quantization_config": method})
