"""Model types that cannot run, and why."""

_EXPERTS = "its mixture of experts is unlike those of the supported families"
_LATENT = "its attention keeps a latent vector in place of keys and values (MLA)"
_DELTA_NET = "most of its layers are gated delta nets, which are not attention"
_STATE_SPACE = "it has state space layers, which are not attention"

REFUSED = {
    **dict.fromkeys(
        """
        dbrx ernie4_5_moe glm4_moe granitemoeshared hunyuan_v1_moe jetmoe llama4
        llama4_text phimoe switch_transformers
        """.split(),
        _EXPERTS,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "longcat_flash", "minicpm3"),
        _LATENT,
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA_NET
    ),
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "zamba2"), _STATE_SPACE
    ),
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"), "its layers have inputs of their own and share keys and values"
    ),
    **dict.fromkeys(
        ("gemma4", "gemma4_text"),
        "its layers have heads of several sizes and share keys and values",
    ),
}
