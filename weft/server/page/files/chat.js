// Conversations with the model: the list, the messages with their branches, the settings, and the box to write in.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { answer, asProgram, bodyOf, Facts, Tokens } from "./answers.js";
import { Markdown, visible } from "./markdown.js";
import * as talks from "./conversations.js";
import { noted } from "./requests.js";

export function Chat({ model }) {
  const [all, setAll] = useState(talks.load);
  const [id, setId] = useState(null);
  const [running, setRunning] = useState(null);
  const [problem, setProblem] = useState(null);
  const [drawer, setDrawer] = useState(false);
  const state = useRef(all);
  const current = all.find((each) => each.id === id) ?? all[0] ?? null;

  // The newest value is always in `state`, because answers arrive between renderings.
  const put = (conversation, keep = true) => {
    const rest = state.current.filter((each) => each.id !== conversation.id);
    const at = state.current.findIndex((each) => each.id === conversation.id);
    state.current = at < 0 ? [conversation, ...rest] : state.current.map((each) => (each.id === conversation.id ? conversation : each));
    setAll(state.current);
    if (keep && !talks.save(state.current)) setProblem("This browser has no room for more conversations. Export some, and delete them.");
  };
  const latest = (which) => state.current.find((each) => each.id === which);

  const begin = () => {
    const fresh = talks.create(current ? { ...current.settings } : {});
    put(fresh, false);
    setId(fresh.id);
    setDrawer(false);
    return fresh;
  };

  const remove = (which) => {
    state.current = state.current.filter((each) => each.id !== which);
    talks.save(state.current);
    setAll(state.current);
    if (running?.conversation === which) running.controller.abort();
  };

  // Ask for the message after `leaf`; `start` continues an answer that begins with this text.
  const ask = async (conversation, leaf, start = null) => {
    setProblem(null);
    const messages = talks.messages(conversation, leaf);
    let body;
    try {
      body = bodyOf(model, start === null ? messages : [...messages, { role: "assistant", content: start }], conversation.settings, start !== null);
    } catch (error) {
      setProblem(error.message);
      return;
    }
    const node = { id: talks.name(), parent: leaf, role: "assistant", content: start ?? "" };
    put(talks.add(conversation, node), false);
    const controller = new AbortController();
    setRunning({ conversation: conversation.id, node: node.id, controller });
    const update = (more) => {
      const known = latest(conversation.id);
      if (known) put(talks.change(known, node.id, more), false);
    };
    const note = noted(conversation.title || "conversation");
    try {
      await answer(body, (more) => { update(more); note(more.facts); }, controller.signal, start ?? "");
    } catch (error) {
      const stopped = error.name === "AbortError";
      const known = latest(conversation.id)?.nodes[node.id];
      update({ facts: { ...(known?.facts ?? { total: 0 }), stopped: true } });
      if (!stopped) setProblem(error.message);
    } finally {
      setRunning(null);
      note(null);
      const known = latest(conversation.id);
      if (known) put(known);
    }
  };

  const send = (text) => {
    const conversation = current ?? begin();
    const node = { id: talks.name(), parent: conversation.leaf, role: "user", content: text };
    const more = talks.add(conversation, node);
    setId(more.id);
    put(more);
    return ask(more, node.id);
  };

  const edit = (node, text) => {
    const changed = talks.add(current, { ...node, id: talks.name(), content: text });
    put(changed);
    return node.role === "user" ? ask(changed, changed.leaf) : undefined;
  };

  const results = (node, texts) => {
    let more = current;
    let parent = node.id;
    node.calls.forEach((call, index) => {
      const result = { id: talks.name(), parent, role: "tool", tool_call_id: call.id, content: texts[index] ?? "" };
      more = talks.add(more, result);
      parent = result.id;
    });
    put(more);
    return ask(more, parent);
  };

  const importFile = async (file) => {
    try {
      if (file.size > 4 << 20) throw new Error("the file is larger than 4 MiB");
      const found = JSON.parse(await file.text());
      if (!talks.isConversation(found)) throw new Error("it is not a conversation of this page");
      const copy = { ...found, id: talks.name(), title: String(found.title ?? "").slice(0, 60) };
      put(copy);
      setId(copy.id);
    } catch (error) {
      setProblem(`This file cannot be imported: ${error.message}.`);
    }
  };

  const busy = running !== null;
  return html`<div class=${`chat ${drawer ? "open" : ""}`}>
    <${List} ...${{ all, current, setId: (which) => { setId(which); setDrawer(false); }, begin, remove, importFile }} />
    <section class="talk" aria-label="Conversation">
      <div class="tools">
        <button type="button" class="quiet only-narrow" aria-expanded=${drawer} onClick=${() => setDrawer(!drawer)}>Conversations</button>
        <${Settings} conversation=${current} model=${model} change=${(settings) => put({ ...(current ?? begin()), settings })} />
      </div>
      <${Messages} ...${{ conversation: current, running, ask, edit, results, put }} />
      ${problem ? html`<p class="problem" role="alert">${problem}</p>` : null}
      <${Box} key=${current?.id} busy=${busy} send=${send} stop=${() => running?.controller.abort()} />
    </section>
  </div>`;
}

