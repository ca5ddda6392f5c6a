// The messages of a conversation with their branches, tokens, tool calls and facts.

import { html, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { Copy } from "./copying.js";
import { Facts } from "./facts.js";
import { Markdown, visible } from "./markdown.js";
import * as talks from "./conversations.js";
import { reasoningTokens, Tokens } from "./tokens.js";

const WHO = { user: "You", assistant: "Model", tool: "Result" };

// `acts` are what messages can ask of the chat: ask, fork, other, edit, results and put.
export function Messages({ conversation, running, acts }) {
  const end = useRef(null);
  const nodes = conversation ? talks.path(conversation) : [];
  const last = nodes.at(-1);
  const follow = useRef(true);
  const top = useRef(0);
  // The end stays in view until someone scrolls up. That an answer grows is no such scroll.
  const watch = (event) => {
    const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
    if (scrollHeight - scrollTop - clientHeight < 80) follow.current = true;
    else if (scrollTop < top.current) follow.current = false;
    top.current = scrollTop;
  };
  useLayoutEffect(() => {
    if (follow.current) end.current?.scrollIntoView({ block: "end" });
  }, [last?.id, last?.content.length, last?.reasoning?.length, last?.facts?.usage, running === null]);
  if (!nodes.length) {
    return html`<div class="messages empty"><p>Ask something. What your prompts share is computed once: the bar under each answer shows how much was reused.</p></div>`;
  }
  const beside = last.group ? talks.siblings(conversation, last).filter((each) => each.group === last.group) : [];
  const single = beside.length > 1 ? nodes.slice(0, -1) : nodes;
  const shared = { conversation, running, acts };
  return html`<div class="messages" onScroll=${watch} tabindex="0" role="region" aria-label="Messages">
    ${single.map((node) => html`<${Message} key=${node.id} node=${node} ...${shared} />`)}
    ${single === nodes ? null : html`<${SideBySide} beside=${beside} chosen=${last} ...${shared} />`}
    <div ref=${end}></div>
  </div>`;
}

function SideBySide({ beside, chosen, conversation, running, acts }) {
  const choose = (node) => acts.put({ ...conversation, leaf: node.id });
  return html`<div class="choices" role="group" aria-label=${`${beside.length} answers side by side`}>
    <div class="columns">
      ${beside.map(
        (node) => html`<div key=${node.id} class=${`choice ${node.id === chosen.id ? "chosen" : ""}`}>
          <${Message} node=${node} ...${{ conversation, running, acts }} alone=${false} />
          <button type="button" disabled=${running !== null} aria-pressed=${node.id === chosen.id} onClick=${() => choose(node)}>
            ${node.id === chosen.id ? "Goes on here" : "Go on with this one"}
          </button>
        </div>`,
      )}
    </div>
    ${running ? null : html`<${Facts} facts=${beside[0].facts ?? {}} />`}
  </div>`;
}

function Message({ conversation, node, running, acts, alone = true }) {
  const [editing, setEditing] = useState(false);
  const [detailed, setDetailed] = useState(false);
  const busy = running !== null;
  const live = busy && running.nodes.includes(node.id);
  return html`<article class=${`message ${node.role}`} aria-busy=${live}>
    <header>
      <b>${WHO[node.role]}</b>
      ${alone ? html`<${Branches} ...${{ conversation, node, busy, put: acts.put }} />` : null}
    </header>
    ${node.reasoning ? html`<details open=${live && !node.content}><summary>Reasoning</summary><${Markdown} text=${node.reasoning} /></details>` : null}
    ${editing
      ? html`<${Editor} text=${node.content} done=${(text) => { setEditing(false); if (text !== null) acts.edit(node, text); }} />`
      : node.role === "assistant"
        ? detailed && node.tokens?.length
          ? html`<${Details} ...${{ node, busy, acts }} />`
          : html`<${Markdown} text=${node.content} />`
        : html`<p class="plain">${visible(node.content)}</p>`}
    ${live && !node.content && !node.reasoning ? html`<p class="waiting" aria-label="Waiting for the first token" role="img"><i></i><i></i><i></i></p>` : null}
    ${node.calls?.length ? html`<${Calls} node=${node} open=${!live && conversation.leaf === node.id} send=${(texts) => acts.results(node, texts)} />` : null}
    ${alone && !live && node.facts ? html`<${Facts} facts=${node.facts} />` : null}
    ${live || editing
      ? null
      : html`<footer>
          ${node.role === "assistant" && alone ? html`<button type="button" class="quiet" disabled=${busy} onClick=${() => acts.ask(conversation, node.parent)}>Retry</button>` : null}
          <button type="button" class="quiet" disabled=${busy} onClick=${() => setEditing(true)}>Edit</button>
          <${Copy} text=${node.content} />
          ${node.tokens?.length ? html`<button type="button" class="quiet" aria-pressed=${detailed} onClick=${() => setDetailed(!detailed)}>Tokens</button>` : null}
        </footer>`}
  </article>`;
}

function Branches({ conversation, node, busy, put }) {
  const beside = talks.siblings(conversation, node);
  if (beside.length < 2) return null;
  const at = beside.findIndex((each) => each.id === node.id);
  const go = (step) => put({ ...conversation, leaf: talks.tip(conversation, beside[at + step].id) });
  return html`<span class="branches">
    <button type="button" class="quiet" disabled=${at === 0 || busy} aria-label="Previous branch" onClick=${() => go(-1)}>‹</button>
    ${at + 1} / ${beside.length}
    <button type="button" class="quiet" disabled=${at === beside.length - 1 || busy} aria-label="Next branch" onClick=${() => go(1)}>›</button>
  </span>`;
}

function Details({ node, busy, acts }) {
  // The token that ended the answer is not part of its text.
  const ended = node.facts?.finish === "stop" && !node.content.endsWith(node.tokens.at(-1)[0]);
  return html`<div>
    ${node.before ? html`<span class="plain before">${visible(node.before)}</span>` : null}
    <${Tokens}
      tokens=${ended ? node.tokens.slice(0, -1) : node.tokens}
      first=${node.calls?.length ? null : reasoningTokens(node)}
      onFork=${busy ? null : (at, n) => acts.fork(node, at, n)}
      onOther=${busy ? null : (at, text) => acts.other(node, at, text)} />
  </div>`;
}

function Calls({ node, open, send }) {
  const [texts, setTexts] = useState([]);
  const set = (index, text) => setTexts((known) => Object.assign([...known], { [index]: text }));
  return html`<div class="calls">
    ${node.calls.map(
      (call, index) => html`<div class="call" key=${call.id}>
        <code>${visible(call.function.name)}(${visible(call.function.arguments)})</code>
        ${open
          ? html`<label>Result
              <textarea rows="2" value=${texts[index] ?? ""} onInput=${(event) => set(index, event.target.value)}></textarea>
            </label>`
          : null}
      </div>`,
    )}
    ${open ? html`<button type="button" onClick=${() => send(texts)}>Send results</button>` : null}
  </div>`;
}

function Editor({ text, done }) {
  const [value, setValue] = useState(text);
  const onKey = (event) => {
    if (event.key === "Escape") done(null);
  };
  return html`<form class="editor" onSubmit=${(event) => { event.preventDefault(); done(value); }}>
    <textarea aria-label="Message" rows=${Math.min(14, value.split("\n").length + 1)} value=${value} onKeyDown=${onKey} onInput=${(event) => setValue(event.target.value)}></textarea>
    <div class="row"><button type="submit">Save as a branch</button><button type="button" class="quiet" onClick=${() => done(null)}>Cancel</button></div>
  </form>`;
}
