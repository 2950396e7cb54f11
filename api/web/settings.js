// The settings on the page, as fields of a request.

/** Number fields that both endpoints call alike; an empty one is left to the server. */
const NUMBERS = ["max_tokens", "temperature", "top_p", "seed"];
/** The other names that the server may use for a field of the page. */
const ALIASES = { stop: "stop-strings", top_logprobs: "logprobs", messages: "message" };
const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };

const field = (id) => document.getElementById(id);

/** The fields of a request in `mode` "raw" or "chat". */
export function settingsFor(mode) {
  const body = { model: field("model").value };
  for (const name of NUMBERS) {
    if (field(name).value !== "") body[name] = field(name).valueAsNumber;
  }
  const stop = field("stop-strings").value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop.map((line) => line.replace(/\\([nt\\])/g, (_, letter) => ESCAPES[letter]));
  const alternatives = field("logprobs").value;
  if (mode === "raw") {
    if (field("n").value !== "") body.n = field("n").valueAsNumber;
    if (alternatives !== "") body.logprobs = Number(alternatives);
  } else if (alternatives !== "") {
    body.logprobs = true;
    body.top_logprobs = Number(alternatives);
  }
  return body;
}

/** The first field that holds no value a browser would send, or null; a browser marks it and says why. */
export function firstInvalid() {
  const settings = field("settings");
  const wrong = settings.querySelector(":invalid");
  if (wrong) settings.open = true;
  return wrong;
}

/** Marks the field that the server calls `param`, if it is one of this page; null unmarks all. */
export function mark(param, describedBy) {
  for (const marked of document.querySelectorAll("[aria-invalid]")) {
    marked.removeAttribute("aria-invalid");
    marked.removeAttribute("aria-describedby");
  }
  const name = /^\w*/.exec(param ?? "")[0];
  const found = name && field(ALIASES[name] ?? name);
  if (!found || !/^(INPUT|SELECT|TEXTAREA)$/.test(found.tagName)) return;
  if (field("settings").contains(found)) field("settings").open = true;
  found.setAttribute("aria-invalid", "true");
  found.setAttribute("aria-describedby", describedBy);
}
