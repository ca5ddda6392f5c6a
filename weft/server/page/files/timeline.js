// What the engine's events say about requests: for each a lane with pieces of time.
//
//     lane = { id, source, tenant, state, began, ended, pieces, marks, prompt, cached, loaded, miss, computed, tokens,
//              drafts, accepted, preemptions, reason }
//     piece = { kind, from, to, why?, tokens?, drafts?, accepted? }    the last one has no `to` while it lasts

const MOST_LANES = 400;
const MOST_PIECES = 1500;
const MOST_STEPS = 20_000;
// Pieces of decoding are joined up to this length.
const JOINED_MS = 400;

export class Timeline {
  constructor() {
    this.lanes = new Map();
    this.steps = [];
    this.lost = 0;
    this.seesSteps = false;
    this.ahead = null;
  }

  // The time on the server's clock.
  get now() {
    return Date.now() + (this.ahead ?? 0);
  }

  take(batch) {
    // A batch arrives late, never early.
    this.ahead = Math.max(this.ahead ?? -Infinity, batch.at - Date.now());
    this.lost += batch.lost ?? 0;
    if (batch.opening) this.forget(batch);
    for (const event of batch.events ?? []) {
      const lane = this.lane(event);
      lane.source = batch.source;
      lane.seen = event.at;
      TAKES[event.event]?.(lane, event);
      if (lane.pieces.length > MOST_PIECES) lane.pieces.splice(0, lane.pieces.length - MOST_PIECES);
    }
    if (batch.steps) {
      this.seesSteps = true;
      this.steps.push(...batch.steps);
      if (this.steps.length > 1.2 * MOST_STEPS) this.steps = this.steps.slice(-MOST_STEPS);
    }
    this.bound();
  }

  // An opening batch has all that runs at its source: what ran there before, and no longer does, ended unseen.
  forget(batch) {
    const running = new Set((batch.events ?? []).map((event) => event.id));
    for (const lane of this.lanes.values()) {
      if (lane.ended === null && lane.source === batch.source && !running.has(lane.id)) end(lane, lane.seen, "unseen");
    }
  }

  lane({ id, at }) {
    const known = this.lanes.get(id);
    if (known) return known;
    const lane = {
      id, source: undefined, tenant: null, state: "waits", began: at, ended: null, seen: at, pieces: [], marks: [], chunks: [], prompt: 0, cached: 0,
      loaded: {}, miss: null, computed: 0, tokens: 0, drafts: 0, accepted: 0, preemptions: 0, reason: null,
    };
    this.lanes.set(id, lane);
    return lane;
  }

  // Add a request that ended before this page listened, from its record.
  recall(record) {
    for (const answer of record.answers) {
      if (this.lanes.has(answer.id)) continue;
      const began = record.started;
      const lane = this.lane({ id: answer.id, at: began });
      const { miss, prompt, cached, loaded, computed, tokens, drafts, accepted, preemptions } = answer;
      Object.assign(lane, { tenant: record.tenant, miss, prompt, cached, loaded, computed, tokens, drafts, accepted, preemptions });
      const ran = began + (answer.queued_ms ?? 0);
      const loads = ran - (answer.loading_ms ?? 0);
      const first = began + (answer.first_token_ms ?? answer.total_ms ?? 0);
      const last = began + (answer.total_ms ?? 0);
      lane.pieces = [
        { kind: "waits", from: began, to: loads },
        { kind: "loads", from: loads, to: ran },
        { kind: "computes", from: ran, to: first },
        { kind: "decodes", from: first, to: last, tokens, drafts, accepted },
      ].filter(({ from, to }) => to > from);
      end(lane, last, answer.finish ?? "unseen");
    }
  }

  bound() {
    if (this.lanes.size <= MOST_LANES) return;
    const ended = [...this.lanes.values()].filter((lane) => lane.ended !== null).sort((one, other) => one.ended - other.ended);
    for (const lane of ended.slice(0, this.lanes.size - MOST_LANES)) this.lanes.delete(lane.id);
  }

  // The lanes of requests that were there since a time, newest first.
  since(time) {
    return [...this.lanes.values()].filter((lane) => lane.ended === null || lane.ended >= time).sort((one, other) => other.began - one.began);
  }
}

function close(lane, at) {
  const last = lane.pieces.at(-1);
  if (last && last.to === undefined) last.to = Math.max(at, last.from);
}

function open(lane, piece) {
  close(lane, piece.from);
  lane.pieces.push(piece);
}

function end(lane, at, reason) {
  close(lane, at);
  Object.assign(lane, { state: "ended", ended: at, reason });
}

const TAKES = {
  waits(lane, { at, tenant, for: why, prompt }) {
    open(lane, { kind: why === "load" ? "loads" : "waits", from: at, why });
    Object.assign(lane, { state: "waits", tenant, prompt });
  },
  starts(lane, { at, tenant, prompt, cached, loaded, miss }) {
    open(lane, { kind: "computes", from: at });
    Object.assign(lane, { state: "computes", tenant, prompt, cached, loaded, miss });
  },
  computes(lane, { at, from, to, of }) {
    lane.computed += to - from;
    lane.chunks.push({ at, from, to });
    if (lane.chunks.length > MOST_PIECES) lane.chunks.shift();
    open(lane, to < of ? { kind: "computes", from: at } : { kind: "decodes", from: at, tokens: 0, drafts: 0, accepted: 0 });
    lane.state = to < of ? "computes" : "decodes";
  },
  decodes(lane, { at, ms, tokens, drafts, accepted }) {
    let piece = lane.pieces.at(-1);
    if (piece?.kind !== "decodes" || (piece.to ?? at) - piece.from > JOINED_MS) {
      open(lane, { kind: "decodes", from: Math.max(at - ms, piece?.to ?? 0), tokens: 0, drafts: 0, accepted: 0 });
      piece = lane.pieces.at(-1);
    }
    piece.to = at;
    for (const each of [piece, lane]) {
      each.tokens += tokens;
      each.drafts += drafts;
      each.accepted += accepted;
    }
    lane.state = "decodes";
  },
  preempted(lane, { at }) {
    close(lane, at);
    lane.marks.push(at);
    lane.preemptions += 1;
    lane.state = "waits";
  },
  ends(lane, { at, reason, tokens }) {
    lane.tokens = tokens;
    end(lane, at, reason);
  },
  runs(lane, { at, event, id, for: why, ...facts }) {
    const known = lane.pieces.at(-1);
    // It may have ended unseen at another source before.
    Object.assign(lane, facts, { ended: null, reason: null });
    const kind = why === "load" ? "loads" : facts.state;
    if (!known || known.to !== undefined) open(lane, { kind, from: at, why: why ?? undefined, tokens: 0, drafts: 0, accepted: 0 });
  },
};
