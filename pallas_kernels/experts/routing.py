"""`Routing`: how a token chooses its experts, and by what weights their results are added."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from fdjax.pallas_kernels.dispatch import Features, used_features


@dataclasses.dataclass(frozen=True)
class Routing:
    """Static description of a router. A field that is not at its default is a feature.

    The scores of the experts are a softmax or sigmoids of the logits. The experts with the largest
    scores are chosen, of equal ones the lower index. A softmax over only the chosen logits is the
    same as `normalised`.

    Attributes:
      experts: X, the number of experts.
      chosen: k, the number of experts of a token.
      normalised: the weights are the scores divided by the sum of those chosen; otherwise the
        scores.
      sigmoid: the scores are sigmoids (DeepSeek-V3, section 2.1.2).
      biased: a bias is added to the scores for the choice, but not for the weights.
      groups: the experts are in this many groups of the same size. Groups are chosen first, by the
        sum of their two largest scores, then experts within them.
      chosen_groups: the number of groups of a token.
      scale: multiplies the weights.
    """

    experts: int
    chosen: int
    normalised: bool = False
    sigmoid: bool = False
    biased: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def __post_init__(self):
        if not 0 < self.chosen <= self.experts:
            raise ValueError(
                f"routing: must choose 1 to {self.experts} of the experts, got {self.chosen}"
            )
        if not 0 < self.chosen_groups <= self.groups:
            raise ValueError(
                f"routing: must choose 1 to {self.groups} of the groups, got {self.chosen_groups}"
            )
        if self.experts % self.groups:
            raise ValueError(
                f"routing: {self.experts} experts must be in groups of the same size, "
                f"got {self.groups} groups"
            )
        size = self.experts // self.groups
        if self.groups > 1 and (size < 2 or self.chosen > size * self.chosen_groups):
            raise ValueError(
                f"routing: {self.chosen_groups} groups of {size} experts must have 2 or more "
                f"each and {self.chosen} in all"
            )

    @functools.cached_property
    def features(self) -> Features:
        """Names of the fields that are not at their defaults."""
        return used_features(self)


ROUTING_FEATURES: Features = frozenset(
    {"normalised", "sigmoid", "biased", "groups", "chosen_groups", "scale"}
)


def route(logits: Array, routing: Routing, bias: Array | None = None) -> tuple[Array, Array]:
    """Choose experts.

    Args:
      logits: [M, X].
      routing: the rule.
      bias: [X], for `routing.biased`.

    Returns:
      (experts [M, k] int32, the largest score first; their weights [M, k] fp32).
    """
    logits = logits.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if routing.sigmoid else jax.nn.softmax(logits, axis=-1)
    # A softmax keeps the order, but may round two logits to the same score.
    ranked = scores if routing.sigmoid or routing.biased or routing.groups > 1 else logits
    if bias is not None:
        ranked = ranked + bias.astype(jnp.float32)[None]
    if routing.groups > 1:
        ranked = _within_groups(ranked, routing)
    best, experts = lax.top_k(ranked, routing.chosen)
    if ranked is logits and routing.normalised:  # nothing is gathered
        return experts, jax.nn.softmax(best, axis=-1) * routing.scale
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if routing.normalised and not routing.sigmoid:
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, axis=1), axis=-1)
    elif routing.normalised:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return experts, weights * routing.scale


def only_live(experts: Array, live: Array | None, routing: Routing) -> Array:
    """experts [M,k] with X, which is no expert, in rows that are not `live` [M]; None: all are."""
    return experts if live is None else jnp.where(live[:, None], experts, routing.experts)


def _within_groups(ranked: Array, routing: Routing) -> Array:
    """Scores [M,X] with -inf outside of the chosen groups."""
    grouped = ranked.reshape(len(ranked), routing.groups, -1)
    best, _ = lax.top_k(grouped, 2)
    _, groups = lax.top_k(jnp.sum(best, axis=-1), routing.chosen_groups)
    ids = jnp.arange(routing.groups, dtype=groups.dtype)
    is_chosen = jnp.any(groups[:, :, None] == ids[None, None], axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
