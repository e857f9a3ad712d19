"""Text in and text out: tokenizer, prompts, chat templates, conversations."""
