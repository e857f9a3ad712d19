"""Checkpoints of real size, here small ones."""

import json
import sys

import numpy as np
import pytest

from benchmarks import checkpoints
from fdjax.bench.ceiling import measure_ceiling
from fdjax.weights.stored import stored_tensors

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def test_layers_are_repeated_in_turns(tmp_path):
    few = tmp_path / "few"
    written = checkpoints.write_random(few, CONFIG | {"num_hidden_layers": 2})
    tensors = stored_tensors(few)
    assert written == sum(tensor.nbytes for tensor in tensors.values())
    checkpoints.repeat_layers(few, tmp_path / "whole", 5)
    whole = stored_tensors(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["num_hidden_layers"] == 5
    name = "model.layers.{}.mlp.down_proj.weight".format
    views = [np.array(whole[name(i)].view()).view(np.uint16) for i in range(5)]
    for i in range(5):
        np.testing.assert_array_equal(views[i], views[i % 2])
    assert not np.array_equal(views[0], views[1])
    assert len(whole) == 5 * (len(tensors) - 3) // 2 + 3


@pytest.mark.slow
def test_it_measures(tmp_path, monkeypatch):
    def quick_ceiling(total_bytes, **options):
        assert total_bytes >= 2**24
        return measure_ceiling(2**16, runs=1, **options)

    monkeypatch.setattr(checkpoints, "measure_ceiling", quick_ceiling)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    options = [
        "--weights-only",
        "--layers",
        "1",
        "--point",
        "2x16",
        "--new-tokens",
        "6",
        "--runs",
        "2",
    ]
    output = tmp_path / "record.json"
    assert checkpoints.main([str(file), "--group", "64", *options, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert [row["case"] for row in record["rows"]] == ["first token B2 P16", "decode step B2 P16"]
    costs = record["costs"]
    assert 0.01 < costs["GB of host memory of fdjax quantize"] < 4
    seconds, gb = zip(*record["config"]["host_gb_by_second"], strict=True)
    assert list(seconds) == sorted(seconds) and list(gb) == sorted(gb)
    assert seconds[0] > 0 and seconds[-1] <= costs["seconds of fdjax quantize"]
    assert gb[-1] == costs["GB of host memory of fdjax quantize"]
    assert 0 < costs["seconds of load"] < costs["seconds of fdjax quantize"] < 60
    assert costs["GB before"] < costs["GB"] * 4
    assert record["config"]["layers_quantised"] == 1


def test_a_command_that_fails_ends_it():
    with pytest.raises(SystemExit, match="exit code 3"):
        checkpoints.run_and_watch([sys.executable, "-c", "raise SystemExit(3)"])
