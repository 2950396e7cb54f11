// The last requests with the beginnings of their prompts and texts, newest first, where the server keeps them.

import { seconds } from "/web/units.js";

/** Requests in the list, as many as the server keeps. */
const MOST = 100;
/** Characters of the prompt in the line that is always there. */
const START = 120;

export class RecentList {
  #list;
  #hint;
  #known = new Set();

  constructor(list, hint) {
    this.#list = list;
    this.#hint = hint;
  }

  /** Before a new connection, which tells all of them again. */
  restart() {
    this.#known = new Set([...this.#list.children].map((item) => item.dataset.id));
  }

  /** Adds the records that are not there yet; null: there are none to be seen. */
  add(records) {
    this.#hint.textContent = records
      ? "at most 100, with the beginnings of their texts"
      : "not shown: the setting request_monitor is off, or the key lacks the scope admin";
    if (!records) {
      this.#list.replaceChildren();
      return;
    }
    for (const record of [...records].sort((a, b) => a.at + a.seconds - b.at - b.seconds)) {
      if (this.#known.has(record.id)) continue;
      this.#known.add(record.id);
      this.#list.prepend(this.#item(record));
    }
    while (this.#list.children.length > MOST) {
      this.#known.delete(this.#list.lastChild.dataset.id);
      this.#list.lastChild.remove();
    }
  }

  #item(record) {
    const item = made("li");
    item.dataset.id = record.id;
    const details = made("details");
    const summary = made("summary");
    const good = record.outcome === "completed";
    const at = made("time", "muted small", new Date(record.at * 1000).toLocaleTimeString("en", { hour12: false }));
    at.dateTime = new Date(record.at * 1000).toISOString();
    summary.append(
      at,
      made("span", `badge ${good ? "good" : record.outcome === "left" ? "warn" : "bad"}`, good ? record.finish_reason ?? "completed" : record.outcome),
      made("span", "start", record.prompt === null ? "not stored" : record.prompt.slice(0, START)),
      made("span", "muted small", `${record.completion_tokens} tokens, ${seconds(record.seconds)}`),
    );
    details.append(summary);
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(...this.#body(record));
    });
    item.append(details);
    return item;
  }

  #body(record) {
    const facts = [
      record.kind === "chat" ? "chat" : "completion",
      record.model,
      record.class,
      `tenant ${record.tenant}`,
      `${record.prompt_tokens} prompt tokens`,
      record.choices > 1 && `${record.choices} choices`,
      `temperature ${record.temperature}`,
      record.max_tokens !== null && `max_tokens ${record.max_tokens}`,
      `queue ${seconds(record.queued)}`,
      `first token ${seconds(record.first_token)}`,
    ];
    const parts = [made("p", "mono small", record.id), made("p", "small muted", facts.filter(Boolean).join(" · "))];
    if (record.prompt !== null) parts.push(made("h3", "", "Prompt"), made("pre", "", record.prompt), made("h3", "", "Text"), made("pre", "", record.text));
    return parts;
  }
}

function made(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
