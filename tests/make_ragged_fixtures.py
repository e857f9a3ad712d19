"""Writes tests/hf_fixtures/ragged.json: which runs of transformers do not depend on the batch.

    python tests/make_ragged_fixtures.py           # needs torch and transformers

All prompts of a case as one batch, padded on the left, greedy: kept are those that transformers
continues as it does alone. Where a rotary embedding goes by the length of the longest row, the
others are continued differently.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

FIXTURES = Path(__file__).parent / "hf_fixtures"
PROMPTS = range(5)


@torch.no_grad()
def independent_of_the_batch(folder: Path) -> list[int]:
    """The prompts of a case whose tokens are the same in a ragged batch."""
    with np.load(folder / "expected.npz") as arrays:
        prompts = [arrays[f"prompt_{i}"].tolist() for i in PROMPTS]
        alone = [arrays[f"tokens_{i}"] for i in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    # A checkpoint's own sampling defaults and stop tokens would change the greedy run.
    model.generation_config = GenerationConfig(do_sample=False)
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=len(alone[0]), do_sample=False, pad_token_id=0
    )
    return [i for i in PROMPTS if np.array_equal(out[i, longest:].numpy(), alone[i])]


def main() -> None:
    torch.set_num_threads(1)
    folders = sorted(path.parent for path in FIXTURES.glob("*/config.alternate.json"))
    found = {folder.name: independent_of_the_batch(folder) for folder in folders}
    text = json.dumps(found, indent=2)
    (FIXTURES / "ragged.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
