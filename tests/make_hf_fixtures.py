"""Writes tests/hf_fixtures: what Hugging Face transformers computes for tiny checkpoints.

`python tests/make_hf_fixtures.py` needs torch, transformers and tokenizers; reading the fixtures
needs none of them. The same versions on the same kind of CPU write the same bytes.

    python tests/make_hf_fixtures.py                     # rewrite tests/hf_fixtures
    python tests/make_hf_fixtures.py --greedy DIR --prompts prompts.json --out truth.json
                                                         # greedy tokens of any checkpoint folder

A case folder holds a checkpoint as `save_pretrained` writes it, `config.alternate.json` (the same
config in the other generation of the format) and `expected.npz`. With i the index of a prompt, P
its length, R = 64, all of it from a run on that prompt alone in float32:

    prompt_i        int32   [P]
    logits_i        float32 [P, V], for the longest prompt [1, V]: the last rows of the prompt
    tokens_i        int32   [R]     greedy continuation, the end-of-text token not stopping it
    gaps_i          float32 [R]     best minus second best logit at each step
    logprobs_i      float32 [R]     log-probability of the chosen token
    final_logits_i  float32 [V]     logits from which the last token was chosen

The bfloat16 cases add `bf16_logits_i`, `bf16_tokens_i`, `bf16_gaps_i`, `bf16_logprobs_i` and
`bf16_final_logits_i` from a run in bfloat16 (values widened to float32). Their gaps may be 0: two
bfloat16 logits tie easily, so those tokens are a record and not a bar.

Where rotary frequencies depend on the length of the sequence, every run starts from a new model:
transformers keeps the frequencies of the longest sequence seen. With longrope it recomputes the
cache when a sequence outgrows the original length; a prompt that may outgrow it while tokens are
generated is run as if both sets of factors were the long one, which is what fdjax does.

`rope_tables.npz` holds, for each of `ROPES` and each length of a sequence, under "name.length":
positions [T], and of transformers' own rotary embedding the inverse frequencies [dim/2], and cos
and sin [T, dim/2] as they multiply a head. `rope_configs.json` has its config.json.
"""

import argparse
import copy
import dataclasses
import hashlib
import json
import platform
import shutil
import tempfile
import zlib
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FIXTURES = Path(__file__).parent / "hf_fixtures"
COMMAND = "python tests/make_hf_fixtures.py"
PROMPT_LENGTHS = (1, 7, 23, 60, 200)
NEW_TOKENS = 64
# Logits of every position are kept up to this prompt length, of the last position beyond it.
ALL_POSITIONS_UP_TO = 60

MAX_FILE_BYTES = 2_000_000
MAX_TOTAL_BYTES = 9_400_000

# An implementation may be off by 1e-4 of the largest logit. A token can only flip when the gap is
# below twice that, so every gap is kept above it with a margin.
LOGITS_BAR = 1e-4
MIN_GAP = 2e-3
MIN_GAP_IN_BARS = 2.5
# Rounding inside transformers itself (other attention kernel, float64 products, cache or not) must
# stay far under the bar, else the fixture would test luck.
MAX_SELF_DEVIATION = LOGITS_BAR / 10
MIN_DISTINCT_TOKENS = 24

ROPE_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Far below the published 8192, so that all three frequency bands differ within 264 positions.
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny checkpoint: `config` in the old generation of the format, as on the hub before v5."""

    seed: int
    config: dict
    old_generation: bool = False
    tokenizer: str | None = None
    generation: dict = dataclasses.field(default_factory=dict)
    alternate_rope_key: str = "rope_type"
    max_shard_size: str = "5GB"
    # Its score caps are not in the other kernel.
    attention: str = "sdpa"
    # Standard deviation of a logit, if the rest of the stream were of unit size.
    embedding_gain: float = 4.0
    # A tied head otherwise favours the token that was just read.
    signed_final_norm: bool = False
    # What post-norms multiply by, so that the layers and not the embeddings decide.
    post_norm_gain: float = 1.0

    @property
    def dtype(self) -> str:
        return self.config["torch_dtype"]

    @property
    def parsed(self) -> PretrainedConfig:
        return AutoConfig.for_model(**copy.deepcopy(self.config))

    @property
    def rope(self) -> dict:
        return self.config.get("rope_scaling") or {}

    @property
    def depends_on_length(self) -> bool:
        """Whether rotary frequencies depend on the length of the sequence."""
        return self.rope.get("type") in ("dynamic", "longrope")


def _family(model_type: str, architecture: str, **fields) -> dict:
    """The keys that published config.json files of 2024 share, in the old generation."""
    config = {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "model_type": model_type,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.45.0",
        "use_cache": True,
    }
    return dict(sorted((config | fields).items()))


def _small(**fields) -> dict:
    """Dimensions of the cases that are about one thing of a family."""
    dimensions = {
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return dimensions | fields


def _config(**overrides) -> dict:
    """The keys a published config.json of a Llama has, in the old generation of the format."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.45.0",
        "use_cache": True,
    }
    return dict(sorted((config | overrides).items()))


