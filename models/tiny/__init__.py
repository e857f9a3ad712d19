"""The embedded model: a small world, its tokenizer and its training run."""
