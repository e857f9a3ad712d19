"""Everything that runs blocks refuses a feature that it does not know."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import fdjax
from fdjax.models import (
    DecoderConfig,
    chain_features,
    chain_shape,
    describe,
    layers_features,
    layers_shape,
    parse_config,
)
from fdjax.models.block import BlockSpec
from fdjax.models.rope import with_spans
from fdjax.pallas_kernels.attention import (
    AttentionSpec,
    append_decode_attention,
    append_prefill_attention,
    attention_reference,
    decode_attention,
    prefill_attention,
)
from fdjax.pallas_kernels.dispatch import NAMES
from fdjax.pallas_kernels.implementations import IMPLEMENTATIONS
from fdjax.pallas_kernels.plan import Plan

# Sizes that every kernel supports.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}
ROWS, SLOTS, ITEMSIZE = 8, 256, 2


@dataclasses.dataclass(frozen=True)
class NewBlock(BlockSpec):
    """A block with a field that no code of the package knows."""

    flag_nobody_knows: bool = False


@dataclasses.dataclass(frozen=True)
class NewAttention(AttentionSpec):
    """An attention with a field that no code of the package knows."""

    flag_nobody_knows: bool = False


def _fields(spec) -> dict:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _config(block: bool = False, attention: bool = False) -> DecoderConfig:
    """A Llama config of blocks with the new fields, set or not."""
    config = parse_config(LLAMA)
    first = config.blocks[0]
    spec = NewAttention(**_fields(first.attention), flag_nobody_knows=attention)
    fields = _fields(first) | {"attention": spec}
    blocks = (NewBlock(**fields, flag_nobody_knows=block),) * config.layers
    return dataclasses.replace(config, blocks=blocks)


def _requests(config: DecoderConfig) -> dict:
    """The requests to a plan for kernels that run several layers."""
    return {
        "linear_chain": (chain_shape(config, ROWS, ITEMSIZE), chain_features(config)),
        "decode_layers": (
            layers_shape(config, ROWS, SLOTS, ITEMSIZE),
            layers_features(config),
        ),
    }


def test_every_kernel_takes_what_it_knows():
    """Without the flag no kernel refuses, so the tests below show that the flag is refused."""
    for op, (shape, features) in _requests(_config()).items():
        assert Plan().has_kernel(op, features, **shape), op
    assert describe(_config()).parameter_count == describe(parse_config(LLAMA)).parameter_count


def test_kernels_of_blocks_refuse_an_unknown_flag():
    for op, (shape, features) in _requests(_config(block=True)).items():
        for i in IMPLEMENTATIONS:
            if i.op == op:
                assert i.refusal(shape, features) == "cannot do flag_nobody_knows", i
        assert Plan().choose(op, features, **shape).implementation == "xla"


def test_the_decoder_refuses_an_unknown_flag():
    with pytest.raises(NotImplementedError, match="decoder: cannot do flag_nobody_knows"):
        describe(_config(block=True))


def test_one_launch_refuses_an_unknown_flag_of_attention():
    """The chain does not run attention, so it accepts the flag; attention itself refuses it."""
    requests = _requests(_config(attention=True))
    shape, features = requests["decode_layers"]
    for i in IMPLEMENTATIONS:
        if i.op == "decode_layers":
            assert i.refusal(shape, features) == "cannot do attention.flag_nobody_knows", i


def test_every_attention_refuses_an_unknown_flag():
    spec = NewAttention(0.1, flag_nobody_knows=True)
    shape = dict(b=1, t=64, h=4, hkv=2, s=256, d=128, itemsize=2, masks=0)
    attentions = [i for i in IMPLEMENTATIONS if "attention" in i.op]
    appends = [i.append for i in attentions if i.append is not None]
    assert len(attentions) == 8 and len(appends) == 2
    for i in (*attentions, *appends):
        one = shape | {"t": 1} if "decode" in i.op else shape
        assert i.supports(one, NewAttention(0.1).features | i.needs), i
        assert i.refusal(one, spec.features | i.needs) == "cannot do flag_nobody_knows", i


@pytest.mark.parametrize("name", [*NAMES, None])
@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("t", [1, 128])
def test_no_op_of_attention_overlooks_an_unknown_flag(name, append, t):
    spec = NewAttention(0.1, flag_nobody_knows=True)
    array = jax.ShapeDtypeStruct
    cache, rows = array((2, 2, 256, 64), jnp.bfloat16), array((2,), jnp.int32)
    if append:
        op = append_decode_attention if t == 1 else append_prefill_attention
        new = array((2, t, 2, 4, 64), jnp.bfloat16)
    else:
        op = decode_attention if t == 1 else prefill_attention
        new = array((2, t, 4, 64), jnp.bfloat16)
    operands = (new, cache, cache, rows, *([rows] * (t > 1)))
    plan = Plan("NVIDIA H100 80GB HBM3", (9, 0))
    with pytest.raises(NotImplementedError, match="cannot do flag_nobody_knows"):
        jax.eval_shape(lambda *a: op(*a, spec=spec, implementation=name, plan=plan), *operands)


def test_the_reference_refuses_an_unknown_flag():
    q, cache, row = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 2, 4, 8)), jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match="attention_reference: cannot do flag_nobody"):
        attention_reference(
            q, cache, cache, row, row, spec=NewAttention(1.0, flag_nobody_knows=True)
        )


def test_a_model_refuses_an_unknown_flag_of_attention():
    model = describe(_config(attention=True))
    ids = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    with pytest.raises(NotImplementedError, match="cannot do flag_nobody_knows"):
        jax.eval_shape(lambda p, ids: fdjax.forward(model, p, ids), model.abstract_params, ids)


@pytest.mark.parametrize(
    ("change", "features"),
    [
        ({}, ["attention.rope"]),
        ({"attention_bias": True}, ["attention.rope", "out_bias", "qkv_bias"]),
        # The loader orders the dimensions so that kernels can rotate whole heads.
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.5, "pad_token_id": 0},
            ["attention.rope"],
        ),
        (
            {"model_type": "mistral", "sliding_window": 64},
            ["attention.rope", "attention.window"],
        ),
    ],
    ids=str,
)
def test_what_a_block_asks_for(change, features):
    assert sorted(layers_features(parse_config(LLAMA | change))) == features


def test_a_part_of_a_head_with_a_norm_stays_as_it_is():
    config = parse_config(LLAMA | {"model_type": "qwen3"})
    specs = [
        dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, dim=spec.rope.dim // 2))
        for spec in config.attention
    ]
    config = with_spans(config.with_attention(tuple(specs)))
    wanted = ["attention.partial_rope", "attention.rope", "qk_norm"]
    assert sorted(layers_features(config)) == wanted


def test_blocks_that_differ_are_named():
    config = parse_config(LLAMA)
    first, second = config.attention
    other = config.with_attention((first, dataclasses.replace(second, scale=0.5)))
    assert "differing_blocks" in layers_features(other)
    assert "differing_blocks" not in chain_features(other)
    calibrated = config.with_attention((first, dataclasses.replace(second, phi=(1.0,) * 4)))
    assert "differing_blocks" not in layers_features(calibrated)
    wider = dataclasses.replace(config.blocks[1], mlp_width=1024)
    config = dataclasses.replace(config, blocks=(config.blocks[0], wider))
    assert "differing_blocks" in chain_features(config) & layers_features(config)
