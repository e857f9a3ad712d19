"""What each device holds of a model: no device is needed to know it."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.tensor_parallel import with_one_launch
from fdjax.models import chain_features, describe, layers_features, parse_config
from fdjax.models.block import DECODER_CAN
from fdjax.models.random_weights import _random_weight
from fdjax.models.sharding import _BLOCK_CAN, local_config, why_tokens_repeat
from fdjax.pallas_kernels.plan import Plan
from fdjax.pallas_kernels.quantised import BRICKS, WeightFormat
from fdjax.pallas_kernels.ranks import AXIS

pytestmark = pytest.mark.usefixtures("quick_on_cpu")

CONFIGS = Path(__file__).parents[1] / "fixtures" / "hf" / "configs"
H100 = Plan.for_kind("NVIDIA H100 80GB HBM3", (9, 0))
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1001,
    "tie_word_embeddings": False,
}


def config(**fields):
    return parse_config(SMALL | fields)


def with_format(form, **fields):
    c = config(**fields)
    formats = tuple((name, form) for name in c.blocks[0].linears)
    return dataclasses.replace(
        c, blocks=tuple(dataclasses.replace(block, formats=formats) for block in c.blocks)
    )


@pytest.mark.parametrize("name", ["llama-2-7b.old", "llama-3-8b.new"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_devices_divide_all_weights_but_norms_and_embedding(name, ranks):
    c = parse_config(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")))
    one, several = (describe(c, plan=H100, tensor_parallel=n) for n in (1, ranks))
    whole = 2 * (c.vocab_size * c.width + (2 * c.layers + 1) * c.width)
    assert several.weight_bytes == one.weight_bytes
    assert several.local.weight_bytes == whole + (one.weight_bytes - whole) // ranks
    shapes = jax.tree.map(lambda a: a.shape, several.abstract_params)
    assert shapes == jax.tree.map(lambda a: a.shape, one.abstract_params)


def test_the_axes_that_are_divided():
    specs = describe(config(), plan=H100, tensor_parallel=2).partitions
    block = specs["blocks"][0]
    assert block["attention"]["qkv"]["weight"] == PartitionSpec(None, AXIS)
    assert block["attention"]["out"]["weight"] == PartitionSpec(AXIS)
    assert block["mlp"]["gate_up"]["weight"] == PartitionSpec(None, None, AXIS)
    assert block["mlp"]["down"]["weight"] == PartitionSpec(AXIS)
    assert specs["head"]["weight"] == PartitionSpec(None, AXIS)
    assert specs["embed"] == specs["norm"]["scale"] == PartitionSpec()
    tied = describe(config(tie_word_embeddings=True), plan=H100, tensor_parallel=2)
    assert tied.partitions["embed"] == PartitionSpec(AXIS)


def test_kv_heads_are_repeated_and_the_vocabulary_is_padded():
    model = describe(config(), plan=H100, tensor_parallel=8)
    local, params = model.local.config, model.abstract_params
    assert (local.heads, local.kv_heads, local.group) == (1, 1, 1)
    assert params["blocks"][0]["attention"]["qkv"]["weight"].shape == (256, 8, 3, 32)
    assert params["head"]["weight"].shape == (256, 1008)
    assert params["embed"].shape == (1001, 256)
    assert model.local.config.vocab_size == 1001


def test_who_divides_the_tokens_of_a_kv_head():
    plan = dataclasses.replace(H100, divide_tokens=True)
    for ranks, count in ((1, 1), (2, 1), (4, 2), (8, 4)):
        model = describe(config(), plan=plan, tensor_parallel=ranks)
        assert model.token_ranks == model.local.token_ranks == count
    # On GPUs, only if the caller asks for it.
    assert describe(config(), plan=H100, tensor_parallel=8).token_ranks == 1
    window = config(model_type="mistral", sliding_window=100)
    assert why_tokens_repeat(window) == "layer 0 has window"
    assert describe(window, plan=plan, tensor_parallel=8).local.token_ranks == 1
    assert why_tokens_repeat(config()) is None


@pytest.mark.slow
def test_random_weights_of_the_same_kv_head_are_equal():
    c = config(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    model = describe(c, dtype="float32", plan=H100, tensor_parallel=8)
    like = model.abstract_params["blocks"][0]["attention"]["qkv"]["weight"]
    weight = _random_weight(like, copies=4, sharding=None)(jax.random.key(0))
    heads = np.asarray(weight).reshape(64, 2, 4, 3, 8)  # of two KV heads, each on four devices
    assert (heads == heads[:, :, :1])[..., -2:, :].all()
    assert not (heads == heads[:, :, :1])[:, :, 1:, 0].any()
    assert not (heads == heads[:, :1])[:, 1:].any()


@pytest.mark.parametrize("layout", ["plain", BRICKS])
def test_quantised_weights_are_divided_by_whole_groups(layout):
    # 4 devices share 512 inputs: a group of 256 becomes two of 128.
    c = with_format(WeightFormat("int4", 256, layout=layout))
    local = local_config(c, 4).blocks[0].linears
    assert local["down"].weight.group == 128
    assert local["gate_up"].weight.group == 256
    model = describe(c, plan=H100, tensor_parallel=4)
    down = model.abstract_params["blocks"][0]["mlp"]["down"]["weight"]
    assert down.shape == (512, 256)
    assert down.scales.shape == (4, 256)
    specs = model.partitions["blocks"][0]["mlp"]["down"]["weight"]
    assert specs.scales == PartitionSpec(AXIS)
    assert AXIS in specs.words


def test_words_of_quantised_weights_are_not_divided():
    c = with_format(WeightFormat("int4", 4), intermediate_size=8 * 12)
    with pytest.raises(ValueError, match="would divide the words of quantised weights: down has"):
        local_config(c, 8)
    c = dataclasses.replace(config(), head_format=WeightFormat("int8", 64))
    with pytest.raises(ValueError, match="must divide the vocabulary 1001 of a quantised head"):
        local_config(c, 2)


def test_what_nobody_lists_is_refused():
    assert _BLOCK_CAN <= DECODER_CAN
    block = dataclasses.replace(config().blocks[0], whole_qk_norm=True, layer_norm=True)
    c = dataclasses.replace(config(), blocks=(block,))
    with pytest.raises(NotImplementedError, match="supports no LayerNorm over all heads"):
        local_config(c, 2)
    attention = dataclasses.replace(config().attention[0], causal=False)
    with pytest.raises(NotImplementedError, match="tensor_parallel: cannot do causal"):
        local_config(config().with_attention([attention] * 2), 2)


@pytest.mark.slow
def test_kernels_for_several_layers_run_by_a_table_or_not_at_all():
    c = parse_config(json.loads((CONFIGS / "llama-2-7b.old.json").read_text(encoding="utf-8")))
    one, several = (describe(c, plan=H100, tensor_parallel=n) for n in (1, 2))
    assert one.one_launch_possible
    assert several.one_launch(1, 1024) and several.one_launch(8, 1024)
    assert not several.one_launch(16, 1024)
    unmeasured = dataclasses.replace(H100, table=())
    for plan, ranks in ((unmeasured, 2), (H100, 4)):
        assert not describe(c, plan=plan, tensor_parallel=ranks).one_launch_possible
    for features in (chain_features, layers_features):
        assert "tensor_parallel" in features(several.local.config)
    able = {i.op for i in H100.implementations if "tensor_parallel" in i.can}
    assert able == {"decode_layers"}
    plan = with_one_launch(unmeasured, c, 2)
    assert describe(c, plan=plan, tensor_parallel=2).one_launch(1, 1024)
    assert not describe(c, plan=plan, tensor_parallel=4).one_launch(1, 1024)


@pytest.mark.parametrize(
    ("ranks", "tiles", "blocks", "want"),
    [
        (2, None, 32, 1),  # our kernel sums
        (4, None, 32, 2),
        (4, None, 31, 1),  # fewer than 4096 tokens
        (4, None, 33, 1),  # not divisible
        (1, None, 32, 1),
        (2, 4, 8, 4),
        (2, 4, 6, 1),
        (2, 1, 32, 1),
    ],
)
def test_calls_of_many_tokens_run_in_tiles(ranks, tiles, blocks, want):
    c = parse_config(json.loads((CONFIGS / "llama-2-7b.old.json").read_text(encoding="utf-8")))
    on_gpu, on_cpu = (dataclasses.replace(plan, prompt_tiles=tiles) for plan in (H100, Plan()))
    assert describe(c, plan=on_gpu, tensor_parallel=ranks).prompt_tiles(blocks, 128) == want
    if tiles is None:
        assert describe(c, plan=on_cpu, tensor_parallel=ranks).prompt_tiles(blocks, 128) == 1
