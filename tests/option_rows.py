"""The 720 greedy runs with options that are compared with transformers.

There are 12 checkpoints, with 5 prompts each and 12 sets of options per prompt. The script that
makes the fixture and the test that compares share this file.
"""

from typing import Any

import numpy as np

# Folders of tests/fixtures/hf whose checkpoints are in float32.
CHECKPOINTS = (
    "gemma2",
    "gemma3",
    "llama2_mha",
    "llama3_gqa_tied",
    "llama_bias",
    "llama_dynamic",
    "llama_linear",
    "llama_yarn",
    "mistral_window",
    "phi3_longrope",
    "qwen2_mixed",
    "qwen3",
)
# With the new tokens, prompts stay shorter than the length at which rotary embeddings change.
PROMPT_LENGTHS = (2, 5, 11, 23, 40)
NEW_TOKENS = 24
SETS = 12


def prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """The prompt of a seed."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def option_sets(greedy: list[int]) -> list[dict[str, Any]]:
    """`SETS` sets of options that change a run with the given greedy tokens."""
    first, second, third, fourth = greedy[:4]
    ends = [greedy[6], greedy[15]]
    words = [[first, second], [greedy[9]]]
    return [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 0.9},
        {"eos_token_id": ends},
        {"eos_token_id": ends, "min_new_tokens": 12},
        {"suppress_tokens": [second, third, greedy[8]]},
        {"begin_suppress_tokens": [first, third], "eos_token_id": [fourth]},
        {"bad_words_ids": [*words, [third, fourth, greedy[4]]]},
        {"bad_words_ids": words, "no_repeat_ngram_size": 2, "suppress_tokens": [fourth]},
        {
            "repetition_penalty": 1.15,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": words,
            "suppress_tokens": [greedy[5]],
            "begin_suppress_tokens": [first],
            "eos_token_id": ends,
            "min_new_tokens": 9,
        },
    ]