CASES = {
    "llama2_mha": Case(
        seed=1,
        old_generation=True,
        tokenizer="metaspace",
        config=_config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
        ),
    ),
    "llama3_gqa_tied": Case(
        seed=0,
        tokenizer="byte_level",
        # Published instruct models sample by default and stop on either of two tokens.
        generation={
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
            "eos_token_id": [316, 319],
        },
        alternate_rope_key="type",
        config=_config(
            bos_token_id=315,
            eos_token_id=316,
            vocab_size=320,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=16,
            rope_theta=500000.0,
            rope_scaling=ROPE_LLAMA3,
            tie_word_embeddings=True,
        ),
    ),
    "llama_bias": Case(
        seed=1,
        config=_config(
            attention_bias=True,
            mlp_bias=True,
            vocab_size=256,
            hidden_size=64,
            intermediate_size=144,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-06,
        ),
    ),
    "llama_d64_bf16": Case(
        seed=3,
        config=_config(
            torch_dtype="bfloat16",
            vocab_size=384,
            hidden_size=256,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ),
    "llama_d128_bf16": Case(
        seed=2,
        # Two MB in one file would be too much for a repository, and sharded loading needs a case.
        max_shard_size="1MB",
        config=_config(
            torch_dtype="bfloat16",
            vocab_size=384,
            hidden_size=256,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=128,
            rope_theta=500000.0,
            rope_scaling=ROPE_LLAMA3,
        ),
    ),
    "llama_linear": Case(
        seed=2,
        config=_config(**_small(rope_scaling={"type": "linear", "factor": 4.0})),
    ),
    "llama_dynamic": Case(
        seed=2,
        # Prompts below, across and beyond the length from which on theta grows.
        config=_config(
            **_small(max_position_embeddings=96, rope_scaling={"type": "dynamic", "factor": 2.0})
        ),
    ),
    "llama_yarn": Case(
        seed=2,
        config=_config(
            **_small(
                rope_scaling={
                    "type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 8.0,
                }
            )
        ),
    ),
    "mistral_window": Case(
        seed=0,
        config=_family("mistral", "MistralForCausalLM", hidden_act="silu", **_small())
        | {"sliding_window": 24},
    ),
    "qwen2_mixed": Case(
        seed=1,
        embedding_gain=2.0,
        signed_final_norm=True,
        config=_family(
            "qwen2",
            "Qwen2ForCausalLM",
            hidden_act="silu",
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=1,
            **_small(),
        )
        | {"tie_word_embeddings": True, "rope_theta": 1000000.0},
    ),
    "qwen3": Case(
        seed=4,
        config=_family(
            "qwen3",
            "Qwen3ForCausalLM",
            attention_bias=False,
            head_dim=16,
            hidden_act="silu",
            max_window_layers=2,
            rope_scaling=None,
            sliding_window=None,
            use_sliding_window=False,
            **_small(),
        )
        | {"rope_theta": 1000000.0},
    ),
    "gemma2": Case(
        seed=24,
        attention="eager",
        embedding_gain=2.0,
        signed_final_norm=True,
        post_norm_gain=3.0,
        config=_family(
            "gemma2",
            "Gemma2ForCausalLM",
            attention_bias=False,
            attn_logit_softcapping=4.0,
            cache_implementation="hybrid",
            final_logit_softcapping=8.0,
            head_dim=16,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
            pad_token_id=0,
            query_pre_attn_scalar=24,
            sliding_window=24,
            **_small(),
        )
        | {"tie_word_embeddings": True},
    ),
    "gemma3": Case(
        seed=38,
        embedding_gain=2.0,
        signed_final_norm=True,
        post_norm_gain=3.0,
        config=_family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            attention_bias=False,
            head_dim=16,
            hidden_activation="gelu_pytorch_tanh",
            pad_token_id=0,
            query_pre_attn_scalar=24,
            rope_local_base_freq=10000.0,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
            sliding_window=24,
            sliding_window_pattern=2,
            **_small(),
        )
        | {"rope_theta": 1000000.0, "tie_word_embeddings": True},
    ),
    "phi3_longrope": Case(
        seed=4,
        embedding_gain=2.0,
        signed_final_norm=True,
        config=_family(
            "phi3",
            "Phi3ForCausalLM",
            embd_pdrop=0.0,
            hidden_act="silu",
            original_max_position_embeddings=96,
            pad_token_id=0,
            partial_rotary_factor=0.75,
            resid_pdrop=0.0,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
                "long_factor": [1.0, 1.3, 2.1, 4.0, 7.5, 16.0],
            },
            sliding_window=None,
            **_small(hidden_size=64),
        )
        | {"tie_word_embeddings": True},
    ),
    "qwen3_d128_bf16": Case(
        seed=4,
        config=_family(
            "qwen3",
            "Qwen3ForCausalLM",
            attention_bias=False,
            head_dim=128,
            hidden_act="silu",
            rope_scaling=None,
            **_small(hidden_size=64, num_attention_heads=2, num_key_value_heads=1),
        )
        | {"torch_dtype": "bfloat16"},
    ),
}


