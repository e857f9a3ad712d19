"""From logits to the next token: options, logits processors, sampling."""
