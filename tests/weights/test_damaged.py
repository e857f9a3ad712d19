"""Damaged and odd checkpoints: each gives a one-line error or a warning that names the place.

Every case damages one part of a valid checkpoint. The message must name the file and the field,
tensor or token. The exit code of the command line for such an error is tested in test_cli.
"""

import errno
import json
import os
import struct
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import fdjax
from fdjax.models import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
Q = "model.layers.0.self_attn.q_proj.weight"
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
SOUND = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 123456\n"
HTML = "<!DOCTYPE html><html><body>404 Not Found</body></html>" * 10

pytestmark = pytest.mark.usefixtures("quick_compiles")


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {EMBED: (12, 16), HEAD: (12, 16), NORM: (16,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (16, 16) for n in "qo"}
        shapes |= {f"{layer}self_attn.{n}_proj.weight": (8, 16) for n in "kv"}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (12, 16) for n in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (16, 12)}
        shapes |= {f"{layer}{n}_layernorm.weight": (16,) for n in ("input", "post_attention")}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A valid checkpoint that a test may damage."""
    write_json(tmp_path / CONFIG, SOUND)
    write_json(tmp_path / GENERATION, {"eos_token_id": 2, "temperature": 0.7})
    safetensors.numpy.save_file(tensors(), tmp_path / SINGLE)
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *"abcdefghi"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / TOKENIZER))
    return tmp_path


def load(folder: Path) -> fdjax.LM:
    return fdjax.load(str(folder), compilation_cache=False, progress=False)


def config(**changes):
    """Change fields of config.json. None removes a field."""

    def spoil(folder):
        data = {k: v for k, v in (SOUND | changes).items() if v is not None}
        write_json(folder / CONFIG, data)

    return spoil


def generation(**fields):
    return lambda folder: write_json(folder / GENERATION, fields)


def file(name, content):
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def gone(name):
    """A broken link, as in a hub's cache that was cleaned up."""

    def spoil(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "gone")

    return spoil


def renamed(name, other):
    return lambda folder: (folder / name).rename(folder / other)


def weights(change):
    """Rewrite model.safetensors; `change` edits the dict of tensors."""

    def spoil(folder):
        every = tensors()
        change(every)
        safetensors.numpy.save_file(every, folder / SINGLE)

    return spoil


def raw(change):
    """Rewrite the bytes of model.safetensors."""
    return lambda folder: (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))


def header(change):
    """Rewrite the header of model.safetensors; `change` edits it."""

    def spoil(content):
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        changed = change(entries)
        text = json.dumps(entries).encode() if changed is None else changed
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return raw(spoil)


def entry(**changes):
    return header(lambda entries: entries[Q].update(changes))


def shards(change=lambda where: None, extra=()):
    """Two shards. `change` edits the index's weight_map, `extra` goes into the second one, too."""

    def spoil(folder):
        (folder / SINGLE).unlink()
        every = tensors()
        names = sorted(every)
        parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
        where = {name: file for file, part in parts.items() for name in part}
        for file, part in parts.items():
            kept = {name: every[name] for name in part}
            if file.startswith("model-00002"):
                kept |= {name: every[name] + 1 for name in extra}
            safetensors.numpy.save_file(kept, folder / file)
        changed = change(where)
        write_json(folder / INDEX, {"weight_map": where if changed is None else changed})

    return spoil


def both(*spoils):
    def spoil(folder):
        for s in spoils:
            s(folder)

    return spoil


def put(name, value):
    return weights(lambda every: every.update({name: value(every.get(name))}))


def without(name):
    return weights(lambda every: every.pop(name))


def nothing_but(name, value):
    return put(name, lambda a: np.full_like(a, value))


def fp8(every):
    every[Q] = every[Q].astype(ml_dtypes.float8_e4m3fn)


QUANTISED = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "fp8", "activation_scheme": "dynamic"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "compressed-tensors"},
]

