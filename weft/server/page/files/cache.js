// The prefix cache as a picture: branches on an axis of tokens, with the points from which a request can resume.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { about, get } from "./client.js";
import { seconds } from "./facts.js";

const ROW = 22;
const LEFT = 12;
const RIGHT = 24;
const TOP = 28;
const PAUSE = 2000;
const MOST_FORKS = 200;
const TIERS = { device: "on the device", host: "in host memory", disk: "on disk", remote: "in the store" };
const ORIGINS = {
  prompt_end: "end of a prompt",
  answer_end: "end of an answer",
  junction: "where prompts parted",
  recalled: "wanted again after it was evicted",
  boundary: "end of a message",
  declared: "declared by a request",
  regular: "at a regular distance",
  candidate: "kept while memory is free",
  imported: "loaded from a file",
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
  const { rows, forks, most } = layout(outline.branches);
  const tiers = Object.entries(outline.cells ?? {});
  const points = outline.branches.reduce((sum, branch) => sum + branch.points.length, 0);
  return html`<section class="view" tabindex="0" aria-label="Cache">
    <h2>Cached prefixes</h2>
    <p class="hint">
      ${outline.branches.length === 1 ? "1 branch" : `${number(outline.branches.length)} branches`} with ${count(points, "resume point")}.
      ${outline.cells ? html` ${tiers.map(([tier, { held }]) => `${number(held * outline.cell_tokens)} tokens ${TIERS[tier] ?? tier}`).join(", ")}.` : " Only the prefixes of your key are shown."}
      ${" "}Texts are not shown: the cache knows prompts by salted keys only.
    </p>
    ${tiers.filter(([, { held, shown }]) => held > shown).map(
      ([tier, { held, shown }]) => html`<p class="note">The newest ${number(shown)} of ${number(held)} cells ${TIERS[tier] ?? tier} are drawn, of ${outline.cell_tokens} tokens each.</p>`,
    )}
    ${rows.length ? html`<${Picture} rows=${rows} forks=${forks} most=${most} />` : html`<p class="hint">Nothing is cached yet. Prompts are cached in pieces of ${outline.cell_tokens} tokens.</p>`}
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
    else if (children.has(parent)) children.get(parent).push(branch);
    else children.set(parent, [branch]);
  }
  const rows = [];
  // Where several branches leave one: a line at these tokens, from its row down to the last of theirs.
  const forks = new Map();
  let next = 0;
  const order = (list) => list.sort((one, other) => other.hits - one.hits || other.to - one.to);
  const stack = order(roots).reverse().map((branch) => ({ branch, row: null, above: null }));
  while (stack.length) {
    const { branch, row, above } = stack.pop();
    const own = row ?? next++;
    rows.push({ branch, row: own });
    if (above !== null) forks.set(`${above}/${branch.from}`, { tier: branch.tier, from: branch.from, above, last: own });
    const below = order(children.get(branch) ?? []);
    below.forEach((child, index) => below[index] = { branch: child, row: index ? null : own, above: index ? own : null });
    stack.push(...below.reverse());
  }
  return { rows, forks: [...forks.values()], most: Math.max(64, ...branches.map((branch) => branch.to)) };
}

const number = (value) => value.toLocaleString("en");
const count = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;
const where = (branch) => `${branch.replica ?? ""}/${branch.tier}`;
const id = (branch) => `${where(branch)}/${branch.name}`;

function Picture({ rows, forks, most }) {
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
  const height = TOP + ROW * (Math.max(...rows.map((each) => each.row)) + 1.4);
  const x = (tokens) => LEFT + ((view.width - LEFT - RIGHT) * tokens) / most;
  const y = (row) => TOP + ROW * row + ROW / 2;
  // Only what is visible is drawn.
  const first = (view.top - TOP) / ROW - 2;
  const last = first + view.height / ROW + 4;
  const drawn = rows.filter(({ row }) => row >= first && row <= last);
  const crossing = forks.filter((fork) => fork.last >= first && fork.above <= last).slice(0, MOST_FORKS);
  const selected = rows.find(({ branch }) => id(branch) === chosen)?.branch;
  return html`<div>
    <div class="picture" ref=${box} tabindex="0" role="region" aria-label="Branches of the cache" onScroll=${(event) => setView({ ...view, top: event.currentTarget.scrollTop })}>
      <svg width=${view.width} height=${height} role="group" aria-label="Branches">
        ${ticks(most).map((tokens) => html`<g class="tick" aria-hidden="true"><line x1=${x(tokens)} x2=${x(tokens)} y1=${TOP - 6} y2=${height} /><text x=${x(tokens)} y=${TOP - 12}>${tokens}</text></g>`)}
        ${crossing.map((fork) => html`<path class=${`fork ${fork.tier}`} d=${`M${x(fork.from)} ${y(Math.max(fork.above, first))} V${y(Math.min(fork.last, last))}`} />`)}
        ${drawn.map(({ branch, row }) => html`<${Branch} key=${id(branch)} ...${{ branch, row, x, y, chosen: id(branch) === chosen }} choose=${() => choose(id(branch) === chosen ? null : id(branch))} />`)}
      </svg>
    </div>
    <${Legend} />
    ${selected ? html`<${Details} branch=${selected} />` : html`<p class="hint">Choose a branch to see its points.</p>`}
  </div>`;
}

function Branch({ branch, row, x, y, chosen, choose }) {
  const label = `${TIERS[branch.tier] ?? branch.tier}, tokens ${branch.from} to ${branch.to}, ${count(branch.hits, "hit")}, ${count(branch.points.length, "resume point")}`;
  const onKey = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose();
    }
  };
  const kind = `branch ${branch.tier} ${chosen ? "chosen" : ""} ${branch.running ? "running" : ""}`;
  return html`<g class=${kind} role="button" tabindex="0" aria-label=${label} aria-pressed=${chosen} onClick=${choose} onKeyDown=${onKey}>
    <title>${label}</title>
    <line class="target" x1=${x(branch.from)} x2=${x(branch.to)} y1=${y(row)} y2=${y(row)} />
    ${branch.retained ? html`<line class="retained" x1=${x(branch.from)} x2=${Math.max(x(branch.to), x(branch.from) + 2)} y1=${y(row) + 6} y2=${y(row) + 6} />` : null}
    <line x1=${x(branch.from)} x2=${Math.max(x(branch.to), x(branch.from) + 2)} y1=${y(row)} y2=${y(row)} />
    ${spread(branch.points, x).map((point) => html`<circle class=${point.origin} cx=${x(point.tokens)} cy=${y(row)} r=${point.hits ? 5 : 3.5} />`)}
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
    ${Object.entries(TIERS).map(([name, text]) => html`<span><i class=${`line ${name}`}></i>${text}</span>`)}
    <span><i class="dot"></i>resume point</span><span><i class="dot hit"></i>one that was hit</span><span><i class="line retained"></i>retained</span>
  </p>`;
}

function Details({ branch }) {
  return html`<div class="details">
    <h3>${branch.name}</h3>
    <p>
      Tokens ${branch.from} to ${branch.to}, <b>${TIERS[branch.tier] ?? branch.tier}</b>${branch.replica ? ` of ${branch.replica}` : ""}.
      ${" "}${count(branch.hits, "hit")}, last used ${branch.age ? `${count(branch.age, "lookup")} ago` : "by the latest lookup"}${branch.running ? `, in use by ${branch.running} running` : ""}${branch.retained ? `, retained for ${seconds(1000 * branch.retained)} more` : ""}.
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
