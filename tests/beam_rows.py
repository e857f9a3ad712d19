"""The beam searches that are compared with transformers.

The script that makes the fixture and the test that compares share this file.
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
    "llama_linear",
    "llama_yarn",
    "mistral_window",
    "qwen2_mixed",
    "qwen3",
)
PROMPT_LENGTHS = (3, 9, 17)
NEW_TOKENS = 16
MOST_BEAMS = 5
# A response that needs several pages, of the checkpoint LONG_CHECKPOINT.
LONG_CHECKPOINT, LONG_PROMPT, LONG_NEW_TOKENS = "llama3_gqa_tied", 126, 140
LONG = {"num_beams": 4, "num_return_sequences": 4, "early_stopping": "never"}


def prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """The prompt of a seed."""
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def option_sets(best: list[list[int]]) -> list[dict[str, Any]]:
    """Sets of options for a prompt, whose beams without end tokens are `best` [5][NEW_TOKENS]."""
    first = best[0]
    several = [first[5], best[1][9]]
    at_once = sorted({beam[4] for beam in best})
    grid = [
        {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
        for beams in (2, 4, 5)
        for penalty in (0.6, 1.0, 2.0)
        for early in (False, True, "never")
    ]
    ends = [[first[6]], several, [best[2][3]]]
    for i, options in enumerate(grid):
        options |= {"eos_token_id": ends[i % 3], "num_return_sequences": 1 + i % 2}
    edits: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "eos_token_id": several},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 2, "eos_token_id": several},
        {"min_new_tokens": 10, "eos_token_id": several},
        {"suppress_tokens": [first[0], first[2]]},
        {"begin_suppress_tokens": [first[0], best[1][0]], "eos_token_id": [first[3]]},
        {"bad_words_ids": [first[2:4], [first[8]]], "eos_token_id": several},
        {
            "repetition_penalty": 1.15,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [first[1:3]],
            "suppress_tokens": [first[4]],
            "eos_token_id": several,
            "min_new_tokens": 5,
        },
    ]
    edits = [{"num_beams": 4, "num_return_sequences": 4} | options for options in edits]
    shapes = [
        {"num_beams": 5, "num_return_sequences": 5},
        {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": at_once},
        {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": at_once, "length_penalty": 0.0},
        {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 1},
        {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 2, "length_penalty": -1.0},
        {"num_beams": 2, "eos_token_id": [best[0][0], best[1][0]], "early_stopping": True},
    ]
    return grid + edits + shapes


# Options of the batch of three prompts of different lengths.
RAGGED = [
    {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": None},
    {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    {"num_beams": 5, "num_return_sequences": 5, "early_stopping": "never", "length_penalty": 0.6},
]
