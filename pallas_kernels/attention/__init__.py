"""Attention against a KV cache `[B,Hkv,S,D]`: decode and prefill, one file per implementation."""

from fdjax.pallas_kernels.attention.append import (
    append_decode_attention,
    append_prefill_attention,
    split_qkv,
    with_norms,
)
from fdjax.pallas_kernels.attention.cache import QuantisedCache
from fdjax.pallas_kernels.attention.decode import DECODE_ATTENTION, decode_attention
from fdjax.pallas_kernels.attention.divided import (
    append_decode_divided,
    append_prefill_divided,
)
from fdjax.pallas_kernels.attention.hopper.widen import rows_at_once
from fdjax.pallas_kernels.attention.merge import merge_attention
from fdjax.pallas_kernels.attention.operands import BeamSlots
from fdjax.pallas_kernels.attention.prefill import PREFILL_ATTENTION, prefill_attention
from fdjax.pallas_kernels.attention.reference import attention_reference
from fdjax.pallas_kernels.attention.shared import (
    SHARED_PAGES,
    SharedPages,
    can_share,
    find_shared,
    reading_shape,
)
from fdjax.pallas_kernels.attention.spec import AttentionSpec, alibi_slopes

__all__ = [
    "DECODE_ATTENTION",
    "PREFILL_ATTENTION",
    "SHARED_PAGES",
    "AttentionSpec",
    "BeamSlots",
    "QuantisedCache",
    "SharedPages",
    "alibi_slopes",
    "append_decode_attention",
    "append_decode_divided",
    "append_prefill_attention",
    "append_prefill_divided",
    "attention_reference",
    "can_share",
    "decode_attention",
    "find_shared",
    "merge_attention",
    "prefill_attention",
    "reading_shape",
    "rows_at_once",
    "split_qkv",
    "with_norms",
]
