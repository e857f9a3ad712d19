"""A Llama in plain PyTorch, in the manner of gpt-fast: static cache, torch.compile, CUDA graphs.

gpt-fast (https://github.com/pytorch-labs/gpt-fast) shows the speed of PyTorch without custom
kernels. As in gpt-fast, q, k and v are one product, the cache has a fixed size, Inductor generates
the attention of a decode step, and a step is one CUDA graph. Prompts run through FlashAttention.
Processes of `torch.distributed` may share a model by tensor parallelism: each has a part of the
heads and of the MLP, and the whole embedding and head.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._dynamo import mark_static_address
from torch._inductor import config as inductor_config
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional as F


def summed(x: Tensor, ranks: int) -> Tensor:
    """The sum over the processes that share a model."""
    if ranks == 1:
        return x
    return functional_collectives.all_reduce(x, "sum", distributed.group.WORLD)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], ranks: int):
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim = config.get("head_dim") or width // heads
        self.heads = heads // ranks
        self.kv_heads = (config.get("num_key_value_heads") or heads) // ranks
        both = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(width, both, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, width, bias=False)

    def make_cache(self, batch: int, slots: int, like: Tensor) -> None:
        """Empty caches [B, Hkv, S, D] in the dtype and on the device of a tensor."""
        for name in ("keys", "values"):
            empty = like.new_zeros(batch, self.kv_heads, slots, self.head_dim)
            # A CUDA graph may then write into the cache.
            mark_static_address(empty)
            self.register_buffer(name, empty, persistent=False)

    def forward(
        self, x: Tensor, rotation: Tensor, positions: Tensor, mask: Tensor | None
    ) -> Tensor:
        """x [B,T,E] of these positions [T]; without a mask [1,S], x is a prompt from its start."""
        b, t, _ = x.shape
        parts = self.qkv(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, rotation), rotate(k, rotation)
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        if mask is None:
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            # With one token, the query heads of a group are the rows of a product.
            q = q.view(b, self.kv_heads, -1, self.head_dim)
            scores = (q @ self.keys.transpose(-1, -2)).float() * self.head_dim**-0.5
            p = scores.masked_fill(~mask, -math.inf).softmax(-1).to(x.dtype)
            o = p @ self.values
        return self.out(o.reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any], ranks: int):
        super().__init__()
        width, hidden, eps = (
            config[n] for n in ("hidden_size", "intermediate_size", "rms_norm_eps")
        )
        hidden, self.ranks = hidden // ranks, ranks
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.attention = Attention(config, ranks)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, y: Tensor, *where: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream is x + y [B,T,E].

        Whoever reads it adds, so that Inductor can add in the kernel of the norm also where each
        block is compiled by itself.
        """
        x = x + y
        x = x + summed(self.attention(self.attention_norm(x), *where), self.ranks)
        y = self.mlp_norm(x)
        return x, summed(self.down(F.silu(self.gate(y)) * self.up(y)), self.ranks)


