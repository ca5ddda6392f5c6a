// Asks the model: for the next message, or for more of an answer from one of its tokens.

import { stream } from "./client.js";
import { tokenOf } from "./tokens.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TOPS = 5;
// An answer whose tokens are shown stays on the server for so long, to be continued from any of them.
const RETAIN_SECONDS = 600;
const DETAILS = { logprobs: true, top_logprobs: TOPS, retain: RETAIN_SECONDS };

// Return the body of a request. Settings that are empty are left to the server.
export function bodyOf(model, messages, settings, { continues = false, n = Number(settings.n) || 1 } = {}) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...sampling(settings) };
  if (n > 1) body.n = n;
  if (settings.schema?.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("JSON schema", settings.schema) } };
  }
  if (settings.tools?.trim()) {
    const tools = parsed("tools", settings.tools);
    body.tools = Array.isArray(tools) ? tools : [tools];
  }
  if (settings.detailed) Object.assign(body, DETAILS);
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

// Return the body of a fork of an answer: `n` continuations after its first `at` tokens.
export function forkOf({ id, choice }, at, n, settings) {
  return { id, choice, at, n, stream: true, ...sampling(settings), ...DETAILS };
}

function sampling(settings) {
  const set = NUMBERS.filter((name) => settings[name] !== undefined && settings[name] !== "");
  return Object.fromEntries(set.map((name) => [name, Number(settings[name])]));
}

function parsed(what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The ${what} in the settings must be JSON: ${error.message}`);
  }
}

// Stream answers into messages: `update` gets the number of an answer and its fields as they grow, at most once a frame.
// `start` is what the answers begin with: `content`, `reasoning`, and `tokens` where they are known.
export async function answers(path, body, update, signal, start = {}) {
  const began = performance.now();
  const found = Array.from({ length: body.n ?? 1 }, () => ({ content: "", reasoning: "", ...start, calls: [], tokens: [...(start.tokens ?? [])] }));
  const facts = { n: found.length, id: null, model: body.model, first: null, usage: null, at: Date.now() };
  const changed = new Set();
  let waiting = false;
  const show = () => {
    waiting = false;
    const total = performance.now() - began;
    for (const index of changed) {
      const { finish, ...message } = found[index];
      update(index, { ...message, facts: { ...facts, choice: index, finish, total } });
    }
    changed.clear();
  };
  try {
    for await (const event of stream(path, body, signal)) {
      facts.id = event.id ?? facts.id;
      facts.model = event.model ?? facts.model;
      if (event.usage) facts.usage = usageOf(event.usage);
      for (const choice of event.choices ?? piecesOf(event)) {
        const { delta, logprobs, finish_reason } = choice;
        const message = found[choice.index];
        if (delta.content || delta.reasoning_content || delta.tool_calls) facts.first ??= performance.now() - began;
        message.content += delta.content ?? "";
        message.reasoning += delta.reasoning_content ?? "";
        for (const part of delta.tool_calls ?? []) addCall(message.calls, part);
        message.tokens.push(...(logprobs?.content ?? []).map(tokenOf));
        message.finish = finish_reason ?? message.finish;
        changed.add(choice.index);
      }
      if (!waiting) requestAnimationFrame(show);
      waiting = true;
    }
  } finally {
    found.forEach((_, index) => changed.add(index));
    show();
  }
}

// The events of a fork, in the form of a chat's.
const piecesOf = ({ index, text, logprobs, finish_reason }) =>
  index === undefined ? [] : [{ index, delta: { content: text }, logprobs, finish_reason }];

// The usage of a fork counts each continuation; the first computes what the others find.
function usageOf(usage) {
  if (!usage.computed_tokens) return usage;
  const [cached_tokens, ...others] = usage.cached_tokens;
  return { ...usage, others, prompt_tokens_details: { cached_tokens, miss: usage.miss } };
}

function addCall(calls, part) {
  const at = part.index ?? calls.length;
  calls[at] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  const call = calls[at];
  if (part.id) call.id = part.id;
  if (part.function.name) call.function.name += part.function.name;
  call.function.arguments += part.function.arguments ?? "";
}