# --- checkpoints -----------------------------------------------------------------------------


def _weight(name: str, shape: tuple[int, ...], case: Case) -> np.ndarray:
    """Random weights whose outputs are varied: transformers' own init (0.02) repeats one token."""
    # Seeded by name: neither torch's generator nor the order of the modules matters.
    rng = np.random.default_rng([case.seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        is_gemma = "gemma" in case.config["model_type"]
        gain = case.post_norm_gain if is_gemma and "post_" in name else 1
        if case.signed_final_norm and name == "model.norm.weight":
            gain = np.sign(rng.standard_normal(shape))
        return (gain - is_gemma + 0.2 * noise).astype(np.float32)
    if name.endswith(".bias"):
        return 0.3 * noise
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        # Logits get the same standard deviation at any width.
        return np.float32(case.embedding_gain / np.sqrt(shape[1])) * noise
    return np.float32(1.5 / np.sqrt(shape[-1])) * noise


def _write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_checkpoint(case: Case, folder: Path) -> None:
    config = case.parsed
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device="cpu")
    # Buffers such as the RoPE frequencies stay unset: this object is saved, never run.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = _weight(name, tuple(parameter.shape), case)
            parameter.copy_(torch.from_numpy(weight))
    model.tie_weights()
    model = model.to(getattr(torch, case.dtype))
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    model.generation_config = GenerationConfig(**(tokens | case.generation))
    model.save_pretrained(folder, max_shard_size=case.max_shard_size)

    old = copy.deepcopy(case.config)
    if old.get("rope_scaling") is not None and case.alternate_rope_key != "rope_type":
        rope_type = old["rope_scaling"].pop("rope_type")
        old["rope_scaling"][case.alternate_rope_key] = rope_type
    if case.old_generation:
        (folder / "config.json").rename(folder / "config.alternate.json")
        _write_json(folder / "config.json", old)
    else:
        _write_json(folder / "config.alternate.json", old)


# --- runs --------------------------------------------------------------------------------------


def _load(folder: Path, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    # A checkpoint's own sampling defaults and stop tokens would change the greedy run.
    model.generation_config = GenerationConfig(do_sample=False)
    return model.eval()


@torch.no_grad()
def _forward(model, ids: list[int]) -> torch.Tensor:
    """Logits [P, V] of one prompt alone, without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def _greedy(model, ids: list[int], n: int) -> dict[str, np.ndarray]:
    """`n` greedy tokens after one prompt alone, with their gaps and log-probabilities."""
    input_ids = torch.tensor([ids])
    out = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=n,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, len(ids) :]
    if len(tokens) != n:
        raise RuntimeError(f"generate: wanted {n} tokens, got {len(tokens)}; did a stop token act?")
    logits = torch.cat(out.logits).float()
    best = logits.topk(2).values
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "gaps": (best[:, 0] - best[:, 1]).numpy(),
        "logprobs": logprobs.numpy(),
        "step_logits": logits.numpy(),
    }


def _prompts(case: Case) -> list[list[int]]:
    rng = np.random.default_rng([case.seed, 1])
    return [rng.integers(0, case.config["vocab_size"], n).tolist() for n in PROMPT_LENGTHS]


def _runs(case: Case, model, ids: list[int]) -> dict[str, np.ndarray]:
    """`_greedy` of a prompt, as fdjax means it where frequencies depend on the length."""
    model = copy.deepcopy(model) if case.depends_on_length else model
    original = case.config.get("original_max_position_embeddings", np.inf)
    if len(ids) <= original < len(ids) + NEW_TOKENS - 1:
        model.model.rotary_emb.original_inv_freq = ROPE_INIT_FUNCTIONS["longrope"](
            model.config, None, seq_len=original + 1
        )[0]
    return _greedy(model, ids, NEW_TOKENS)


def _expected(
    case: Case, model, prompts: list[list[int]], prefix: str = ""
) -> dict[str, np.ndarray]:
    arrays = {}
    for i, ids in enumerate(prompts):
        fresh = copy.deepcopy(model) if case.depends_on_length else model
        logits = _forward(fresh, ids).float().numpy()
        run = _runs(case, model, ids)
        kept = logits if len(ids) <= ALL_POSITIONS_UP_TO else logits[-1:]
        arrays[f"{prefix}logits_{i}"] = kept
        arrays[f"{prefix}final_logits_{i}"] = run["step_logits"][-1]
        for key in ("tokens", "gaps", "logprobs"):
            arrays[f"{prefix}{key}_{i}"] = run[key]
    return arrays


def _check_truth(
    case: Case, folder: Path, prompts, arrays: dict[str, np.ndarray], model
) -> dict[str, float]:
    """Proves the fixture well conditioned, so that a failing test means a wrong implementation."""

    def logits_of(model, ids: list[int], tokens: np.ndarray) -> np.ndarray:
        """Logits [..., V] of the sequence, at the end those the continuation was chosen from."""
        if case.depends_on_length:
            return _runs(case, model, ids)["step_logits"]
        return _forward(model, [*ids, *tokens[:-1].tolist()]).numpy()

    eager = _load(folder, torch.float32, "eager")
    # The norms and the RoPE of transformers stay in float32, everything else is float64 here.
    double = copy.deepcopy(model).double()
    gap, gap_in_bars, deviation, distinct, largest = np.inf, np.inf, 0.0, NEW_TOKENS, 0.0
    for i, ids in enumerate(prompts):
        tokens, gaps = arrays[f"tokens_{i}"], arrays[f"gaps_{i}"]
        logits = logits_of(model, ids, tokens)
        scale = float(np.abs(logits).max())
        for other in (eager, double):
            other_logits = logits_of(other, ids, tokens)
            deviation = max(deviation, float(np.abs(other_logits - logits).max()) / scale)
            if not np.array_equal(other_logits[-len(tokens) :].argmax(-1), tokens):
                raise RuntimeError(f"{folder.name}: prompt {i} has other greedy tokens in float64")
        cached = arrays[f"final_logits_{i}"]
        deviation = max(deviation, float(np.abs(cached - logits[-1]).max()) / scale)
        bar = LOGITS_BAR * scale
        gap, gap_in_bars = min(gap, float(gaps.min())), min(gap_in_bars, float(gaps.min()) / bar)
        distinct = min(distinct, len(set(tokens.tolist())))
        largest = max(largest, scale)
    if gap < MIN_GAP or gap_in_bars < MIN_GAP_IN_BARS:
        raise RuntimeError(f"{folder.name}: min gap {gap:.2e} ({gap_in_bars:.2f} bars): new seed")
    if deviation > MAX_SELF_DEVIATION:
        raise RuntimeError(f"{folder.name}: transformers deviates from itself by {deviation:.1e}")
    if distinct < MIN_DISTINCT_TOKENS:
        raise RuntimeError(f"{folder.name}: only {distinct} distinct tokens: new seed")
    return {
        "min_gap": _rounded(gap),
        "min_gap_over_bar": _rounded(gap_in_bars),
        "max_abs_logit": _rounded(largest),
        # Rounding noise differs between CPUs, so two digits of it would not reproduce elsewhere.
        "self_deviation_below": MAX_SELF_DEVIATION,
        "min_distinct_tokens": distinct,
    }


def _rounded(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _bf16_summary(prompts, arrays) -> dict[str, float]:
    deviation, agree = 0.0, []
    for i in range(len(prompts)):
        logits, bf16_logits = arrays[f"logits_{i}"], arrays[f"bf16_logits_{i}"]
        deviation = max(deviation, float(np.abs(bf16_logits - logits).max() / np.abs(logits).max()))
        differs = np.flatnonzero(arrays[f"bf16_tokens_{i}"] != arrays[f"tokens_{i}"])
        agree.append(int(differs[0]) if len(differs) else NEW_TOKENS)
    return {
        "bf16_max_deviation": _rounded(deviation),
        "bf16_tokens_before_first_difference": agree,
        "bf16_min_gap": _rounded(
            min(float(arrays[f"bf16_gaps_{i}"].min()) for i in range(len(prompts)))
        ),
    }


def _write_expected(case: Case, folder: Path) -> dict:
    prompts = _prompts(case)
    arrays = {f"prompt_{i}": np.array(ids, np.int32) for i, ids in enumerate(prompts)}
    model = _load(folder, torch.float32, case.attention)
    arrays |= _expected(case, model, prompts)
    summary = {"seed": case.seed, "parameters": sum(p.numel() for p in model.parameters())}
    summary |= _check_truth(case, folder, prompts, arrays, model)
    if case.dtype == "bfloat16":
        half = _load(folder, torch.bfloat16, case.attention)
        arrays |= _expected(case, half, prompts, "bf16_")
        summary |= _bf16_summary(prompts, arrays)
    np.savez_compressed(folder / "expected.npz", **arrays)
    return summary


# --- tokenizers --------------------------------------------------------------------------------

CORPUS = [
    "The largest ocean on Earth is the Pacific Ocean, and the river runs to the sea.",
    "Once upon a time there was a small ship that sailed over the ocean for 1234 days.",
    "What is the name of the station on the other side of the mountain?",
    "The weather in the north is colder than the weather in the south, isn't it?",
    "def add(a, b):\n    return a + b\n",
]

TEXTS = [
    "",
    " ",
    "The largest ocean",
    " leading and trailing ",
    "two  spaces,\ttab\nand\n\n  newlines\r\n",
    "it's 12345 o'clock, isn't IT?",
    "naïve café — “quoted” … 100 €",
    "日本語のテキスト と 한국어",
    "👩‍👩‍👧 emoji 🦙!",
    "a<|eot_id|>b </s> c <s>d",
    "def add(a, b):\n    return a + b\n",
]

MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "  What is the largest ocean? "},
    {"role": "assistant", "content": "The Pacific."},
    {"role": "user", "content": "And the smallest?\n"},
]

CHAT_TEMPLATE_BYTE_LEVEL = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

CHAT_TEMPLATE_METASPACE = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip()"
    " + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% endfor %}"
)

# Words, digits in threes, punctuation and line ends apart: the split that Llama 3 publishes.
BYTE_LEVEL_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level_tokenizer(vocab_size: int) -> tuple[Tokenizer, dict]:
    """Shaped like Llama 3's tokenizer: byte-level BPE, special tokens after the vocabulary."""
    special = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(BYTE_LEVEL_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(special)
    bos_id = tokenizer.token_to_id(special[0])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{special[0]} $A",
                pair=f"{special[0]} $A {special[0]}:1 $B:1",
                special_tokens=[(special[0], bos_id)],
            ),
        ]
    )
    return tokenizer, {
        "bos_token": special[0],
        "chat_template": CHAT_TEMPLATE_BYTE_LEVEL,
        "clean_up_tokenization_spaces": False,
        "eos_token": special[4],
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _metaspace_tokenizer(vocab_size: int) -> tuple[Tokenizer, dict]:
    """Shaped like Llama 2's tokenizer: spaces as U+2581, unknown characters as bytes."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(special) - len(byte_tokens),
            limit_alphabet=40,
            show_progress=False,
        ),
    )
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    vocab = {piece: i for i, piece in enumerate([*special, *byte_tokens, *pieces])}
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "chat_template": CHAT_TEMPLATE_METASPACE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "</s>",
        "model_max_length": 512,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }


TOKENIZERS = {"byte_level": _byte_level_tokenizer, "metaspace": _metaspace_tokenizer}


def _write_tokenizer(case: Case, folder: Path) -> None:
    vocab_size = case.config["vocab_size"]
    tokenizer, tokenizer_config = TOKENIZERS[case.tokenizer](vocab_size)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"{folder.name}: tokenizer has {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)

    auto = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = []
    for text in TEXTS:
        ids = auto.encode(text)
        if ids != tokenizer.encode(text).ids:
            raise RuntimeError(f"{folder.name}: AutoTokenizer and tokenizer.json split {text!r}")
        texts.append(
            {
                "text": text,
                "ids": ids,
                "ids_without_special": auto.encode(text, add_special_tokens=False),
                "decoded": auto.decode(ids, skip_special_tokens=True),
                "decoded_with_special": auto.decode(ids, skip_special_tokens=False),
            }
        )
    chat = {"messages": MESSAGES}
    for key, add in (("text", False), ("text_with_generation_prompt", True)):
        chat[key] = auto.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
    chat["ids_with_generation_prompt"] = auto.encode(
        chat["text_with_generation_prompt"], add_special_tokens=False
    )
    _write_json(folder / "tokenizer_expected.json", {"texts": texts, "chat": chat})


# --- published configs -------------------------------------------------------------------------


def _llama2(hidden_size, intermediate_size, layers, heads, kv_heads, version) -> dict:
    # As published: no rope_theta (10000 is implied), no attention_bias, mlp_bias or head_dim.
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": version,
        "use_cache": True,
        "vocab_size": 32000,
    }


def _llama3(hidden_size, intermediate_size, layers, heads, version, **overrides) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": version,
        "use_cache": True,
        "vocab_size": 128256,
    }
    return dict(sorted((config | overrides).items()))


def _llama3_rope(factor: float) -> dict:
    return ROPE_LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192}


def _published(model_type, architecture, version, **fields) -> dict:
    return _family(model_type, architecture, **fields) | {"transformers_version": version}


def _qwen(model_type, architecture, version, **fields) -> dict:
    config = {
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    return _published(model_type, architecture, version, **config | fields)


def _qwen2(hidden_size, intermediate_size, layers, heads, kv_heads, version, **fields) -> dict:
    return _qwen(
        "qwen2",
        "Qwen2ForCausalLM",
        version,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **fields,
    )


def _gemma(model_type, architecture, version, layers, heads, kv_heads, **fields) -> dict:
    config = {
        "attention_bias": False,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
    }
    config = _published(model_type, architecture, version, **config | fields)
    # Their files leave it to the default, which is true.
    del config["tie_word_embeddings"]
    return config


def _gemma2(hidden_size, intermediate_size, layers, heads, kv_heads, **fields) -> dict:
    return _gemma(
        "gemma2",
        "Gemma2ForCausalLM",
        "4.42.0.dev0",
        layers,
        heads,
        kv_heads,
        **{
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "torch_dtype": "float32",
            "vocab_size": 256000,
        }
        | fields,
    )


def _phi(version, layers, heads, kv_heads, **fields) -> dict:
    config = {
        "attention_bias": False,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    return _published("phi3", "Phi3ForCausalLM", version, **config | fields)


# fmt: off
PHI4_MINI_LONG_FACTORS = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]
# fmt: on
PHI4_MINI_ROPE = {
    "long_factor": PHI4_MINI_LONG_FACTORS,
    "short_factor": [1.0] * 48,
    "type": "longrope",
}

# As published, and the number of parameters that the model's page or its safetensors index gives.
PUBLISHED = {
    "codellama-7b": (
        _llama2(4096, 11008, 32, 32, 32, "4.33.0.dev0")
        | {
            "max_position_embeddings": 16384,
            "rope_theta": 1000000,
            "torch_dtype": "bfloat16",
            "vocab_size": 32016,
        },
        6_738_546_688,
    ),
    "vicuna-7b-v1.5-16k": (
        _llama2(4096, 11008, 32, 32, 32, "4.31.0")
        | {
            "_name_or_path": "vicuna-7b-v1.5-16k",
            "max_sequence_length": 16384,
            "rope_scaling": {"factor": 4.0, "type": "linear"},
        },
        6_738_415_616,
    ),
    "mistral-7b-v0.1": (
        _published(
            "mistral",
            "MistralForCausalLM",
            "4.34.0.dev0",
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-05,
            sliding_window=4096,
            torch_dtype="bfloat16",
            vocab_size=32000,
        ),
        7_241_732_096,
    ),
    "qwen1.5-7b": (
        _qwen2(
            4096,
            11008,
            32,
            32,
            32,
            "4.37.0",
            max_position_embeddings=32768,
            max_window_layers=28,
            sliding_window=32768,
            vocab_size=151936,
        ),
        7_721_324_544,
    ),
    "qwen1.5-72b": (
        _qwen2(
            8192,
            24576,
            80,
            64,
            64,
            "4.37.0",
            max_position_embeddings=32768,
            max_window_layers=70,
            sliding_window=32768,
            vocab_size=152064,
        ),
        72_287_920_128,
    ),
    "qwen2-7b": (
        _qwen2(
            3584,
            18944,
            28,
            28,
            4,
            "4.37.2",
            max_position_embeddings=131072,
            max_window_layers=28,
            sliding_window=131072,
            vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "qwen3-8b": (
        _qwen(
            "qwen3",
            "Qwen3ForCausalLM",
            "4.51.0",
            attention_bias=False,
            eos_token_id=151645,
            head_dim=128,
            hidden_size=4096,
            intermediate_size=12288,
            max_position_embeddings=40960,
            max_window_layers=36,
            num_attention_heads=32,
            num_hidden_layers=36,
            num_key_value_heads=8,
            rope_scaling=None,
            sliding_window=None,
            vocab_size=151936,
        ),
        8_190_735_360,
    ),
    "gemma-2-2b": (_gemma2(2304, 9216, 26, 8, 4), 2_614_341_888),
    "gemma-2-9b": (_gemma2(3584, 14336, 42, 16, 8), 9_241_705_984),
    "gemma-2-27b": (
        _gemma2(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
        27_227_128_320,
    ),
    "gemma-3-1b": (
        _gemma(
            "gemma3_text",
            "Gemma3ForCausalLM",
            "4.50.0.dev0",
            26,
            4,
            1,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            hidden_size=1152,
            intermediate_size=6912,
            max_position_embeddings=32768,
            rope_local_base_freq=10000,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=512,
            sliding_window_pattern=6,
            torch_dtype="bfloat16",
            vocab_size=262144,
        ),
        999_885_952,
    ),
    "phi-3-mini-4k": (
        _phi(
            "4.40.2",
            32,
            32,
            32,
            eos_token_id=32000,
            hidden_size=3072,
            intermediate_size=8192,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            pad_token_id=32000,
            sliding_window=2047,
            vocab_size=32064,
        ),
        3_821_079_552,
    ),
    "phi-4-mini": (
        _phi(
            "4.45.0",
            32,
            24,
            8,
            bos_token_id=199999,
            eos_token_id=199999,
            full_attn_mod=1,
            hidden_size=3072,
            intermediate_size=8192,
            interpolate_factor=1,
            lm_head_bias=False,
            max_position_embeddings=131072,
            mlp_bias=False,
            original_max_position_embeddings=4096,
            pad_token_id=199999,
            partial_rotary_factor=0.75,
            rope_scaling=PHI4_MINI_ROPE,
            sliding_window=262144,
            tie_word_embeddings=True,
            vocab_size=200064,
        ),
        3_836_021_760,
    ),
    "llama-2-7b": (_llama2(4096, 11008, 32, 32, 32, "4.31.0.dev0"), 6_738_415_616),
    "llama-2-13b": (_llama2(5120, 13824, 40, 40, 40, "4.32.0.dev0"), 13_015_864_320),
    "llama-2-70b": (_llama2(8192, 28672, 80, 64, 8, "4.32.0.dev0"), 68_976_648_192),
    "llama-3-8b": (_llama3(4096, 14336, 32, 32, "4.40.0.dev0"), 8_030_261_248),
    "llama-3-70b": (_llama3(8192, 28672, 80, 64, "4.40.0.dev0"), 70_553_706_496),
    "llama-3.1-8b": (
        _llama3(
            4096,
            14336,
            32,
            32,
            "4.43.0.dev0",
            max_position_embeddings=131072,
            mlp_bias=False,
            rope_scaling=_llama3_rope(8.0),
        ),
        8_030_261_248,
    ),
    "llama-3.2-1b": (
        _llama3(
            2048,
            8192,
            16,
            32,
            "4.45.0.dev0",
            head_dim=64,
            max_position_embeddings=131072,
            mlp_bias=False,
            rope_scaling=_llama3_rope(32.0),
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
}


def _write_published(folder: Path) -> None:
    folder.mkdir(parents=True)
    counts = {}
    for name, (old, parameters) in PUBLISHED.items():
        _write_json(folder / f"{name}.old.json", old)
        config = AutoConfig.for_model(**copy.deepcopy(old))
        with tempfile.TemporaryDirectory() as saved:
            config.save_pretrained(saved)
            shutil.copyfile(Path(saved) / "config.json", folder / f"{name}.new.json")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
        counts[name] = sum(p.numel() for p in model.parameters())
        if counts[name] != parameters:
            raise RuntimeError(f"{name}: {parameters} parameters published, got {counts[name]}")
    _write_json(folder / "parameter_counts.json", counts)


# --- rotary embeddings ---------------------------------------------------------------------------


def _rope(head_dim: int, theta: float, context: int, scaling: dict, **fields) -> dict:
    """A Llama's config.json around a rotary embedding."""
    return _config(
        vocab_size=8,
        hidden_size=head_dim,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_theta=theta,
        rope_scaling=scaling,
        **fields,
    )


QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# Config and lengths of sequences.
ROPES = {
    "default": (_rope(64, 10000.0, 4096, None), [100, 4096]),
    "linear": (_rope(128, 10000.0, 4096, {"type": "linear", "factor": 4.0}), [100, 16384]),
    "llama3": (_rope(128, 500000.0, 131072, _llama3_rope(8.0)), [100, 131072]),
    "llama3.2": (_rope(64, 500000.0, 131072, _llama3_rope(32.0)), [131072]),
    "dynamic": (
        _rope(128, 10000.0, 2048, {"type": "dynamic", "factor": 2.0}),
        [100, 2048, 2049, 3000, 16384],
    ),
    "yarn": (_rope(128, 1000000.0, 32768, QWEN_YARN), [100, 131072]),
    "yarn_mscale": (
        _rope(
            64,
            10000.0,
            163840,
            {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.707,
            },
        ),
        [100, 163840],
    ),
    "yarn_untruncated": (
        _rope(
            64,
            150000.0,
            131072,
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.25,
                "truncate": False,
            },
        ),
        [100, 131072],
    ),
    "longrope": (
        _rope(
            128,
            10000.0,
            131072,
            PHI4_MINI_ROPE | {"original_max_position_embeddings": 4096},
            partial_rotary_factor=0.75,
        ),
        [100, 4096, 4097, 131072],
    ),
    "longrope_factor": (
        _rope(
            8,
            10000.0,
            4096,
            {
                "rope_type": "longrope",
                "factor": 16.0,
                "long_factor": [1.0, 2.0, 3, 4.5],
                "short_factor": [1.0, 1.0, 1.5, 2],
                "original_max_position_embeddings": 1024,
            },
        ),
        [1024, 1025],
    ),
}


