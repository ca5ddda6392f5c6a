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
