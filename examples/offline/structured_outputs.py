"""Answers of a given form: a choice, a regular expression, a JSON schema, a grammar."""

from __future__ import annotations

import sys

from weft import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 12}, "kind": {"enum": ["sedan", "truck", "coupe"]}},
    "required": ["brand", "kind"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""
FORMS = {
    "Classify this sentiment: I love it!": StructuredOutputsParams(choice=["Positive", "Negative"]),
    "Write an email address of Alan Turing.": StructuredOutputsParams(regex=r"[a-z]{1,9}\.[a-z]{1,9}@[a-z]{2,9}\.com"),
    "Describe the most iconic car of the 90s as JSON.": StructuredOutputsParams(json=SCHEMA),
    "Write SQL that shows col_1 of table_1.": StructuredOutputsParams(grammar=GRAMMAR),
}


def main(model: str | None = None) -> list[RequestOutput]:
    llm = LLM(model=model, max_model_len=512)
    # One set of parameters for each prompt.
    sampling_params = [SamplingParams(structured_outputs=form, seed=1, max_tokens=100) for form in FORMS.values()]
    outputs = llm.generate(list(FORMS), sampling_params, use_tqdm=False)
    for output in outputs:
        print(f"{output.prompt!r}: {output.outputs[0].text!r}")
    llm.close()
    return outputs


if __name__ == "__main__":
    main(*sys.argv[1:])
