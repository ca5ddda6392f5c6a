// The prefix cache as a picture: branches on an axis of tokens, with the points from which a request can resume.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { about, get } from "./client.js";

const ROW = 22;
const LEFT = 12;
const RIGHT = 24;
const TOP = 28;
const PAUSE = 2000;
const ORIGINS = {
  prompt_end: "end of a prompt",
  answer_end: "end of an answer",
  junction: "where prompts parted",
  recalled: "wanted again after it was evicted",
  boundary: "end of a message",
  declared: "declared by a request",
  regular: "at a regular distance",
  candidate: "kept while memory is free",
};

export function Cache({ model }) {
  const [outline, setOutline] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let timer = null;
    let ended = false;
    const ask = async () => {
      // Nothing is asked of the server while nobody looks.
      if (!document.hidden) {
        try {
          setOutline(await get(about("/cache/outline", model)));
          setProblem(null);
        } catch (error) {
          setProblem(error.message);
        }
      }
      if (!ended) timer = setTimeout(ask, PAUSE);
    };
    ask();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [model]);
  if (problem) return html`<section class="view"><p class="problem" role="alert">${problem}</p></section>`;
  if (!outline) return html`<section class="view"><p class="hint">Reading the cache…</p></section>`;
  const { rows, most } = layout(outline.branches);
  const points = outline.branches.reduce((sum, branch) => sum + branch.points.length, 0);
  return html`<section class="view" aria-label="Cache">
    <h2>Cached prefixes</h2>
    <p class="hint">
      ${outline.branches.length === 1 ? "1 branch" : `${outline.branches.length} branches`} with ${count(points, "resume point")}.
      ${outline.cells ? html` ${Object.entries(outline.cells).map(([tier, { held, shown }]) => `${tier}: ${held * outline.cell_tokens} tokens${held > shown ? `, of which the newest ${shown * outline.cell_tokens} are drawn` : ""}`).join("; ")}.` : " Only the prefixes of your key are shown."}
      ${" "}Texts are not shown: the cache knows prompts by salted keys only.
    </p>
    ${rows.length ? html`<${Picture} rows=${rows} most=${most} />` : html`<p class="hint">Nothing is cached yet. Prompts are cached in pieces of ${outline.cell_tokens} tokens.</p>`}
  </section>`;
}

// Give every branch a row: the continuation that was hit most stays on the row of its parent, others go below.
export function layout(branches) {
  const known = new Map(branches.map((branch) => [id(branch), branch]));
  const children = new Map();
  const roots = [];
  for (const branch of branches) {
    const parent = branch.parent === null ? undefined : known.get(`${where(branch)}/${branch.parent}`);
    if (!parent) roots.push(branch);
    else children.set(parent, [...(children.get(parent) ?? []), branch]);
  }
  const rows = [];
  let next = 0;
  const order = (list) => list.sort((one, other) => other.hits - one.hits || other.to - one.to);
  const stack = order(roots).reverse().map((branch) => ({ branch, row: null, above: null }));
  while (stack.length) {
    const { branch, row, above } = stack.pop();
    const own = row ?? next++;
    rows.push({ branch, row: own, above });
    const below = order(children.get(branch) ?? []);
    below.forEach((child, index) => below[index] = { branch: child, row: index ? null : own, above: index ? own : null });
    stack.push(...below.reverse());
  }
  return { rows, most: Math.max(64, ...branches.map((branch) => branch.to)) };
}

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const where = (branch) => `${branch.replica ?? ""}/${branch.tier}`;
const id = (branch) => `${where(branch)}/${branch.name}`;

