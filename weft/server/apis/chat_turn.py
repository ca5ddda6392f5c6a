"""One turn of a conversation, for any API: its prompt, the form of its answer, and the parser of that answer."""

from __future__ import annotations

from weft.base.errors import InvalidField, RequestError
from weft.base.grammar import Grammar
from weft.server.access.auth import Tenant
from weft.server.apis.split_answer import Parser, SplitAnswer
from weft.server.front import AskedPrompt, Front
from weft.server.generation import Generation
from weft.server.texts.grammars import Form
from weft.server.texts.openai_messages import Tool, ToolChoice, wanted_tools
from weft.server.texts.prompt_builder import Prompt
from weft.server.texts.schemas import SamplingFields, sampling_params
from weft.text.output import output_parser
from weft.text.reasoning import opens
from weft.text.tool_grammar import after_reasoning, auto_tool_grammar, tool_grammar

# Number of tokens at the prompt's end that show whether it opens the reasoning.
PROMPT_END = 16


class ChatTurn:
    """Tools and constraints, named as in the chat API. A grammar forces a required call, and strict arguments.

    `field` is the place of the conversation in the body.
    """

    def __init__(
        self,
        front: Front,
        *,
        field: str = "messages",
        tools: list[Tool] | None = None,
        choice: ToolChoice | None = None,
        parallel: bool | None = None,
        form: Form | None = None,
        reasoning: bool = True,
    ) -> None:
        self.front = front
        self.field = field
        self.tools, self.choice = wanted_tools(tools, choice, front.limits)
        self.parallel = parallel is not False
        self._strict = frozenset(tool.function.name for tool in tools or () if tool.function.strict)
        self.reasoning = reasoning
        self._only = self.choice.removeprefix("name:") if self.choice.startswith("name:") else None
        self._forced = self.choice == "required" or self._only is not None
        self._form = form
        if self._forced and form is not None:
            raise InvalidField("tool_choice", "forces a tool call, which excludes another constraint on the answer")
        self._prompt_end = ""

    async def generate(
        self,
        prompt: Prompt,
        body: SamplingFields,
        tenant: Tenant,
        name: str,
        *,
        max_tokens: tuple[str, int | None],
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        keeps_answer: bool = False,
    ) -> Generation:
        """Start the answers. `max_tokens` is the body's value and its name."""
        front = self.front
        tokens = prompt.tokens
        self._prompt_end = front.need_tokenizer().decode(tokens[-PROMPT_END:].tolist(), skip_special=False)
        most = front.max_tokens(max_tokens[1], len(tokens), max_tokens[0])
        params = sampling_params(
            body, front.limits, most, logprobs, prompt_logprobs, scored="top_logprobs", suggested=front.suggested
        )
        return await front.generate(
            [AskedPrompt(prompt, params, n, self.field, scores_once=True)],
            tenant,
            name=name,
            cache_salt=body.cache_salt,
            priority=body.priority,
            retain=body.retain,
            form=self._whole_form(),
            skip_special=body.skip_special_tokens is not False,
            shown=self._shown,
            keeps_answer=keeps_answer,
        )

    def _whole_form(self) -> Form | None:
        """Return the form of the whole answer, including reasoning. Known once the prompt is rendered."""
        style, token_of = self.front.reasoning_parser, self.front.need_tokenizer().special_token
        # Harmony's answers are in a channel of their own, with or without reasoning.
        framed = style is not None and (style == "harmony" or opens(style, self._prompt_end))
        reasoning = style if framed else None
        if self._forced:
            return Form(self._tool_grammar(reasoning), "tools")
        if self._form is None and self._strict and self.tools and self.front.tool_parser is not None:
            return Form(self._auto_grammar(self.front.tool_parser), "tools")
        if self._form is None or reasoning is None:
            return self._form
        try:
            return self._form.within(after_reasoning(self._form.grammar, reasoning, self._prompt_end, token_of))
        except RequestError as error:
            raise self._form.named(error) from None

    def _tool_grammar(self, reasoning: str | None) -> Grammar:
        return tool_grammar(
            self._notation,
            self.tools,
            only=self._only,
            parallel=self.parallel,
            strict=self._strict,
            token_of=self.front.need_tokenizer().special_token,
            reasoning=reasoning,
            prompt=self._prompt_end,
        )

    def _auto_grammar(self, form: str) -> Grammar:
        return auto_tool_grammar(
            # Harmony is one format for both.
            "harmony" if self.front.reasoning_parser == "harmony" else form,
            self.tools,
            self._strict,
            parallel=self.parallel,
            token_of=self.front.need_tokenizer().special_token,
            reasoning=self.front.reasoning_parser,
            prompt=self._prompt_end,
        )

    @property
    def _notation(self) -> str:
        """Return the format of tool calls; a model without one is made to use the most common one."""
        return self.front.tool_parser or "hermes"

    @property
    def _shown(self) -> frozenset[str]:
        """Return the special tokens that the parser must see."""
        return getattr(self._parser(), "markers", frozenset())

    def parts(self) -> SplitAnswer:
        """Return a parser for one answer."""
        return SplitAnswer(self._parser(), self.parallel, self.reasoning, self._forced)

    def _parser(self) -> Parser:
        calls = self._notation if self._forced else self.front.tool_parser
        return output_parser(self.front.reasoning_parser, calls if self.tools else None, self.tools, self._prompt_end)
