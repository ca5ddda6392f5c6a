"""The tokenizer: byte-level pairs learnt on the texts, digits one by one. `python -m weft_training.tokenizer DATA`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from weft_training.pack import documents
from weft_training.template import SPECIALS

VOCABULARY = 8192
# Words with the space before them, single digits (sums are learnt digit by digit), runs of signs, runs of spaces.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Of a source only so much is looked at, so that a large one does not decide alone.
SHARE_CHARACTERS = 6_000_000


def make() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def texts(data: Path) -> Iterator[str]:
    for file in sorted((data / "text").glob("*.jsonl")) + sorted((data / "dialogues").glob("*.jsonl")):
        left = SHARE_CHARACTERS
        for text in documents(file):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    tokenizer = make()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tokenizer.train_from_iterator(texts(data), trainer)
    folder = data / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    sample = "Hello! Count from 1 to 12: def add(a, b):\n    return a + b"
    print(f"{tokenizer.get_vocab_size()} tokens; {len(sample)} characters become {len(tokenizer.encode(sample).ids)}")


if __name__ == "__main__":
    main()
