// The requests of all clients as lanes of time, and the engine's steps above them on the same axis.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { about, get, listen } from "./client.js";
import { PromptBar, seconds, Shares, sharesOf } from "./facts.js";
import { visible } from "./markdown.js";
import * as own from "./own.js";
import { Timeline } from "./timeline.js";

const WINDOWS = [[10, "10 s"], [60, "1 min"], [300, "5 min"]];
const MOST_SHOWN = 40;
const FRAME_MS = 200;
const MOST_RECALLED = 8;
const HEIGHT = 18;
const WAITS = {
  turn: "others are before it", sequences: "all seats are taken", memory: "no memory is free for it", load: "its prefix is being loaded",
  prefix: "another request computes the same prefix", grammar: "its grammar is being computed", step: "the step has no room for its tokens",
};
const STATES = { waits: "waits", computes: "reads its prompt", decodes: "answers" };
const ENDS = { stop: "ended", length: "ended at its limit of tokens", abort: "aborted", error: "failed", unseen: "ended while nobody looked" };

// What was seen stays while other views are open; of another model nothing does.
let seen = { model: undefined, timeline: new Timeline() };

export function Requests({ model }) {
  const [, redraw] = useState(0);
  const [problem, setProblem] = useState(null);
  const [span, setSpan] = useState(60);
  const [chosen, choose] = useState(null);
  if (seen.model !== model) seen = { model, timeline: new Timeline() };
  const { timeline } = seen;
  useEffect(() => watch(timeline, model, setProblem), [model]);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || redraw((count) => count + 1), FRAME_MS);
    return () => clearInterval(timer);
  }, []);
  const now = timeline.now;
  const since = now - 1000 * span;
  const lanes = timeline.since(since);
  return html`<section class="view" tabindex="0" aria-label="Requests">
    <div class="row">
      <h2>Requests</h2>
      <div class="segments" role="group" aria-label="Length of the axis">
        ${WINDOWS.map(([value, label]) => html`<button type="button" class="quiet" aria-pressed=${span === value} onClick=${() => setSpan(value)}>${label}</button>`)}
      </div>
      <${LaneLegend} />
    </div>
    ${problem ? html`<p class="problem" role="status">${problem}</p>` : null}
    ${timeline.seesSteps ? html`<${Steps} steps=${timeline.steps} since=${since} now=${now} />` : null}
    ${lanes.length
      ? html`<ul class="lanes">${lanes.slice(0, MOST_SHOWN).map(
          (lane) => html`<${Lane} key=${lane.id} ...${{ lane, since, now, model, chosen: chosen === lane.id }} choose=${() => choose(chosen === lane.id ? null : lane.id)} />`,
        )}</ul>`
      : problem ? null : html`<p class="hint">No request was running in this time. ${timeline.seesSteps ? "Requests of all clients appear here." : "Requests with your key appear here, whoever sends them."}</p>`}
    <p class="hint">
      ${lanes.length > MOST_SHOWN ? `${lanes.length - MOST_SHOWN} older requests of this time are not drawn. ` : ""}
      ${timeline.lost ? `${timeline.lost} events came faster than this page could read, and are missing. ` : ""}
    </p>
  </section>`;
}

// Listen while this view is open and the tab is visible.
function watch(timeline, model, setProblem) {
  let controller = null;
  const say = (error) => setProblem(error && problemOf(error));
  const follow = () => {
    if (document.hidden) {
      controller?.abort();
      controller = null;
    } else if (!controller) {
      controller = new AbortController();
      listen(about("/debug/events", model), controller.signal, { take: (batch) => timeline.take(batch), say });
      recall(timeline, model, controller.signal);
    }
  };
  follow();
  document.addEventListener("visibilitychange", follow);
  return () => {
    document.removeEventListener("visibilitychange", follow);
    controller?.abort();
  };
}

function problemOf(error) {
  if (error.status === 429) return "As many pages look at requests as the server allows. Trying again.";
  if (error.status === 404) return "This server does not report what its requests do.";
  return error.status ? error.message : "The connection was lost. Trying again.";
}

// Of what this page sent before this view was open, the server has records.
async function recall(timeline, model, signal) {
  for (const id of own.ids().slice(0, MOST_RECALLED)) {
    if (signal.aborted) return;
    if (timeline.lanes.has(id)) continue;
    const record = await recordOf(id, model).catch(() => null);
    if (record?.state === "ended") timeline.recall(record);
  }
}

const recordOf = (id, model) => get(about(`/debug/requests/${encodeURIComponent(id.split("#")[0])}`, model));

