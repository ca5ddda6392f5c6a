"""Text processing: tokenizer, chat template, detokenizer, stop strings. No torch, no engine."""
