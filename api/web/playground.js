// The playground: wires the form to requests and their answers to the page. What came from people or models is only ever
// set as text.

import { Answer } from "/web/answer.js";
import { ApiError, call } from "/web/api.js";
import { askForKey, key, wireKey } from "/web/key.js";
import { PATHS, Run } from "/web/run.js";
import { firstInvalid, mark, settingsFor } from "/web/settings.js";
import { snippets } from "/web/snippets.js";
import { TokenCard } from "/web/tokens.js";

/** Until the list of models is asked for again while it is empty, ms. */
const MODELS_AGAIN = 3000;
/** The engine that only repeats what it is told; never the first choice. */
const SCRIPTED = "scripted";

const found = (id) => document.getElementById(id);
const checked = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const card = new TokenCard(found("token-card"));

/** The chat so far: {role, content, element}, the system message not included. */
let turns = [];
/** What is on the page, by mode. */
const answers = { raw: [], chat: [] };
let run = null;

const mode = () => checked("mode");

// ---- models

async function loadModels() {
  let models;
  try {
    models = (await (await call("/v1/models")).json()).data;
  } catch (error) {
    report(error);
    return;
  }
  const select = found("model");
  const before = select.value;
  const ids = models.map((model) => model.id);
  select.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  select.disabled = !ids.length;
  if (!ids.length) {
    select.append(new Option("no model is served", ""));
    setTimeout(loadModels, MODELS_AGAIN);
    return;
  }
  select.value = ids.includes(before) ? before : (ids.find((id) => id !== SCRIPTED) ?? ids[0]);
}

// ---- what is asked

function request() {
  if (mode() === "raw") return { path: PATHS.raw, body: { ...settingsFor("raw"), prompt: found("prompt").value } };
  const system = found("system").value;
  const written = found("message").value;
  const messages = turns.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  if (written) messages.push({ role: "user", content: written });
  return { path: PATHS.chat, body: { ...settingsFor("chat"), messages } };
}

async function send() {
  if (run) return;
  hideProblem();
  const wrong = firstInvalid();
  if (wrong) {
    wrong.reportValidity();
    return;
  }
  if (mode() === "raw") await sendPrompt();
  else await sendMessage();
}

async function sendPrompt() {
  const asked = request();
  found("answers").replaceChildren();
  answers.raw = Array.from({ length: asked.body.n || 1 }, () =>
    new Answer({ className: "mono", card, actions: [["Copy", copy], ["Add to the prompt", addToPrompt]] }));
  found("answers").append(...answers.raw.map((answer) => answer.element));
  await follow(asked, answers.raw);
}

async function sendMessage() {
  const written = found("message").value;
  if (!written && turns.at(-1)?.role !== "user") {
    found("message").focus();
    return;
  }
  const asked = request();
  if (written) addTurn("user", written, userTurn(written));
  found("message").value = "";
  const answer = new Answer({ card, actions: [["Copy", copy]] });
  answers.chat.push(answer);
  const turn = addTurn("assistant", "", answer.element);
  const problem = await follow(asked, [answer]);
  turn.content = answer.text;
  if (problem && answer.empty) {
    dropTurn();
    answers.chat.pop();
    if (written) {
      dropTurn();
      found("message").value = written;
    }
  }
  showAgain();
}

function addTurn(role, content, element) {
  const item = document.createElement("li");
  item.className = `turn ${role}`;
  item.append(element);
  found("turns").append(item);
  const turn = { role, content, element: item };
  turns.push(turn);
  return turn;
}

function userTurn(text) {
  const element = document.createElement("div");
  const speaker = document.createElement("span");
  speaker.className = "unseen";
  speaker.textContent = "You: ";
  element.append(speaker, text);
  return element;
}

function dropTurn() {
  turns.pop().element.remove();
}

async function answerAgain() {
  if (run || turns.at(-1)?.role !== "assistant") return;
  dropTurn();
  answers.chat.pop();
  await send();
}

// ---- what comes back

/** Runs the request into `into`, one answer a choice. Resolves to the error it ended with, or null. */
async function follow(asked, into) {
  run = new Run(asked);
  showRunning(true);
  say("Sent");
  const clock = { began: performance.now(), first: 0, last: 0 };
  const finishes = into.map(() => "");
  let usage = null;
  let problem = null;
  try {
    for await (const event of run.events()) {
      if (event.waiting) say(waiting(event.waiting));
      if (event.usage) usage = event.usage;
      if (event.finish) finishes[event.index] = event.finish;
      if (event.stopped) finishes.fill("stopped by you");
      if (event.tokens) {
        clock.last = performance.now();
        if (!clock.first) {
          clock.first = clock.last;
          say("Answering…");
        }
        keepInView(() => into[event.index].add(event));
        if (checked("view") === "tokens") into[event.index].show("tokens");
      }
    }
    say(ended(finishes[0], usage, clock));
  } catch (error) {
    problem = error;
    say("");
  }
  run = null;
  showRunning(false);
  into.forEach((answer, i) => {
    answer.end(finishes[i] || "broken off", i === into.length - 1 ? figures(usage, clock) : []);
    if (problem && answer.empty) answer.element.remove();
  });
  showViews();
  if (problem) report(problem);
  return problem;
}

