"""The configuration all families parse to, and what parsing a Hugging Face config.json needs."""

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fdjax.models.attention import AttentionSpec
from fdjax.pallas_kernels.rope import SCALINGS, Rope


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file and the field or tensor."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer. One object for every family and every generation of config.json.

    Attributes:
      family: key of `fdjax.models.FAMILIES`.
      vocab_size: V.
      width: E.
      mlp_width: F.
      heads, kv_heads, head_dim: H, Hkv, D.
      norm_eps: epsilon of the RMS norms.
      activation: of the gated MLP, a key of `pallas_kernels.gemm.ACTIVATIONS`.
      attention: one `AttentionSpec` per layer.
      tie_embeddings: the head is the transposed embedding.
      qkv_bias, out_bias, mlp_bias: biases of the linear layers.
      max_position_embeddings: longest context the model was made for, in tokens.
      dtype: of the checkpoint, a NumPy name.
    """

    family: str
    vocab_size: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    attention: tuple[AttentionSpec, ...]
    tie_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    dtype: str

    def __post_init__(self):
        for name in ("vocab_size", "width", "mlp_width", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                "config: heads must be a multiple of kv_heads, "
                f"got {self.heads} and {self.kv_heads}"
            )
        if not self.attention:
            raise ValueError("config: there must be at least one layer, got 0")

    @property
    def layers(self) -> int:
        """L."""
        return len(self.attention)

    @property
    def group(self) -> int:
        """G = H / Hkv."""
        return self.heads // self.kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of KV cache one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


class ConfigReader:
    """Typed access to a config.json that remembers what was read, so that nothing goes unseen."""

    def __init__(self, data: Mapping[str, Any], source: str = "config.json"):
        self.data = data
        self.source = source
        self._read: set[str] = set()

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of `key`; `default` when it is absent or null.

        Raises:
          CheckpointError: absent without a default, of another type, or not finite.
        """
        self._read.add(key)
        value = self.data.get(key)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.source}: {key!r} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 2**1023:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.source}: {key!r} must be {kind.__name__}, got {value!r}")
        if kind is float and not math.isfinite(value):
            raise CheckpointError(f"{self.source}: {key!r} must be finite, got {value}")
        return value

    def positive(self, key: str, default: Any = ..., kind: type = int) -> Any:
        """A positive number."""
        value = self.get(key, kind, default)
        if value <= 0:
            raise CheckpointError(f"{self.source}: {key!r} must be positive, got {value}")
        return value

    def one_of(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """The value `choices` gives for the string under `key`."""
        value = self.get(key, str, default)
        if value not in choices:
            raise CheckpointError(
                f"{self.source}: {key} {value!r} is not supported; "
                f"supported: {', '.join(sorted(choices))}"
            )
        return choices[value]

    def finish(self, ignorable: Sequence[str]) -> None:
        """Refuse what changes the model and cannot be done, warn of fields nobody knows."""
        if self.data.get("quantization_config"):
            raise CheckpointError(
                f"{self.source}: 'quantization_config' is not supported; "
                "use the unquantised checkpoint"
            )
        for key in sorted(set(_NEUTRAL) & set(self.data) - self._read):
            if key == "sliding_window" and self.data.get("use_sliding_window") is False:
                continue
            value = self.data[key]
            allowed = (None, *_NEUTRAL[key])
            if not all(v in allowed for v in (value if isinstance(value, list) else [value])):
                raise CheckpointError(
                    f"{self.source}: {key!r} {value!r} is not supported for this model_type; "
                    f"supported: {', '.join('null' if v is None else repr(v) for v in allowed)}"
                )
        unknown = sorted(
            key
            for key in set(self.data) - self._read - set(ignorable) - _IGNORABLE - set(_NEUTRAL)
            if self.data[key] is not None
        )
        if unknown:
            warnings.warn(
                f"{self.source}: ignoring unknown fields {', '.join(unknown)}", stacklevel=2
            )


# Fields that say nothing about the forward pass in inference.
_IGNORABLE = frozenset(
    """
    _name_or_path add_cross_attention architectures attention_dropout auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout id2label initializer_range is_decoder
    is_encoder_decoder label2id length_penalty max_length max_sequence_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    transformers_version typical_p unsloth_version use_bfloat16 use_cache
    """.split()
)

# Fields of some family that change its forward pass, and values (or list items) with which they do
# not. A family that can do more reads the field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "compression_config": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "layer_types": ("full_attention",),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "num_experts": (),
    "num_local_experts": (),
    "qk_layernorm": (False,),
    "quantization_config": ({},),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "sliding_window": (),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DTYPES = {name: name for name in ("float32", "bfloat16", "float16")}


def read_dtype(reader: ConfigReader) -> str:
    """The checkpoint's dtype under its old or its new name."""
    key = "dtype" if reader.data.get("dtype") is not None else "torch_dtype"
    reader.get("dtype", str, None)
    reader.get("torch_dtype", str, None)
    return reader.one_of(key, DTYPES, "float32")


def read_rope(reader: ConfigReader, head_dim: int, default_theta: float = 10000.0) -> Rope:
    """The rotary embedding of either generation of config.json.

    Old: `rope_theta` beside `rope_scaling` with `type` or `rope_type`. New: `rope_parameters` with
    everything inside. A file may have both, if they say the same.

    Raises:
      CheckpointError: an unknown rope type, a rope key that is neither used nor ignorable, or two
        places that disagree.
    """
    sections = [
        ConfigReader(section, f"{reader.source}: {key}")
        for key in ("rope_parameters", "rope_scaling")
        if (section := reader.get(key, dict, {}))
    ]
    theta = _agreed([reader, *sections], "rope_theta", default_theta)
    partial = _agreed([reader, *sections], "partial_rotary_factor", 1.0)
    dim = int(head_dim * partial)
    if partial > 1 or dim < 2 or dim % 2:
        raise CheckpointError(
            f"{reader.source}: 'head_dim' times 'partial_rotary_factor' must be even, at least 2 "
            f"and at most head_dim, got {head_dim} times {partial}"
        )
    ropes = {_read_scaling(section, dim, theta) for section in sections}
    if len(ropes) > 1:
        # transformers takes rope_scaling, others the newer rope_parameters.
        raise CheckpointError(
            f"{reader.source}: 'rope_parameters' and 'rope_scaling' disagree; remove one"
        )
    return ropes.pop() if ropes else Rope(dim=dim, theta=theta)


def _agreed(readers: Sequence[ConfigReader], key: str, default: float) -> float:
    """A positive number that may stand in several places."""
    given = [r.positive(key, kind=float) for r in readers if r.get(key, float, None) is not None]
    if len(set(given)) > 1:
        raise CheckpointError(
            f"{readers[0].source}: {key!r} must be the same everywhere, "
            f"got {' and '.join(map(str, given))}"
        )
    return given[0] if given else default


def _read_scaling(section: ConfigReader, dim: int, theta: float) -> Rope:
    names = {section.get(key, str, None) for key in ("rope_type", "type")} - {None}
    if len(names) > 1:
        raise CheckpointError(
            f"{section.source}: 'rope_type' and 'type' disagree, got {' and '.join(sorted(names))}"
        )
    kind = names.pop() if names else "default"
    if kind not in SCALINGS:
        raise CheckpointError(
            f"{section.source}: rope_type {kind!r} is not supported; "
            f"supported: {', '.join(SCALINGS)}"
        )
    options = {}
    if kind == "llama3":
        options = {
            "factor": section.positive("factor", kind=float),
            "low_freq_factor": section.positive("low_freq_factor", kind=float),
            "high_freq_factor": section.positive("high_freq_factor", kind=float),
            "original_max_position": section.positive("original_max_position_embeddings"),
        }
    unused = sorted(set(section.data) - section._read)
    if unused:
        raise CheckpointError(
            f"{section.source}: unknown keys {', '.join(unused)} for rope_type {kind!r}; "
            f"known: {', '.join(sorted(section._read))}"
        )
    try:
        return Rope(dim=dim, theta=theta, scaling=kind, **options)
    except ValueError as error:
        raise CheckpointError(f"{section.source}: {error}") from None
