// Conversations with the model: the list, the messages, the settings, and the box to write in.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { answers, bodyOf, forkOf } from "./answers.js";
import { visible } from "./markdown.js";
import { Messages } from "./messages.js";
import * as talks from "./conversations.js";
import { note } from "./own.js";
import { Settings } from "./settings.js";
import { reasoningTokens, textOf } from "./tokens.js";

const CHAT = "/v1/chat/completions";

export function Chat({ model }) {
  const [all, setAll] = useState(talks.load);
  const [id, setId] = useState(null);
  const [running, setRunning] = useState(null);
  const [problem, setProblem] = useState(null);
  const [removed, setRemoved] = useState(null);
  const [drawer, setDrawer] = useState(false);
  const state = useRef(all);
  const current = all.find((each) => each.id === id) ?? all[0] ?? null;

  // The newest value is always in `state`, because answers arrive between renderings.
  const replace = (list) => {
    state.current = list;
    setAll(list);
  };
  const put = (conversation, keep = true) => {
    const known = state.current.some((each) => each.id === conversation.id);
    replace(known ? state.current.map((each) => (each.id === conversation.id ? conversation : each)) : [conversation, ...state.current]);
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
    setRemoved(latest(which));
    replace(state.current.filter((each) => each.id !== which));
    talks.save(state.current);
    if (running?.conversation === which) running.controller.abort();
  };

  // Stream the answers to a body into new messages below `parent`, all of which begin with `start`.
  const receive = async (conversation, parent, { path = CHAT, body, start = {}, more = {} }) => {
    const count = body.n ?? 1;
    const group = count > 1 ? { group: talks.name() } : {};
    const nodes = Array.from({ length: count }, () => ({ id: talks.name(), parent, role: "assistant", content: "", ...start, ...group }));
    const grown = nodes.reduce(talks.add, conversation);
    put({ ...grown, leaf: nodes[0].id }, false);
    const controller = new AbortController();
    setRunning({ conversation: conversation.id, nodes: nodes.map((node) => node.id), controller });
    const update = (index, fields) => {
      const known = latest(conversation.id);
      if (fields.facts?.id) note(fields.facts.id, conversation.title);
      if (known) put(talks.change(known, nodes[index].id, { ...fields, facts: { ...fields.facts, ...more } }), false);
    };
    try {
      await answers(path, body, update, controller.signal, start);
    } catch (error) {
      const known = latest(conversation.id);
      const stopped = nodes.map((node) => [node.id, { facts: { total: 0, ...known?.nodes[node.id]?.facts, stopped: true } }]);
      if (known) put(stopped.reduce((found, each) => talks.change(found, ...each), known), false);
      if (error.name !== "AbortError") throw error;
    } finally {
      setRunning(null);
      const known = latest(conversation.id);
      if (known) put(known);
    }
  };
  const run = async (work) => {
    setProblem(null);
    try {
      await work();
    } catch (error) {
      setProblem(error.message);
    }
  };

  // Ask for the message after `leaf`.
  const ask = (conversation, leaf) =>
    run(() => receive(conversation, leaf, { body: bodyOf(model, talks.messages(conversation, leaf), conversation.settings) }));

  // Send the beginning of an answer again, to be continued.
  const resend = (node, text, options, more) => {
    const messages = [...talks.messages(current, node.parent), { role: "assistant", content: text }];
    const body = bodyOf(model, messages, current.settings, { continues: true, ...options });
    return receive(latest(current.id), node.parent, { body, start: { content: text, before: text }, more });
  };

  // Continue an answer after its first `at` tokens: on the server that kept it, otherwise by sending its text.
  const fork = (node, at, n) => run(async () => {
    const first = reasoningTokens(node);
    const text = textOf(node.tokens.slice(first, at));
    const before = node.before ?? "";
    const content = before + (first ? text.trimStart() : text);
    const { reasoning } = node;
    const start = { content, before, tokens: node.tokens.slice(0, at), ...(reasoning ? { reasoning } : {}) };
    try {
      const body = forkOf(node.facts, at, n, current.settings);
      await receive(current, node.parent, { path: "/v1/fork", body, start, more: { forked: { at, sent: false } } });
    } catch (error) {
      // What is no longer kept can be sent again, unless a template would drop its reasoning.
      if (error.status !== 404 || reasoning) throw error;
      put({ ...current });
      await resend(node, content, { n }, { forked: { at, sent: true } });
    }
  });

  const other = (node, at, text) =>
    run(() => resend(node, (node.before ?? "") + textOf(node.tokens.slice(0, at)) + text, { n: 1 }, {}));

  const send = (text) => {
    const conversation = current ?? begin();
    const node = { id: talks.name(), parent: conversation.leaf, role: "user", content: text };
    const more = talks.add(conversation, node);
    setId(more.id);
    put(more);
    return ask(more, node.id);
  };

  const edit = (node, text) => {
    const { tokens, facts, group, before, ...kept } = node;
    const changed = talks.add(current, { ...kept, id: talks.name(), content: text });
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
  const acts = { ask, fork, other, edit, results, put };
  return html`<div class=${`chat ${drawer ? "open" : ""}`}>
    <${List} ...${{ all, current, setId: (which) => { setId(which); setDrawer(false); }, begin, remove, importFile }} />
    <section class="talk" aria-label="Conversation">
      <div class="tools">
        <button type="button" class="quiet only-narrow" aria-expanded=${drawer} onClick=${() => setDrawer(!drawer)}>Conversations</button>
        <${Settings} conversation=${current} model=${model} change=${(settings) => put({ ...(current ?? begin()), settings })} />
      </div>
      <${Messages} ...${{ conversation: current, running, acts }} />
      ${problem ? html`<p class="problem" role="alert">${problem}</p>` : null}
      ${removed ? html`<p class="removed" role="status">“${visible(removed.title) || "New conversation"}” is deleted.
          <button type="button" class="quiet" onClick=${() => { put(removed); setRemoved(null); }}>Undo</button>
          <button type="button" class="quiet" aria-label="Dismiss" onClick=${() => setRemoved(null)}>×</button></p>` : null}
      <p class="unseen" role="status">${busy ? "The model is answering." : ""}</p>
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

function Box({ busy, send, stop }) {
  const [text, setText] = useState("");
  const area = useRef(null);
  useEffect(() => {
    // On a phone the keyboard would cover the page.
    if (matchMedia("(min-width: 761px)").matches) area.current?.focus();
  }, []);
  const submit = () => {
    if (busy || !text.trim()) return;
    setText("");
    send(text);
  };
  const onKey = (event) => {
    if (event.key === "Escape" && busy) stop();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  };
  return html`<form class="box" onSubmit=${(event) => { event.preventDefault(); submit(); }}>
    <textarea ref=${area} aria-label="Your message" placeholder="Your message. Enter sends, Shift-Enter begins a line." rows=${Math.min(8, text.split("\n").length + 1)}
      value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    ${busy ? html`<button type="button" onClick=${stop}>Stop</button>` : html`<button type="submit" disabled=${!text.trim()}>Send</button>`}
  </form>`;
}
