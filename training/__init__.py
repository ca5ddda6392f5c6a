"""How the default model came to be: texts, dialogues, tokenizer, training, samples. Not part of the package.

The way: `sources` -> `dialogues` -> `tokenizer` -> `pack` -> `train` -> `samples`. docs/model.md tells it in words.
"""