function LaneLegend() {
  return html`<p class="legend">
    ${[["waits", "waits"], ["loads", "loads"], ["computes", "reads its prompt"], ["decodes", "answers"], ["accepted", "from drafts"], ["refused", "drafts refused"], ["preempted", "preempted"]].map(
      ([name, text]) => html`<span><i class=${`lane-key ${name}`}></i>${text}</span>`,
    )}
  </p>`;
}

function Lane({ lane, since, now, model, chosen, choose }) {
  const title = own.titleOf(lane.id.split("#")[0]);
  const kept = lane.prompt ? Math.round((100 * lane.cached) / lane.prompt) : 0;
  return html`<li>
    <button type="button" class="lane" aria-expanded=${chosen} onClick=${choose}>
      <span class="name">${title ? visible(title) : html`<code>${short(visible(lane.id))}</code>`}</span>
      <span class="state">${lane.ended === null ? STATES[lane.state] : ENDS[lane.reason] ?? lane.reason}</span>
      <${Track} lane=${lane} since=${since} now=${now} />
      <span class="counts">${lane.prompt ? html`<b>${lane.prompt}</b> in, ${kept} % reused` : ""}</span>
      <span class="counts"><b>${lane.tokens}</b> out${lane.drafts ? `, ${lane.accepted}/${lane.drafts} drafts` : ""}</span>
    </button>
    ${chosen ? html`<${History} lane=${lane} model=${model} />` : null}
  </li>`;
}

const short = (id) => (id.length > 20 ? `${id.slice(0, 17)}…${id.includes("#") ? id.slice(id.indexOf("#")) : ""}` : id);

