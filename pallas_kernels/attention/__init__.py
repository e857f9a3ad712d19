"""Attention against a KV cache `[B,Hkv,S,D]`: decode and prefill, one file per implementation."""

from fdjax.pallas_kernels.attention.append import (
    append_decode_attention,
    append_prefill_attention,
    split_qkv,
)
from fdjax.pallas_kernels.attention.decode import decode_attention
from fdjax.pallas_kernels.attention.merge import merge_attention
from fdjax.pallas_kernels.attention.prefill import prefill_attention
from fdjax.pallas_kernels.attention.reference import attention_reference
from fdjax.pallas_kernels.attention.spec import alibi_slopes

__all__ = [
    "alibi_slopes",
    "append_decode_attention",
    "append_prefill_attention",
    "attention_reference",
    "decode_attention",
    "merge_attention",
    "prefill_attention",
    "split_qkv",
]
