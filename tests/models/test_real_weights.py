"""Published weights, tokenizers and templates: Weft's answers are transformers' answers, and hits equal cold runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.models.real_weights import INSTALL, PUBLISHED, Published, convert, missing
from weft import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "memory": "512MiB", "threads": 1, "max_length": 1536, "progress": False}
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Ein Zug fährt um 8:15 Uhr in Köln ab, naïve 中文 🚂 \t and 3.14159",
)
# Longer than Gemma's window of 512 tokens.
STORY = " ".join(f"On day {day} the crew sailed {3 * day} miles and wrote down what they saw." for day in range(1, 60))
COUNT = 24
# Of log-probabilities in float32, from logits of about 20: the order of sums differs. Seen: 2.6e-5 and 4.7e-5.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Real:
    """A published model in both implementations."""

    published: Published
    llm: LLM
    twin: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return [*self.published.starts_with, *self.llm.tokenizer.encode(text)]


@pytest.fixture(scope="module", params=PUBLISHED)
def real(request, tmp_path_factory):
    published = PUBLISHED[request.param]
    absent = missing(published)
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed: {INSTALL}")
    import transformers

    folder = convert(published, tmp_path_factory.mktemp(request.param))
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        yield Real(published, llm, twin, tokenizer)


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)


def expected_logprobs(twin: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = twin(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.slow
def test_texts_have_the_tokens_that_transformers_gives_them(real):
    assert real.twin.config.architectures == [real.published.architecture]
    for text in (*TEXTS, STORY, "", " leading", "trailing \n\n"):
        ours = real.llm.tokenizer.encode(text)
        assert ours == real.tokenizer(text, add_special_tokens=True)["input_ids"], text
        assert real.llm.tokenizer.decode(ours) == real.tokenizer.decode(ours), text


@pytest.mark.slow
def test_conversations_are_written_as_the_published_template_says(real):
    if not real.published.chats:
        assert real.llm.template is None
        assert real.tokenizer.chat_template is None
        return
    talk = [{"role": "user", "content": "Hi, I'm Zoë."}, {"role": "assistant", "content": "Hello!"}]
    for messages in (talk[:1], [{"role": "system", "content": "Be brief."}, *talk, talk[0]]):
        text = real.llm.template.render(messages)
        assert text == real.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.slow
@pytest.mark.parametrize("text", [*TEXTS, STORY], ids=["fact", "tale", "code", "signs", "long"])
def test_greedy_answers_and_their_log_probabilities_are_those_of_transformers(real, text):
    prompt = real.encode(text)
    made = real.twin.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=COUNT, min_new_tokens=COUNT, pad_token_id=0
    )
    [ours] = real.llm.generate(prompt, greedy(), cache_salt=text, use_tqdm=False)
    assert ours.cached_tokens == 0
    assert ours.token_ids == made[0, len(prompt) :].tolist()
    expected = expected_logprobs(real.twin, prompt, ours.token_ids)
    found = torch.tensor([score.logprob for score in ours.logprobs])
    assert (found - expected).abs().max() <= TOLERANCE


@pytest.mark.slow
def test_a_hit_answers_as_a_cold_run_does(real):
    """After a prompt, after an answer, and where two conversations part, behind Gemma's window and before it."""
    llm, story = real.llm, real.encode(STORY)
    [first] = llm.generate(story, greedy(), cache_salt="hits", use_tqdm=False)
    follow = [*story, *first.token_ids, *real.llm.tokenizer.encode(" Then the storm came, and")]
    apart = [*story[:400], *real.llm.tokenizer.encode(" And then they all went home, because")]
    for prompt in (story, follow, apart):
        [cold] = llm.generate(prompt, greedy(), cache_salt=f"cold {len(prompt)}", use_tqdm=False)
        [hit] = llm.generate(prompt, greedy(), cache_salt="hits", use_tqdm=False)
        assert cold.cached_tokens == 0
        assert hit.token_ids == cold.token_ids
        difference = [abs(a.logprob - b.logprob) for a, b in zip(hit.logprobs, cold.logprobs, strict=True)]
        assert max(difference) <= TOLERANCE
        # What parts in the middle is reused as far as a resume point before it reaches.
        assert hit.cached_tokens >= (0 if prompt is apart else len(prompt) - 192)


@pytest.mark.slow
def test_an_instructed_model_answers_sensibly(real):
    if not real.published.chats:
        pytest.skip("a base model, which was never taught to answer")
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    [answer] = real.llm.chat(question, SamplingParams(temperature=0.0, max_tokens=60), use_tqdm=False)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
