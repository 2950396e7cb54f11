// The monitor: shows each state that the server sends. What came from people or models is only ever set as text.

import { ApiError, call } from "/web/api.js";
import { askForKey, wireKey } from "/web/key.js";
import { RecentList } from "/web/recent.js";
import { setText, showRows } from "/web/rows.js";
import { events } from "/web/sse.js";
import { ago, count, seconds } from "/web/units.js";

/** Pause before another attempt, ms. */
const AGAIN = 2000;
/** Without an event for so long the connection counts as lost, ms. */
const SILENCE = 10_000;
/** Points of the curve: one a second. */
const POINTS = 120;
/** How long a cancel button waits for its second press, ms. */
const SURE = 4000;

const LATENCIES = [
  ["first_token", "First token"],
  ["inter_token", "Between tokens"],
  ["queue", "In the queue"],
  ["duration", "Whole request"],
];
const TOTALS = [
  ["prompt_tokens", "Prompt tokens"],
  ["completion_tokens", "Completion tokens"],
  ["failovers", "Failovers"],
  ["handovers", "Handed over"],
  ["workers_lost", "Workers lost"],
  ["gap_repairs", "Streams repaired"],
  ["put_backs", "Put back"],
];

const found = (id) => document.getElementById(id);
const recent = new RecentList(found("recent"), found("recent-hint"));
const speeds = [];
let connection = null;
let paused = false;

// ---- from the server

