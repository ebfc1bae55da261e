// Lags and faults: reducer, consumer groups, processes, refusals, anomalies and dead letters.

import { count, duration, empty, h, moment, panel, table } from "./format.js";

const BEHIND = 3000; // milliseconds for which entries are not folded before the page says so

// Returns the dead letters up to a moment of the past, in milliseconds.
export function deadUntil(letters, at) {
  return { dead: letters.dead.filter(([entry]) => Number(entry.split("-")[0]) <= at) };
}

export function renderHealth(view, dead, { scrub }) {
  const link = (entry) => h("button", { class: "link", onclick: () => scrub({ entry }) }, entry);
  const list = (rows, none) => (rows.length ? table([], rows, "list") : empty(none));
  const cells = (...all) => h("tr", {}, all);
  return [
    groupsPanel(view, link),
    processesPanel(view),
    panel(
      "Failures",
      "",
      list(
        view.failures.map((line) => cells(h("td", {}, line))),
        view.closed_error ?? "No step is failed.",
      ),
    ),
    panel(
      "Refused weights",
      count(view.refused),
      view.suspects.map((line) => h("p", { class: "callout" }, line)),
      list(
        view.refusals
          .slice()
          .reverse()
          .map(([at, line]) =>
            cells(h("td", { class: "muted nowrap" }, moment(at)), h("td", {}, line)),
          ),
        "No explorer refused weights.",
      ),
    ),
    panel(
      "Anomalies",
      Object.entries(view.anomaly_counts)
        .map(([name, number]) => `${name} ${number}`)
        .join(" · "),
      list(
        view.anomalies
          .slice()
          .reverse()
          .map(([entry, name, detail]) =>
            cells(
              h("td", {}, link(entry)),
              h("td", { class: "strong nowrap" }, name),
              h("td", {}, detail),
            ),
          ),
        "None: every event came once, in order.",
      ),
    ),
    panel(
      "Dead letters",
      count(view.dead_letters),
      list(
        (dead?.dead ?? [])
          .slice()
          .reverse()
          .map(([entry, reason, text]) =>
            cells(
              h("td", {}, link(entry)),
              h("td", {}, reason),
              h("td", { class: "mono muted" }, text),
            ),
          ),
        view.dead_letters
          ? "Their entries are in the log: search for them by time."
          : "None: every entry could be decoded.",
      ),
    ),
  ];
}

function groupsPanel(view, link) {
  const rows = (view.groups ?? []).map(
    ([stream, name, members, pending, , oldest, idle, done, lag, holder]) =>
      h(
        "tr",
        {},
        h("td", { class: "strong" }, name),
        h("td", {}, stream),
        h("td", { class: "number" }, members),
        h("td", { class: "number" }, count(pending)),
        h("td", {}, holder ?? "–"),
        h("td", { class: "number" }, count(lag)),
        h("td", {}, oldest ?? "–"),
        h("td", { class: "number" }, idle === null ? "–" : duration(idle * 1000)),
        h("td", { class: `state ${done ? "ok" : "going"}` }, done ? "✓ caught up" : "behind"),
      ),
  );
  const heads = [
    "group",
    "stream",
    ["members", "number"],
    ["pending", "number"],
    "most of it with",
    ["not delivered", "number"],
    "oldest pending",
    ["idle", "number"],
    "",
  ];
  const detached = view.detached.map(([name, entry, pending, idle]) =>
    h(
      "li",
      {},
      `Group ${name} was idle for ${duration(idle * 1000)} and was detached at `,
      link(entry),
      `, with ${count(pending)} entries not acknowledged.`,
    ),
  );
  return panel(
    "Reducer and consumer groups",
    reducerWords(view),
    rows.length ? table(heads, rows, "list") : empty("No consumer group reads this run now."),
    detached.length ? h("ul", { class: "plain" }, detached) : null,
  );
}

function reducerWords(view) {
  if (!view.live) return "";
  return view.unfolded > BEHIND
    ? `the reducer is ${duration(view.unfolded)} behind`
    : "the reducer has folded everything";
}

function processesPanel(view) {
  if (!view.processes?.length) return null;
  const mood = { running: "ok", stopped: "going", ended: "bad" };
  const rows = view.processes.map(([name, pid, condition]) =>
    h(
      "tr",
      {},
      h("td", { class: "strong" }, name),
      h("td", { class: "number" }, pid),
      h("td", { class: `state ${mood[condition]}` }, condition),
    ),
  );
  return panel(
    "Processes on the dashboard's host",
    "",
    table(["process", ["process id", "number"], ""], rows, "list narrow"),
  );
}
