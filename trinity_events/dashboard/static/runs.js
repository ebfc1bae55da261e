// The list of runs of a server.

import { clock, count, day, duration, empty, figure, h, panel, table } from "./format.js";

const HEADS = [
  "run",
  "trainer",
  ["step", "number"],
  ["reward", "number"],
  "last activity",
  "last opened ▾",
  ["checkpoint", "number"],
  ["explorers", "number"],
  ["problems", "number"],
];

export function runsPanel(runs) {
  return panel(
    "Runs",
    count(runs.length),
    runs.length
      ? h("div", { class: "scroll" }, table(HEADS, runs.map(row), "list runs"))
      : empty("No runs yet. Start one with: trinity-events demo"),
  );
}

function row(one) {
  const address = `#/${encodeURIComponent(one.run)}`;
  const number = (value) => h("td", { class: "number" }, count(value));
  return h(
    "tr",
    { onclick: () => (location.hash = address) },
    h("td", {}, h("a", { href: address, class: "strong" }, one.run), nextLine(one)),
    h("td", {}, statusOf(one)),
    h("td", { class: "number" }, `${count(one.step)}${one.steps ? ` of ${count(one.steps)}` : ""}`),
    h("td", { class: "number" }, one.reward === null ? "–" : figure(one.reward)),
    h(
      "td",
      { class: "nowrap muted" },
      one.heard_at ? `${duration(Date.now() - one.heard_at)} ago` : "–",
    ),
    h(
      "td",
      { class: "nowrap muted" },
      one.last_opened ? `${day(one.last_opened)} ${clock(one.last_opened)}` : "–",
    ),
    number(one.ready?.checkpoint),
    number(one.explorers),
    h(
      "td",
      { class: `number ${one.problems ? "late" : "muted"}` },
      one.problems ? count(one.problems) : "–",
    ),
  );
}

// Says how a run goes on that did not finish.
function nextLine(one) {
  const isBroken = one.silent_since || one.trainer === "failed" || one.trainer === "interrupted";
  if (!isBroken || !one.command) return null;
  return h("div", { class: "muted next" }, "continue: ", h("code", {}, one.command));
}

function statusOf(one) {
  if (one.problem) return h("span", { class: "state bad" }, one.problem);
  if (one.silent_since) return h("span", { class: "pill going" }, "silent");
  const mood = { running: "ok", require_sync: "ok", failed: "bad", interrupted: "going" };
  return h("span", { class: `pill ${mood[one.trainer] ?? ""}` }, one.trainer ?? "–");
}
