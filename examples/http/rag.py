"""Questions about documents that all share a prefix: `python examples/http/rag.py [URL]`.

The instructions and the documents that were retrieved stand first and in a fixed order, the question last. Then the
server computes the documents once: `cached_tokens` grows from the second question on. Needs `pip install openai`.
"""

from __future__ import annotations

import sys

from openai import OpenAI

RULES = "Answer from the pages below in one sentence. If they do not say it, answer that you do not know.\n\n"
PAGES = {
    "looms": "A loom holds the warp threads under tension, so that the weft can be drawn through them. " * 6,
    "dyes": "Madder gives a red that lasts, woad a blue, and weld a yellow; alum makes them stay. " * 6,
    "wool": "Wool is washed, carded and spun before it is woven, and fulled afterwards. " * 6,
}
QUESTIONS = {
    "What holds the warp?": ("looms", "wool"),
    "What is drawn through the warp?": ("looms", "wool"),
    "What happens to wool after weaving?": ("wool", "looms"),
}


def retrieved(names: tuple[str, ...]) -> str:
    """Return pages in the order of their names: the same pages are then the same prefix, however they were ranked."""
    return "".join(f"## {name}\n{PAGES[name]}\n" for name in sorted(names))


def main(url: str = "http://127.0.0.1:8000") -> list[tuple[str, int, int]]:
    """Return answers, with the tokens of each prompt and how many of them were cached."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    found = []
    for question, names in QUESTIONS.items():
        answer = client.chat.completions.create(
            model="weft-small",
            messages=[
                {"role": "system", "content": RULES + retrieved(names)},
                {"role": "user", "content": question},
            ],
            max_tokens=32,
            temperature=0,
        )
        usage = answer.usage
        assert usage is not None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
        found.append((answer.choices[0].message.content or "", usage.prompt_tokens, cached or 0))
    return found


if __name__ == "__main__":
    for text, tokens, cached in main(*sys.argv[1:]):
        print(f"{cached} of {tokens} tokens cached: {text}")
