"""Text in and out: tokenizer, prompts, chat templates, conversations."""
