"""The configuration all families parse to, and what parsing a Hugging Face config.json needs."""

import dataclasses
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
          CheckpointError: absent without a default, or of another type.
        """
        self._read.add(key)
        value = self.data.get(key)
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self.source}: {key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.source}: {key!r} must be {kind.__name__}, got {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, int, ... if default is None else default)
        if value < 1:
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
        unknown = sorted(set(self.data) - self._read - set(ignorable) - _IGNORABLE)
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
    everything inside.

    Raises:
      CheckpointError: an unknown rope type, or a rope key that is neither used nor ignorable.
    """
    theta = reader.get("rope_theta", float, default_theta)
    partial = reader.get("partial_rotary_factor", float, 1.0)
    scaling = reader.get("rope_scaling", dict, {})
    parameters = reader.get("rope_parameters", dict, {})
    key = "rope_parameters" if parameters else "rope_scaling"
    inner = ConfigReader(parameters or scaling, f"{reader.source}: {key}")
    theta = inner.get("rope_theta", float, theta)
    partial = inner.get("partial_rotary_factor", float, partial)
    old_name = inner.get("type", str, "default")
    kind = inner.get("rope_type", str, old_name)
    if kind not in SCALINGS:
        raise CheckpointError(
            f"{inner.source}: rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}"
        )
    options = {}
    if kind == "llama3":
        options = {
            "factor": inner.get("factor", float),
            "low_freq_factor": inner.get("low_freq_factor", float),
            "high_freq_factor": inner.get("high_freq_factor", float),
            "original_max_position": inner.positive("original_max_position_embeddings"),
        }
    unused = sorted(set(inner.data) - inner._read)
    if unused:
        raise CheckpointError(
            f"{inner.source}: unknown keys {', '.join(unused)} for rope_type {kind!r}; "
            f"known: {', '.join(sorted(inner._read))}"
        )
    try:
        return Rope(dim=int(head_dim * partial), theta=theta, scaling=kind, **options)
    except ValueError as error:
        raise CheckpointError(f"{inner.source}: {error}") from None
