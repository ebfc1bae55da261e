// The state now, or at an event: its headline, its first cause, waits, steps, saves and explorers.

import {
  bytes,
  byName,
  clock,
  count,
  duration,
  empty,
  h,
  hideTip,
  meter,
  panel,
  plural,
  short,
  showTip,
  table,
} from "./format.js";
import { goodputLine, learningTiles, progressLine, standing } from "./learning.js";

const LISTED = 12; // explorers that are listed one below the other; more become a grid
const LASTING = 2000; // milliseconds for which a step is missing something before a line says so

// Returns the processes that waits name, and that report no wait themselves.
export function culpritsOf(waits) {
  const waiting = new Set(waits.map((one) => one.by));
  const named = waits.flatMap((one) => one.for).filter((name) => !waiting.has(name));
  return [...new Set(named)].sort(byName);
}

// Returns the mood and the words of the headline; green only if nothing needs a look.
function headlineOf(view) {
  const serious = view.troubles.filter((one) => one[2] && one[1] !== "run failed");
  const but = serious.length ? `${serious.map(([number, what]) => `${count(number)} ${what}`)[0]}` : "";
  if (view.closed === "finished")
    return but
      ? ["held", `The run finished at step ${count(view.step)}, but: ${but}.`]
      : ["ok", `The run finished at step ${count(view.step)}.`];
  if (view.closed) {
    const how = view.closed === "failed" ? "failed" : "was interrupted";
    return ["bad", `The run ${how} at step ${count(view.step)}.`];
  }
  const worst = view.waits.find((one) => one.by.startsWith("trainer")) ?? view.waits[0];
  if (worst && view.step) return ["held", `${worst.by} waits for ${worst.what}.`];
  if (view.failures.length) return ["bad", view.failures.at(-1)];
  if (standing(view)) return ["held", `No step for ${duration(standing(view))}.`];
  if (view.causes.length && view.step) return ["held", "The run is held up."];
  if (but) return ["held", `Step ${count(view.step)} is trained, but: ${but}.`];
  if (view.epoch === 0) return ["idle", "The run was not opened yet."];
  if (!view.step)
    return ["idle", worst ? `It starts: ${worst.by} waits for ${worst.what}.` : "It starts."];
  return ["ok", `Step ${count(view.step)} is trained; nothing is reported to wait.`];
}

// `marks` are the failures and the ends of epochs up to the shown state, oldest first.
// `learning` has the metrics that say whether the run learns.
export function renderOverview(view, learning, marks, actions) {
  return [
    headline(view, marks, actions),
    learningTiles(learning, actions.go),
    goodputLine(learning, actions.go),
    tiles(view, actions),
    h(
      "div",
      { class: "columns" },
      waitsPanel(view, actions),
      troublesPanel(view, marks, actions),
      explorersPanel(view, actions),
      stepsPanel(view, actions),
    ),
  ].filter(Boolean);
}

function headline(view, marks, { scrub }) {
  const [mood, words] = headlineOf(view);
  const culprits = culpritsOf(view.waits);
  const end = view.closed === "failed" ? marks.findLast((one) => one[3] === "run-closed") : null;
  return h(
    "div",
    { class: `headline ${mood}` },
    h(
      "div",
      { class: "headline-mark", "aria-hidden": "true" },
      { ok: "✓", held: "…", bad: "✕", idle: "·" }[mood],
    ),
    h(
      "div",
      {},
      h("h1", {}, words),
      h("p", { class: "progress-line" }, progressLine(view)),
      culprits.length && !view.causes.length
        ? h("p", {}, "Culprits: ", h("strong", {}, firstOf(culprits, 6)), ".")
        : null,
      view.closed_error ? h("p", {}, view.closed_error) : null,
      end ? h("p", {}, before(end[1], scrub, "See the state just before")) : null,
      view.closed && view.closed !== "finished" && view.command
        ? h("p", {}, "Continue it with: ", h("code", {}, view.command))
        : null,
      causesBox(view),
    ),
  );
}

function firstOf(names, most) {
  const more = names.length - most;
  return `${names.slice(0, most).join(", ")}${more > 0 ? ` and ${more} more` : ""}`;
}

function before(number, scrub, words) {
  return h("button", { class: "link", onclick: () => scrub({ number: number - 1 }) }, words);
}

function tile(label, value, detail, mood, action) {
  return h(
    action ? "button" : "div",
    { class: `tile ${mood ?? ""}`, onclick: action },
    h("span", { class: "tile-label" }, label),
    h("span", { class: "tile-value" }, value),
    h("span", { class: "tile-detail", title: detail ?? "" }, detail ?? ""),
  );
}

