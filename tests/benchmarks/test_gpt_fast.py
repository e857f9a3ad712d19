"""The PyTorch peer generates the tokens of transformers. Needs torch and transformers."""

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
    got = gpt_fast.Generator(model, mode=None)(ids, 12)
    assert torch.equal(got, want)
    with torch.no_grad():
        logits = model(ids, torch.arange(9), True)
    torch.testing.assert_close(logits, theirs(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [{"model_type": "qwen2"}, {"rope_scaling": {"type": "yarn"}}])
def test_other_models_are_refused(change):
    from benchmarks import gpt_fast

    with pytest.raises(ValueError, match="must be a Llama"):
        gpt_fast.Llama(CONFIG | change)
