// Conversations as trees of messages, kept in this browser. Editing a message or asking again adds a branch beside it.
//
//     conversation = { id, title, settings, nodes: { id: node }, leaf }
//     node = { id, parent, role, content, reasoning?, calls?, tool_call_id?, facts?, tokens? }

const STORE = "weft.conversations";
const MOST = 100;

export const name = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    return Array.isArray(found) ? found.filter(isConversation) : [];
  } catch {
    return [];
  }
}

// Return whether there was room. Token details are dropped before conversations are.
export function save(conversations) {
  const kept = conversations.slice(0, MOST);
  for (const shape of [kept, kept.map(withoutTokens)]) {
    try {
      localStorage.setItem(STORE, JSON.stringify(shape));
      return true;
    } catch {
      // Full: try with less.
    }
  }
  return false;
}

const withoutTokens = (conversation) => ({
  ...conversation,
  nodes: Object.fromEntries(Object.entries(conversation.nodes).map(([id, { tokens, ...node }]) => [id, node])),
});

export function create(settings = {}) {
  return { id: name(), title: "", settings, nodes: {}, leaf: null };
}

const ROLES = ["user", "assistant", "tool"];

export function isConversation(value) {
  if (typeof value !== "object" || value === null || typeof value.id !== "string") return false;
  if (typeof value.nodes !== "object" || value.nodes === null || typeof value.settings !== "object") return false;
  return Object.entries(value.nodes).every(
    ([id, node]) =>
      node?.id === id &&
      ROLES.includes(node.role) &&
      typeof node.content === "string" &&
      (node.parent === null || Object.hasOwn(value.nodes, node.parent)),
  );
}

// The messages from the first one to `leaf`.
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  const seen = new Set();
  for (let at = leaf; at !== null && at !== undefined && !seen.has(at); at = conversation.nodes[at]?.parent) {
    seen.add(at);
    if (conversation.nodes[at]) found.push(conversation.nodes[at]);
  }
  return found.reverse();
}

export const siblings = (conversation, node) =>
  Object.values(conversation.nodes).filter((each) => each.parent === node.parent && each.role === node.role);

// The end of the branch that begins with a message: its newest continuation.
export function tip(conversation, id) {
  const seen = new Set();
  for (let at = id; !seen.has(at); ) {
    seen.add(at);
    const next = Object.values(conversation.nodes).filter((each) => each.parent === at).at(-1);
    if (!next) return at;
    at = next.id;
  }
  return id;
}

export function add(conversation, node) {
  const nodes = { ...conversation.nodes, [node.id]: node };
  const title = conversation.title || (node.role === "user" ? node.content.trim().slice(0, 60) : "");
  return { ...conversation, nodes, title, leaf: node.id };
}

export function change(conversation, id, more) {
  if (!conversation.nodes[id]) return conversation;
  return { ...conversation, nodes: { ...conversation.nodes, [id]: { ...conversation.nodes[id], ...more } } };
}

// The `messages` of a request for the next message after `leaf`.
export function messages(conversation, leaf = conversation.leaf) {
  const system = conversation.settings.system?.trim();
  const found = system ? [{ role: "system", content: system }] : [];
  for (const node of path(conversation, leaf)) {
    const message = { role: node.role, content: node.content };
    if (node.calls?.length) message.tool_calls = node.calls;
    if (node.tool_call_id) message.tool_call_id = node.tool_call_id;
    found.push(message);
  }
  return found;
}

export function download(conversation) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 1)], { type: "application/json" }));
  link.download = `weft-${(conversation.title || "conversation").replace(/[^\w-]+/g, "-").slice(0, 40)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
