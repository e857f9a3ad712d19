"""From logits to the next token: options, processors, the draw."""
