// What the server runs, what it decided on its own and why, and how busy it is.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { about, get } from "./client.js";

const PAUSE = 2000;
const MOST_SAMPLES = 150;

export function Model({ model: named }) {
  const [facts, setFacts] = useState(null);
  const [model, setModel] = useState(null);
  const [problem, setProblem] = useState(null);
  const samples = useRef([]);
  useEffect(() => {
    let timer = null;
    let ended = false;
    samples.current = [];
    setFacts(null);
    setModel(null);
    setProblem(null);
    get(about("/model_info", named)).then(setModel, (error) => setProblem(error.message));
    const ask = async () => {
      if (!document.hidden) {
        try {
          const found = await get(about("/server_info", named));
          samples.current = [...samples.current, sample(found.stats)].slice(-MOST_SAMPLES);
          setFacts(found);
          setProblem(null);
        } catch (error) {
          setProblem(error.status === 403 ? "Counters and memory are shown with the admin key only." : error.message);
          if (error.status === 403) return;
        }
      }
      if (!ended) timer = setTimeout(ask, PAUSE);
    };
    ask();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [named]);
  return html`<section class="view" tabindex="0" aria-label="Model">
    <h2>${model?.served_model_name ?? "Model"}</h2>
    ${problem ? html`<p class="problem" role="status">${problem}</p>` : null}
    <div class="cards">
      ${model ? html`<${Card} title="Model" rows=${modelRows(model, facts)} />` : null}
      ${facts ? html`<${Card} title="Options in force" rows=${optionRows(facts)} />` : null}
      ${facts ? html`<${Decisions} auto=${facts.auto ?? {}} />` : null}
      ${facts ? html`<${Card} title="Since the start" rows=${totalRows(facts.stats)} />` : null}
      ${samples.current.length > 1
        ? html`<${Card} title="Now" rows=${nowRows(facts.stats, samples.current)} />
          <${Chart} title="Tokens a second" values=${rates(samples.current)} format=${(value) => value.toFixed(0)} />
          <${Memory} samples=${samples.current} />
          ${Object.entries(facts.stats.tiers ?? {}).filter(([, tier]) => tier.limit_bytes).map(
            ([name, tier]) => html`<${Chart} title=${`${TIERS[name] ?? name}, ${bytes(tier.limit_bytes)}`} values=${samples.current.map((each) => each.tiers[name] ?? 0)} format=${bytes} />`,
          )}`
        : null}
      ${facts ? html`<${Misses} stats=${facts.stats} />` : null}
    </div>
  </section>`;
}

const sample = (stats) => ({
  at: performance.now(),
  tokens: stats.tokens_out,
  tiers: Object.fromEntries(Object.entries(stats.tiers ?? {}).map(([name, tier]) => [name, tier.used_bytes])),
  memory: Object.entries(stats.units ?? {}).map(([kind, { live, cached }]) => {
    const size = stats.unit_bytes?.[kind] ?? 0;
    return { kind, live: live * size, cached: cached * size };
  }),
});

const rates = (samples) =>
  samples.slice(1).map((each, index) => {
    const before = samples[index];
    return Math.max(0, (1000 * (each.tokens - before.tokens)) / Math.max(1, each.at - before.at));
  });

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${count.toFixed(count < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

const number = (count) => Number(count).toLocaleString("en");

function modelRows(model, facts) {
  const weights = Object.entries(facts?.weights?.bytes ?? {});
  return [
    ["Path", model.model_path],
    ["Device", facts?.device],
    ["Architecture", model.architecture],
    ["Activations", model.dtype],
    ["Vocabulary", number(model.vocab_size)],
    ["Longest context", `${number(model.max_length)} tokens`],
    ...weights.map(([format, size]) => [`Weights in ${format}`, bytes(size)]),
  ].filter(([, value]) => value);
}

function optionRows(facts) {
  return [
    ["Version", facts.version],
    ["Drafts", facts.draft],
    ["Exact answers", facts.exact ? "on" : "off"],
    ["Role", facts.role === "both" ? null : facts.role],
    ["Quantised at load", facts.quantize],
    ["Memory", bytes(facts.memory_bytes)],
    ["Room for", `${number(facts.memory_tokens)} tokens`],
    ["Answers at once", number(facts.max_sequences)],
    ["Prefix cache", facts.disable_radix_cache ? "off" : "on"],
    ...Object.entries(facts.stats.replicas ?? {}).map(([name, member]) => [`Replica ${name}`, member.state]),
  ].filter(([, value]) => value);
}

function nowRows(stats, samples) {
  const rate = rates(samples.slice(-2)).at(-1);
  return [
    ["Running", number(stats.running)],
    ["Waiting", number(stats.waiting)],
    ["Tokens a second", rate === undefined ? "–" : rate.toFixed(0)],
    ["Cells in the cache", number(stats.cells)],
    ["Resume points", number(stats.resume_points)],
  ];
}

function totalRows(stats) {
  const sum = (counts) => Object.values(counts ?? {}).reduce((total, each) => total + (typeof each === "number" ? each : sum(each)), 0);
  const proposed = sum(stats.drafts?.proposed);
  return [
    ["Requests", number(stats.requests)],
    ["Prompt tokens", number(stats.tokens_in)],
    ["Reused", `${number(stats.cached_tokens)} (${((100 * stats.cached_tokens) / Math.max(1, stats.tokens_in)).toFixed(0)} %)`],
    ["Answer tokens", number(stats.tokens_out)],
    ["Drafts accepted", proposed ? `${number(sum(stats.drafts.accepted))} of ${number(proposed)}` : "none drafted"],
    ["Preemptions", number(stats.preemptions)],
    ["Steps", number(stats.steps)],
  ];
}

// What each option that was left to the server means here: "off: the reason".
function Decisions({ auto }) {
  const rows = Object.entries(auto).map(([name, text]) => [name, ...text.split(/(?:: |, )(.*)/s)]);
  if (!rows.length) return null;
  return html`<div class="card">
    <h3>What “auto” means here</h3>
    <dl class="reasons">${rows.map(([name, value, why]) => html`<div><dt>${name.replaceAll("_", " ")}</dt><dd><b>${value}</b>${why ? html`<span>${why}</span>` : null}</dd></div>`)}</dl>
  </div>`;
}

function Card({ title, rows }) {
  return html`<div class="card">
    <h3>${title}</h3>
    <dl>${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}

function Chart({ title, values, format }) {
  const most = Math.max(...values, 1);
  const points = values.map((value, index) => `${(300 * index) / Math.max(1, values.length - 1)},${80 - (76 * value) / most}`).join(" ");
  return html`<figure class="card">
    <figcaption><h3>${title}</h3><span class="small">now ${format(values.at(-1) ?? 0)}, at most ${format(most)}</span></figcaption>
    <svg class="chart" viewBox="0 0 300 80" preserveAspectRatio="none" role="img" aria-label=${`${title}: now ${format(values.at(-1) ?? 0)}`}><polyline points=${points} /></svg>
  </figure>`;
}

const TIERS = { host: "Host memory", disk: "File", remote: "Store" };
const LABELS = { page: "keys and values", window: "window keys and values", state: "states", tail: "tails" };

function Memory({ samples }) {
  const last = samples.at(-1).memory;
  const most = Math.max(1, ...samples.map((each) => each.memory.reduce((sum, { live, cached }) => sum + live + cached, 0)));
  const bands = last.flatMap(({ kind }) => ["live", "cached"].map((held) => ({ kind, held })));
  const sums = samples.map(() => 0);
  const areas = bands.map(({ kind, held }) => {
    const x = (index) => (300 * index) / Math.max(1, samples.length - 1);
    const y = (value) => 80 - (78 * value) / most;
    const lower = sums.map((value, index) => `${x(index)},${y(value)}`);
    samples.forEach((each, index) => { sums[index] += each.memory.find((unit) => unit.kind === kind)?.[held] ?? 0; });
    const upper = sums.map((value, index) => `${x(index)},${y(value)}`);
    return html`<polygon class=${`kind-${kind} ${held}`} points=${[...lower, ...upper.reverse()].join(" ")} />`;
  });
  return html`<figure class="card">
    <figcaption><h3>Memory</h3><span class="small">at most ${bytes(most)}</span></figcaption>
    <svg class="chart" viewBox="0 0 300 80" preserveAspectRatio="none" role="img" aria-label="Memory over time by kind">${areas}</svg>
    <dl>${last.map(({ kind, live, cached }) => html`<div><dt><i class=${`swatch kind-${kind}`}></i>${LABELS[kind] ?? kind}</dt><dd>${bytes(live)} running, ${bytes(cached)} cached</dd></div>`)}</dl>
  </figure>`;
}

function Misses({ stats }) {
  const rows = Object.entries(stats.lost_tokens ?? {}).filter(([, tokens]) => tokens > 0).sort((one, other) => other[1] - one[1]);
  if (!rows.length) return null;
  return html`<div class="card">
    <h3>Why prompt tokens were computed</h3>
    <dl>${rows.map(([reason, tokens]) => html`<div><dt>${reason.replaceAll("_", " ")}</dt><dd>${number(tokens)} tokens</dd></div>`)}</dl>
  </div>`;
}
