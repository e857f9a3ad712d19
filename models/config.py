"""The configuration that all families parse to, and helpers to parse a Hugging Face config.json."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fdjax.models.block import BlockSpec, LinearShape
from fdjax.models.readable import readable
from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.quantised import WeightFormat


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be loaded; names the file and the field or tensor."""

    def __init__(self, message: str):
        super().__init__(readable(message))


_BLOCK_NAMES = {f.name for f in dataclasses.fields(BlockSpec)} | {"group"}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer, the same for every family and every generation of config.json.

    It also has the attributes of its first block: `width`, `heads` and so on.

    Attributes:
      family: key of `fdjax.models.FAMILIES`.
      vocab_size: V.
      blocks: one `BlockSpec` per layer.
      tie_embeddings: the head is the transposed embedding.
      max_position_embeddings: longest context that the model supports, in tokens.
      dtype: dtype of the checkpoint, a NumPy name.
      embedding_scale: multiplies the embeddings, rounded to their dtype.
      embedding_norm: the embeddings are normalised.
      embedding_width: width of embedding and head if it is not E; linear layers without bias lead
        from one to the other.
      position_offset: row of position 0 in a learned table, whose rows are added to the embeddings;
        None for no table.
      final_norm: the residual stream is normalised before the head.
      head_bias: the head, which is not tied, has a bias.
      logit_scale: multiplies the logits.
      logit_soft_cap: logits become soft_cap * tanh(logits / soft_cap), or None.
      head_format: format of a quantised head, or None. The head is then not tied.
    """

    family: str
    vocab_size: int
    blocks: tuple[BlockSpec, ...]
    tie_embeddings: bool
    max_position_embeddings: int
    dtype: str
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    embedding_width: int | None = None
    position_offset: int | None = None
    final_norm: bool = True
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    head_format: WeightFormat | None = None

    def __post_init__(self):
        if self.vocab_size < 1:
            raise ValueError(f"config: vocab_size must be positive, got {self.vocab_size}")
        if not self.blocks:
            raise ValueError("config: layers must be at least 1, got 0")
        for name in ("width", "kv_heads", "head_dim"):
            if len(sizes := {getattr(block, name) for block in self.blocks}) > 1:
                raise ValueError(f"config: {name} must be the same in all layers, got {sizes}")

    @classmethod
    def alike(cls, *, attention: Sequence[AttentionSpec], **fields: Any) -> "DecoderConfig":
        """A decoder whose blocks differ only in attention.

        Args:
          attention: one spec per layer.
          **fields: fields of `DecoderConfig`, and fields of `BlockSpec` that all layers share.
        """
        own = {f.name for f in dataclasses.fields(cls)}
        block = {name: fields.pop(name) for name in list(fields) if name not in own}
        return cls(blocks=tuple(BlockSpec(attention=spec, **block) for spec in attention), **fields)

    def with_attention(self, attention: Iterable[AttentionSpec]) -> "DecoderConfig":
        """A copy with one layer per spec. Additional layers have the last block's other fields."""
        attention = list(attention)
        blocks = [*self.blocks, *self.blocks[-1:] * max(0, len(attention) - self.layers)]
        pairs = zip(blocks, attention, strict=False)
        replaced = (dataclasses.replace(block, attention=spec) for block, spec in pairs)
        return dataclasses.replace(self, blocks=tuple(replaced))

    def with_formats(
        self, formats: Mapping[tuple[str | int, ...], WeightFormat]
    ) -> "DecoderConfig":
        """A copy with quantised weights: their formats by path, as in a `WeightMap`."""
        blocks = tuple(
            dataclasses.replace(
                block,
                formats=tuple(
                    (name, formats[path])
                    for name, (own, _) in block.weights.items()
                    if (path := ("blocks", i, *own)) in formats
                ),
            )
            for i, block in enumerate(self.blocks)
        )
        return dataclasses.replace(self, blocks=blocks, head_format=formats.get(("head", "weight")))

    def format_of(self, path: tuple[str | int, ...]) -> WeightFormat | None:
        """The format of the parameter at a path, None if it is not quantised."""
        if path == ("head", "weight"):
            return self.head_format
        if path[0] != "blocks":
            return None
        block = self.blocks[path[1]]
        weights = block.weights
        return next((form for name, form in block.formats if weights[name][0] == path[2:]), None)

    @property
    def formats_by_path(self) -> dict[tuple[str | int, ...], WeightFormat]:
        """The formats of quantised weights, as `with_formats` takes them."""
        formats = {
            ("blocks", i, *block.weights[name][0]): weight
            for i, block in enumerate(self.blocks)
            for name, weight in block.formats
        }
        return formats | ({("head", "weight"): self.head_format} if self.head_format else {})

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(block.experts is not None for block in self.blocks)

    @property
    def weight_formats(self) -> tuple[WeightFormat, ...]:
        """The different formats of quantised weights."""
        formats = [weight for block in self.blocks for _, weight in block.formats]
        return tuple(dict.fromkeys([*formats, *([self.head_format] if self.head_format else [])]))

    def __getattr__(self, name: str) -> Any:
        if name in _BLOCK_NAMES:
            return getattr(self.blocks[0], name)
        raise AttributeError(f"DecoderConfig has no attribute {name!r}")

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer."""
        return tuple(block.attention for block in self.blocks)

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.blocks)

    @property
    def head_width(self) -> int:
        """Number of columns of the head on a device. The sum over the devices may exceed V."""
        return -(-self.vocab_size // self.tensor_parallel)

    @property
    def linear_shapes(self) -> dict[str, LinearShape]:
        """The linear layers of a decoder step, by name.

        A head that is the transposed embedding is left out, because no kernel reads it.
        """
        shapes = {}
        for block in dict.fromkeys(self.blocks):
            for name, linear in block.linears.items():
                shapes.setdefault(name, linear.shape)
        if not self.tie_embeddings:
            width = self.embedding_width or self.width
            normed = self.final_norm and width == self.width
            shapes["head"] = LinearShape(
                *(width, self.head_width), norm=normed, result="float32", weight=self.head_format
            )
        return shapes

    def idle_expert_weights(self, rows: int) -> int:
        """Number of weights of all layers' experts that this many tokens cannot choose."""
        return sum(block.idle_experts(rows) * block.expert_weights for block in self.blocks)

    @property
    def position_rows(self) -> int:
        """Rows of the learned table of positions."""
        return self.max_position_embeddings + self.position_offset


