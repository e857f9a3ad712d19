"""Trying options does not compile again and again."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

_SWEEP = textwrap.dedent(
    """
    import itertools, json, time
    import fdjax

    lm = fdjax.load("tiny")
    began = time.perf_counter()
    count = 0
    for temperature, tail, cut, penalty, ngram, extra in itertools.product(
        (None, 0.7, 1.3), (0, 1), (0, 1), (1.0, 1.2), (0, 3), (0, 1, 2)
    ):
        options = {"max_new_tokens": 16, "repetition_penalty": penalty}
        options["no_repeat_ngram_size"] = ngram
        if temperature:
            options |= {"temperature": temperature, "seed": 1}
            options |= {"top_k": 20} if tail else {}
            options |= {"top_p": 0.9} if cut else {}
        else:
            options |= {"frequency_penalty": 0.5} if tail else {}
            options |= {"bad_words_ids": [[5, 6]]} if cut else {}
        options |= ({}, {"return_logprobs": 2}, {"stop_strings": ["ing"]})[extra]
        options |= {"suppress_tokens": [3, 4]} if extra == 2 else {}
        lm.generate("Once upon a time", **options)
        count += 1
    seconds = time.perf_counter() - began
    print(json.dumps({"count": count, "seconds": seconds} | lm.program_counts()))
    """
)


@pytest.mark.soak
def test_144_sets_of_options_take_less_than_a_minute(tmp_path):
    """Nothing is compiled yet, with two cores. Run it alone: other tests would take its time."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _SWEEP], env=environment, capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    print(result)
    assert result["count"] == 144
    assert result["decode_steps"] <= 5
    assert result["seconds"] <= 60