# name: (damage, text of the error)
ERRORS = {
    # config.json as a file
    "no config": (lambda f: (f / CONFIG).unlink(), "no config.json"),
    "empty config": (file(CONFIG, ""), "config.json: not valid JSON"),
    "truncated config": (file(CONFIG, json.dumps(SOUND)[:-40]), "config.json: not valid JSON"),
    "binary config": (file(CONFIG, b"\x80\x00\xff"), "config.json: not valid JSON"),
    "web page": (file(CONFIG, HTML), "config.json: not valid JSON"),
    "config pointer": (file(CONFIG, LFS), "config.json: a pointer of Git LFS"),
    "list config": (file(CONFIG, "[]"), "config.json: must be a JSON object"),
    "adapter": (
        lambda f: (f / CONFIG).rename(f / "adapter_config.json"),
        "this is an adapter: merge it",
    ),
    # fields of config.json, each of its type, sign and size
    "no model_type": (config(model_type=None), "model_type is missing"),
    "foreign model_type": (
        config(model_type="mamba"),
        "'mamba' is not supported, because .*; supported: ",
    ),
    "model_type 5": (config(model_type=5), "'model_type' must be"),
    **{
        f"no {name}": (config(**{name: None}), f"config.json: '{name}' is missing")
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        + ("num_hidden_layers",)
    },
    **{
        f"{name} {value!r}": (config(**{name: value}), f"config.json: .*'?{name}'?")
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        + ("num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "head_dim")
        for value in (-16, 0, "16", 16.5, True, [16])
    },
    "hidden_size 24": (config(hidden_size=24), "must have shape .* by config.json"),
    "intermediate_size 13": (config(intermediate_size=13), r"mlp\..*must have shape"),
    "3 heads": (config(num_attention_heads=3), "'num_attention_heads' must be a multiple"),
    "8 heads": (config(num_attention_heads=8, num_key_value_heads=8), "must have shape"),
    "4 KV heads": (config(num_key_value_heads=4), r"k_proj.*must have shape"),
    "head_dim 8": (config(head_dim=8), "q_proj.*must have shape"),
    "1 layer": (config(num_hidden_layers=1), r"model\.layers\.1\..* is unexpected"),
    "3 layers": (config(num_hidden_layers=3), r"model\.layers\.2\..* is missing"),
    "vocabulary 11": (config(vocab_size=11), r"embed_tokens.*must have shape \[11, 16\]"),
    "vocabulary 13": (config(vocab_size=13), r"embed_tokens.*must have shape \[13, 16\]"),
    "a bias that is not there": (config(attention_bias=True), "bias' is missing"),
    "bias 1": (config(attention_bias=1), "'attention_bias' must be bool"),
    "tied 'false'": (config(tie_word_embeddings="false"), "'tie_word_embeddings' must be bool"),
    "eps 0": (config(rms_norm_eps=0), "'rms_norm_eps' must be positive"),
    "eps text": (config(rms_norm_eps="1e-5"), "'rms_norm_eps' must be float"),
    "eps NaN": (config(rms_norm_eps=float("nan")), "'rms_norm_eps' must be finite"),
    "activation": (config(hidden_act="relu2"), "'relu2' is not supported; supported: "),
    "theta 0": (config(rope_theta=0), "'rope_theta' must be positive"),
    "theta text": (config(rope_theta="big"), "'rope_theta' must be float"),
    "rope text": (config(rope_scaling="linear"), "'rope_scaling' must be dict"),
    "foreign rope": (config(rope_scaling={"rope_type": "spiral"}), "'spiral' is not supported"),
    "rope without factor": (config(rope_scaling={"type": "linear"}), "'factor' is missing"),
    "rope factor -2": (config(rope_scaling=LLAMA3 | {"factor": -2}), "'factor' must be positive"),
    "foreign rope key": (config(rope_scaling=LLAMA3 | {"mystery": 1}), "unknown keys mystery"),
    "two ropes": (
        config(
            rope_scaling=LLAMA3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        ),
        "disagree",
    ),
    "dtype int8": (config(torch_dtype="int8"), "torch_dtype 'int8' is not supported"),
    "dtype 16": (config(torch_dtype=16), "'torch_dtype' must be str"),
    **{
        f"quantised {q['quant_method']}": (config(quantization_config=q), "'quantization_config'")
        for q in QUANTISED
    },
    "experts": (config(num_local_experts=8), "'num_local_experts' 8 is not supported"),
    "soft cap": (config(final_logit_softcapping=30.0), "'final_logit_softcapping' 30.0 is not"),
    # generation_config.json
    "empty defaults": (file(GENERATION, ""), "generation_config.json: not valid JSON"),
    "list defaults": (file(GENERATION, "[]"), "generation_config.json: must be a JSON object"),
    "hot": (generation(temperature="hot"), "generation_config.json: .*temperature"),
    "top_p 2": (generation(top_p=2), "generation_config.json: .*top_p"),
    "top_k -1": (generation(top_k=-1), "generation_config.json: .*top_k"),
    "end 'x'": (generation(eos_token_id="x"), "generation_config.json: .*eos_token_id"),
    "end -1": (generation(eos_token_id=[2, -1]), "generation_config.json: .*eos_token_id"),
    "ban of no token": (generation(suppress_tokens=[12]), r"suppress_tokens has id 12, .* 0\.\.11"),
    "defaults gone": (gone(GENERATION), "generation_config.json: a broken link"),
    # tokenizer.json
    "tokenizer gone": (gone(TOKENIZER), "tokenizer.json: a broken link"),
    "empty tokenizer": (file(TOKENIZER, ""), "tokenizer.json: not a tokenizer"),
    "tokenizer {}": (file(TOKENIZER, "{}"), "tokenizer.json: not a tokenizer"),
    "tokenizer pointer": (file(TOKENIZER, LFS), "tokenizer.json: a pointer of Git LFS"),
    "tokenizer folder": (
        lambda f: ((f / TOKENIZER).unlink(), (f / TOKENIZER).mkdir()),
        "tokenizer.json: ",
    ),
    # model.safetensors as a file
    "no weights": (lambda f: (f / SINGLE).unlink(), "no model.safetensors and no"),
    "weights gone": (gone(SINGLE), "model.safetensors: a broken link"),
    "index gone": (both(lambda f: (f / SINGLE).unlink(), gone(INDEX)), "index.json: a broken link"),
    "no index": (
        both(shards(), lambda f: (f / INDEX).unlink()),
        "model-00001-of-.* alone is not enough",
    ),
    "weights of an adapter": (renamed(SINGLE, "adapter_model.safetensors"), "an adapter: merge it"),
    "GGUF": (renamed(SINGLE, "model.gguf"), "GGUF files are not supported"),
    "zero bytes": (file(SINGLE, b""), "model.safetensors: truncated"),
    "cut in the header": (raw(lambda b: b[:100]), "model.safetensors: truncated"),
    "cut in the data": (raw(lambda b: b[:-1]), "model.safetensors: truncated, tensor"),
    "half": (raw(lambda b: b[: len(b) // 2]), "model.safetensors: truncated, tensor"),
    "weights pointer": (file(SINGLE, LFS), "model.safetensors: a pointer of Git LFS"),
    "weights page": (file(SINGLE, HTML), "model.safetensors: truncated or not safetensors"),
    "more behind": (raw(lambda b: b + b"more"), "model.safetensors: 4 bytes follow the last"),
    "twice": (raw(lambda b: b + b), "bytes follow the last tensor"),
    "garbage header": (header(lambda e: b"{'not': json}"), "header is not that of a safetensors"),
    "empty header": (header(lambda e: b"{}"), "bytes follow the last tensor"),
    "pickle": (
        renamed(SINGLE, "pytorch_model.bin"),
        "pytorch_model.bin: pickled weights are not supported",
    ),
    # tensors
    "missing tensor": (without(Q), f"{Q}' is missing"),
    "tied, with another head": (config(tie_word_embeddings=True), "differs from"),
    "missing head": (without(HEAD), r"lm_head\.weight' is missing"),
    "one tensor more": (put("model.extra", lambda _: np.ones(3)), "model.extra' is unexpected"),
    "other prefix": (
        weights(lambda e: [e.update({f"base.{n}": e.pop(n)}) for n in list(e)]),
        "embed_tokens.weight' is missing",
    ),
    "transposed": (put(EMBED, lambda a: a.T.copy()), r"must have shape \[12, 16\].*got \[16, 12\]"),
    "flat": (put(Q, np.ravel), r"must have shape \[16, 16\].*got \[256\]"),
    "int8": (put(Q, lambda a: a.astype(np.int8)), f"{Q}' has dtype I8, supported"),
    "fp8": (weights(fp8), f"{Q}' has dtype F8_E4M3, supported"),
    "bool": (put(Q, lambda a: a > 0), "has dtype BOOL, supported"),
    "GPTQ tensors": (
        put(Q.replace("weight", "qweight"), lambda _: np.ones((2, 16), np.int32)),
        "qweight' belongs to quantised weights",
    ),
    "FP8 scales": (
        put(Q + "_scale_inv", lambda _: np.ones((1, 1), np.float32)),
        "weight_scale_inv' belongs to quantised weights",
    ),
    "shape -16": (entry(shape=[-16, -16]), f"{Q}' is malformed"),
    "shape text": (entry(shape="16x16"), f"{Q}' is malformed"),
    "shape 16.0": (entry(shape=[16.0, 16.0]), f"{Q}' is malformed"),
    "dtype null": (entry(dtype=None), f"{Q}' is malformed"),
    "dtype F99": (entry(dtype="F99"), f"{Q}' has dtype F99"),
    "bytes disagree": (entry(shape=[16, 15]), "must take 960 bytes, got 1024"),
    "offsets turned": (entry(data_offsets=[1024, 0]), f"{Q}' is malformed"),
    "offsets elsewhere": (entry(data_offsets=[0, 1024]), "overlaps another"),
    "a key twice": (
        header(lambda e: json.dumps(e).replace(NORM, Q).encode()),
        "header is not that of a safetensors",
    ),
    "a gap": (header(lambda e: e.pop(Q) and None), "leaves a gap before it"),
    # shards
    "no shard": (
        both(shards(), lambda f: (f / "model-00002-of-00002.safetensors").unlink()),
        "model-00002-of-00002.safetensors: shard is missing",
    ),
    "empty shard": (
        both(shards(), file("model-00001-of-00002.safetensors", b"")),
        "model-00001-of-00002.safetensors: truncated",
    ),
    "index garbage": (both(shards(), file(INDEX, "{")), "index.json: not valid JSON"),
    "index without map": (both(shards(), file(INDEX, "{}")), "'weight_map' must map"),
    "index numbers": (shards(lambda w: dict.fromkeys(w, 1)), "'weight_map' must map"),
    "index of too much": (
        shards(lambda w: w.update({"ghost": w[Q]})),
        "tensor 'ghost' is in the index but not in the file",
    ),
    "index elsewhere": (
        shards(lambda w: w.update({Q: "../secret.safetensors"})),
        "must be in a file beside the index",
    ),
    "index mixed up": (
        shards(lambda w: w.update({HEAD: w[EMBED], EMBED: w[HEAD]})),
        "is in the index but not in the file",
    ),
}

# name: (damage, text of the warning)
WARNINGS = {
    "unknown field": (config(mystery=7), "config.json: ignoring unknown fields mystery"),
    "two copies": (shards(extra=[HEAD]), f"{HEAD}' is not read, the index has it in model-00001"),
    "both forms": (
        lambda f: ((c := (f / SINGLE).read_bytes()), shards()(f), (f / SINGLE).write_bytes(c)),
        "model.safetensors is read, and model-00001-of-00002.safetensors is not",
    ),
    "NaN weights": (nothing_but(Q, np.nan), f"{Q}' has values that are not finite"),
    "one NaN": (
        put(EMBED, lambda a: np.where(np.arange(192).reshape(12, 16) == 7, np.nan, a)),
        f"{EMBED}' has values that are not finite",
    ),
    "infinite norm": (nothing_but(NORM, np.inf), f"{NORM}' has values that are not finite"),
    "zero weights": (nothing_but(Q, 0), f"{Q}' has only zeros"),
    "zero norm": (nothing_but(NORM, 0), f"{NORM}' has only zeros"),
}


def one_line(error) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_the_place(folder, name):
    spoil, says = ERRORS[name]
    spoil(folder)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(folder)
    assert len(one_line(caught.value)) < 500


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_names_the_place(folder, name):
    spoil, says = WARNINGS[name]
    spoil(folder)
    with pytest.warns(UserWarning, match=says) as warned:
        load(folder)
    assert len(warned) == 1
    one_line(warned[0].message)


def test_there_are_many():
    assert len(ERRORS) + len(WARNINGS) >= 40


def test_the_sound_checkpoint_is_sound(folder):
    lm = load(folder)
    assert lm.score("a b c").tokens == [[3, 4, 5]]


# Odd but unambiguous: there is no warning.
SOUND_ALL_THE_SAME = {
    "byte order mark": file(CONFIG, b"\xef\xbb\xbf" + json.dumps(SOUND).encode()),
    "float64 weights": weights(lambda e: e.update({k: v.astype(float) for k, v in e.items()})),
    "shards": shards(),
    "index of too little": shards(lambda w: w.pop(Q) and None),
    "no defaults": lambda f: (f / GENERATION).unlink(),
    "null fields": lambda f: write_json(
        f / CONFIG, SOUND | {"rope_scaling": None, "mystery": None}
    ),
    "tied with a head": both(
        config(tie_word_embeddings=True), weights(lambda every: every.update({HEAD: every[EMBED]}))
    ),
    "old frequencies": put(
        "model.layers.0.self_attn.rotary_emb.inv_freq", lambda _: np.ones(2, np.float32)
    ),
}


@pytest.mark.parametrize("name", SOUND_ALL_THE_SAME)
def test_what_is_merely_odd_loads_in_silence(folder, name):
    SOUND_ALL_THE_SAME[name](folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(folder).config.layers == 2


# Paths that are not regular files.

CALIBRATION, INDEX_OF_TWO = "fdjax_calibration.json", {"weight_map": {NORM: "model-1.safetensors"}}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    "name",
    [
        *(CONFIG, GENERATION, TOKENIZER, SINGLE, INDEX, "model-1.safetensors", CALIBRATION),
        *("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/a.jinja"),
    ],
)
def test_what_is_no_regular_file_is_refused_unread(folder, name, kind):
    path = folder / name
    if name in (INDEX, "model-1.safetensors"):
        (folder / SINGLE).unlink()
        write_json(folder / INDEX, INDEX_OF_TWO)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    what = "a folder" if kind == "folder" else "a pipe or a device"
    with pytest.raises(CheckpointError, match=rf"{name}: must be a regular file, but is {what}$"):
        load(folder)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_that_may_not_be_read_is_named(folder, kind, monkeypatch):
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind})
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == TOKENIZER:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path, "rb").read())
    with pytest.raises(CheckpointError, match=rf"{TOKENIZER}: cannot be read \(Permission denied"):
        load(folder)


