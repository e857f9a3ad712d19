"""GPU kernels for LLM inference: one public function per op, several implementations each.

==========================  =========================================================
`gemm.matmul`               linear layer with fused norm, bias, gate and residual
`gemm.linear_chain`         the linear layers between two attentions of a decode step
`decode_attention`          a few query tokens against a KV cache
`append_decode_attention`   a decode step: RoPE, append to the cache, attention
`prefill_attention`         a chunk of a prompt against a KV cache
`append_prefill_attention`  a chunk of a prompt: RoPE, append to the cache, attention
`experts.moe`               a mixture of experts
`layers.decode_layers`      all layers of a decode step
`all_reduce.all_reduce`     the sum over devices
`rope.apply_rope`           rotary position embedding
`norm.rms_norm`             RMS normalisation
`plan.Plan`                 chooses the implementation for each shape
==========================  =========================================================
"""