async function follow() {
  connection?.abort();
  const own = new AbortController();
  connection = own;
  recent.restart();
  while (!own.signal.aborted && !paused) {
    let silence;
    const wake = () => {
      clearTimeout(silence);
      silence = setTimeout(() => own === connection && follow(), SILENCE);
    };
    try {
      wake();
      const response = await call("/monitor/events", { signal: own.signal });
      for await (const event of events(response)) {
        wake();
        if ("data" in event) take(JSON.parse(event.data));
      }
      say("warn", "reconnecting");
    } catch (error) {
      if (error.name === "AbortError") return;
      say("bad", "not connected");
      showProblem(error);
      if (error.status === 401 || error.status === 403) {
        if (await askForKey(error.message)) follow();
        return;
      }
    } finally {
      clearTimeout(silence);
    }
    recent.restart();
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

function take(state) {
  if (state.error) throw new ApiError(200, state.error);
  say("good", "live");
  found("problem").hidden = true;
  show(state);
}

function say(kind, words) {
  const badge = found("live");
  badge.className = `badge ${kind}`;
  setText(badge, words);
}

function showProblem(error) {
  setText(found("problem"), error.message);
  found("problem").hidden = false;
}

// ---- to the page

function show(state) {
  showTiles(state);
  showRows(
    found("queues"),
    state.queues.map((queue) => ({
      key: JSON.stringify([queue.model, queue.class]),
      cells: [queue.model, queue.class, count(queue.waiting), count(queue.running)],
    })),
    "No model has been served yet.",
  );
  showRows(found("workers"), state.workers.map(workerRow), "No worker is running.");
  showRows(found("latencies"), state.latencies.flatMap(latencyRows), "Nothing was measured in the last minutes.");
  setText(found("minutes"), `the last ${state.latencies_minutes} minutes`);
  showRows(found("running"), state.running.map(runningRow), "Nothing is running.");
  setText(found("running-more"), state.running_more ? `and ${count(state.running_more)} more` : "");
  recent.add(state.recent);
  showTotals(state.totals);
  const streams = state.nodes.reduce((sum, node) => sum + node.streams, 0);
  setText(found("nodes"), `${count(state.nodes.length)} API processes follow ${count(streams)} requests.`);
}

const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);

function showTiles(state) {
  const lanes = sum(state.workers, "lanes");
  const busy = lanes - sum(state.workers, "free");
  const speed = sum(state.workers, "tokens_per_second");
  setText(found("speed"), count(Math.round(speed)));
  setText(found("running-count"), count(sum(state.queues, "running")));
  setText(found("waiting-count"), count(sum(state.queues, "waiting")));
  setText(found("lanes-count"), `${count(busy)} / ${count(lanes)}`);
  found("lanes-meter").value = lanes ? busy / lanes : 0;
  setText(found("failovers"), count(state.totals.failovers));
  setText(found("repairs"), count(state.totals.gap_repairs + state.totals.put_backs));
  speeds.push(speed);
  if (speeds.length > POINTS) speeds.shift();
  const most = Math.max(1, ...speeds);
  const points = speeds.map((value, index) => `${120 - speeds.length + index + 1},${(31 - (30 * value) / most).toFixed(2)}`);
  found("speeds").querySelector("polyline").setAttribute("points", points.join(" "));
  found("speeds").querySelector("polygon").setAttribute("points", [`${121 - speeds.length},32`, ...points, "120,32"].join(" "));
}

function workerRow(worker) {
  const busy = worker.lanes - worker.free;
  const state = worker.draining ? ["warn", "draining"] : worker.out_of_memory ? ["warn", "was out of memory"] : ["good", "ready"];
  return {
    key: worker.name,
    cells: [
      (cell, isNew) => isNew && cell.append(element("span", "mono", worker.name)),
      worker.model,
      (cell, isNew) => lanesCell(cell, isNew, busy, worker.lanes),
      count(Math.round(worker.tokens_per_second)),
      (cell, isNew) => {
        if (isNew) cell.append(element("span"));
        cell.firstChild.className = `badge ${state[0]}`;
        setText(cell.firstChild, state[1]);
      },
    ],
  };
}

function lanesCell(cell, isNew, busy, lanes) {
  if (isNew) {
    const meter = element("meter");
    meter.setAttribute("aria-label", "Part of the lanes that are busy");
    cell.append(element("div"), meter);
  }
  setText(cell.firstChild, `${count(busy)} of ${count(lanes)} busy`);
  cell.lastChild.value = lanes ? busy / lanes : 0;
}

function latencyRows(latency) {
  return LATENCIES.filter(([name]) => latency[name]?.count).map(([name, words]) => {
    const { p50, p95, p99, count: measured } = latency[name];
    return {
      key: JSON.stringify([latency.model, name]),
      cells: [latency.model, words, seconds(p50), seconds(p95), seconds(p99), count(measured)],
    };
  });
}

function runningRow(job) {
  return {
    key: job.id,
    cells: [
      (cell, isNew) => {
        if (isNew) cell.append(element("span", "mono", job.id));
      },
      job.model,
      job.class,
      (cell, isNew) => {
        if (isNew) cell.append(element("span", "mono"));
        setText(cell.firstChild, job.worker);
      },
      count(job.tokens),
      ago(job.seconds),
      (cell, isNew) => isNew && cell.append(cancelButton(job)),
    ],
  };
}

/** Asks for a second press. */
function cancelButton(job) {
  const button = element("button", "danger", "Cancel");
  button.type = "button";
  button.setAttribute("aria-label", `Cancel ${job.id}`);
  let sure;
  const reset = () => {
    sure = undefined;
    button.disabled = false;
    button.textContent = "Cancel";
    button.setAttribute("aria-label", `Cancel ${job.id}`);
  };
  button.addEventListener("click", async () => {
    if (!sure) {
      sure = setTimeout(reset, SURE);
      button.textContent = "Really?";
      button.setAttribute("aria-label", `Really cancel ${job.id}?`);
      return;
    }
    clearTimeout(sure);
    button.disabled = true;
    button.textContent = "Cancelling";
    try {
      await call(`${job.kind === "chat" ? "/v1/chat/completions" : "/v1/completions"}/${encodeURIComponent(job.id)}/cancel`, { method: "POST" });
    } catch (error) {
      showProblem(error);
      reset();
    }
  });
  return button;
}

function showTotals(totals) {
  const requests = Object.entries(totals.requests).map(([outcome, number]) => [`Requests: ${outcome.replaceAll("_", " ")}`, number]);
  const rows = [...requests.sort(), ...TOTALS.map(([name, words]) => [words, totals[name]])];
  const list = found("totals");
  const known = new Map([...list.children].map((item) => [item.firstChild.textContent, item]));
  list.replaceChildren(
    ...rows.map(([words, number]) => {
      const item = known.get(words) ?? element("div");
      if (!item.firstChild) item.append(element("dt", "", words), element("dd"));
      setText(item.lastChild, count(number));
      return item;
    }),
  );
}

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

found("pause").addEventListener("click", () => {
  paused = !paused;
  found("pause").setAttribute("aria-pressed", String(paused));
  if (paused) {
    connection?.abort();
    say("", "paused");
  } else {
    say("", "connecting");
    follow();
  }
});
wireKey(follow);
follow();