def _write_ropes(root: Path) -> None:
    arrays, configs = {}, {}
    for name, (config, lengths) in ROPES.items():
        for length in lengths:
            rope = LlamaRotaryEmbedding(AutoConfig.for_model(**copy.deepcopy(config)))
            positions = np.unique(np.linspace(0, length - 1, 9).astype(np.int32))
            cos, sin = rope(torch.zeros(1), torch.from_numpy(positions)[None].long())
            key = f"{name}.{length}"
            configs[key] = config
            half = cos.shape[-1] // 2
            arrays[f"{key}.positions"] = positions
            arrays[f"{key}.inverse_frequencies"] = rope.inv_freq.numpy()
            arrays[f"{key}.cos"] = cos[0, :, :half].numpy()
            arrays[f"{key}.sin"] = sin[0, :, :half].numpy()
    _write_json(root / "rope_configs.json", configs)
    np.savez_compressed(root / "rope_tables.npz", **arrays)


# --- command line --------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
    }


def _check_alternate(folder: Path) -> None:
    """Both generations of a case's config must mean the same to transformers itself."""
    parsed = []
    for name in ("config.json", "config.alternate.json"):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        config = AutoConfig.for_model(**values).to_dict()
        config["rope_parameters"].pop("type", None)
        config.pop("transformers_version")
        parsed.append(config)
    if parsed[0] != parsed[1]:
        raise RuntimeError(f"{folder.name}: the two configs disagree: {parsed}")


