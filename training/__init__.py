"""How the default model came to be: texts, dialogues, tokenizer, training, figures. Not part of the package.

The way: `sources` -> `dialogues` -> `tokenizer` -> `pack` -> `train` -> `export` -> `show`. docs/model.md tells it.
"""
