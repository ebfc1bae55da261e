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

function row(run) {
  const address = `#/${encodeURIComponent(run.run)}`;
  const number = (value) => h("td", { class: "number" }, count(value));
  return h(
    "tr",
    { onclick: () => (location.hash = address) },
    h("td", {}, h("a", { href: address, class: "strong" }, run.run), nextLine(run)),
    h("td", {}, statusOf(run)),
    h("td", { class: "number" }, `${count(run.step)}${run.steps ? ` of ${count(run.steps)}` : ""}`),
    h("td", { class: "number" }, run.reward === null ? "–" : figure(run.reward)),
    h(
      "td",
      { class: "nowrap muted" },
      run.heard_at ? `${duration(Date.now() - run.heard_at)} ago` : "–",
    ),
    h(
      "td",
      { class: "nowrap muted" },
      run.last_opened ? `${day(run.last_opened)} ${clock(run.last_opened)}` : "–",
    ),
    number(run.ready?.checkpoint),
    number(run.explorers),
    h(
      "td",
      { class: `number ${run.problems ? "late" : "muted"}` },
      run.problems ? count(run.problems) : "–",
    ),
  );
}

// Says how a run goes on that did not finish.
function nextLine(run) {
  const isBroken = run.silent_since || run.trainer === "failed" || run.trainer === "interrupted";
  if (!isBroken || !run.command) return null;
  return h("div", { class: "muted next" }, "continue: ", h("code", {}, run.command));
}

function statusOf(run) {
  if (run.problem) return h("span", { class: "state bad" }, run.problem);
  if (run.silent_since) return h("span", { class: "pill going" }, "silent");
  const mood = { running: "ok", require_sync: "ok", failed: "bad", interrupted: "going" };
  return h("span", { class: `pill ${mood[run.trainer] ?? ""}` }, run.trainer ?? "–");
}
