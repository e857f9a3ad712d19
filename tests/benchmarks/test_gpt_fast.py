"""The PyTorch peer generates the tokens of transformers. Needs torch and transformers."""

import socket

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of Inductor
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_tokens_are_those_of_transformers(kv_heads):
    from benchmarks import gpt_fast

    torch.manual_seed(0)
    data = CONFIG | {"num_key_value_heads": kv_heads}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**data)).eval()
    model = gpt_fast.random_model(data, "float32", "cpu")
    gpt_fast.load_transformers(model, theirs.state_dict())
    model.make_cache(2, 32)
    ids = torch.randint(128, (2, 9))
    want = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    for mode in (None, "blocks"):
        got = gpt_fast.Generator(model, mode)(ids, 12)
        assert torch.equal(got, want)
    with torch.no_grad():
        logits = model(ids, torch.arange(9), True)
    torch.testing.assert_close(logits, theirs(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [{"model_type": "qwen2"}, {"rope_scaling": {"type": "yarn"}}])
def test_other_models_are_refused(change):
    from benchmarks import gpt_fast

    with pytest.raises(ValueError, match="must be a Llama"):
        gpt_fast.Llama(CONFIG | change)


def part_of(weights, rank):
    """The weights of one of two processes."""
    part = {}
    for name, weight in weights.items():
        if name.endswith("qkv.weight"):
            heads = [w.chunk(2)[rank] for w in weight.split([64, 32, 32])]
            part[name] = torch.cat(heads)
        elif name.endswith(("gate.weight", "up.weight")):
            part[name] = weight.chunk(2)[rank]
        elif name.endswith(("out.weight", "down.weight")):
            part[name] = weight.chunk(2, dim=1)[rank]
        else:
            part[name] = weight
    return part


def generate_in_process(rank, port, weights, ids, want):
    from benchmarks import gpt_fast

    address = f"tcp://localhost:{port}"
    torch.distributed.init_process_group("gloo", address, rank=rank, world_size=2)
    model = gpt_fast.random_model(CONFIG, "float32", "cpu", ranks=2)
    model.load_state_dict(part_of(weights, rank))
    model.make_cache(2, 32)
    assert torch.equal(gpt_fast.Generator(model, mode=None)(ids, 12), want)
    torch.distributed.destroy_process_group()


def test_two_processes_share_a_model():
    from benchmarks import gpt_fast

    torch.manual_seed(0)
    model = gpt_fast.random_model(CONFIG, "float32", "cpu")
    model.make_cache(2, 32)
    ids = torch.randint(128, (2, 9))
    want = gpt_fast.Generator(model, mode=None)(ids, 12)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    arguments = port, dict(model.state_dict()), ids, want
    torch.multiprocessing.spawn(generate_in_process, arguments, nprocs=2)


def test_what_cannot_be_divided_is_refused():
    from benchmarks import gpt_fast

    with pytest.raises(ValueError, match="3 must divide num_attention_heads, got 4"):
        gpt_fast.Llama(CONFIG, ranks=3)