function Picture({ rows, most }) {
  const [chosen, choose] = useState(null);
  const [view, setView] = useState({ top: 0, height: 600, width: 800 });
  const box = useRef(null);
  useEffect(() => {
    const measure = () => box.current && setView({ top: box.current.scrollTop, height: box.current.clientHeight, width: box.current.clientWidth });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const height = TOP + ROW * (Math.max(...rows.map((each) => each.row)) + 1);
  const x = (tokens) => LEFT + ((view.width - LEFT - RIGHT) * tokens) / most;
  const y = (row) => TOP + ROW * row + ROW / 2;
  // Only what is visible is drawn.
  const first = (view.top - TOP) / ROW - 2;
  const last = first + view.height / ROW + 4;
  const drawn = rows.filter(({ row, above }) => row >= first && (above ?? row) <= last);
  const selected = rows.find(({ branch }) => id(branch) === chosen)?.branch;
  return html`<div>
    <div class="picture" ref=${box} tabindex="0" aria-label="Branches of the cache" onScroll=${(event) => setView({ ...view, top: event.currentTarget.scrollTop })}>
      <svg width=${view.width} height=${height} role="list" aria-label="Branches">
        ${ticks(most).map((tokens) => html`<g class="tick" aria-hidden="true"><line x1=${x(tokens)} x2=${x(tokens)} y1=${TOP - 6} y2=${height} /><text x=${x(tokens)} y=${TOP - 12}>${tokens}</text></g>`)}
        ${drawn.map(({ branch, row, above }) => html`<${Branch} key=${id(branch)} ...${{ branch, row, above, x, y, chosen: id(branch) === chosen }} choose=${() => choose(id(branch) === chosen ? null : id(branch))} />`)}
      </svg>
    </div>
    <${Legend} />
    ${selected ? html`<${Details} branch=${selected} />` : html`<p class="hint">Choose a branch to see its points.</p>`}
  </div>`;
}

function Branch({ branch, row, above, x, y, chosen, choose }) {
  const label = `${branch.tier}: tokens ${branch.from} to ${branch.to}, ${count(branch.hits, "hit")}, ${count(branch.points.length, "resume point")}`;
  const onKey = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose();
    }
  };
  return html`<g class=${`branch ${branch.tier} ${chosen ? "chosen" : ""} ${branch.running ? "running" : ""}`} role="listitem">
    <g role="button" tabindex="0" aria-label=${label} aria-pressed=${chosen} onClick=${choose} onKeyDown=${onKey}>
      <title>${label}</title>
      ${above === null ? null : html`<path class="fork" d=${`M${x(branch.from)} ${y(above)} V${y(row)}`} />`}
      <line x1=${x(branch.from)} x2=${Math.max(x(branch.to), x(branch.from) + 2)} y1=${y(row)} y2=${y(row)} />
      ${spread(branch.points, x).map((point) => html`<circle class=${point.origin} cx=${x(point.tokens)} cy=${y(row)} r=${point.hits ? 5 : 3.5} />`)}
    </g>
  </g>`;
}

// Of points that would cover each other, the one with the most hits.
function spread(points, x) {
  const places = new Map();
  for (const point of points) {
    const place = Math.round(x(point.tokens) / 5);
    if ((places.get(place)?.hits ?? -1) < point.hits) places.set(place, point);
  }
  return [...places.values()];
}

function ticks(most) {
  const step = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072].find((each) => most / each <= 10) ?? 262144;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, index) => index * step);
}

function Legend() {
  return html`<p class="legend">
    ${[["device", "on the device"], ["host", "in host memory"], ["disk", "on disk"], ["remote", "in the store"]].map(([name, text]) => html`<span><i class=${`line ${name}`}></i>${text}</span>`)}
    <span><i class="dot"></i>resume point</span><span><i class="dot hit"></i>hit</span>
  </p>`;
}

function Details({ branch }) {
  return html`<div class="details">
    <h3>${branch.name}</h3>
    <p>
      Tokens ${branch.from} to ${branch.to}, in tier <b>${branch.tier}</b>${branch.replica ? ` of ${branch.replica}` : ""}.
      ${" "}${count(branch.hits, "hit")}, last used ${count(branch.age, "lookup")} ago${branch.running ? `, in use by ${branch.running} running` : ""}.
      ${branch.tenant ? html` Tenant <code>${branch.tenant.slice(0, 12)}</code>.` : null}
    </p>
    ${branch.points.length
      ? html`<div class="scrolls" tabindex="0"><table>
          <thead><tr><th>Resume at token</th><th>Kept because</th><th>Hits</th></tr></thead>
          <tbody>${branch.points.slice(0, 200).map((point) => html`<tr><td class="number">${point.tokens}</td><td>${ORIGINS[point.origin] ?? point.origin}</td><td class="number">${point.hits}</td></tr>`)}</tbody>
        </table></div>`
      : html`<p class="hint">No request can resume inside this branch.</p>`}
  </div>`;
}
