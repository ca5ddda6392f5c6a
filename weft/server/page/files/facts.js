// What is known about an answer: its speed, and where the tokens of its prompt came from.

import { html } from "./vendor/preact.js";

// Return the tokens of a prompt by where they came from.
export function sharesOf(prompt, { cached_tokens: cached = 0, loaded_tokens: loaded = 0, disk_tokens: disk = 0, remote_tokens: remote = 0 }) {
  return [
    ["reused", cached - loaded],
    ["from host memory", loaded - disk - remote],
    ["from disk", disk],
    ["from the store", remote],
    ["computed", prompt - cached],
  ].filter(([, count]) => count > 0);
}

const sharesIn = (usage) => sharesOf(usage.prompt_tokens, usage.prompt_tokens_details ?? {});
const KINDS = { reused: "reused", "from host memory": "host", "from disk": "disk", "from the store": "store", computed: "computed" };

export function PromptBar({ prompt, shares }) {
  const label = `Prompt of ${prompt} tokens: ${shares.map(([what, count]) => `${count} ${what}`).join(", ")}`;
  return html`<div class="bar" role="img" aria-label=${label} title=${label}>
    ${shares.map(([what, count]) => html`<span class=${KINDS[what]} style=${{ flexGrow: count }}></span>`)}
  </div>`;
}

export const Shares = ({ shares }) =>
  shares.map(([what, count], index) => html`${index ? ", " : ""}<span class=${`key ${KINDS[what]}`}></span>${count} ${what}`);

export function seconds(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 120_000 ? `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s` : `${Math.round(ms / 60_000)} min`;
}

export function Facts({ facts }) {
  const { usage, first, total, finish, n = 1, forked } = facts;
  const origin = forked
    ? html`<p>Continued after token ${forked.at}${forked.sent ? ", by sending the text again: the server no longer keeps the answer" : ", from what the server kept of the answer"}.</p>`
    : null;
  if (!usage) return facts.stopped ? html`<div class="facts">${origin}<p>Stopped after ${seconds(total)}.</p></div>` : null;
  const decoded = usage.completion_tokens - n;
  const rate = first !== null && decoded > 0 ? (decoded * 1000) / Math.max(1, total - first) : null;
  const { draft_tokens: drafted, accepted_draft_tokens: accepted } = usage.completion_tokens_details ?? {};
  const miss = usage.prompt_tokens_details?.miss;
  const shares = sharesIn(usage);
  return html`<div class="facts">
    ${origin}
    <p>
      ${n > 1 ? `${n} answers: ` : ""}<b>${usage.completion_tokens}</b> tokens${rate === null ? "" : html` at <b>${rate.toFixed(rate < 10 ? 1 : 0)}</b> a second`}${first === null ? "" : html`, first after <b>${seconds(first)}</b>`}.
      ${drafted ? html` <b>${accepted}</b> of ${drafted} drafts accepted.` : null}
      ${finish === "length" ? " Cut at the limit of tokens." : null}
    </p>
    <${PromptBar} prompt=${usage.prompt_tokens} shares=${shares} />
    <p>
      <${Shares} shares=${shares} /> of ${usage.prompt_tokens} prompt tokens${usage.others?.some((each) => each) ? `; the others reused ${usage.others.join(" and ")}` : ""}${miss ? html`. ${sentence(miss.why)}` : "."}
    </p>
  </div>`;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;
