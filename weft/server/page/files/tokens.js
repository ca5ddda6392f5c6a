// The tokens of an answer, each with its probability; a click shows what else could follow.
//
//     token = [text, logprob, [[text, logprob], ...], drafted, bytes of a text that is no whole character]

import { html, useState } from "./vendor/preact.js";
import { visible } from "./markdown.js";

const WAYS = [1, 2, 3];

export function tokenOf({ token, logprob, top_logprobs, drafted, bytes }) {
  const found = [token, logprob, top_logprobs.map((top) => [top.token, top.logprob]), drafted ? 1 : 0];
  return token.includes("\ufffd") && bytes ? [...found, bytes] : found;
}

// Return the text of tokens. A character may be spread over several of them.
export function textOf(tokens) {
  const encoder = new TextEncoder();
  const bytes = tokens.flatMap(([text, , , , raw]) => raw ?? [...encoder.encode(text)]);
  return new TextDecoder().decode(Uint8Array.from(bytes));
}

// Return how many tokens the reasoning before an answer has, or null if its end is not found.
export function reasoningTokens({ reasoning, tokens }) {
  if (!reasoning) return 0;
  let text = "";
  const end = tokens.findIndex(([piece]) => { text = (text + piece).slice(-40); return text.includes("</think>"); });
  return end < 0 ? null : end + 1;
}

// `onFork(at, n)` continues after the first `at` tokens, `onOther(at, text)` with another token there. Tokens before
// `first` cannot be continued.
export function Tokens({ tokens, first, onFork, onOther }) {
  const [chosen, choose] = useState(null);
  return html`<div class="tokens">
    ${tokens.map(
      ([text, logprob, , drafted], index) => html`<button
        type="button"
        class=${`token p${Math.min(4, Math.floor(Math.exp(logprob) * 5))}${drafted ? " drafted" : ""}`}
        aria-expanded=${chosen === index}
        title=${`${percent(logprob)}${drafted ? ", drafted" : ""}`}
        onClick=${() => choose(chosen === index ? null : index)}
        >${shown(text)}</button>`,
    )}
    ${chosen !== null && tokens[chosen] ? html`<${Alternatives} ...${{ tokens, at: chosen, first, onFork, onOther }} />` : null}
    <p class="legend">
      ${["below 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %"].map((text, index) => html`<span><i class=${`swatch p${index}`}></i>${text}</span>`)}
      <span><i class="swatch drafted"></i>drafted and accepted</span>
    </p>
  </div>`;
}

// A token that is no whole character cannot be sent as text.
function Alternatives({ tokens, at, first, onFork, onOther }) {
  const [text, logprob, tops, drafted] = tokens[at];
  const off = first === null || at < first;
  return html`<div class="alternatives" role="group" aria-label="What can follow">
    <p>Token ${at + 1}, <code>${shown(text)}</code>: ${percent(logprob)}${drafted ? ", drafted and accepted" : ", not drafted"}.
      ${off ? " An answer cannot be continued inside its reasoning or from a tool call." : null}</p>
    <div class="row"><span>Continue after it</span>${WAYS.map((n) => html`<button type="button" disabled=${off || !onFork} onClick=${() => onFork(at + 1, n)}>${n === 1 ? "once" : `${n} ways`}</button>`)}</div>
    ${tops.length ? html`<div class="row"><span>or with another token in its place</span>${tops.filter(([other]) => other !== text).map(
      ([other, likely]) => html`<button type="button" disabled=${off || first > 0 || !onOther || other.includes("\ufffd")} onClick=${() => onOther(at, other)}>
        <code>${shown(other).trimEnd()}</code> <span>${percent(likely)}</span>
      </button>`,
    )}</div>` : null}
  </div>`;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const shown = (text) => visible(text).replaceAll("\n", "↵\n");
