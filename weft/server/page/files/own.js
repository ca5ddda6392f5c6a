// The requests that this page sent: their ids, newest first, with the title of their conversation.

const MOST = 50;
const known = new Map();

export function note(id, title) {
  if (known.has(id)) return;
  known.set(id, title);
  if (known.size > MOST) known.delete(known.keys().next().value);
}

export const titleOf = (id) => known.get(id);
export const ids = () => [...known.keys()].reverse();
