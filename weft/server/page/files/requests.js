// The requests of this page as lanes: the time to the first token, then the answer.

import { html, useEffect, useState } from "./vendor/preact.js";
import { PromptBar } from "./answers.js";
import { visible } from "./markdown.js";

const MOST = 50;
let requests = [];
const listeners = new Set();

// Note the start of a request; call the result with what is known of its answer, and with null at its end.
export function noted(title) {
  const request = { title, started: performance.now(), first: null, total: 0, usage: null, ended: false };
  requests = [request, ...requests].slice(0, MOST);
  return (facts) => {
    if (facts === null) request.ended = true;
    else Object.assign(request, { first: facts.first, total: facts.total, usage: facts.usage });
    for (const each of listeners) each();
  };
}

export function Requests() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const listen = () => redraw((count) => count + 1);
    listeners.add(listen);
    return () => listeners.delete(listen);
  }, []);
  if (!requests.length) return html`<section class="view"><p class="hint">No request was sent from this page yet.</p></section>`;
  const longest = Math.max(...requests.map((each) => each.total), 1);
  return html`<section class="view" aria-label="Requests">
    <h2>Requests of this page</h2>
    <div class="scrolls" tabindex="0"><table class="lanes">
      <thead><tr><th>Conversation</th><th>First token</th><th>Total</th><th class="wide">Time</th><th>Prompt</th><th>Answer</th><th>Drafts</th></tr></thead>
      <tbody>${requests.map((each) => html`<${Lane} request=${each} longest=${longest} />`)}</tbody>
    </table></div>
    <p class="hint"><span class="key computed"></span>until the first token <span class="key reused"></span>answer</p>
  </section>`;
}

function Lane({ request, longest }) {
  const { title, first, total, usage, ended } = request;
  const before = first ?? total;
  const details = usage?.completion_tokens_details ?? {};
  return html`<tr>
    <td>${visible(title)}</td>
    <td class="number">${first === null ? "–" : `${Math.round(first)} ms`}</td>
    <td class="number">${ended ? `${Math.round(total)} ms` : "running"}</td>
    <td><div class="lane">
      <span class="computed" style=${{ width: `${(100 * before) / longest}%` }}></span>
      <span class="reused" style=${{ width: `${(100 * (total - before)) / longest}%` }}></span>
    </div></td>
    <td>${usage ? html`<${PromptBar} usage=${usage} /><span class="small">${usage.prompt_tokens} tokens</span>` : "–"}</td>
    <td class="number">${usage?.completion_tokens ?? "–"}</td>
    <td class="number">${details.draft_tokens ? `${details.accepted_draft_tokens} of ${details.draft_tokens}` : "–"}</td>
  </tr>`;
}