class Head(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.linear = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Logits [B,V] of the residual stream x + y [B,E]."""
        return self.linear(self.norm(x + y))


class Llama(nn.Module):
    """A Llama 2 or 3 described by a config.json, or the part of one of `ranks` processes.

    Raises:
      ValueError: the config needs a feature that this model lacks, or cannot be divided.
    """

    def __init__(self, config: dict[str, Any], ranks: int = 1):
        super().__init__()
        scaled = config.get("rope_scaling")
        if config["model_type"] != "llama" or scaled or config.get("attention_bias"):
            raise ValueError("gpt-fast: must be a Llama without rope_scaling and attention_bias")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (config.get(name) or 0) % ranks:
                raise ValueError(f"gpt-fast: {ranks} must divide {name}, got {config[name]}")
        self.config = config
        self.embed = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.blocks = nn.ModuleList(
            Block(config, ranks) for _ in range(config["num_hidden_layers"])
        )
        self.head = Head(config)
        if config.get("tie_word_embeddings"):
            self.head.linear.weight = self.embed.weight

    @torch.no_grad()
    def make_cache(self, batch: int, slots: int) -> None:
        """Caches of every layer, and the tables that depend on their size."""
        for block in self.blocks:
            block.attention.make_cache(batch, slots, self.embed.weight)
        device, dim = self.embed.weight.device, self.blocks[0].attention.head_dim
        theta = (self.config.get("rope_parameters") or self.config).get("rope_theta", 1e4)
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        angles = torch.arange(slots, device=device)[:, None] * theta**-exponents
        self.register_buffer(
            "rotations", torch.stack([angles.cos(), angles.sin()]), persistent=False
        )
        causal = torch.ones(slots, slots, dtype=torch.bool, device=device).tril()
        self.register_buffer("causal", causal, persistent=False)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        prompt: bool,
        run_block: Callable = Block.forward,
        run_head: Callable = Head.forward,
    ) -> Tensor:
        """Logits [B,V] after the last of the ids [B,T], whose positions are [T].

        Args:
          ids: the tokens.
          positions: their positions.
          prompt: whether they begin at the start; else T = 1.
          run_block: runs a `Block`.
          run_head: runs the `Head`.
        """
        mask = None if prompt else self.causal[positions]
        rotation = self.rotations[:, positions]
        x = self.embed(ids)
        y = torch.zeros_like(x)
        for block in self.blocks:
            x, y = run_block(block, x, y, rotation, positions, mask)
        return run_head(self.head, x[:, -1], y[:, -1])


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """RoPE of x [B,H,T,D] by halves, with cosines and sines [2,T,D/2]."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Generator:
    """Generates greedily with a compiled prefill and a compiled decode step.

    Args:
      model: the model with its weights.
      mode: mode of torch.compile for the step; None runs eagerly. "blocks" compiles one block for
        all, which takes seconds however many there are, and records the step as a CUDA graph.
      compile_prefill: whether the prefill is compiled, too, if the step is. gpt-fast does not by
        default. For Llama 2 7B, compiling both takes three minutes.
    """

    def __init__(
        self, model: Llama, mode: str | None = "reduce-overhead", compile_prefill: bool = True
    ):
        self.model = model
        self._prefill, self._step = self._first, self._next
        if not mode:
            return
        inductor_config.coordinate_descent_tuning = True
        if mode == "blocks":
            parts = {
                "run_block": torch.compile(Block.forward, fullgraph=True, dynamic=False),
                "run_head": torch.compile(Head.forward, fullgraph=True, dynamic=False),
            }
            if compile_prefill:
                self._prefill = functools.partial(self._first, **parts)
            self._step = Recorded(functools.partial(self._next, **parts))
        else:
            if compile_prefill:
                self._prefill = torch.compile(self._first, fullgraph=True)
            self._step = torch.compile(self._next, mode=mode, fullgraph=True)

    def _first(self, ids: Tensor, positions: Tensor, **parts) -> Tensor:
        return self.model(ids, positions, True, **parts).argmax(-1, keepdim=True)

    def _next(self, token: Tensor, position: Tensor, **parts) -> Tensor:
        return self.model(token, position, False, **parts).argmax(-1, keepdim=True)

    @torch.no_grad()
    def __call__(self, ids: Tensor, new_tokens: int) -> Tensor:
        """The prompts [B,P], each followed by `new_tokens` greedy tokens: [B, P + new_tokens]."""
        device, length = ids.device, ids.shape[1]
        token = self._prefill(ids, torch.arange(length, device=device)).clone()
        tokens = [ids, token]
        position = torch.tensor([length], device=device)
        for _ in range(new_tokens - 1):
            token = self._step(token, position).clone()
            tokens.append(token)
            position += 1
        return torch.cat(tokens, dim=1)


class Recorded:
    """A decode step (token, position) → token as a CUDA graph, recorded when it is first called.

    On a CPU it runs without a graph.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]):
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, token: Tensor, position: Tensor) -> Tensor:
        """The next tokens [B,1]. The next call overwrites them."""
        if token.device.type != "cuda":
            return self._step(token, position)
        if self._graph is None:
            self._token, self._position = token.clone(), position.clone()
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                for _ in range(3):
                    self._step(self._token, self._position)
            torch.cuda.current_stream().wait_stream(other)
            self._graph = torch.cuda.CUDAGraph()
            # NCCL's own threads may call CUDA meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._next = self._step(self._token, self._position)
        self._token.copy_(token)
        self._position.copy_(position)
        self._graph.replay()
        return self._next


def random_model(config: dict[str, Any], dtype: str, device: str, ranks: int = 1) -> Llama:
    """A `Llama` with random weights of the scale of a trained one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = Llama({"rms_norm_eps": 1e-6} | config, ranks).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
    return model


def _tinygemm(name: str) -> Any:
    """A PyTorch operator with a private name."""
    return getattr(torch.ops.aten, f"_{name}")


class Int4Linear(nn.Module):
    """A linear layer with random weights of 4 bits in groups of 128, through PyTorch's tinygemm."""

    _GROUP, _K_TILES = 128, 8

    def __init__(self, k: int, n: int, device: torch.device):
        super().__init__()
        pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        weight = _tinygemm("convert_weight_to_int4pack")(pairs, self._K_TILES)
        scales = torch.full((k // self._GROUP, n, 2), 0.0, dtype=torch.bfloat16, device=device)
        scales[..., 0] = math.sqrt(12 / k) / 16
        self.register_buffer("weight", weight)
        self.register_buffer("scales_and_zeros", scales)
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        product = _tinygemm("weight_int4pack_mm")
        y = product(rows, self.weight, self._GROUP, self.scales_and_zeros)
        return y.reshape(*x.shape[:-1], self.n)


def quantise(model: nn.Module) -> None:
    """Replace all linear layers of a model in bfloat16 on a GPU by random ones of 4 bits."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            n, k = child.weight.shape
            setattr(model, name, Int4Linear(k, n, child.weight.device))
        else:
            quantise(child)


def load_transformers(model: Llama, weights: dict[str, Tensor]) -> None:
    """Take the weights of a transformers Llama, by the names of its state dict."""
    ours = {"embed.weight": weights["model.embed_tokens.weight"]}
    ours["head.norm.weight"] = weights["model.norm.weight"]
    ours["head.linear.weight"] = weights.get("lm_head.weight", ours["embed.weight"])
    names = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    for i in range(len(model.blocks)):
        theirs = f"model.layers.{i}"
        for name, their in names.items():
            ours[f"blocks.{i}.{name}.weight"] = weights[f"{theirs}.{their}.weight"]
        parts = [weights[f"{theirs}.self_attn.{n}_proj.weight"] for n in "qkv"]
        ours[f"blocks.{i}.attention.qkv.weight"] = torch.cat(parts)
    model.load_state_dict(ours)
