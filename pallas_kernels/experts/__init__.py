"""Mixture of experts: `moe`, and the rule by which a token chooses experts."""

from fdjax.pallas_kernels.experts.moe import MOE, moe, moe_features, moe_key
from fdjax.pallas_kernels.experts.reference import moe_reference
from fdjax.pallas_kernels.experts.routing import ROUTING_FEATURES, Routing, route

__all__ = [
    "MOE",
    "ROUTING_FEATURES",
    "Routing",
    "moe",
    "moe_features",
    "moe_key",
    "moe_reference",
    "route",
]