class ConfigReader:
    """Typed access to a config.json. It remembers the fields read, so that none is overlooked.

    `defaults` are used for absent fields, but not for null. `names` has other names that the file
    may use for Llama's fields.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        source: str = "config.json",
        defaults: Mapping[str, Any] = {},
        names: Mapping[str, Sequence[str]] = {},
    ):
        self.data = {**defaults, **data}
        self.source = source
        self._names = names
        self._read: set[str] = set()

    def name(self, key: str) -> str:
        """The name of a field in this file."""
        names = (*self._names.get(key, ()), key)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        """The value of `key`; `default` when it is absent or null.

        Raises:
          CheckpointError: it is absent or null and has no default, has another type, is not finite,
            or is an integer of 2**31 or more.
        """
        key = self.name(key)
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
        if kind is int and abs(value) >= 2**31:
            raise CheckpointError(f"{self.source}: {key!r} must be below 2**31, got {value}")
        if kind is float and not math.isfinite(value):
            raise CheckpointError(f"{self.source}: {key!r} must be finite, got {value}")
        return value

    def positive(self, key: str, default: Any = ..., kind: type = int) -> Any:
        """Like `get`, for a positive number."""
        value = self.get(key, kind, default)
        if value <= 0:
            raise CheckpointError(
                f"{self.source}: {self.name(key)!r} must be positive, got {value}"
            )
        return value

    def one_of(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """The value in `choices` for the string under `key`."""
        value = self.get(key, str, default)
        if value not in choices:
            raise CheckpointError(
                f"{self.source}: {self.name(key)} {value!r} is not supported; "
                f"supported: {', '.join(sorted(choices))}"
            )
        return choices[value]

    def known(self) -> set[str]:
        """The keys read so far, present or not."""
        return set(self._read)

    def unread(self) -> list[str]:
        """The keys that are present and were not read."""
        return sorted(set(self.data) - self._read)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        """Raise CheckpointError for unread fields that change the model; warn of unknown ones."""
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
                readable(f"{self.source}: ignoring unknown fields {', '.join(unknown)}"),
                stacklevel=2,
            )


# Fields that do not affect the forward pass in inference, and fields that describe how weights are
# stored.
_IGNORABLE = frozenset(
    """
    _name_or_path add_cross_attention architectures attention_dropout auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    compression_config cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    hidden_dropout id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length max_sequence_length min_length model_type no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    quantization_config
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torchscript transformers_version typical_p
    unsloth_version use_bfloat16 use_cache
    """.split()
)

# Fields that change the forward pass of some family, with the values (or list items) that have no
# effect. A family that supports other values reads the field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "layer_types": ("full_attention",),
    "logit_scale": (1.0,),
    "lm_head_bias": (False,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "num_experts": (),
    "num_local_experts": (),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
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
UNGATED_NAMES = ACTIVATION_NAMES | {"relu": "relu", "gelu_fast": "gelu_tanh"}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Far more than any model has. A damaged file must not fill the memory.
_MOST_LAYERS = 4096
DTYPES = {name: name for name in ("float32", "bfloat16", "float16")}


def read_dtype(reader: ConfigReader) -> str:
    """The checkpoint's dtype, from its old or its new field."""
    key = "dtype" if reader.data.get("dtype") is not None else "torch_dtype"
    reader.get("dtype", str, None)
    reader.get("torch_dtype", str, None)
    return reader.one_of(key, DTYPES, "float32")


