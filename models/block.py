"""`BlockSpec`, the one description of a decoder block, from which everything else derives.

The decoder derives its modules from it, the weight map its tensors, memory plans their buffers,
`tune` and `info` their shapes. It also decides which kernels for several layers can run a block.
"""

import dataclasses
import functools
import math

from fdjax.pallas_kernels.attention.spec import AttentionSpec
from fdjax.pallas_kernels.dispatch import NO_FEATURES, Features, used_features
from fdjax.pallas_kernels.experts.routing import ROUTING_FEATURES, Routing
from fdjax.pallas_kernels.quantised import WEIGHT_FEATURES, WeightFormat

BlockPath = tuple[str, ...]

# Features of a `BlockSpec` that the modules of `fdjax.models.decoder_block` support.
DECODER_CAN = (
    frozenset(
        """
    qkv_bias out_bias mlp_bias norm_offset norm_bias layer_norm qk_norm whole_qk_norm no_pre_norms
    post_norms sum_norms parallel shared_norm no_gate residual_multiplier tensor_parallel experts
    shared_width shared_gate router_bias expert_bias
    """.split()
    )
    | {f"experts.{name}" for name in ROUTING_FEATURES}
    | WEIGHT_FEATURES
)


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """The shape of a linear layer, and the operations fused with it.

    Attributes:
      k, n: shape of the weight [K,N], or [K,2,N/2] with a gate.
      gate: the result is act(gate) * up. All activations cost the same.
      norm: x is normalised first. An RMS norm costs as much as a LayerNorm.
      residual: a residual is added.
      result: dtype of the result; default the dtype of x.
      weight: format of a quantised weight, or None.
    """

    k: int
    n: int
    gate: bool = False
    norm: bool = False
    residual: bool = False
    result: str | None = None
    weight: WeightFormat | None = None

    @property
    def features(self) -> Features:
        """The features of `matmul` for `Plan.choose`."""
        names = frozenset(name for name in ("gate", "norm", "residual") if getattr(self, name))
        return names | (self.weight.features if self.weight else NO_FEATURES)

    @property
    def fused(self) -> bool:
        """Whether anything is fused with the product."""
        return self.gate or self.norm or self.residual

    def key(self, m: int, itemsize: int) -> dict[str, int]:
        """The key of `matmul` for `Plan.choose`, with M rows."""
        return {
            "m": m,
            "k": self.k,
            "n": self.n,
            "itemsize": itemsize,
            "gate": int(self.gate),
            "fused": int(self.fused),
            **(self.weight.key if self.weight else {}),
        }

    def __str__(self):
        weight = f"[{self.k},2,{self.n // 2}]" if self.gate else f"[{self.k},{self.n}]"
        weight += f" {self.weight}" if self.weight else ""
        return weight + " norm" * self.norm + " gate" * self.gate + " residual" * self.residual


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """A linear layer of a block.

    Attributes:
      path: path of its parameters in the block.
      k: rows of the weight.
      outs: the weight's other axes.
      bias: whether it has a bias.
      norm, gate, residual, result: fused operations and the dtype of the result, as in
        `LinearShape`.
      weight: format of a quantised weight, or None.
      ranks: number of devices whose products are summed.
    """

    path: BlockPath
    k: int
    outs: tuple[int, ...]
    bias: bool
    norm: bool = False
    gate: bool = False
    residual: bool = False
    result: str | None = None
    weight: WeightFormat | None = None
    ranks: int = 1

    @property
    def shape(self) -> LinearShape:
        """Its shape for a plan and `tune`. The bias is left out: it costs nothing measurable."""
        n = math.prod(self.outs)
        fused = {"gate": self.gate, "norm": self.norm, "residual": self.residual}
        return LinearShape(self.k, n, **fused, result=self.result, weight=self.weight)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """A decoder layer. A field that is not at its default is a feature.

    All code that runs a block lists the features it supports and refuses all others.

    Attributes:
      width: width of the residual stream, E.
      mlp_width: width of the MLP or of each expert, F.
      heads, kv_heads, head_dim: numbers of query and KV heads, size of a head: H, Hkv, D.
      norm_eps: epsilon of the norms.
      activation: activation of the MLP, a key of `ACTIVATIONS` in `pallas_kernels.activations`;
        without a gate, a key of `UNGATED` there; with experts, also a key of `PAIRED`.
      attention: scores, mask and RoPE.
      qkv_bias, out_bias, mlp_bias: whether these linear layers have a bias.
      norm_offset: added to the weights of every norm.
      layer_norm: the norms subtract the mean first (LayerNorm); otherwise they are RMS norms.
      norm_bias: the LayerNorms have a bias.
      qk_norm: q and k are normalised per head, before RoPE.
      whole_qk_norm: q and k are normalised over all heads at once, before RoPE.
      no_pre_norms: the inputs of attention and MLP are not normalised.
      post_norms: the outputs of attention and MLP are normalised before they are added to the
        residual stream.
      sum_norms: the residual stream is normalised after each addition.
      parallel: attention and MLP read the same residual stream, and both are added to it.
      shared_norm: the MLP of a parallel block reads the norm of attention.
      no_gate: the MLP is down(act(up(x))).
      residual_multiplier: multiplies each addend of the residual stream.
      experts: how experts are chosen, if the MLP is a mixture of experts with gates; None for a
        single MLP.
      shared_width: F of an MLP beside the experts that runs for every token; 0 for none.
      shared_gate: the result of that MLP is multiplied by the sigmoid of a linear layer [E,1].
      router_bias: the router, a linear layer, has a bias.
      expert_bias: the linear layers of the experts have biases.
      formats: formats of the quantised weights, by the names in `weights`.
      tensor_parallel: number of devices that share the layer. Heads and F are then for one device.
    """

    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    attention: AttentionSpec
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0
    layer_norm: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    no_pre_norms: bool = False
    post_norms: bool = False
    sum_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    no_gate: bool = False
    residual_multiplier: float = 1.0
    experts: Routing | None = None
    shared_width: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    formats: tuple[tuple[str, WeightFormat], ...] = ()
    tensor_parallel: int = 1

    def __post_init__(self):
        for name in ("width", "mlp_width", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"config: {name} must be positive, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                "config: heads must be a multiple of kv_heads, "
                f"got {self.heads} and {self.kv_heads}"
            )
        if self.norm_bias and not self.layer_norm:
            raise ValueError("config: norm_bias needs layer_norm")
        if self.qk_norm and self.whole_qk_norm:
            raise ValueError("config: qk_norm and whole_qk_norm exclude each other")
        if self.sum_norms and self.parallel:
            raise ValueError("config: sum_norms and parallel exclude each other")
        if self.shared_norm and (self.no_pre_norms or not self.parallel):
            raise ValueError("config: shared_norm needs parallel and pre-norms")
        if self.shared_width < 0:
            raise ValueError(f"config: shared_width must not be negative, got {self.shared_width}")
        if self.shared_width and self.experts is None:
            raise ValueError("config: shared_width needs experts")
        if self.shared_gate and not self.shared_width:
            raise ValueError("config: shared_gate needs shared_width")
        if self.experts is None and (self.router_bias or self.expert_bias):
            raise ValueError("config: router_bias and expert_bias need experts")
        if self.experts is not None and (self.no_gate or self.mlp_bias):
            raise ValueError("config: experts exclude no_gate and mlp_bias")

    @property
    def group(self) -> int:
        """G = H / Hkv."""
        return self.heads // self.kv_heads

    @functools.cached_property
    def features(self) -> Features:
        """Features outside of attention, as the names of their fields."""
        weights = (weight.features for _, weight in self.formats)
        routing = self.experts.features if self.experts else ()
        rules = (f"experts.{name}" for name in routing)
        return (used_features(self) - {"formats"}).union(*weights, rules)

    @functools.cached_property
    def attention_features(self) -> Features:
        """Features of its attention, such as "attention.window"."""
        rope = self.attention.rope
        names = set(self.attention.features)
        if rope is None:
            names.add("no_rope")
        elif (rope.span or rope.dim) != self.head_dim:
            names.add("partial_rope")
        return frozenset(f"attention.{name}" for name in names)

    @property
    def linears(self) -> dict[str, LinearSpec]:
        """The linear layers by name, in the order they run."""
        heads = self.heads * self.head_dim
        qkv = self.kv_heads, self.group + 2, self.head_dim
        ranks = self.tensor_parallel
        summed = self.fuses_residual
        normed = not self.no_pre_norms
        linears = {
            "qkv": LinearSpec(("attention", "qkv"), self.width, qkv, self.qkv_bias, norm=normed),
            "out": LinearSpec(
                *(("attention", "out"), heads, (self.width,), self.out_bias),
                residual=summed,
                ranks=ranks,
            ),
            **(self._mlp(normed, summed) if self.experts is None else self._around_experts()),
        }
        for name, weight in self.formats:
            if name in linears:
                linears[name] = dataclasses.replace(linears[name], weight=weight)
        return linears

    @property
    def weights(self) -> dict[str, tuple[BlockPath, int]]:
        """The path and K of each weight that may be quantised, by name."""
        weights = {name: ((*one.path, "weight"), one.k) for name, one in self.linears.items()}
        if self.experts is not None:
            path = "mlp", "experts"
            weights["experts.gate_up"] = (*path, "gate_up"), self.width
            weights["experts.down"] = (*path, "down"), self.mlp_width
        return weights

    def _mlp(self, normed: bool, summed: bool) -> dict[str, LinearSpec]:
        """The linear layers of an MLP."""
        up = ("up", (self.mlp_width,)) if self.no_gate else ("gate_up", (2, self.mlp_width))
        return {
            up[0]: LinearSpec(
                *(("mlp", up[0]), self.width, up[1], self.mlp_bias),
                norm=normed,
                gate=not self.no_gate,
            ),
            "down": LinearSpec(
                *(("mlp", "down"), self.mlp_width, (self.width,), self.mlp_bias),
                residual=summed,
                ranks=self.tensor_parallel,
            ),
        }

    def _around_experts(self) -> dict[str, LinearSpec]:
        """The linear layers beside the experts, which all read the same normalised input."""
        inputs = {"k": self.width, "bias": False}
        path, shared = ("mlp", "shared"), self.shared_width
        router = LinearSpec(
            *(("mlp", "router"), self.width, (self.experts.experts,), self.router_bias),
            result="float32",
        )
        if not shared:
            return {"router": router}
        linears = {
            "router": router,
            "shared_gate_up": LinearSpec((*path, "gate_up"), **inputs, outs=(2, shared), gate=True),
            "shared_down": LinearSpec((*path, "down"), shared, (self.width,), False),
        }
        if self.shared_gate:
            linears["shared_gate"] = LinearSpec(("mlp", "shared_gate"), **inputs, outs=(1,))
        return linears

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert; 0 without experts."""
        if self.experts is None:
            return 0
        biases = (2 * self.mlp_width + self.width) * self.expert_bias
        return 3 * self.width * self.mlp_width + biases

    def idle_experts(self, rows: int) -> int:
        """The number of experts that this many rows certainly do not choose."""
        if self.experts is None:
            return 0
        return max(0, self.experts.experts - rows * self.experts.chosen)

    @property
    def fuses_residual(self) -> bool:
        """Whether linear layers add their result to the residual stream."""
        # If devices share the layer, the residual is added after their sum.
        alone = self.tensor_parallel == 1
        return alone and not self.post_norms and self.residual_multiplier == 1

    @property
    def norms(self) -> dict[BlockPath, int]:
        """Width of each norm, by the path of its parameters."""
        there = {
            "attention_norm": not self.no_pre_norms,
            "mlp_norm": not (self.no_pre_norms or self.shared_norm),
            "attention_post_norm": self.post_norms,
            "mlp_post_norm": self.post_norms,
            "attention_sum_norm": self.sum_norms,
            "mlp_sum_norm": self.sum_norms,
        }
        norms: dict[BlockPath, int] = {(name,): self.width for name, here in there.items() if here}
        if self.qk_norm or self.whole_qk_norm:
            for name, heads in (("q_norm", self.heads), ("k_norm", self.kv_heads)):
                norms["attention", name] = self.head_dim * (heads if self.whole_qk_norm else 1)
        return norms

    @property
    def mlp_values(self) -> int:
        """Values per token that the MLP holds at the same time.

        FlashDecoding++Next (Dai et al., section V) needs buffers of 2E + F. A gated MLP holds the
        2F values of its product and the F values computed from them, and XLA of JAX 0.11 keeps the
        residual stream a third time.
        """
        if self.experts is not None:
            # The experts' sum is in fp32. The tiles of `moe` are small.
            return 6 * self.width + 3 * self.shared_width
        hidden = 2 if self.no_gate else 3
        return 3 * self.width + hidden * self.mlp_width

    @property
    def pair_values(self) -> int:
        """Values per token of its pairs with experts: E of input or result, and F hidden ones."""
        return 0 if self.experts is None else self.experts.chosen * (self.width + self.mlp_width)

    @property
    def attention_values(self) -> int:
        """Values per token that attention holds: residual; Q, K and V; rotated Q or the result."""
        return self.width + 2 * (self.heads + self.kv_heads) * self.head_dim
