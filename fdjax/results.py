"""What `LM.generate` returns."""

import dataclasses

from fdjax.models import Model

# Datasheet memory bandwidth in GB/s by device kind.
PEAK_GB_PER_S = {
    "NVIDIA A100-SXM4-40GB": 1555.0,
    "NVIDIA A100-SXM4-80GB": 2039.0,
    "NVIDIA A100 80GB PCIe": 1935.0,
    "NVIDIA H100 80GB HBM3": 3352.0,
    "NVIDIA H100 PCIe": 2039.0,
    "NVIDIA H200": 4800.0,
    "NVIDIA B200": 8000.0,
}


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call cost.

    Attributes:
      prompt_tokens: tokens of all prompts.
      decode_tokens: tokens generated, all rows.
      prefill_seconds: from the call to the first token of the last row.
      decode_seconds: from there to the last token.
      decode_bytes: bytes the decode steps had to read: weights each step, live cache slots.
      peak_gb_per_s: datasheet bandwidth of the device, or None if it is not known.
    """

    prompt_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_bytes: int = 0
    decode_steps: int = 0
    peak_gb_per_s: float | None = None

    @property
    def seconds(self) -> float:
        """The whole call."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of the whole call."""
        return self.decode_tokens / self.seconds if self.seconds else 0.0

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per decode step (one token for each row), the first token left out."""
        return 1e3 * self.decode_seconds / self.decode_steps if self.decode_steps else None

    @property
    def gb_per_s(self) -> float | None:
        """Memory traffic the decode steps could not avoid, over the time they took."""
        return self.decode_bytes / self.decode_seconds / 1e9 if self.decode_steps else None

    @property
    def share_of_peak(self) -> float | None:
        """`gb_per_s` over the datasheet's bandwidth."""
        if self.gb_per_s is None or self.peak_gb_per_s is None:
            return None
        return self.gb_per_s / self.peak_gb_per_s

    def __str__(self) -> str:
        """One line for people."""
        line = (
            f"{self.prompt_tokens} prompt + {self.decode_tokens} new tokens "
            f"in {self.seconds:.2f} s, {self.tokens_per_s:.1f} tok/s"
        )
        if self.ms_per_token is not None:
            line += f", {self.ms_per_token:.2f} ms/step, {self.gb_per_s:.1f} GB/s"
        if self.share_of_peak is not None:
            line += f" ({self.share_of_peak:.0%} of peak)"
        return line


@dataclasses.dataclass(frozen=True)
class GenerateResult:
    """The outcome of `LM.generate`, one entry per prompt.

    Attributes:
      tokens: generated ids, the end-of-sequence id included.
      texts: their text, special tokens left out; None without a tokenizer.
      finish_reasons: "stop" (end of sequence) or "length".
      logprobs: log-probability of each token under the raw model, if asked for.
      stats: what the call cost.
    """

    tokens: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    logprobs: list[list[float]] | None
    stats: Stats

    @property
    def text(self) -> str:
        """The text of the only prompt.

        Raises:
          ValueError: there were several prompts, or no tokenizer.
        """
        if self.texts is None or len(self.texts) != 1:
            raise ValueError("text: needs one prompt and a tokenizer; see `texts` and `tokens`")
        return self.texts[0]


def step_bytes(model: Model, params_bytes: int, embed_bytes: int) -> int:
    """Bytes of weights one decode step reads: all but an embedding table that is only looked up."""
    return params_bytes if model.config.tie_embeddings else params_bytes - embed_bytes