def read_dimensions(reader: ConfigReader, *, default_mlp: int | None = None) -> dict[str, Any]:
    """The fields that every family has, as fields of `DecoderConfig`.

    Args:
      reader: reader of the whole file.
      default_mlp: without `intermediate_size`, the MLP is this many times as wide as the model.
    """
    width = reader.positive("hidden_size")
    heads = reader.positive("num_attention_heads")
    heads_key = reader.name("num_attention_heads")
    kv_heads = reader.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{reader.source}: {heads_key!r} must be a multiple of "
            f"{reader.name('num_key_value_heads')!r}, got {heads} and {kv_heads}"
        )
    if width % heads and reader.get("head_dim", int, None) is None:
        raise CheckpointError(
            f"{reader.source}: without 'head_dim', {reader.name('hidden_size')!r} must be a "
            f"multiple of {heads_key!r}, got {width} and {heads}"
        )
    return {
        "vocab_size": reader.positive("vocab_size"),
        "width": width,
        "mlp_width": reader.positive(
            "intermediate_size", default_mlp * width if default_mlp else ...
        ),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": reader.positive("head_dim", width // heads),
        "norm_eps": reader.positive("rms_norm_eps", 1e-6, float),
        "tie_embeddings": reader.get("tie_word_embeddings", bool, False),
        "max_position_embeddings": reader.positive("max_position_embeddings", 2048),
        "dtype": read_dtype(reader),
    }


def read_decoder(
    reader: ConfigReader, family: str, *, ignorable: Sequence[str] = (), **fields: Any
) -> DecoderConfig:
    """Build the decoder from fields that were read, and check the fields that were not.

    Args:
      reader: reader of the whole file.
      family: name of the family.
      ignorable: keys without effect, see `ConfigReader.finish`.
      **fields: arguments of `DecoderConfig.alike`; default for the activation is `hidden_act`.
    """
    if "activation" not in fields:
        known = UNGATED_NAMES if fields.get("no_gate") else ACTIVATION_NAMES
        fields["activation"] = reader.one_of("hidden_act", known, "silu")
    config = DecoderConfig.alike(family=family, **fields)
    if config.tie_embeddings and config.head_bias:
        raise CheckpointError(
            f"{reader.source}: 'tie_word_embeddings' true is not supported, because the head has a "
            "bias; supported: False"
        )
    reader.finish(ignorable)
    return config


def read_layers(reader: ConfigReader) -> int:
    """Read the number of layers."""
    layers = reader.positive("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise CheckpointError(
            f"{reader.source}: {reader.name('num_hidden_layers')!r} must be at most "
            f"{_MOST_LAYERS}, got {layers}"
        )
    return layers


def read_windows(reader: ConfigReader, default: Callable[[int], str]) -> tuple[int | None, ...]:
    """Read the sliding window of each layer in tokens, None for a layer without a window.

    Args:
      reader: reader of the whole file.
      default: layer → "full_attention" or "sliding_attention", used if the file has no list.
    """
    layers = read_layers(reader)
    types = reader.get("layer_types", list, [default(i) for i in range(layers)])
    unknown = sorted({repr(kind) for kind in types if kind not in _LAYER_TYPES})
    if unknown:
        raise CheckpointError(
            f"{reader.source}: 'layer_types' {', '.join(unknown)} not supported; "
            f"supported: {', '.join(_LAYER_TYPES)}"
        )
    if len(types) != layers:
        raise CheckpointError(
            f"{reader.source}: 'layer_types' must have one entry per layer ({layers}), "
            f"got {len(types)}"
        )
    reader.get("sliding_window", int, None)
    sliding = _LAYER_TYPES[1]
    window = reader.positive("sliding_window") if sliding in types else None
    return tuple(window if kind == sliding else None for kind in types)
