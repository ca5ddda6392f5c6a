// Requests to the server that sent this page. The key stays in this module's memory: it is gone with the tab.

let key = null;

export function signIn(secret) {
  key = secret;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  return key === null ? more : { ...more, authorization: `Bearer ${key}` };
}

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.message ?? message;
  } catch {
    // The status says enough.
  }
  return new Refused(response.status, message);
}

// The path of facts about one of several models; a server with one model needs no name.
export const about = (path, model) => (model ? `${path}?model=${encodeURIComponent(model)}` : path);

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// The JSON objects of a stream of server-sent events, until `[DONE]`.
export async function* stream(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  yield* events(response);
}

async function* events(response) {
  if (!response.ok) throw await refusal(response);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(event.error.code ?? 500, event.error.message);
      yield event;
    }
  }
}

const SHORTEST_PAUSE = 1000;
const LONGEST_PAUSE = 30_000;

// Listen to a stream that has no end, until the signal: `take` is called for every event, `say` with a problem, or null
// when there is none. It connects again, after longer and longer pauses.
export async function listen(path, signal, { take, say }) {
  for (let pause = SHORTEST_PAUSE; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
    try {
      const response = await fetch(path, { headers: headers(), signal });
      for await (const event of events(response)) {
        pause = SHORTEST_PAUSE;
        say(null);
        take(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      say(error);
      if ([401, 403, 404].includes(error.status)) return;
    }
    await new Promise((end) => {
      const timer = setTimeout(end, pause);
      signal.addEventListener("abort", () => { clearTimeout(timer); end(); }, { once: true });
    });
  }
}