function List({ all, current, setId, begin, remove, importFile }) {
  const input = useRef(null);
  return html`<nav class="list" aria-label="Conversations">
    <div class="row">
      <button type="button" onClick=${begin}>New</button>
      <button type="button" class="quiet" onClick=${() => input.current.click()}>Import</button>
      <input ref=${input} type="file" accept="application/json" hidden aria-label="Conversation to import"
        onChange=${(event) => { if (event.target.files[0]) importFile(event.target.files[0]); event.target.value = ""; }} />
    </div>
    <ul>
      ${all.map(
        (each) => html`<li key=${each.id} class=${each.id === current?.id ? "current" : ""}>
          <button type="button" class="title" aria-current=${each.id === current?.id ? "true" : null} onClick=${() => setId(each.id)}>${visible(each.title) || "New conversation"}</button>
          <button type="button" class="quiet" title="Export" aria-label=${`Export ${each.title || "new conversation"}`} onClick=${() => talks.download(each)}>↓</button>
          <button type="button" class="quiet" title="Delete" aria-label=${`Delete ${each.title || "new conversation"}`} onClick=${() => remove(each.id)}>×</button>
        </li>`,
      )}
    </ul>
  </nav>`;
}

function Messages({ conversation, running, ask, edit, results, put }) {
  const end = useRef(null);
  const nodes = conversation ? talks.path(conversation) : [];
  const last = nodes.at(-1);
  const follow = useRef(true);
  const watch = (event) => {
    const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
    follow.current = scrollHeight - scrollTop - clientHeight < 80;
  };
  useEffect(() => {
    if (follow.current) end.current?.scrollIntoView({ block: "end" });
  }, [last?.id, last?.content.length, last?.reasoning?.length, last?.facts?.usage]);
  if (!nodes.length) {
    return html`<div class="messages empty"><p>Ask something. What your prompts share is computed once: the bar under each answer shows how much was reused.</p></div>`;
  }
  return html`<div class="messages" onScroll=${watch} tabindex="0" aria-label="Messages">
    ${nodes.map((node) => html`<${Message} key=${node.id} ...${{ conversation, node, running, ask, edit, results, put }} />`)}
    <div ref=${end}></div>
  </div>`;
}

function Message({ conversation, node, running, ask, edit, results, put }) {
  const [editing, setEditing] = useState(false);
  const [detailed, setDetailed] = useState(false);
  const busy = running !== null;
  const live = running?.node === node.id;
  const beside = talks.siblings(conversation, node);
  const at = beside.findIndex((each) => each.id === node.id);
  const go = (step) => put({ ...conversation, leaf: talks.tip(conversation, beside[at + step].id) });
  const who = { user: "You", assistant: "Model", tool: "Result" }[node.role];
  const fork = node.reasoning || node.calls?.length || busy ? null : (text) => ask(conversation, node.parent, text);
  return html`<article class=${`message ${node.role}`} aria-busy=${live}>
    <header>
      <b>${who}</b>
      ${beside.length > 1
        ? html`<span class="branches">
            <button type="button" class="quiet" disabled=${at === 0 || busy} aria-label="Previous branch" onClick=${() => go(-1)}>‹</button>
            ${at + 1} / ${beside.length}
            <button type="button" class="quiet" disabled=${at === beside.length - 1 || busy} aria-label="Next branch" onClick=${() => go(1)}>›</button>
          </span>`
        : null}
    </header>
    ${node.reasoning ? html`<details open=${live && !node.content}><summary>Reasoning</summary><${Markdown} text=${node.reasoning} /></details>` : null}
    ${editing
      ? html`<${Editor} text=${node.content} done=${(text) => { setEditing(false); if (text !== null) edit(node, text); }} />`
      : node.role === "assistant"
        ? detailed && node.tokens?.length
          ? html`<${Tokens} tokens=${node.tokens} onFork=${fork} />`
          : html`<${Markdown} text=${node.content} />`
        : html`<p class="plain">${visible(node.content)}</p>`}
    ${live && !node.content && !node.reasoning ? html`<p class="waiting" aria-label="Waiting for the first token"><i></i><i></i><i></i></p>` : null}
    ${node.calls?.length ? html`<${Calls} node=${node} open=${!live && conversation.leaf === node.id} send=${(texts) => results(node, texts)} />` : null}
    ${!live && node.facts ? html`<${Facts} facts=${node.facts} />` : null}
    ${live || editing
      ? null
      : html`<footer>
          ${node.role === "assistant" ? html`<button type="button" class="quiet" disabled=${busy} onClick=${() => ask(conversation, node.parent)}>Retry</button>` : null}
          <button type="button" class="quiet" disabled=${busy} onClick=${() => setEditing(true)}>Edit</button>
          <button type="button" class="quiet" onClick=${() => navigator.clipboard?.writeText(node.content)}>Copy</button>
          ${node.tokens?.length ? html`<button type="button" class="quiet" aria-pressed=${detailed} onClick=${() => setDetailed(!detailed)}>Tokens</button>` : null}
        </footer>`}
  </article>`;
}

