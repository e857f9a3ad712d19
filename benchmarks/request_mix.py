"""A random list of requests whose lengths are log-normal, like those of users."""

import numpy as np


def requests(
    count: int, vocab_size: int, scale: float = 1.0, seed: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Return (prompts, numbers of new tokens).

    Args:
      count: number of requests.
      vocab_size: number of token ids to draw from.
      scale: factor of all lengths. With 1, prompts have a median of 384 tokens (σ 0.8, at most
        2048), and answers of 160 (σ 0.7, at most 768).
      seed: seed of the token ids; the lengths do not depend on it.
    """
    rng = np.random.default_rng(0)

    def lengths(median, sigma, most):
        drawn = rng.lognormal(np.log(median), sigma, count)
        return np.clip((scale * np.minimum(drawn, most)).astype(int), 1, None).tolist()

    prompts, new = lengths(384, 0.8, 2048), lengths(160, 0.7, 768)
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in prompts], new
