"""Reading checkpoints: right numbers, one line about every damage, little memory."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fdjax
from fdjax.models import CheckpointError, describe, export_tensors, parse_config, weight_map
from fdjax.text.tokenizer import MissingTokenizerError, Tokenizer
from fdjax.weights import checkpoint
from fdjax.weights.checkpoint import load_params, locate, read_json, stored_tensors
from marks import slow_unless_fast

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
CASES = sorted(p.parent.name for p in FIXTURES.glob("*/config.alternate.json"))
LLAMAS = [case for case in CASES if case.startswith("llama")]
# Fused and tied tensors, biases, other names, conversions of layouts, experts, quantised experts.
FAST_EXPORTS = {"llama3_gqa_tied", "llama_bias", "chatglm", "gpt2", "mixtral", "gpt_oss"}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I8": np.int8,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 11,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def pack(header: dict | bytes, data: bytes, align: int = 8) -> bytes:
    """A safetensors file whose tensors start at a multiple of `align` bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-(len(raw) + 8) % align)
    return struct.pack("<Q", len(raw)) + raw + data


def header_of(tensors: dict[str, np.ndarray]) -> dict:
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        span = [position, position + tensor.nbytes]
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        position = span[1]
    return header


def write(path: Path, tensors: dict[str, np.ndarray], align: int = 8) -> None:
    data = b"".join(t.tobytes() for t in tensors.values())
    path.write_bytes(pack(header_of(tensors), data, align))


def read(path: Path) -> dict[str, np.ndarray]:
    """An independent reader of safetensors."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*t["data_offsets"])], DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in header.items()
    }


def read_all(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read(path)
    return tensors


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama, written down independently."""
    e, f, v = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q = e
    kv = e // c["num_attention_heads"] * c["num_key_value_heads"]
    result = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        result |= {
            f"{layer}self_attn.q_proj.weight": (q, e),
            f"{layer}self_attn.k_proj.weight": (kv, e),
            f"{layer}self_attn.v_proj.weight": (kv, e),
            f"{layer}self_attn.o_proj.weight": (e, q),
            f"{layer}mlp.gate_proj.weight": (f, e),
            f"{layer}mlp.up_proj.weight": (f, e),
            f"{layer}mlp.down_proj.weight": (e, f),
            f"{layer}input_layernorm.weight": (e,),
            f"{layer}post_attention_layernorm.weight": (e,),
        }
    if not c.get("tie_word_embeddings"):
        result["lm_head.weight"] = (v, e)
    return result


def random_tensors(c: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes(c).items()}


def make_single(folder: Path, dtype=np.float32, align: int = 8, **changes) -> dict:
    c = TINY | changes
    (folder / "config.json").write_text(json.dumps(c))
    tensors = random_tensors(c, dtype)
    write(folder / SINGLE, tensors, align)
    return tensors


def make_sharded(folder: Path) -> dict[str, str]:
    """Three shards; returns the index's weight_map."""
    (folder / "config.json").write_text(json.dumps(TINY))
    tensors = random_tensors(TINY)
    where = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        mine = dict(list(tensors.items())[shard::3])
        write(folder / file, mine)
        where |= dict.fromkeys(mine, file)
    write_index(folder, where)
    return where


def write_index(folder: Path, where) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def describe_folder(folder: Path, dtype: str | None = None):
    path = folder / "config.json"
    return describe(parse_config(read_json(path), str(path)), dtype=dtype)


def load(folder: Path, dtype: str | None = None, **options):
    return load_params(folder, describe_folder(folder, dtype), **options)