function tiles(view, { go }) {
  const { weights, checkpoint } = view.ready;
  const gone = new Set(
    (view.processes ?? []).filter((one) => one[2] !== "running").map(([name]) => name),
  );
  const runs = (one) => one[1] !== "stopped" && one[1] !== "lost" && !gone.has(one[0]);
  const serving = view.explorers.filter((one) => one[3] !== null && (view.closed || runs(one)));
  const newest = serving.filter((one) => one[6] === 0).length;
  const late = Math.max(0, ...serving.map((one) => one[6] ?? 0));
  const { ledger } = view;
  const dropped = ledger ? sum(Object.values(ledger.dropped)) : 0;
  const found = view.troubles;
  const age = (one) => `${duration(view.now - one.since)} ago`;
  return h(
    "div",
    { class: "tiles" },
    tile(
      "Trainer",
      `step ${count(view.step)}`,
      `epoch ${view.epoch} · ${view.trainer ?? "not there yet"}`,
    ),
    tile(
      "Weights ready",
      weights ? `step ${count(weights.step)}` : "none",
      weights ? `${age(weights)} · ${short(weights.digest)}` : "",
      "",
      () => go("versions"),
    ),
    tile(
      "Checkpoint ready",
      checkpoint ? `step ${count(checkpoint.step)}` : "none",
      checkpoint ? age(checkpoint) : "",
    ),
    tile(
      "Explorers on it",
      `${count(newest)} of ${count(view.explorers.length)}`,
      late ? `the latest is ${plural(late, "step")} behind` : "none is behind",
      late > 1 ? "warn" : "",
      () => go("versions"),
    ),
    ledger
      ? tile(
          "Prompts trained",
          count(ledger.trained),
          `${count(ledger.open)} open · ${count(dropped)} dropped`,
          "",
          () => go("ledger"),
        )
      : null,
    tile(
      "Problems",
      count(sum(found.map((one) => one[0]))),
      found.map(([number, words]) => `${number} ${words}`).join(" · ") || "none",
      found.some((one) => one[2]) ? "warn" : "",
      () => go("health"),
    ),
  );
}

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

function waitsPanel(view, { lane, scrub }) {
  const chip = (name, kind = "") =>
    h("button", { class: `chip ${kind}`, onclick: () => lane(name) }, name);
  const rows = view.waits.map((one) => {
    const more = one.unnamed + Math.max(0, one.for.length - 6);
    const waited = view.now - one.since;
    return h(
      "li",
      { class: "wait", css: { "--depth": one.depth } },
      chip(one.by),
      h(
        "span",
        { class: "wait-what" },
        ` waits for ${one.what}`,
        one.for.length ? " from " : "",
        one.for.slice(0, 6).flatMap((name, at) => [at ? ", " : "", chip(name, "culprit")]),
        more > 0 ? ` and ${more} more` : "",
      ),
      h(
        "span",
        { class: "wait-time" },
        duration(waited),
        one.left === null ? "" : ` · gives up in ${duration(one.left * 1000)}`,
      ),
      one.left === null ? null : meter(waited / (waited + one.left * 1000)),
    );
  });
  return panel(
    "Who waits for whom",
    rows.length ? `${rows.length} open` : "",
    stacksLine(view, scrub),
    rows.length
      ? h("ul", { class: "waits" }, rows)
      : empty(view.closed ? "The run is over." : "No process has reported a wait."),
  );
}

function causesBox(view) {
  const [first, ...others] = view.causes;
  if (!first) return null;
  return h(
    "div",
    { class: "callout cause" },
    h("strong", {}, "First cause: "),
    first.words,
    others.length
      ? h(
          "details",
          {},
          h("summary", {}, `${plural(others.length, "cause")} more`),
          h(
            "ul",
            { class: "plain" },
            others.map((one) => h("li", {}, one.words)),
          ),
        )
      : null,
  );
}

function stacksLine(view, scrub) {
  if (!view.stacks.length) return null;
  const link = ([process, entry]) =>
    h("button", { class: "link", onclick: () => scrub({ entry }) }, process);
  return h(
    "p",
    { class: "muted" },
    "Stacks were taken at the deadline of a wait: ",
    view.stacks.flatMap((one, at) => [at ? ", " : "", link(one)]),
  );
}