@pytest.mark.parametrize("name", [CONFIG, TOKENIZER, SINGLE])
def test_a_path_that_may_not_be_looked_at_is_named(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("x" * 300)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \(File name too long\)$"):
        load(folder)


LONG = "x" * 100_000
HOSTILE = "\x1b[2J\r\n\x07\u202e"


@pytest.mark.parametrize("name", [HOSTILE, LONG], ids=["control characters", "long"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder, name: put(name, lambda _: np.ones(2, np.float32))(folder),
        lambda folder, name: write_json(folder / CONFIG, SOUND | {"model_type": name}),
        lambda folder, name: write_json(folder / CONFIG, SOUND | {"layer_types": [name] * 2}),
        lambda folder, name: (
            write_json(folder / INDEX, {"weight_map": {name: name}}) or (folder / SINGLE).unlink()
        ),
        lambda folder, name: (folder / TOKENIZER).write_text(name),
    ],
    ids=["tensor", "model_type", "layer_types", "index", "tokenizer"],
)
def test_names_in_files_reach_no_terminal_as_they_are(folder, spoil, name):
    spoil(folder, name)
    with pytest.raises(CheckpointError) as raised:
        load(folder)
    message = str(raised.value)
    assert message.isprintable() and len(message) < 1000


@pytest.mark.parametrize("name", [HOSTILE, LONG], ids=["control characters", "long"])
def test_warnings_show_no_names_as_they_are(folder, name):
    write_json(folder / CONFIG, SOUND | {name: 5})
    with pytest.warns(UserWarning, match="ignoring unknown fields") as warned:
        load(folder)
    messages = [str(warning.message) for warning in warned]
    assert all(message.isprintable() and len(message) < 1000 for message in messages)


# Damage that is found only when it matters.


@pytest.mark.slow
@pytest.mark.parametrize("how", ["generate", "score"])
def test_weights_that_are_not_finite_give_no_answer(folder, how):
    put(NORM, lambda a: np.where(np.arange(16) == 3, np.nan, a).astype(np.float32))(folder)
    with pytest.warns(UserWarning, match="not finite"):
        lm = load(folder)
    with pytest.raises(FloatingPointError, match=r"(prompt|text) 0: logits are not finite"):
        getattr(lm, how)("a b")


def test_a_tokenizer_with_more_ids_than_the_model(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.add_tokens(["new"])
    tokenizer.save(str(folder / TOKENIZER))
    lm = load(folder)
    for method in (lm.generate, lm.score):
        with pytest.raises(ValueError, match=r"has id 12, the vocabulary is 0\.\.11; tokenizer"):
            method("a new b")
        with pytest.raises(ValueError, match=r"has id 12, the vocabulary is 0\.\.11$"):
            method([3, 12])


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/y"])
def test_a_name_too_long_for_a_folder(name):
    with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\)$"):
        fdjax.load(name)
