"""Text in, text out: tokenizer, chat template, detokenizer, stop strings. No torch, no engine."""
