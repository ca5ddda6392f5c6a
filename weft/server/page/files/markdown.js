// Shows a model's Markdown as elements. Nothing here makes HTML from text: tokens that are not known, and HTML itself,
// appear as the characters that the model wrote. Images are never loaded; links leave without a referrer.

import { html } from "./vendor/preact.js";
import { Copy } from "./copying.js";
import { lexer } from "./vendor/marked.js";

// Longer answers, and blocks nested deeper, are shown as plain text.
const MOST_CHARACTERS = 200_000;
const MOST_DEPTH = 24;
const MOST_CELLS = 5_000;

export function Markdown({ text }) {
  return html`<div class="markdown">${elements(text)}</div>`;
}

function elements(text) {
  const shown = visible(text);
  if (shown.length > MOST_CHARACTERS) return html`<pre class="plain">${shown}</pre>`;
  try {
    return blocks(lexer(shown, { gfm: true, breaks: false }), 0);
  } catch {
    return html`<pre class="plain">${shown}</pre>`;
  }
}

// Control and bidirectional characters could make text look like something else; they are shown as what they are.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
}

function blocks(tokens, depth) {
  return depth > MOST_DEPTH ? tokens.map((token) => token.raw) : tokens.map((token) => block(token, depth));
}

function block(token, depth) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<p class=${`heading h${token.depth}`} role="heading" aria-level=${token.depth + 2}>${inline(token.tokens, depth)}</p>`;
    case "paragraph":
      return html`<p>${inline(token.tokens, depth)}</p>`;
    case "text":
      return token.tokens ? inline(token.tokens, depth) : token.text;
    case "code":
      return html`<${Code} language=${token.lang ?? ""} text=${token.text} />`;
    case "blockquote":
      return html`<blockquote>${blocks(token.tokens, depth + 1)}</blockquote>`;
    case "list": {
      const items = token.items.map((item) => html`<li>${item.task ? (item.checked ? "☑ " : "☐ ") : null}${blocks(item.tokens.filter((each) => each.type !== "checkbox"), depth + 1)}</li>`);
      return token.ordered ? html`<ol start=${token.start || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
    }
    case "table":
      return table(token, depth);
    case "hr":
      return html`<hr />`;
    default:
      return html`<p class="plain">${token.raw}</p>`;
  }
}

function table(token, depth) {
  if (token.header.length * token.rows.length > MOST_CELLS) return html`<pre class="plain">${token.raw}</pre>`;
  const row = (cells, kind) => cells.map((cell) => html`<${kind}>${inline(cell.tokens, depth)}<//>`);
  return html`<div class="scrolls" tabindex="0"><table>
    <thead><tr>${row(token.header, "th")}</tr></thead>
    <tbody>${token.rows.map((cells) => html`<tr>${row(cells, "td")}</tr>`)}</tbody>
  </table></div>`;
}

function inline(tokens, depth) {
  if (!tokens) return null;
  return depth > MOST_DEPTH ? tokens.map((token) => token.raw) : tokens.map((token) => piece(token, depth + 1));
}

function piece(token, depth) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inline(token.tokens, depth)}</strong>`;
    case "em":
      return html`<em>${inline(token.tokens, depth)}</em>`;
    case "del":
      return html`<del>${inline(token.tokens, depth)}</del>`;
    case "codespan":
      return html`<code>${token.text}</code>`;
    case "br":
      return html`<br />`;
    case "link": {
      const address = safe(token.href);
      return address === null
        ? token.raw
        : html`<a href=${address} title=${address} target="_blank" rel="noopener noreferrer nofollow">${inline(token.tokens, depth)}</a>`;
    }
    case "image":
      return html`<span class="image">[image: ${token.text || token.href}]</span>`;
    case "escape":
      return token.text;
    case "text":
      return token.tokens ? inline(token.tokens, depth) : token.text;
    default:
      return token.raw;
  }
}

function safe(address) {
  try {
    const found = new URL(address);
    return ["http:", "https:", "mailto:"].includes(found.protocol) ? found.href : null;
  } catch {
    return null;
  }
}

function Code({ language, text }) {
  return html`<figure class="code">
    <figcaption><span>${language.slice(0, 24)}</span><${Copy} text=${text} /></figcaption>
    <pre tabindex="0"><code>${text}</code></pre>
  </figure>`;
}
