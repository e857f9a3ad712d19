"""lm-evaluation-harness on fdjax: `python -m benchmarks.lm_eval_adapter run --model fdjax ...`.

It takes the command line of the harness, with `--model_args pretrained=FOLDER_OR_HUB_ID` and other
arguments of `FdjaxLM`. Prompts are encoded, cut and scored as the harness does for transformers, so
scores can be compared.
"""

import sys
from collections.abc import Iterator
from itertools import batched

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import fdjax


@register_model("fdjax")
class FdjaxLM(TemplateLM):
    """Adapts an `fdjax.LM` to the harness.

    Args:
      pretrained: a folder or hub id; "tiny" is the embedded model.
      dtype: dtype of the weights; default the checkpoint's.
      max_length: context in tokens; default the model's.
      max_gen_toks: limit of generated tokens, for tasks without one.
      batch_size: largest number of requests that run together.
      max_batch_size, device: passed by the harness and ignored. fdjax runs on JAX's default device.
    """

    def __init__(
        self,
        pretrained: str = "tiny",
        *,
        dtype: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        super().__init__()
        self.lm = fdjax.load(pretrained, dtype=dtype)
        self.tokenizer = self.lm.tokenizer
        self.max_length = int(max_length or self.lm.config.max_position_embeddings)
        self.max_gen_toks = int(max_gen_toks)
        self.batch_size = 16 if batch_size == "auto" else int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self._special("eos_token")

    @property
    def prefix_token_id(self) -> int:
        return self._special("bos_token", "eos_token")

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.folder)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if chat_template is False:
            return None
        return self.tokenizer.chat_template.choose(None if chat_template is True else chat_template)

    def apply_chat_template(self, chat_history, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.chat_template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        if add_special_tokens is None:
            begun = self.tokenizer.token(self.prefix_token_id)
            add_special_tokens = not string.startswith(begun)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False):
        windows = []
        for i, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(i, *make_disjoint_window(pair)) for pair in rolling]
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for (i, *_), (logprob, _) in zip(windows, scores, strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_):
        """(log-likelihood, whether greedy decoding gives it) of each continuation, in order."""
        results: list[tuple[float, bool] | None] = [None] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i][1:])))
        for group in self._batches(order, disable_tqdm):
            # The last token is only predicted, so it needs no room in the context.
            texts = [(requests[i][1] + requests[i][2])[-self.max_length - 1 :] for i in group]
            scored = self.lm.score(texts, batch_size=self.batch_size)
            for i, logprobs, likeliest in zip(
                group, scored.logprobs, scored.likeliest, strict=True
            ):
                n = len(requests[i][2])
                results[i] = sum(logprobs[-n:]), all(likeliest[-n:])
                if isinstance(requests[i][0], tuple):
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        results: list[str | None] = [None] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        end = self.tokenizer.token(self.eot_token_id)
        for order in groups.values():
            options = normalize_gen_kwargs(requests[order[0]].args[1], self.max_gen_toks)
            until = handle_stop_sequences(options.pop("until", None), eos=end)
            room = self.max_length - options["max_gen_toks"]
            if room < 1:
                raise ValueError(
                    f"max_gen_toks must be below the context of {self.max_length}, "
                    f"got {options['max_gen_toks']}"
                )
            prompts = {i: self.tok_encode(requests[i].args[0])[-room:] for i in order}
            order.sort(key=lambda i: -len(prompts[i]))
            for group in self._batches(order, disable_tqdm):
                texts = self._generate([prompts[i] for i in group], options, until)
                for i, text in zip(group, texts, strict=True):
                    results[i] = postprocess_generated_text(text, until, None)
                    self.cache_hook.add_partial("generate_until", requests[i].args, results[i])
        return results

    def _generate(self, prompts: list[list[int]], options: dict, until: list[str]) -> list[str]:
        names = ("temperature", "top_p", "top_k", "min_p", "seed") * bool(options["do_sample"])
        return self.lm.generate(
            prompts,
            max_new_tokens=options["max_gen_toks"],
            do_sample=options["do_sample"],
            stop_strings=tuple(filter(None, until)),
            **{name: options[name] for name in names if name in options},
        ).texts

    def _batches(self, order: list[int], quiet: bool) -> Iterator[tuple[int, ...]]:
        with tqdm(total=len(order), disable=quiet or not sys.stderr.isatty()) as bar:
            for group in batched(order, self.batch_size):
                yield group
                bar.update(len(group))

    def _special(self, *names: str) -> int:
        tokens = self.tokenizer.chat_template.special_tokens
        for name in names:
            ids = self.tokenizer.encode(tokens.get(name, ""), add_special_tokens=False)
            if len(ids) == 1:
                return ids[0]
        raise ValueError(f"{self.tokenizer_name}: tokenizer_config.json must name {names[0]}")


if __name__ == "__main__":
    cli_evaluate()