// One path for each kind of piece, whatever their number.
function Track({ lane, since, now }) {
  const x = (time) => (1000 * (Math.min(Math.max(time, since), now) - since)) / (now - since);
  const paths = { waits: "", loads: "", computes: "", decodes: "", accepted: "", refused: "" };
  const add = (kind, from, to, y, height) => {
    paths[kind] += `M${x(from).toFixed(1)} ${y}h${Math.max(x(to) - x(from), 1.5).toFixed(1)}v${height}h${-Math.max(x(to) - x(from), 1.5).toFixed(1)}z`;
  };
  for (const piece of lane.pieces) {
    const to = piece.to ?? now;
    if (to < since) continue;
    const thin = piece.kind === "waits" || piece.kind === "loads";
    add(piece.kind, piece.from, to, thin ? HEIGHT / 2 - 2 : 1, thin ? 4 : HEIGHT - 2);
    if (piece.accepted) {
      const height = (HEIGHT - 2) * Math.min(1, piece.accepted / piece.tokens);
      add("accepted", piece.from, to, HEIGHT - 1 - height, height);
    }
    if (piece.drafts > piece.accepted) add("refused", piece.from, to, 1, Math.max(1.5, (4 * (piece.drafts - piece.accepted)) / piece.drafts));
  }
  const chunks = lane.chunks.filter(({ at }) => at >= since).map(({ at }) => `M${x(at).toFixed(1)} 1v${HEIGHT - 2}`).join("");
  const marks = lane.marks.filter((at) => at >= since).map((at) => `M${x(at).toFixed(1)} 0v${HEIGHT}`).join("");
  return html`<svg class="track" viewBox=${`0 0 1000 ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
    ${Object.entries(paths).map(([kind, path]) => (path ? html`<path class=${kind} d=${path} />` : null))}
    ${chunks ? html`<path class="chunks" d=${chunks} />` : null}
    ${marks ? html`<path class="preempted" d=${marks} />` : null}
  </svg>`;
}

const BUCKETS = 200;
const MEASURES = [
  ["ms", "Time of a step", (value) => `${value.toFixed(value < 10 ? 1 : 0)} ms`],
  ["tokens", "Tokens of a step", (value) => `${value}`],
  ["rows", "Rows of a step", (value) => `${value}`],
];

// The most of each measure in each of some equal parts of the time.
function Steps({ steps, since, now }) {
  const first = steps.findIndex((step) => step.at >= since);
  const shown = first < 0 ? [] : steps.slice(first);
  return html`<div class="strips">
    ${MEASURES.map(([name, title, format]) => {
      const tops = { prompt: new Float64Array(BUCKETS), decode: new Float64Array(BUCKETS) };
      for (const step of shown) {
        const place = Math.min(BUCKETS - 1, Math.max(0, Math.floor((BUCKETS * (step.at - since)) / (now - since))));
        const kind = step.prompt_tokens ? "prompt" : "decode";
        tops[kind][place] = Math.max(tops[kind][place], step[name]);
      }
      const most = Math.max(0, ...tops.prompt, ...tops.decode);
      const bars = (values) => Array.from(values, (value, place) => (value ? `M${place} 40v${(-38 * value / most).toFixed(1)}h.8V40z` : "")).join("");
      return html`<figure>
        <figcaption><span>${title}</span><span class="small">up to ${format(most)}</span></figcaption>
        <svg viewBox=${`0 0 ${BUCKETS} 40`} preserveAspectRatio="none" role="img" aria-label=${`${title}: up to ${format(most)}, in ${shown.length} steps`}>
          <path class="computes" d=${bars(tops.prompt)} /><path class="decodes" d=${bars(tops.decode)} />
        </svg>
      </figure>`;
    })}
  </div>`;
}

function History({ lane, model }) {
  const [record, setRecord] = useState(null);
  const latest = useRef(null);
  useEffect(() => {
    latest.current = lane.id;
    recordOf(lane.id, model).then((found) => latest.current === lane.id && setRecord(found), () => {});
  }, [lane.id, lane.state]);
  const shares = sharesOf(lane.prompt, {
    cached_tokens: lane.cached, loaded_tokens: sum(lane.loaded), disk_tokens: lane.loaded.disk ?? 0, remote_tokens: lane.loaded.remote ?? 0,
  });
  const answer = record?.answers.find((each) => each.id === lane.id) ?? record?.answers[0];
  return html`<div class="details">
    <h3>${visible(lane.id)}</h3>
    ${lane.prompt ? html`<div><${PromptBar} prompt=${lane.prompt} shares=${shares} /><p class="small"><${Shares} shares=${shares} /> of ${lane.prompt} prompt tokens.</p></div>` : null}
    ${lane.miss ? html`<p>The hit ended at token <b>${lane.miss.at}</b>: ${lane.miss.why}${lane.miss.lost ? ` ${lane.miss.lost} tokens were computed that could have been reused.` : ""}</p>` : null}
    <ol class="history">${storyOf(lane).map(([at, text]) => html`<li><span class="number">${at === null ? "" : `+${seconds(Math.max(0, at - lane.began))}`}</span>${text}</li>`)}</ol>
    <p class="small">
      ${answer?.queued_ms != null ? `Queued ${seconds(answer.queued_ms)}, first token after ${answer.first_token_ms === null ? "–" : seconds(answer.first_token_ms)}. ` : ""}
      ${record?.request ? html`Request id <code>${visible(record.request)}</code>. ` : ""}${lane.tenant ? html`Tenant <code>${lane.tenant.slice(0, 12)}</code>.` : ""}
    </p>
  </div>`;
}

const sum = (counts) => Object.values(counts ?? {}).reduce((total, each) => total + each, 0);
const MOST_LINES = 60;

// The pieces of a lane in words; neighbours of the same kind are one line.
function storyOf(lane) {
  const lines = [];
  for (const piece of lane.pieces) {
    const last = lines.at(-1);
    if (last?.kind === piece.kind && last.why === piece.why) {
      last.to = piece.to ?? lane.seen;
      for (const name of ["tokens", "drafts", "accepted"]) last[name] = (last[name] ?? 0) + (piece[name] ?? 0);
    } else {
      lines.push({ ...piece, to: piece.to ?? lane.seen });
    }
  }
  const story = lines.map((line) => [line.from, `${textOf(line, lane)} (${seconds(Math.max(0, line.to - line.from))})`]);
  story.push(...lane.marks.map((at) => [at, "preempted: its memory was needed"]));
  if (lane.ended !== null) story.push([lane.ended, `${ENDS[lane.reason] ?? lane.reason} after ${lane.tokens} tokens`]);
  return story.sort(([one], [other]) => one - other).slice(-MOST_LINES);
}

function textOf(line, lane) {
  if (line.kind === "computes") {
    const chunks = lane.chunks.filter(({ at }) => at > line.from && at <= line.to);
    const parts = chunks.map(({ from, to }) => `${from}–${to}`);
    return parts.length ? `read prompt tokens ${parts.slice(0, 12).join(", ")}${parts.length > 12 ? " …" : ""}` : "read its prompt";
  }
  if (line.kind === "decodes") return `answered ${line.tokens} tokens${line.drafts ? `, ${line.accepted} of ${line.drafts} drafts accepted` : ""}`;
  return line.why ? `waited: ${WAITS[line.why] ?? line.why}` : "waited";
}