def refusal(folder: Path, *says: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for words in says:
        assert words in message, f"{words!r} not in: {message}"
    return message


def leaf(params, *path):
    for key in path:
        params = params[key]
    return np.asarray(params)


def expected_params(tensors: dict[str, np.ndarray], config) -> dict[tuple, np.ndarray]:
    """The fused parameters, head by head, derived from their meaning and not from the code."""
    d, g, hkv = config.head_dim, config.heads // config.kv_heads, config.kv_heads
    result = {
        ("embed",): tensors["model.embed_tokens.weight"],
        ("norm", "scale"): tensors["model.norm.weight"],
    }
    if not config.tie_embeddings:
        result["head", "weight"] = tensors["lm_head.weight"].T
    for i in range(config.layers):

        def get(name, layer=f"model.layers.{i}."):
            return tensors[layer + name]

        for kind in ("weight", "bias"):
            if f"model.layers.{i}.self_attn.q_proj.{kind}" in tensors:
                q, k, v = (get(f"self_attn.{p}_proj.{kind}") for p in "qkv")
                # Rows of a projection are outputs; a bias is a single input column.
                qkv = np.empty((*q.shape[1:], hkv, g + 2, d), q.dtype)
                for j in range(hkv):
                    for head in range(g):
                        at = (j * g + head) * d
                        qkv[..., j, head, :] = q[at : at + d].T
                    qkv[..., j, g, :] = k[j * d : (j + 1) * d].T
                    qkv[..., j, g + 1, :] = v[j * d : (j + 1) * d].T
                result["blocks", i, "attention", "qkv", kind] = qkv
                result["blocks", i, "attention", "out", kind] = get(f"self_attn.o_proj.{kind}").T
            if f"model.layers.{i}.mlp.up_proj.{kind}" in tensors:
                gate, up = get(f"mlp.gate_proj.{kind}"), get(f"mlp.up_proj.{kind}")
                gate_up = np.empty((*gate.shape[1:], 2, gate.shape[0]), gate.dtype)
                gate_up[..., 0, :], gate_up[..., 1, :] = gate.T, up.T
                result["blocks", i, "mlp", "gate_up", kind] = gate_up
                result["blocks", i, "mlp", "down", kind] = get(f"mlp.down_proj.{kind}").T
        result["blocks", i, "attention_norm", "scale"] = get("input_layernorm.weight")
        result["blocks", i, "mlp_norm", "scale"] = get("post_attention_layernorm.weight")
    return result


def assert_same_bits(got: np.ndarray, want: np.ndarray, what) -> None:
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    assert got.tobytes() == want.tobytes(), what


def assert_params(params, expected: dict[tuple, np.ndarray], dtype) -> None:
    assert len(jax.tree.leaves(params)) == len(expected)
    for path, want in expected.items():
        assert_same_bits(leaf(params, *path), want.astype(dtype), path)


def test_the_fixtures_cover_single_and_sharded_tied_and_not_with_and_without_bias():
    assert len(LLAMAS) >= 5
    assert {(FIXTURES / case / INDEX).exists() for case in LLAMAS} == {True, False}
    configs = [describe_folder(FIXTURES / case).config for case in LLAMAS]
    assert {c.tie_embeddings for c in configs} == {c.qkv_bias for c in configs} == {True, False}


@pytest.mark.parametrize("case", LLAMAS)
def test_parameters_are_the_files_tensors_fused(case):
    model = describe_folder(FIXTURES / case)
    params = load_params(FIXTURES / case, model)
    assert_params(params, expected_params(read_all(FIXTURES / case), model.config), model.dtype)


@pytest.mark.parametrize("case", slow_unless_fast(CASES, FAST_EXPORTS))
def test_export_undoes_loading(case):
    model = describe_folder(FIXTURES / case)
    params = load_params(FIXTURES / case, model)
    tensors = read_all(FIXTURES / case)
    exported = export_tensors(params, weight_map(model.config))
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_bits(np.asarray(exported[name]), tensor, name)


def test_shards_hold_the_same_as_one_file(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    make_single(one)
    make_sharded(many)
    assert len(stored_tensors(many)) == len(stored_tensors(one))
    jax.tree.map(np.testing.assert_array_equal, load(one), load(many))


@pytest.mark.parametrize(
    ("stored", "to", "align"),
    [
        (np.float32, "bfloat16", 8),
        (np.float32, "bfloat16", 64),
        (np.float32, "float16", 8),
        (ml_dtypes.bfloat16, "float32", 8),
        (ml_dtypes.bfloat16, "float32", 64),
        (ml_dtypes.bfloat16, "float16", 8),
        (np.float16, "float16", 8),
        (np.float16, "bfloat16", 8),
        (np.float64, "float32", 8),
        (np.float64, "float32", 64),
        (np.float64, "bfloat16", 8),
    ],
)
def test_dtypes_are_converted(tmp_path, stored, to, align):
    tensors = make_single(tmp_path, stored, align, num_hidden_layers=1)
    model = describe_folder(tmp_path, to)
    if stored is np.float64:
        # JAX has no float64 here, so a float64 checkpoint is rounded to float32 first.
        tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    expected = expected_params(tensors, model.config)
    assert_params(load_params(tmp_path, model), expected, np.dtype(to))


@pytest.mark.parametrize("with_head", [False, True])
def test_a_tied_model_has_no_head_whether_or_not_the_file_has_one(tmp_path, with_head):
    tensors = make_single(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    if with_head:
        extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        write(tmp_path / SINGLE, tensors | extra)
    params = load(tmp_path)
    assert "head" not in params
    assert_same_bits(leaf(params, "embed"), tensors["model.embed_tokens.weight"], "embed")


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_may_have_another_name(tmp_path, same):
    shutil.copytree(FIXTURES / "gpt_neox", tmp_path, dirs_exist_ok=True)
    tensors = read_all(tmp_path)
    embedding = tensors["gpt_neox.embed_in.weight"]
    write(tmp_path / SINGLE, tensors | {"embed_out.weight": embedding if same else -embedding})
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    tied = json.dumps(data | {"tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(tied, encoding="utf-8")
    if same:
        assert "head" not in load(tmp_path)
    else:
        refusal(tmp_path, "tensor 'embed_out.weight' differs from", "'tie_word_embeddings' to")


@pytest.mark.parametrize("how", ["value", "shape", "dtype"])
def test_a_head_of_its_own_is_not_dropped_for_a_config_that_ties_it(tmp_path, how):
    tensors = make_single(tmp_path, tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"].copy()
    if how == "value":
        head[-1, -1] += 1
    head = {"shape": head[:-1], "dtype": head.astype(np.float16)}.get(how, head)
    write(tmp_path / SINGLE, tensors | {"lm_head.weight": head})
    text = refusal(tmp_path, "tensor 'lm_head.weight' differs from", "'tie_word_embeddings' to")
    assert how == "value" or f"F{8 * head.itemsize} {list(head.shape)}, F32 " in text


@pytest.mark.parametrize("named", [{}, {"torch_dtype": None}, {"dtype": "float32"}])
def test_the_dtype_is_that_of_the_tensors_where_none_is_named(tmp_path, named):
    make_single(tmp_path, DTYPES["BF16"])
    config = {k: v for k, v in TINY.items() if k != "torch_dtype"} | named
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"compilation_cache": False, "progress": False}
    expected = "float32" if named.get("dtype") else "bfloat16"
    assert fdjax.load(tmp_path, **options).model.dtype == expected
    assert fdjax.load(tmp_path, dtype="float16", **options).model.dtype == "float16"


def test_a_file_of_its_name_does_not_hide_the_embedded_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").touch()
    assert (locate("tiny") / "config.json").exists()


def test_precomputed_frequencies_are_no_matter(tmp_path):
    tensors = make_single(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    write(tmp_path / SINGLE, tensors | extra)
    load(tmp_path)


def test_an_empty_tensor_among_the_ignored_is_no_matter(tmp_path):
    tensors = make_single(tmp_path, tie_word_embeddings=True)
    write(tmp_path / SINGLE, {"lm_head.weight": np.zeros((0, 16), np.float32)} | tensors)
    load(tmp_path)


def test_progress_counts_the_bytes_read_up_to_all_of_them(tmp_path):
    tensors = make_single(tmp_path, tie_word_embeddings=True)
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write(tmp_path / SINGLE, tensors | extra)
    seen = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    done = [d for d, _ in seen]
    assert {t for _, t in seen} == {total}
    assert done == sorted(set(done)) and done[-1] == total


def test_loading_twice_gives_two_trees_and_leaves_the_description_alone(tmp_path):
    make_single(tmp_path)
    model = describe_folder(tmp_path)
    first, second = load_params(tmp_path, model), load_params(tmp_path, model)
    first["blocks"][0]["mlp"]["down"]["weight"] = None
    assert second["blocks"][0]["mlp"]["down"]["weight"] is not None
    kinds = {type(node) for node in jax.tree.leaves(model.abstract_params)}
    assert kinds == {jax.ShapeDtypeStruct}


@pytest.mark.parametrize("align", [8, 64])
def test_parameters_do_not_live_in_the_file(tmp_path, align):
    tensors = make_single(tmp_path, align=align)
    model = describe_folder(tmp_path)
    params = load_params(tmp_path, model)
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.write(b"\xff" * size)
    assert_params(params, expected_params(tensors, model.config), np.float32)


# --- damage


Q = "model.layers.0.self_attn.q_proj.weight"
AGAIN = "download the file again"


def test_a_missing_tensor(tmp_path):
    tensors = make_single(tmp_path)
    del tensors[Q]
    write(tmp_path / SINGLE, tensors)
    refusal(tmp_path, SINGLE, Q, "missing", "download the checkpoint again")


def test_a_missing_head_of_an_untied_model(tmp_path):
    tensors = make_single(tmp_path)
    del tensors["lm_head.weight"]
    write(tmp_path / SINGLE, tensors)
    refusal(tmp_path, SINGLE, "lm_head.weight", "missing")


def test_a_missing_tensor_of_a_sharded_checkpoint_is_missing_from_the_index(tmp_path):
    where = make_sharded(tmp_path)
    shard = tmp_path / where[Q]
    tensors = read(shard)
    del tensors[Q], where[Q]
    write(shard, tensors)
    write_index(tmp_path, where)
    refusal(tmp_path, INDEX, Q, "missing")


def test_an_unexpected_tensor(tmp_path):
    name = "model.layers.0.self_attn.q_norm.weight"
    write(tmp_path / SINGLE, make_single(tmp_path) | {name: np.ones(4, np.float32)})
    refusal(tmp_path, SINGLE, name, "unexpected", "config.json describes another model")


def test_an_unexpected_bias(tmp_path):
    name = "model.layers.1.self_attn.o_proj.bias"
    write(tmp_path / SINGLE, make_single(tmp_path) | {name: np.ones(16, np.float32)})
    refusal(tmp_path, SINGLE, name, "unexpected")


def test_more_layers_than_config_json_says(tmp_path):
    make_single(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    refusal(tmp_path, SINGLE, "model.layers.1.", "unexpected")


@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (256,), (16, 4, 4)])
def test_a_wrong_shape_even_with_as_many_elements(tmp_path, shape):
    tensors = make_single(tmp_path)
    tensors[Q] = np.ones(shape, np.float32)
    write(tmp_path / SINGLE, tensors)
    refusal(tmp_path, SINGLE, Q, "[16, 16]", str(list(shape)), "config.json")


@pytest.mark.parametrize("dtype", ["F8_E5M2", "U32", "BOOL"])
def test_an_unsupported_dtype(tmp_path, dtype):
    header = header_of(make_single(tmp_path))
    header[Q]["dtype"] = dtype
    size = max(t["data_offsets"][1] for name, t in header.items() if name != "__metadata__")
    (tmp_path / SINGLE).write_bytes(pack(header, bytes(size)))
    refusal(tmp_path, SINGLE, Q, dtype, "supported: F32, F16, BF16, F64")


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100])
def test_a_file_truncated_in_its_header(tmp_path, keep):
    make_single(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:keep])
    refusal(tmp_path, SINGLE, "truncated", AGAIN)


@pytest.mark.parametrize("lost", [1, 4, 700, 5000])
def test_a_file_truncated_in_its_data(tmp_path, lost):
    tensors = make_single(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:-lost])
    message = refusal(tmp_path, SINGLE, "truncated", AGAIN)
    assert any(repr(name) in message for name in tensors)


def test_a_truncated_shard(tmp_path):
    shard = tmp_path / make_sharded(tmp_path)[Q]
    shard.write_bytes(shard.read_bytes()[:-1])
    refusal(tmp_path, shard.name, "truncated", AGAIN)


def test_a_missing_shard(tmp_path):
    where = make_sharded(tmp_path)
    (tmp_path / where[Q]).unlink()
    first = min(name for name, file in where.items() if file == where[Q])
    refusal(tmp_path, where[Q], first, "missing", AGAIN)


def test_a_shard_that_is_a_broken_link(tmp_path):
    # The state of a hub cache after its blobs were deleted.
    shard = tmp_path / make_sharded(tmp_path)[Q]
    shard.unlink()
    shard.symlink_to(tmp_path / "gone")
    refusal(tmp_path, shard.name, "missing", AGAIN)


def test_an_index_that_names_a_tensor_its_file_lacks(tmp_path):
    where = make_sharded(tmp_path)
    other = next(file for file in where.values() if file != where[Q])
    write_index(tmp_path, where | {Q: other})
    refusal(tmp_path, other, Q, "in the index but not in the file", AGAIN)


def test_a_tensor_in_two_shards_is_read_from_the_one_the_index_names(tmp_path):
    where = make_sharded(tmp_path)
    for name in ("model.embed_tokens.weight", "model.norm.weight", Q):
        for file in set(where.values()) - {where[name]}:
            tensors = read(tmp_path / file)
            write(tmp_path / file, tensors | {name: np.zeros(shapes(TINY)[name], np.float32)})
    model = describe_folder(tmp_path)
    expected = expected_params(random_tensors(TINY), model.config)
    with pytest.warns(UserWarning, match=r"is not read, the index has it in model-0000") as warned:
        params = load_params(tmp_path, model)
    assert len(warned) == 6
    assert_params(params, expected, np.float32)


def test_one_file_goes_before_shards_as_in_transformers(tmp_path):
    make_sharded(tmp_path)
    tensors = make_single(tmp_path)
    tensors[Q] += 1
    write(tmp_path / SINGLE, tensors)
    model = describe_folder(tmp_path)
    with pytest.warns(UserWarning, match=r"model\.safetensors is read, and model-00001-of"):
        params = load_params(tmp_path, model)
    assert_params(params, expected_params(tensors, model.config), np.float32)


def test_a_tensor_in_a_shard_and_not_in_the_index_is_unexpected(tmp_path):
    where = make_sharded(tmp_path)
    shard = tmp_path / where[Q]
    write(shard, read(shard) | {"surplus": np.zeros(4, np.float32)})
    refusal(tmp_path, shard.name, "surplus", "unexpected")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_another_form(tmp_path, content):
    make_sharded(tmp_path)
    (tmp_path / INDEX).write_text(content)
    refusal(tmp_path, INDEX)


@pytest.mark.parametrize(
    "elsewhere",
    ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "..", ".", "", "sub/x", "a\nb"],
)
def test_an_index_leads_nowhere_but_to_its_own_folder(tmp_path, elsewhere):
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    where = make_sharded(folder)
    # All files of the index exist, so only the check of names refuses them.
    for target in (tmp_path / "x.safetensors", folder / "sub/x"):
        shutil.copy(folder / where[Q], target)
    refused = elsewhere
    if elsewhere.startswith("/"):
        refused = str(tmp_path / "x.safetensors")
    lost = {name: refused for name, file in where.items() if file == where[Q]}
    write_index(folder, where | lost)
    refusal(folder, INDEX, min(lost), repr(refused), "beside the index")