function Calls({ node, open, send }) {
  const [texts, setTexts] = useState([]);
  return html`<div class="calls">
    ${node.calls.map(
      (call, index) => html`<div class="call" key=${call.id}>
        <code>${visible(call.function.name)}(${visible(call.function.arguments)})</code>
        ${open
          ? html`<label>Result
              <textarea rows="2" value=${texts[index] ?? ""} onInput=${(event) => { const text = event.target.value; setTexts((known) => Object.assign([...known], { [index]: text })); }}></textarea>
            </label>`
          : null}
      </div>`,
    )}
    ${open ? html`<button type="button" onClick=${() => send(texts)}>Send results</button>` : null}
  </div>`;
}

function Editor({ text, done }) {
  const [value, setValue] = useState(text);
  return html`<form class="editor" onSubmit=${(event) => { event.preventDefault(); done(value); }}>
    <textarea aria-label="Message" rows=${Math.min(14, value.split("\n").length + 1)} value=${value} onInput=${(event) => setValue(event.target.value)}></textarea>
    <div class="row"><button type="submit">Save as a branch</button><button type="button" class="quiet" onClick=${() => done(null)}>Cancel</button></div>
  </form>`;
}

function Box({ busy, send, stop }) {
  const [text, setText] = useState("");
  const submit = () => {
    if (busy || !text.trim()) return;
    setText("");
    send(text);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  };
  return html`<form class="box" onSubmit=${(event) => { event.preventDefault(); submit(); }}>
    <textarea aria-label="Your message" placeholder="Your message. Enter sends, Shift-Enter begins a line." rows=${Math.min(8, text.split("\n").length + 1)}
      value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    ${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button type="submit" disabled=${!text.trim()}>Send</button>`}
  </form>`;
}

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];

function Settings({ conversation, model, change }) {
  const [copied, setCopied] = useState(null);
  const settings = conversation?.settings ?? {};
  const set = (name, value) => change({ ...settings, [name]: value });
  const copy = (kind) => {
    let text;
    try {
      text = asProgram(kind, bodyOf(model, conversation ? talks.messages(conversation) : [], settings));
    } catch (error) {
      text = error.message;
    }
    setCopied({ kind, text });
    navigator.clipboard?.writeText(text).catch(() => {});
  };
  return html`<details class="settings">
    <summary>Settings</summary>
    <div class="panel">
      <label class="wide">System prompt
        <textarea rows="3" value=${settings.system ?? ""} onInput=${(event) => set("system", event.target.value)}></textarea>
      </label>
      ${FIELDS.map(
        ([name, label, bounds]) => html`<label>${label}
          <input type="number" ...${bounds} placeholder="default" value=${settings[name] ?? ""} onInput=${(event) => set(name, event.target.value)} />
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
        Keep the probability and the alternatives of every token
      </label>
      <div class="wide row">Copy this conversation as
        ${["curl", "Python", "Node"].map((kind) => html`<button type="button" class="quiet" onClick=${() => copy(kind)}>${kind}</button>`)}
      </div>
      ${copied ? html`<pre class="wide program" tabindex="0" aria-label=${`The request in ${copied.kind}`}>${copied.text}</pre>` : null}
    </div>
  </details>`;
}