def write_fixtures(root: Path) -> None:
    """Rewrites every folder that this script owns under `root`, and the manifest."""
    cases = {}
    for name, case in CASES.items():
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _write_checkpoint(case, folder)
        _check_alternate(folder)
        if case.tokenizer is not None:
            _write_tokenizer(case, folder)
        cases[name] = _write_expected(case, folder)
        print(name, cases[name])
    shutil.rmtree(root / "configs", ignore_errors=True)
    _write_published(root / "configs")
    _write_ropes(root)

    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != "MANIFEST.json":
            data = path.read_bytes()
            if len(data) > MAX_FILE_BYTES:
                raise RuntimeError(f"{path}: {len(data)} bytes, at most {MAX_FILE_BYTES}")
            digest = hashlib.sha256(data).hexdigest()
            files[path.relative_to(root).as_posix()] = {"bytes": len(data), "sha256": digest}
    total_bytes = sum(file["bytes"] for file in files.values())
    if total_bytes > MAX_TOTAL_BYTES:
        raise RuntimeError(f"{root}: {total_bytes} bytes, at most {MAX_TOTAL_BYTES}")
    manifest = {
        "command": COMMAND,
        "versions": _versions(),
        "prompt_lengths": PROMPT_LENGTHS,
        "new_tokens": NEW_TOKENS,
        "cases": cases,
        "total_bytes": total_bytes,
        "files": files,
    }
    _write_json(root / "MANIFEST.json", manifest)
    print(f"{total_bytes} bytes in {root}")