@pytest.mark.parametrize(
    "header",
    [b"", b"not json", b"\xff\xfe\x00", b"[1, 2]", b"3", b"null", b'"text"', b"[" * 200_000],
    ids=lambda h: repr(h[:9]),
)
def test_a_header_that_is_garbage(tmp_path, header):
    make_single(tmp_path)
    (tmp_path / SINGLE).write_bytes(pack(header, bytes(5000), align=1))
    refusal(tmp_path, SINGLE, "header", AGAIN)


@pytest.mark.parametrize("length", [10**6, 2**31, 2**62, 2**64 - 1])
def test_a_header_length_beyond_the_file(tmp_path, length):
    make_single(tmp_path)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", length) + content[8:])
    refusal(tmp_path, SINGLE, str(length), "truncated or not safetensors", AGAIN)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 1020]},
        {"data_offsets": [0, 0]},
        {"data_offsets": [-8, 1016]},
        {"data_offsets": [1024, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 512, 1024]},
        {"data_offsets": ["0", "1024"]},
        {"data_offsets": [0.0, 1024.0]},
        {"data_offsets": None},
        {"data_offsets": 5},
        {"data_offsets": [2**70, 2**70 + 1024]},
        {"shape": [-16, -16]},
        {"shape": [16, "16"]},
        {"shape": [16.0, 16.0]},
        {"shape": "ab"},
        {"shape": None},
        {"shape": [2**32, 2**32]},
        {"dtype": None},
        {"dtype": ["F32"]},
    ],
    ids=str,
)
def test_an_entry_that_makes_no_sense(tmp_path, change):
    tensors = make_single(tmp_path)
    tensors = {Q: tensors.pop(Q)} | tensors
    header = header_of(tensors)
    assert header[Q]["data_offsets"] == [0, 1024]
    header[Q] |= change
    (tmp_path / SINGLE).write_bytes(pack(header, b"".join(t.tobytes() for t in tensors.values())))
    refusal(tmp_path, SINGLE, Q, AGAIN)


