// A button that copies a text, and says so.

import { html, useState } from "./vendor/preact.js";

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers have no clipboard for pages without TLS, unless they come from this machine.
  const box = document.createElement("textarea");
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

export function Copy({ text, label = "Copy" }) {
  const [said, say] = useState(label);
  const onClick = () => {
    copy(text).then(() => say("Copied"), () => say("Not allowed")).then(() => setTimeout(() => say(label), 1500));
  };
  return html`<button type="button" class="quiet" onClick=${onClick}>${said}</button>`;
}