/** A comment of the stream in words: `queued position=3 eta=4s`, `prefill 40 %`, ... */
function waiting(comment) {
  const queued = /^queued position=(\d+)(?: eta=(\w+))?/.exec(comment);
  if (queued) return `Waiting: place ${queued[1]} in the queue${queued[2] ? `, about ${queued[2]}` : ""}`;
  return /^(keep-?alive)?$/i.test(comment) ? found("status").textContent : comment[0].toUpperCase() + comment.slice(1);
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`);

function ended(finish, usage, clock) {
  const words = finish === "stopped by you" ? "Stopped" : "Done";
  return `${words}${usage ? `: ${usage.completion_tokens} tokens` : ""} in ${seconds(performance.now() - clock.began)}`;
}

function figures(usage, clock) {
  const shown = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    shown.push(["prompt", `${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`], ["completion", usage.completion_tokens]);
  }
  if (clock.first) shown.push(["first token", seconds(clock.first - clock.began)]);
  if (usage && clock.last > clock.first && usage.completion_tokens > 1) {
    shown.push(["tokens/s", (((usage.completion_tokens - 1) * 1000) / (clock.last - clock.first)).toFixed(1)]);
  }
  return shown;
}

/** Who looks at the end of the page goes on looking at it. */
function keepInView(change) {
  const page = document.documentElement;
  const atEnd = page.scrollHeight - page.clientHeight - page.scrollTop < 60;
  change();
  if (atEnd) page.scrollTop = page.scrollHeight;
}

// ---- what is shown

/** Words for everybody, read out by screen readers: few, never token by token. */
function say(words) {
  if (found("status").textContent !== words) found("status").textContent = words;
}

function showRunning(running) {
  const held = document.activeElement === (running ? found("send") : found("stop"));
  found("send").hidden = running;
  found("stop").hidden = !running;
  if (held) found(running ? "stop" : "send").focus();
  showAgain();
}

function showAgain() {
  found("again").hidden = run !== null || mode() !== "chat" || turns.at(-1)?.role !== "assistant";
}

function showMode() {
  const chat = mode() === "chat";
  found("raw").hidden = chat;
  found("chat").hidden = !chat;
  found("n-field").hidden = chat;
  found("output").hidden = chat;
  history.replaceState(null, "", chat ? "#chat" : location.pathname);
  showAgain();
  showViews();
}

function showViews() {
  const view = checked("view");
  for (const answer of answers[mode()]) answer.show(view);
  found("legend").hidden = view !== "tokens";
}

function report(error) {
  const problem = found("problem");
  const message = document.createElement("p");
  message.textContent = error.message;
  problem.replaceChildren(message);
  if (error instanceof ApiError) {
    const details = [error.param && `field: ${error.param}`, error.code, error.status > 200 && `status ${error.status}`, error.retryAfter && `try again in ${error.retryAfter} s`, error.requestId];
    const line = document.createElement("p");
    line.className = "small muted";
    line.textContent = details.filter(Boolean).join(" · ");
    problem.append(line);
    mark(error.param, "problem");
  }
  problem.hidden = false;
  if (error.status === 401) askAndGoOn(error.message);
}

async function askAndGoOn(reason) {
  if (!(await askForKey(reason))) return;
  hideProblem();
  await loadModels();
}

function hideProblem() {
  found("problem").hidden = true;
  found("problem").replaceChildren();
  mark(null);
}

function clear() {
  if (run) return;
  const input = found(mode() === "raw" ? "prompt" : "message");
  input.value = "";
  answers[mode()] = [];
  if (mode() === "raw") found("answers").replaceChildren();
  else while (turns.length) dropTurn();
  hideProblem();
  say("");
  showAgain();
  input.focus();
}

// ---- copies

async function copy(answer, button) {
  const words = button.textContent;
  button.textContent = (await copied(answer.text)) ? "Copied" : "Not allowed here";
  setTimeout(() => { button.textContent = words; }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

function addToPrompt(answer) {
  found("prompt").value += answer.text;
  found("prompt").focus();
}

function showCode() {
  found("code-text").textContent = snippets(request(), location.origin, key() !== "")[checked("language")];
  found("code-status").textContent = "";
}

async function copyCode() {
  if (await copied(found("code-text").textContent)) {
    found("code-status").textContent = "Copied";
    return;
  }
  getSelection().selectAllChildren(found("code-text"));
  found("code-status").textContent = "Selected: copy it with your keyboard";
}

// ---- wiring

found("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
found("stop").addEventListener("click", () => run?.stop());
found("again").addEventListener("click", answerAgain);
found("clear").addEventListener("click", clear);
found("code").addEventListener("click", () => {
  showCode();
  found("code-dialog").showModal();
});
found("code-copy").addEventListener("click", copyCode);
for (const radio of document.querySelectorAll('input[name="language"]')) radio.addEventListener("change", showCode);
for (const radio of document.querySelectorAll('input[name="mode"]')) radio.addEventListener("change", showMode);
for (const radio of document.querySelectorAll('input[name="view"]')) radio.addEventListener("change", showViews);
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") run?.stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});

found("settings").open = matchMedia("(min-width: 56rem)").matches;
if (location.hash === "#chat") document.querySelector('input[name="mode"][value="chat"]').checked = true;
showMode();
wireKey(loadModels);
loadModels();