@pytest.mark.parametrize("entry", [None, 3, [], "text", {}], ids=repr)
def test_an_entry_that_is_none(tmp_path, entry):
    header = header_of(make_single(tmp_path))
    header[Q] = entry
    (tmp_path / SINGLE).write_bytes(pack(header, bytes(5000)))
    refusal(tmp_path, SINGLE, Q, "malformed", AGAIN)


@pytest.mark.parametrize("shift", [4, 512, 768])
def test_tensors_that_overlap(tmp_path, shift):
    tensors = make_single(tmp_path)
    header = header_of(tensors)
    header[Q]["data_offsets"] = [offset - shift for offset in header[Q]["data_offsets"]]
    (tmp_path / SINGLE).write_bytes(pack(header, b"".join(t.tobytes() for t in tensors.values())))
    message = refusal(tmp_path, SINGLE, "overlaps", AGAIN)
    assert any(repr(name) in message for name in tensors)


def test_an_empty_folder(tmp_path):
    refusal(tmp_path, str(tmp_path), "no config.json", "checkpoint folder?")


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    refusal(tmp_path, str(tmp_path), SINGLE, INDEX)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth"])
def test_only_pickled_weights(tmp_path, file):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / file).write_bytes(b"pickle")
    refusal(tmp_path, file, "pickled", "save_pretrained")


