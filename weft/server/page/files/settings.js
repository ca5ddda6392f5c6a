// The settings of a conversation: the system prompt, sampling, the form of answers, tools; and the request as a program.

import { html, useState } from "./vendor/preact.js";
import { bodyOf } from "./answers.js";
import { copy } from "./copying.js";
import * as talks from "./conversations.js";
import { asProgram } from "./programs.js";

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["n", "Answers", { min: 1, max: 4, step: 1 }, "1"],
];

export function Settings({ conversation, model, change }) {
  const [copied, setCopied] = useState(null);
  const settings = conversation?.settings ?? {};
  const set = (name, value) => change({ ...settings, [name]: value });
  const copyAs = (kind) => {
    let text;
    try {
      text = asProgram(kind, bodyOf(model, conversation ? talks.messages(conversation) : [], settings));
    } catch (error) {
      text = error.message;
    }
    setCopied({ kind, text });
    copy(text).catch(() => {});
  };
  return html`<details class="settings">
    <summary>Settings</summary>
    <div class="panel">
      <label class="wide">System prompt
        <textarea rows="3" value=${settings.system ?? ""} onInput=${(event) => set("system", event.target.value)}></textarea>
      </label>
      ${FIELDS.map(
        ([name, label, bounds, usual = "default"]) => html`<label>${label}
          <input type="number" ...${bounds} placeholder=${usual} value=${settings[name] ?? ""} onInput=${(event) => set(name, event.target.value)} />
        </label>`,
      )}
      <label class="wide">JSON schema of the answer
        <textarea rows="2" spellcheck="false" value=${settings.schema ?? ""} onInput=${(event) => set("schema", event.target.value)}></textarea>
      </label>
      <label class="wide">Tools, as a JSON list
        <textarea rows="2" spellcheck="false" value=${settings.tools ?? ""} onInput=${(event) => set("tools", event.target.value)}></textarea>
      </label>
      <label class="check wide">
        <input type="checkbox" checked=${Boolean(settings.detailed)} onChange=${(event) => set("detailed", event.target.checked)} />
        Keep the probability and the alternatives of every token, and the answer on the server for ten minutes
      </label>
      <div class="wide row">Copy this conversation as
        ${["curl", "Python", "Node"].map((kind) => html`<button type="button" class="quiet" onClick=${() => copyAs(kind)}>${kind}</button>`)}
      </div>
      ${copied ? html`<pre class="wide program" tabindex="0" role="region" aria-label=${`The request in ${copied.kind}`}>${copied.text}</pre>` : null}
    </div>
  </details>`;
}
