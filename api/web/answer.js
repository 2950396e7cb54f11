// One answer on the page: its text, the reasoning before it, its tokens, and figures once it is complete.

import { TokenList } from "/web/tokens.js";

/** `className`: of the text. `actions`: [words, function of the answer] of the buttons below it. */
export class Answer {
  #said = document.createElement("div");
  #reasoning = document.createElement("details");
  #footer = document.createElement("footer");
  #actions;
  #tokens;

  constructor({ className = "", card, actions }) {
    this.text = "";
    this.element = document.createElement("article");
    this.element.className = "answer card";
    this.element.setAttribute("aria-busy", "true");
    this.#said.className = `said ${className}`;
    this.#reasoning.className = "reasoning";
    this.#reasoning.hidden = true;
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    this.#reasoning.append(summary, document.createElement("div"));
    this.#tokens = new TokenList(card);
    this.#actions = actions;
    this.element.append(this.#reasoning, this.#said, this.#tokens.element, this.#footer);
    this.show("text");
  }

  get empty() {
    return !this.text && this.#reasoning.hidden;
  }

  /** Adds a piece: {text, reasoning, tokens}. */
  add({ text, reasoning, tokens }) {
    this.text += text;
    this.#said.append(text);
    if (reasoning) {
      this.#reasoning.hidden = false;
      this.#reasoning.lastChild.append(reasoning);
    }
    this.#tokens.add(tokens);
  }

  /** `view`: "text" or "tokens"; an answer that has no tokens to show stays text. */
  show(view) {
    const asTokens = view === "tokens" && this.#tokens.element.hasChildNodes();
    this.#said.hidden = asTokens;
    this.#tokens.element.hidden = !asTokens;
  }

  /** No more comes. `figures`: [name, value] to show. */
  end(finish, figures) {
    this.element.setAttribute("aria-busy", "false");
    const list = document.createElement("dl");
    list.className = "figures";
    for (const [name, value] of [["finish", finish], ...figures]) {
      const group = document.createElement("div");
      group.append(document.createElement("dt"), document.createElement("dd"));
      group.firstChild.textContent = name;
      group.lastChild.textContent = value;
      list.append(group);
    }
    const buttons = document.createElement("div");
    buttons.className = "row";
    for (const [words, act] of this.#actions) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = words;
      button.addEventListener("click", () => act(this, button));
      buttons.append(button);
    }
    this.#footer.append(list, buttons);
  }
}