def test_only_tokenizer_model(tmp_path):
    make_single(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    load(tmp_path)
    with pytest.raises(MissingTokenizerError, match=r"tokenizer\.model alone .*save_pretrained"):
        Tokenizer(tmp_path).encode("text")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b'{"a": 1,}', b"[" * 200_000, b'{"a": ' + b"1" * 5000 + b"}"],
    ids=lambda c: repr(c[:9]),
)
def test_config_json_that_is_garbage(tmp_path, content):
    make_single(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    refusal(tmp_path, "config.json", "not valid JSON")


@pytest.mark.parametrize(("content", "kind"), [("[]", "list"), ("3", "int"), ('"a"', "str")])
def test_config_json_that_is_no_object(tmp_path, content, kind):
    make_single(tmp_path)
    (tmp_path / "config.json").write_text(content)
    refusal(tmp_path, "config.json", "must be a JSON object", kind)


@pytest.mark.parametrize("file", ["config.json", SINGLE])
def test_a_folder_where_a_file_should_be(tmp_path, file):
    make_single(tmp_path)
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    refusal(tmp_path, file, "must be a regular file, but is a folder")


# --- where a checkpoint is


def lost(name: str, *says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate(name)
    message = str(caught.value)
    assert message.startswith(f"{name}: ") and "\n" not in message
    assert all(words in message for words in says), message


def test_a_folder_is_itself(tmp_path, monkeypatch):
    assert locate(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert locate(f"~/{tmp_path.name}") == tmp_path
    with pytest.raises(CheckpointError, match="~no-such-user/x: no such user"):
        locate("~no-such-user/x")


@pytest.mark.parametrize("name", ["nowhere", "/no/such/folder", "a/b/c", "", "owner/na me"])
def test_a_folder_that_is_not_there(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    if name:
        lost(name, "no such folder", "'owner/name'")


def test_a_file_is_not_a_folder(tmp_path):
    make_single(tmp_path)
    lost(str(tmp_path / SINGLE), "a checkpoint is a folder, this is a file")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("We couldn't connect.\nCheck your connection.\n"), "We couldn't connect."),
        (RuntimeError("\n\n401 Client Error\nRepository Not Found"), "401 Client Error"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_hub_id_the_hub_does_not_give(monkeypatch, error, says):
    def download(name, **options):
        assert name == "owner/name"
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    lost("owner/name", "no such folder", "the hub", says)


def test_a_revision_is_for_hub_ids(tmp_path):
    for name in (str(tmp_path), "tiny"):
        with pytest.raises(CheckpointError, match="revision 'main' is only for hub ids"):
            locate(name, revision="main")


def test_a_hub_id_is_downloaded_without_pickles(tmp_path, monkeypatch):
    def download(name, revision, token, allow_patterns):
        assert (name, revision, token) == ("owner/name", "v1", "hf_x")
        assert not any(pattern.endswith((".bin", ".pth", ".py")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("owner/name", revision="v1", token="hf_x") == tmp_path
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        fdjax.load("owner/name", revision="v1", token="hf_x", compilation_cache=False)


# --- memory


BIG = TINY | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 11,
    "torch_dtype": "bfloat16",
}

PROBE = """
import json, sys, threading, time
from pathlib import Path
import jax
from fdjax.weights.checkpoint import load_params, read_json
from fdjax.models import describe, parse_config

def anonymous_bytes():
    kilobytes = 0
    for line in open("/proc/self/status"):
        if line.startswith(("RssAnon:", "RssShmem:")):
            kilobytes += int(line.split()[1])
    return 1024 * kilobytes

folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
config = parse_config(read_json(folder / "config.json"))
model = describe(config, tensor_parallel=ranks)
devices = jax.devices()[:ranks]
# The backend is up before the level is taken.
jax.block_until_ready([jax.numpy.zeros(8, device=device) for device in devices])
before = anonymous_bytes()
samples, stop = [before], threading.Event()

def watch():
    while not stop.is_set():
        samples.append(anonymous_bytes())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(folder, model, devices=devices)
stop.set()
watcher.join()
samples.append(anonymous_bytes())
shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
sizes = [shard.data.nbytes for shard in shards]
print(json.dumps({
    "peak": max(samples) - before,
    "params": sum(sizes),
    "largest": max(sizes),
    "samples": len(samples),
}))
"""


def write_big(folder: Path, c: dict, shards: int, offset: int) -> int:
    """Stream a bfloat16 checkpoint to disk; tensors start `offset` bytes past a multiple of 64."""
    rng = np.random.default_rng(0)
    block = (rng.normal(size=2**20) / 50).astype(ml_dtypes.bfloat16).tobytes()
    (folder / "config.json").write_text(json.dumps(c))
    every = list(shapes(c).items())
    share = -(-len(every) // shards)
    where, total = {}, 0
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header, position = {}, 0
        for name, shape in every[shard * share : (shard + 1) * share]:
            span = [position, position + 2 * math.prod(shape)]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": span}
            position = span[1]
        raw = json.dumps(header).encode()
        raw += b" " * ((offset - len(raw) - 8) % 64)
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(raw)) + raw)
            for start in range(0, position, len(block)):
                out.write(block[: position - start])
        where |= dict.fromkeys(header, file)
        total += position
    write_index(folder, where)
    return total


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 10240, 20479])
def test_one_value_that_is_not_finite_is_seen(dtype, value, where):
    tensor = np.full(20480, 0.01, np.float32)
    tensor[where] = value
    assert not np.isfinite(checkpoint._largest(jnp.asarray(tensor, dtype)))
    tensor[where] = -3
    assert checkpoint._largest(jnp.asarray(tensor, dtype)) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_looking_for_damage_takes_no_memory(dtype):
    compiled = checkpoint._largest.lower(jax.ShapeDtypeStruct((512, 512), dtype)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


def _whole(name):
    return "norm" in name or "embed" in name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("vocab_size", "offset", "ranks"),
    [
        # The embedding is the largest parameter.
        (32000, 8, 1),
        # All large tensors are repeated in every layer, so leftovers of a layer add up. XLA uses
        # aligned host memory in place and copies other memory.
        pytest.param(2048, 8, 1, marks=pytest.mark.soak),
        pytest.param(2048, 0, 1, marks=pytest.mark.soak),
        # A device reads only its part of each tensor, which the file may hold in pieces.
        (2048, 8, 4),
        pytest.param(2048, 0, 4, marks=pytest.mark.soak),
    ],
)
def test_loading_holds_little_more_than_the_parameters(tmp_path, vocab_size, offset, ranks):
    config = BIG | {"vocab_size": vocab_size}
    total = write_big(tmp_path, config, shards=4, offset=offset)
    assert total > 0.9e9
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path), str(ranks)],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}"},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(tmp_path)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    print(seen)
    # Norms and the embedding are whole on every device.
    shared = sum(2 * math.prod(shape) for name, shape in shapes(config).items() if _whole(name))
    assert seen["params"] == total + (ranks - 1) * shared
    assert seen["samples"] > 100
    # On CPU the parameters themselves are anonymous memory.
    assert seen["peak"] >= seen["params"]
    # Memory for one fused parameter of a device, and for the programs that fuse and check. On four
    # devices, whole parameters would take 35 MB more than their parts.
    programs = 5e6 if ranks == 1 else 25e6
    assert seen["peak"] <= seen["params"] + 1.3 * seen["largest"] + programs, seen
