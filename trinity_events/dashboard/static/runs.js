// The list of runs of a server.

import { clock, count, day, empty, h, panel, table } from "./format.js";

const HEADS = [
  "run",
  "opened",
  "trainer",
  ["step", "number"],
  ["weights", "number"],
  ["checkpoint", "number"],
  ["explorers", "number"],
  ["events", "number"],
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
    h("td", {}, h("a", { href: address, class: "strong" }, one.run)),
    h(
      "td",
      { class: "nowrap muted" },
      one.opened_at ? `${day(one.opened_at)} ${clock(one.opened_at)}` : "–",
    ),
    h("td", {}, statusOf(one)),
    number(one.step),
    number(one.ready?.weights),
    number(one.ready?.checkpoint),
    number(one.explorers),
    number(one.entries),
    h(
      "td",
      { class: `number ${one.problems ? "late" : "muted"}` },
      one.problems ? count(one.problems) : "–",
    ),
  );
}

function statusOf(one) {
  if (one.problem) return h("span", { class: "state bad" }, one.problem);
  if (one.silent_since) return h("span", { class: "pill going" }, "silent");
  const mood = { running: "ok", require_sync: "ok", failed: "bad", interrupted: "going" };
  return h("span", { class: `pill ${mood[one.trainer] ?? ""}` }, one.trainer ?? "–");
}
