// Tokens with the colour of how likely they were; what else could have come is shown for the one under the pointer or with
// the focus (arrow keys move it). Everything is set as text.

/** Smallest probability of each shade, the first being the faintest. */
const SHADES = [0.9, 0.5, 0.2, 0.05, 0];
const SIGNS = { "\n": "↵", "\r": "␍", "\t": "⇥" };
/** Between a token and its card, and how long the pointer may take from one to the other, ms. */
const GAP = 6;
const LINGER = 120;

const made = (tag, className, text = "") => {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
};
const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return `${share >= 99.95 || share === 0 ? Math.round(share) : share >= 0.1 ? share.toFixed(1) : share.toPrecision(1)} %`;
};
/** Outer spaces and what has no shape, made visible. */
const visible = (text) => text.replace(/[\n\r\t]/g, (sign) => SIGNS[sign]).replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "∅";

/** A list of tokens that grows. */
export class TokenList {
  #tokens = [];

  constructor(card) {
    this.element = made("div", "said tokens mono");
    this.element.setAttribute("role", "list");
    this.element.setAttribute("aria-label", "Tokens; the arrow keys move between them");
    card.serve(this.element, (element) => this.#tokens[[...this.element.children].indexOf(element)]);
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Each: {text, logprob, top, control}, as in run.js. */
  add(tokens) {
    this.element.append(...tokens.map((token, i) => tokenElement(token, this.#tokens.length + i === 0)));
    this.#tokens.push(...tokens);
  }

  #move(event) {
    const all = [...this.element.children];
    const here = all.indexOf(event.target);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: all.length - 1 }[event.key];
    if (here < 0 || !all[to]) return;
    event.preventDefault();
    all[here].tabIndex = -1;
    all[to].tabIndex = 0;
    all[to].focus();
  }
}

function tokenElement({ text, logprob, control }, first) {
  const shade = 1 + SHADES.findIndex((least) => Math.exp(logprob) >= least);
  const element = made("span", `token heat-${shade}${control ? " control" : ""}`);
  element.setAttribute("role", "listitem");
  element.tabIndex = first ? 0 : -1;
  for (const part of (text || "∅").split(/([\n\r\t])/)) {
    if (part in SIGNS) element.append(made("span", "sign", SIGNS[part]), part);
    else element.append(part);
  }
  return element;
}

/** The card with the alternatives: one for the whole page. */
export class TokenCard {
  #element;
  #of = null;
  #leaving = 0;

  constructor(element) {
    this.#element = element;
    element.addEventListener("pointerenter", () => clearTimeout(this.#leaving));
    element.addEventListener("pointerleave", () => this.hide());
    addEventListener("scroll", () => this.#follow(), { passive: true });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.hide());
  }

  /** Shows the card for the children of `list`; `tokenOf` tells what each stands for. */
  serve(list, tokenOf) {
    const shown = (event) => {
      const element = event.target.closest(".token");
      if (element && element !== this.#of) this.#show(element, tokenOf(element));
    };
    list.addEventListener("pointerover", shown);
    list.addEventListener("focusin", shown);
    list.addEventListener("focusout", () => this.hide());
    list.addEventListener("pointerleave", () => {
      this.#leaving = setTimeout(() => this.hide(), LINGER);
    });
  }

  hide() {
    clearTimeout(this.#leaving);
    this.#of?.removeAttribute("aria-describedby");
    this.#of = null;
    this.#element.hidden = true;
  }

  #show(element, token) {
    this.hide();
    this.#of = element;
    element.setAttribute("aria-describedby", this.#element.id);
    this.#element.replaceChildren(alternatives(token));
    this.#element.hidden = false;
    this.#place(element.getClientRects()[0]);
  }

  #follow() {
    if (this.#of === null) return;
    const token = this.#of.getClientRects()[0];
    if (token && token.bottom > 0 && token.top < innerHeight) this.#place(token);
    else this.hide();
  }

  /** Under the token, or above it where there is no room. Lengths in px of the window. */
  #place(token) {
    const { offsetWidth: width, offsetHeight: height } = this.#element;
    const below = token.bottom + GAP + height < innerHeight;
    this.#element.style.left = `${Math.max(8, Math.min(token.left, document.documentElement.clientWidth - width - 8))}px`;
    this.#element.style.top = `${below ? token.bottom + GAP : Math.max(8, token.top - GAP - height)}px`;
  }
}

function alternatives({ text, logprob, top }) {
  const rows = top.some(([other]) => other === text) ? top : [[text, logprob], ...top];
  const table = made("table", "");
  table.append(made("caption", "", `log probability ${logprob.toFixed(3)}`));
  for (const [other, its] of rows) {
    const row = table.insertRow();
    row.className = other === text ? "chosen" : "";
    row.append(made("td", "", visible(other)), made("td", "number", percent(its)), made("td", "share"));
    row.lastChild.append(made("div", ""));
    row.lastChild.firstChild.style.width = `${Math.exp(its) * 100}%`;
  }
  return table;
}