function stepsPanel(view, { search }) {
  const open = new Map();
  for (const { step, kinds } of view.steps.slice().reverse())
    for (const kind of kinds) open.set(`${step}/${kind.kind}`, [step, kind]);
  const settled = ([, kind]) => (kind.outcome ? 1 : 0);
  const rows = [...open.values()]
    .sort((one, other) => settled(one) - settled(other))
    .slice(0, 6)
    .map(([step, kind]) => stepRow(step, kind, () => search({ step: String(step) })));
  const more = view.saves.length - 5;
  const saves = view.saves.slice(0, more > 0 ? 4 : 5).map((one) => saveLine(one, view.now));
  return panel(
    "Steps",
    view.saves.length ? `${view.saves.length} under way` : "",
    rows.length
      ? table([["step", "number"], "kind", "saves or parts", ""], rows, "steps")
      : empty("No step yet."),
    saves.length
      ? h(
          "ul",
          { class: "plain" },
          saves,
          more > 0 ? h("li", { class: "muted" }, `and ${more + 1} more`) : null,
        )
      : null,
    unfinishedLines(view),
  );
}

function stepRow(step, kind, open) {
  const mood = kind.outcome === "failed" ? "bad" : kind.outcome ? "ok" : "going";
  const words = { failed: "✕ failed", ready: "✓ ready" }[kind.outcome];
  const share = kind.compacted ? 1 : kind.expected ? kind.have / kind.expected : 0;
  return h(
    "tr",
    { title: kind.failure ?? "" },
    h(
      "td",
      { class: "number" },
      h("button", { class: "link", title: "Its events and its proof", onclick: open }, count(step)),
    ),
    h("td", {}, kind.kind.replace("_", " ")),
    h("td", { class: "wide" }, meter(share, mood)),
    h(
      "td",
      { class: `state ${mood}` },
      words ?? (kind.outcome || `${kind.have} of ${kind.expected || "?"}`),
    ),
  );
}

function saveLine(one, now) {
  return h(
    "li",
    {},
    h("span", { class: "strong" }, one.holder),
    ` on ${one.node} ${one.started ? "saves" : "waits to save"} ${one.slot}`,
    h(
      "span",
      { class: "muted" },
      ` · ${duration(now - one.since)}${one.bytes ? ` · ${bytes(one.bytes)}` : ""}`,
    ),
  );
}

// Every step lacks something for a moment: a line appears once the log stands still.
function unfinishedLines(view) {
  const lines = view.now - view.at < LASTING && view.live ? [] : view.unfinished.slice(0, 4);
  if (!lines.length) return null;
  return h(
    "ul",
    { class: "plain words" },
    lines.map((line) => h("li", {}, line)),
  );
}

// --- explorers ----------------------------------------------------------------------------

const staleWords = (one) => {
  if (one[3] === null) return "serves nothing yet";
  if (one[6] === -1) return "serves an earlier epoch";
  return one[6] ? `${plural(one[6], "step")} behind` : "serves the newest";
};

const staleMood = (one) => {
  if (one[1] === "stopped" || one[1] === "suspended" || one[1] === "ended") return "s-off";
  if (one[1] === "lost") return "s-lost";
  if (one[3] === null) return "s-none";
  return one[6] === 0 ? "s-0" : one[6] === 1 ? "s-1" : "s-2";
};

const LEGEND = [
  ["s-0", "newest"],
  ["s-1", "1 behind"],
  ["s-2", "2 or more"],
  ["s-none", "nothing yet"],
  ["s-off", "stopped"],
  ["s-lost", "lost"],
  ["s-0 waiting", "waits"],
];

function explorersPanel(view, { lane }) {
  const waiting = new Set(view.waits.map((one) => one.by));
  // A process of this host that was stopped or has ended: the log still says that it runs.
  const conditions = new Map((view.processes ?? []).map(([name, , condition]) => [name, condition]));
  const status = (one) => {
    const condition = conditions.get(one[0]);
    if (one[1] === "stopped" || !condition || condition === "running") return one;
    return [one[0], condition === "stopped" ? "suspended" : "ended", ...one.slice(2)];
  };
  const explorers = view.explorers.map(status).sort((one, other) => byName(one[0], other[0]));
  const cell = (one) =>
    [
      "cell",
      staleMood(one),
      waiting.has(one[0]) ? "waiting" : "",
      one[5] === "differs" ? "differs" : "",
    ].join(" ");
  const shown =
    explorers.length > LISTED
      ? [
          h(
            "div",
            { class: "cells" },
            explorers.map((one) => explorerCell(one, cell(one), view, waiting, lane)),
          ),
          h(
            "div",
            { class: "legend" },
            LEGEND.map(([name, words]) => h("span", {}, h("i", { class: `cell ${name}` }), words)),
          ),
        ]
      : table(
          ["", "explorer", "serves", "", ["applied", "number"]],
          explorers.map((one) => explorerRow(one, cell(one), view, waiting, lane)),
          "explorers",
        );
  return panel(
    "Explorers",
    count(explorers.length),
    explorers.length ? shown : empty("No explorer has joined."),
  );
}

