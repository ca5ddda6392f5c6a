// The page: signs in if the server wants a key, and shows one of four views.

import { html, render, useEffect, useState } from "./vendor/preact.js";
import { get, signIn } from "./client.js";
import { Cache } from "./cache.js";
import { Chat } from "./chat.js";
import { Model } from "./model.js";
import { Requests } from "./requests.js";

const VIEWS = ["Chat", "Cache", "Requests", "Model"];

function App() {
  const [models, setModels] = useState([]);
  const [model, setModel] = useState(null);
  const [state, setState] = useState("loading");
  const [problem, setProblem] = useState(null);
  const [view, setView] = useState(VIEWS.find((each) => `#${each.toLowerCase()}` === location.hash) ?? "Chat");

  const connect = async (key) => {
    if (key !== undefined) signIn(key);
    try {
      const found = await get("/v1/models");
      setModels(found.data.map((each) => each.id));
      setModel(found.data[0]?.id ?? null);
      setState("ready");
    } catch (error) {
      setState(error.status === 401 ? "key" : "failed");
      setProblem(error.status === 401 ? (key === undefined ? null : "The server does not know this key.") : error.message);
    }
  };
  useEffect(() => { connect(); }, []);
  useEffect(() => {
    const move = () => setView(VIEWS.find((each) => `#${each.toLowerCase()}` === location.hash) ?? "Chat");
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);

  if (state === "loading") return html`<main class="notice"><p>Connecting…</p></main>`;
  if (state === "key") return html`<${SignIn} problem=${problem} connect=${connect} />`;
  if (state === "failed") {
    return html`<main class="notice"><h1>Weft</h1><p class="problem" role="alert">The server does not answer: ${problem}</p>
      <button type="button" onClick=${() => connect()}>Try again</button></main>`;
  }
  const named = models.length > 1 ? model : null;
  return html`<div class="page">
    <header class="top">
      <h1><img src="/page/icon.svg" alt="" width="22" height="22" /> Weft</h1>
      ${named === null
        ? html`<span class="model" title=${model}>${model}</span>`
        : html`<select class="model" aria-label="Model" value=${model} onChange=${(event) => setModel(event.target.value)}>
            ${models.map((each) => html`<option value=${each}>${each}</option>`)}
          </select>`}
      <nav aria-label="Views">
        ${VIEWS.map((each) => html`<a href=${`#${each.toLowerCase()}`} aria-current=${view === each ? "page" : null}>${each}</a>`)}
      </nav>
    </header>
    <main>
      <div hidden=${view !== "Chat"} class="fill"><${Chat} model=${model} /></div>
      ${view === "Cache" ? html`<${Cache} model=${named} />` : null}
      ${view === "Requests" ? html`<${Requests} model=${named} />` : null}
      ${view === "Model" ? html`<${Model} model=${named} />` : null}
    </main>
  </div>`;
}

function SignIn({ problem, connect }) {
  const [key, setKey] = useState("");
  return html`<main class="notice">
    <h1>Weft</h1>
    <form onSubmit=${(event) => { event.preventDefault(); connect(key.trim()); }}>
      <label>API key
        <input type="password" autocomplete="off" autofocus value=${key} onInput=${(event) => setKey(event.target.value)} />
      </label>
      <button type="submit" disabled=${!key.trim()}>Sign in</button>
    </form>
    ${problem ? html`<p class="problem" role="alert">${problem}</p>` : null}
    <p class="hint">The key stays in this tab's memory and is forgotten when you close or reload it.</p>
  </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
