"""Bytes of the cache of beams, without a device: `python -m benchmarks.segment_cache`.

For the models of Table 1 of Wu et al. 2024, and prompts with several beams: the standard cache, in
which each beam has its own copy of the prompt, the paper's segments, and the pages of this package.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from fdjax.bench.record import environment
from fdjax.engine.memory import beam_slots
from fdjax.engine.state import cache_bytes
from fdjax.models import describe, parse_config
from fdjax.system.files import output_file, write_whole

# Model → layers and heads. A head has 128 values, and no model has fewer KV heads.
MODELS = {
    "GPT-J-6B": (32, 32),
    "Llama2-13B": (40, 40),
    "OPT-30B": (48, 56),
    "BLOOM-176B": (70, 112),
}
BATCHES = (1, 2, 4, 8, 16, 32)
# The paper's segments of a response grow by this many tokens.
_STEP = 16


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--output", type=output_file)
    parser.add_argument("--commit")
    return parser.parse_args(argv)


def sizes(name: str, batch: int, prompt: int, new: int, beams: int) -> dict[str, Any]:
    """Bytes in 16 bits at the last step: equations 2 and 3 of the paper, and this package."""
    layers, heads = MODELS[name]
    config = {"model_type": "llama", "hidden_size": 128 * heads, "num_attention_heads": heads}
    config |= {"num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 128}
    model = describe(parse_config(config | {"rms_norm_eps": 1e-5}), dtype="bfloat16")
    of_token = layers * cache_bytes(model, 1, 1)
    return {
        "model": name,
        "batch": batch,
        "standard_bytes": batch * beams * (prompt + new) * of_token,
        "segment_bytes": batch * (prompt + beams * -(-new // _STEP) * _STEP) * of_token,
        "fdjax_bytes": batch * beam_slots(prompt, new, beams=beams) * of_token,
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    case = {"prompt": args.prompt, "new": args.new, "beams": args.beams}
    rows = [sizes(name, batch, **case) for name in MODELS for batch in BATCHES]
    record = {"environment": environment(args.commit), "segment_cache": case | {"rows": rows}}
    text = json.dumps(record, indent=1) + "\n"
    if args.output:
        write_whole(args.output, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