// Says what the explorer's checks proved of what it serves.
const served = (status) => `what it serves is ${status || "not said to be proven"}`;

function explorerRow(one, cell, view, waiting, lane) {
  const [name, status, , step, digest, proof, , , heard] = one;
  const ended = { stopped: "stopped", suspended: "suspended", ended: "ended", lost: `lost, heard ${duration(view.now - heard)} ago` };
  return h(
    "tr",
    {},
    h("td", {}, h("i", { class: cell })),
    h(
      "td",
      { class: "nowrap" },
      h("button", { class: "link", onclick: () => lane(name) }, name),
    ),
    h("td", { class: "nowrap" }, step === null ? "–" : `step ${count(step)}`),
    h(
      "td",
      { class: "muted", title: digest ? `digest ${short(digest)}: ${proof}; ${served(one[10])}` : "" },
      ended[status] ?? (waiting.has(name) ? "waits" : staleWords(one)),
      proof === "differs" ? " ≠" : "",
      one[10] && !ended[status] ? ` · ${one[10]}` : "",
    ),
    h(
      "td",
      { class: "number muted nowrap" },
      one[7] ? `${duration(Math.max(0, view.now - one[7]))} ago` : "–",
    ),
  );
}

function explorerCell(one, cell, view, waiting, lane) {
  const [name, status, epoch, step, digest, proof, , , heard] = one;
  const tip = () => [
    name,
    `${status} · ${staleWords(one)}`,
    step === null ? "" : `step ${step} of epoch ${epoch} · ${proof} ${short(digest)}`,
    step === null ? "" : served(one[10]),
    heard ? `heard of ${duration(view.now - heard)} ago` : "",
    waiting.has(name) ? "reports a wait" : "",
  ];
  return h("button", {
    class: cell,
    "aria-label": `${name}: ${staleWords(one)}`,
    onclick: () => lane(name),
    onmousemove: (event) => showTip(event.clientX, event.clientY, tip()),
    onmouseleave: hideTip,
  });
}

// --- problems -----------------------------------------------------------------------------

// Returns the failures among marks, newest first: a step's in the place of the save's that failed it.
function failuresOf(marks) {
  const found = new Map();
  for (const [at, number, entry, name, words] of marks) {
    const isFailure =
      name === "step-failed" ||
      (name === "save-failed" && !found.has(entry)) ||
      (name === "run-closed" && !words.endsWith(": finished"));
    if (isFailure) found.set(entry, ["✕", words, entry, number, at]);
  }
  return [...found.values()].slice(-4).reverse();
}

// Kinds of trouble that have lines of their own.
const LISTED_TROUBLES = /^(run failed|saves? failed|weights refused)/;

function troublesPanel(view, marks, { scrub }) {
  const lines = [
    ...view.suspects.map((words) => ["!", words]),
    ...failuresOf(marks),
    ...view.troubles
      .filter(([, words, serious]) => serious && !LISTED_TROUBLES.test(words))
      .map(([number, words]) => ["!", `${count(number)} ${words}`]),
    ...view.anomalies
      .slice(-4)
      .reverse()
      .map(([entry, name, detail]) => ["~", `${name}: ${detail}`, entry]),
  ];
  const links = (entry, number, at) =>
    h(
      "span",
      { class: "links" },
      h("button", { class: "link", onclick: () => scrub({ entry }) }, at ? clock(at) : entry),
      number ? [" · ", before(number, scrub, "just before")] : null,
    );
  return panel(
    "Problems",
    "",
    lines.length
      ? h(
          "ul",
          { class: "plain troubles" },
          lines
            .slice(0, 7)
            .map(([mark, words, entry, number, at]) =>
              h(
                "li",
                {},
                h("span", { class: "mark", "aria-hidden": "true" }, mark),
                h("span", {}, words),
                entry ? links(entry, number, at) : null,
              ),
            ),
        )
      : empty("None."),
  );
}
