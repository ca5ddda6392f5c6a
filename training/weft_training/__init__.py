"""Training of Weft's built-in model: texts, dialogues, tokenizer, training, figures.

The order is `sources`, `dialogues`, `tokenizer`, `pack`, `train`, `export`, `show`. docs/lab/weft-small.md describes the run.
"""