def greedy(model_dir: Path, prompts: list[str | list[int]], n: int) -> dict:
    """Greedy tokens, gaps and log-probabilities of each prompt alone, in float32 and bfloat16.

    The end-of-text token does not stop a run: what transformers returns with it enabled is the
    same row cut after the first token of `eos_token_id`.
    """
    model = _load(model_dir, torch.float32)
    half = _load(model_dir, torch.bfloat16)
    defaults = model.config
    if (model_dir / "generation_config.json").exists():
        defaults = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    eos_token_id = defaults.eos_token_id
    stops = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    auto = raw = None
    if any(isinstance(prompt, str) for prompt in prompts):
        auto = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        raw = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    results, disagreements = [], []
    for i, prompt in enumerate(prompts):
        result = {}
        ids = prompt
        if isinstance(prompt, str):
            ids = auto.encode(prompt)
            result["prompt"] = prompt
            if ids != raw.encode(prompt).ids:
                disagreements.append(i)
        if not 0 < len(ids) <= model.config.max_position_embeddings - n:
            raise ValueError(
                f"greedy: prompt {i} has {len(ids)} tokens, want 1 to "
                f"{model.config.max_position_embeddings - n} to leave room for {n}"
            )
        result["ids"] = ids
        for name, runner in (("fp32", model), ("bf16", half)):
            run = _greedy(runner, ids, n)
            tokens = run["tokens"].tolist()
            result[name] = {
                "tokens": tokens,
                "gaps": [_rounded(gap, 6) for gap in run["gaps"].tolist()],
                "logprobs": [_rounded(logprob, 6) for logprob in run["logprobs"].tolist()],
            }
            if auto is not None:
                end = next((j for j, token in enumerate(tokens) if token in stops), n)
                result[name]["text_before_eos"] = auto.decode(tokens[:end])
        results.append(result)
    return {
        "versions": _versions(),
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "eos_token_id": eos_token_id,
        "new_tokens": n,
        "tokenizer_class": None if auto is None else type(auto).__name__,
        # Prompts which AutoTokenizer and the tokenizer.json read as it is encode differently.
        "tokenizer_disagreements": disagreements,
        "min_gap": min((min(result["fp32"]["gaps"]) for result in results), default=None),
        "results": results,
    }


