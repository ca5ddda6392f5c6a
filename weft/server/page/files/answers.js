// Asks the model for the next message, and shows what is known about an answer: speed, reuse, tokens.

import { html, useState } from "./vendor/preact.js";
import { stream } from "./client.js";
import { visible } from "./markdown.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
export const TOPS = 5;

// The body of a request. Settings that are empty are left to the server.
export function bodyOf(model, messages, settings, continues = false) {
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.schema?.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("JSON schema", settings.schema) } };
  }
  if (settings.tools?.trim()) body.tools = toolsOf(parsed("tools", settings.tools));
  if (settings.detailed) Object.assign(body, { logprobs: true, top_logprobs: TOPS });
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  return body;
}

function parsed(what, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The ${what} in the settings must be JSON: ${error.message}`);
  }
}

const toolsOf = (value) => (Array.isArray(value) ? value : [value]);

// Stream an answer into a message: `update` gets its fields as they grow, at most once a frame.
export async function answer(body, update, signal, start = "") {
  const began = performance.now();
  const found = { content: start, reasoning: "", calls: [], tokens: [] };
  let first = null;
  let usage = null;
  let finish = null;
  let model = body.model;
  let waiting = false;
  const shape = () => ({
    ...found,
    facts: { first, total: performance.now() - began, usage, finish, model, at: Date.now() },
  });
  const show = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      update(shape());
    });
  };
  try {
    for await (const event of stream("/v1/chat/completions", body, signal)) {
      model = event.model ?? model;
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const { delta, logprobs } = choice;
      if (first === null && (delta.content || delta.reasoning_content || delta.tool_calls)) first = performance.now() - began;
      found.content += delta.content ?? "";
      found.reasoning += delta.reasoning_content ?? "";
      for (const part of delta.tool_calls ?? []) addCall(found.calls, part);
      for (const each of logprobs?.content ?? []) {
        found.tokens.push([each.token, each.logprob, each.top_logprobs.map((top) => [top.token, top.logprob])]);
      }
      finish = choice.finish_reason ?? finish;
      show();
    }
  } finally {
    waiting = true; // no later frame may overwrite the last one
    update(shape());
  }
}

function addCall(calls, part) {
  const at = part.index ?? calls.length;
  calls[at] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
  const call = calls[at];
  if (part.id) call.id = part.id;
  if (part.function.name) call.function.name += part.function.name;
  call.function.arguments += part.function.arguments ?? "";
}

// The tokens of the prompt by where they came from.
function shares(usage) {
  const details = usage.prompt_tokens_details ?? {};
  const { cached_tokens: cached = 0, loaded_tokens: loaded = 0, disk_tokens: disk = 0, remote_tokens: remote = 0 } = details;
  return [
    ["reused", cached - loaded],
    ["from host memory", loaded - disk - remote],
    ["from disk", disk],
    ["from the store", remote],
    ["computed", usage.prompt_tokens - cached],
  ].filter(([, count]) => count > 0);
}

const KINDS = { reused: "reused", "from host memory": "host", "from disk": "disk", "from the store": "store", computed: "computed" };

export function PromptBar({ usage }) {
  const parts = shares(usage);
  const label = `Prompt of ${usage.prompt_tokens} tokens: ${parts.map(([what, count]) => `${count} ${what}`).join(", ")}`;
  return html`<div class="bar" role="img" aria-label=${label} title=${label}>
    ${parts.map(([what, count]) => html`<span class=${KINDS[what]} style=${{ flexGrow: count }}></span>`)}
  </div>`;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`);

export function Facts({ facts }) {
  const { usage, first, total, finish } = facts;
  if (!usage) return facts.stopped ? html`<p class="facts">Stopped after ${seconds(total)}.</p>` : null;
  const rate = first !== null && usage.completion_tokens > 1 ? ((usage.completion_tokens - 1) * 1000) / Math.max(1, total - first) : null;
  const { draft_tokens: drafted, accepted_draft_tokens: accepted } = usage.completion_tokens_details ?? {};
  const miss = usage.prompt_tokens_details?.miss;
  return html`<div class="facts">
    <p>
      <b>${usage.completion_tokens}</b> tokens${rate === null ? "" : html` at <b>${rate.toFixed(rate < 10 ? 1 : 0)}</b> a second`},
      ${" "}first after <b>${first === null ? "–" : seconds(first)}</b>.
      ${drafted ? html` <b>${accepted}</b> of ${drafted} drafts accepted.` : null}
      ${finish === "length" ? " Cut at the limit of tokens." : null}
    </p>
    <${PromptBar} usage=${usage} />
    <p>
      ${shares(usage).map(([what, count], index) => html`${index ? ", " : ""}<span class=${`key ${KINDS[what]}`}></span>${count} ${what}`)}
      ${" "}of ${usage.prompt_tokens} prompt tokens${miss ? html`: ${miss.why}` : null}.
    </p>
  </div>`;
}

// Every token with its probability; a click shows the alternatives, from each of which the answer can be continued.
export function Tokens({ tokens, onFork }) {
  const [chosen, choose] = useState(null);
  const before = (index) => tokens.slice(0, index).map((each) => each[0]).join("");
  return html`<div class="tokens">
    ${tokens.map(
      ([text, logprob], index) => html`<button
        type="button"
        class=${`token p${Math.min(4, Math.floor(Math.exp(logprob) * 5))}`}
        aria-expanded=${chosen === index}
        title=${`${percent(logprob)}`}
        onClick=${() => choose(chosen === index ? null : index)}
        >${shown(text)}</button>`,
    )}
    ${chosen !== null && tokens[chosen]
      ? html`<div class="alternatives" role="group" aria-label="Alternatives of this token">
          <p>Continue from here with another token:</p>
          ${tokens[chosen][2].map(
            ([text, logprob]) => html`<button type="button" disabled=${!onFork} onClick=${() => onFork(before(chosen) + text)}>
              <code>${shown(text)}</code> <span>${percent(logprob)}</span>
            </button>`,
          )}
        </div>`
      : null}
  </div>`;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const shown = (text) => visible(text).replaceAll("\n", "↵\n");

// The request as a program.
export function asProgram(kind, body) {
  const { stream: _, stream_options: __, ...sent } = body;
  const address = location.origin;
  const json = JSON.stringify(sent, null, 2);
  if (kind === "curl") {
    return `curl ${address}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  -H "Authorization: Bearer $API_KEY" \\\n  -d '${json.replaceAll("'", "'\\''")}'`;
  }
  if (kind === "Python") {
    const literal = `json.loads(r'''${JSON.stringify(sent).replaceAll("'''", "\\u0027\\u0027\\u0027")}''')`;
    return `import json\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${address}/v1", api_key="API_KEY")\nbody = ${literal}\nanswer = client.chat.completions.create(**body)\nprint(answer.choices[0].message.content)\n`;
  }
  return `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${address}/v1", apiKey: process.env.API_KEY });\nconst answer = await client.chat.completions.create(${json});\nconsole.log(answer.choices[0].message.content);\n`;
}