def _write_greedy(path: Path, truth: dict) -> None:
    """As JSON, or with an .npz suffix as arrays [prompts, n] and prompts end to end."""
    if path.suffix != ".npz":
        # One prompt a line keeps a diff readable.
        results = ",\n".join(json.dumps(result, ensure_ascii=False) for result in truth["results"])
        head = json.dumps({k: v for k, v in truth.items() if k != "results"}, indent=2)
        path.write_text(f'{head[:-2]},\n  "results": [\n{results}\n]\n}}\n', encoding="utf-8")
        return
    rows = truth["results"]
    arrays = {
        "ids": np.concatenate([np.array(row["ids"], np.int32) for row in rows]),
        "lengths": np.array([len(row["ids"]) for row in rows], np.int32),
    }
    for name in ("fp32", "bf16"):
        for key, dtype in (("tokens", np.int32), ("gaps", np.float32), ("logprobs", np.float32)):
            arrays[f"{name}_{key}"] = np.array([row[name][key] for row in rows], dtype)
    np.savez_compressed(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=FIXTURES, help="where the fixtures go")
    parser.add_argument("--greedy", type=Path, metavar="DIR", help="a checkpoint folder to run")
    parser.add_argument("--prompts", type=Path, help="JSON list of texts or lists of token ids")
    parser.add_argument("--out", type=Path, help=".json or .npz")
    parser.add_argument("--n", type=int, default=NEW_TOKENS, help="tokens after each prompt")
    args = parser.parse_args()

    # One thread: the order of a sum, hence its rounding, depends on how it is split.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    if args.greedy is None:
        write_fixtures(args.root)
        return
    if args.prompts is None or args.out is None:
        parser.error("--greedy needs --prompts and --out")
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))
    truth = greedy(args.greedy, prompts, args.n)
    _write_greedy(args.out, truth)
    summary = {k: v for k, v in truth.items() if k != "results"}
    print(json.dumps(summary | {"prompts": len(prompts)}, indent=2))


if __name__ == "__main__":
    main()
