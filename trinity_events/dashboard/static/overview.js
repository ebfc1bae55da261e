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
  const waiting = new Set(waits.map((wait) => wait.by));
  const culprits = waits.flatMap((wait) => wait.for).filter((name) => !waiting.has(name));
  return [...new Set(culprits)].sort(byName);
}

// Returns the mood and the words of the headline; green only if nothing needs a look.
function headlineOf(view) {
  const problems = view.troubles.filter(([, words, isSerious]) => isSerious && words !== "run failed");
  const but = problems.length ? `${problems.map(([number, what]) => `${count(number)} ${what}`)[0]}` : "";
  if (view.closed === "finished")
    return but
      ? ["held", `The run finished at step ${count(view.step)}, but: ${but}.`]
      : ["ok", `The run finished at step ${count(view.step)}.`];
  if (view.closed) {
    const how = view.closed === "failed" ? "failed" : "was interrupted";
    return ["bad", `The run ${how} at step ${count(view.step)}.`];
  }
  const worst = view.waits.find((wait) => wait.by.startsWith("trainer")) ?? view.waits[0];
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
  const end = view.closed === "failed" ? marks.findLast((mark) => mark[3] === "run-closed") : null;
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
    (view.processes ?? []).filter(([, , condition]) => condition !== "running").map(([name]) => name),
  );
  const runs = ([name, status]) => status !== "stopped" && status !== "lost" && !gone.has(name);
  const serving = view.explorers.filter(
    (explorer) => explorer[3] !== null && (view.closed || runs(explorer)),
  );
  const newest = serving.filter((explorer) => explorer[6] === 0).length;
  const late = Math.max(0, ...serving.map((explorer) => explorer[6] ?? 0));
  const { ledger } = view;
  const dropped = ledger ? sum(Object.values(ledger.dropped)) : 0;
  const { troubles } = view;
  const age = (version) => `${duration(view.now - version.since)} ago`;
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
      count(sum(troubles.map(([number]) => number))),
      troubles.map(([number, words]) => `${number} ${words}`).join(" · ") || "none",
      troubles.some(([, , isSerious]) => isSerious) ? "warn" : "",
      () => go("health"),
    ),
  );
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

function waitsPanel(view, { lane, scrub }) {
  const chip = (name, kind = "") =>
    h("button", { class: `chip ${kind}`, onclick: () => lane(name) }, name);
  const rows = view.waits.map((wait) => {
    const more = wait.unnamed + Math.max(0, wait.for.length - 6);
    const waited = view.now - wait.since;
    return h(
      "li",
      { class: "wait", css: { "--depth": wait.depth } },
      chip(wait.by),
      h(
        "span",
        { class: "wait-what" },
        ` waits for ${wait.what}`,
        wait.for.length ? " from " : "",
        wait.for.slice(0, 6).flatMap((name, at) => [at ? ", " : "", chip(name, "culprit")]),
        more > 0 ? ` and ${more} more` : "",
      ),
      h(
        "span",
        { class: "wait-time" },
        duration(waited),
        wait.left === null ? "" : ` · gives up in ${duration(wait.left * 1000)}`,
      ),
      wait.left === null ? null : meter(waited / (waited + wait.left * 1000)),
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
  const [first, ...furtherCauses] = view.causes;
  if (!first) return null;
  return h(
    "div",
    { class: "callout cause" },
    h("strong", {}, "First cause: "),
    first.words,
    furtherCauses.length
      ? h(
          "details",
          {},
          h("summary", {}, `${plural(furtherCauses.length, "cause")} more`),
          h(
            "ul",
            { class: "plain" },
            furtherCauses.map((cause) => h("li", {}, cause.words)),
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
    view.stacks.flatMap((stack, at) => [at ? ", " : "", link(stack)]),
  );
}

function stepsPanel(view, { search }) {
  const open = new Map();
  for (const { step, kinds } of view.steps.slice().reverse())
    for (const kind of kinds) open.set(`${step}/${kind.kind}`, [step, kind]);
  const settled = ([, kind]) => (kind.outcome ? 1 : 0);
  const rows = [...open.values()]
    .sort((a, b) => settled(a) - settled(b))
    .slice(0, 6)
    .map(([step, kind]) => stepRow(step, kind, () => search({ step: String(step) })));
  const more = view.saves.length - 5;
  const saves = view.saves.slice(0, more > 0 ? 4 : 5).map((save) => saveLine(save, view.now));
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

function saveLine(save, now) {
  return h(
    "li",
    {},
    h("span", { class: "strong" }, save.holder),
    ` on ${save.node} ${save.started ? "saves" : "waits to save"} ${save.slot}`,
    h(
      "span",
      { class: "muted" },
      ` · ${duration(now - save.since)}${save.bytes ? ` · ${bytes(save.bytes)}` : ""}`,
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

const staleWords = (explorer) => {
  if (explorer[3] === null) return "serves nothing yet";
  if (explorer[6] === -1) return "serves an earlier epoch";
  return explorer[6] ? `${plural(explorer[6], "step")} behind` : "serves the newest";
};

const staleMood = (explorer) => {
  if (["stopped", "suspended", "ended"].includes(explorer[1])) return "s-off";
  if (explorer[1] === "lost") return "s-lost";
  if (explorer[3] === null) return "s-none";
  return explorer[6] === 0 ? "s-0" : explorer[6] === 1 ? "s-1" : "s-2";
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
  const waiting = new Set(view.waits.map((wait) => wait.by));
  // A process of this host that was stopped or has ended: the log still says that it runs.
  const conditions = new Map((view.processes ?? []).map(([name, , condition]) => [name, condition]));
  const status = (explorer) => {
    const condition = conditions.get(explorer[0]);
    if (explorer[1] === "stopped" || !condition || condition === "running") return explorer;
    return [explorer[0], condition === "stopped" ? "suspended" : "ended", ...explorer.slice(2)];
  };
  const explorers = view.explorers.map(status).sort((a, b) => byName(a[0], b[0]));
  const cell = (explorer) =>
    [
      "cell",
      staleMood(explorer),
      waiting.has(explorer[0]) ? "waiting" : "",
      explorer[5] === "differs" ? "differs" : "",
    ].join(" ");
  const shown =
    explorers.length > LISTED
      ? [
          h(
            "div",
            { class: "cells" },
            explorers.map((explorer) => explorerCell(explorer, cell(explorer), view, waiting, lane)),
          ),
          h(
            "div",
            { class: "legend" },
            LEGEND.map(([name, words]) => h("span", {}, h("i", { class: `cell ${name}` }), words)),
          ),
        ]
      : table(
          ["", "explorer", "serves", "", ["applied", "number"]],
          explorers.map((explorer) => explorerRow(explorer, cell(explorer), view, waiting, lane)),
          "explorers",
        );
  return panel(
    "Explorers",
    count(explorers.length),
    explorers.length ? shown : empty("No explorer has joined."),
  );
}

// Says what the explorer's checks proved of what it serves.
const formatProof = (status) => `what it serves is ${status || "not said to be proven"}`;

function explorerRow(explorer, cell, view, waiting, lane) {
  const [name, status, , step, digest, proof, , , heard] = explorer;
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
      { class: "muted", title: digest ? `digest ${short(digest)}: ${proof}; ${formatProof(explorer[10])}` : "" },
      ended[status] ?? (waiting.has(name) ? "waits" : staleWords(explorer)),
      proof === "differs" ? " ≠" : "",
      explorer[10] && !ended[status] ? ` · ${explorer[10]}` : "",
    ),
    h(
      "td",
      { class: "number muted nowrap" },
      explorer[7] ? `${duration(Math.max(0, view.now - explorer[7]))} ago` : "–",
    ),
  );
}

function explorerCell(explorer, cell, view, waiting, lane) {
  const [name, status, epoch, step, digest, proof, , , heard] = explorer;
  const tip = () => [
    name,
    `${status} · ${staleWords(explorer)}`,
    step === null ? "" : `step ${step} of epoch ${epoch} · ${proof} ${short(digest)}`,
    step === null ? "" : formatProof(explorer[10]),
    heard ? `heard of ${duration(view.now - heard)} ago` : "",
    waiting.has(name) ? "reports a wait" : "",
  ];
  return h("button", {
    class: cell,
    "aria-label": `${name}: ${staleWords(explorer)}`,
    onclick: () => lane(name),
    onmousemove: (event) => showTip(event.clientX, event.clientY, tip()),
    onmouseleave: hideTip,
  });
}

// --- problems -----------------------------------------------------------------------------

// Returns the failures among marks, newest first: a step's in the place of the save's that failed it.
function failuresOf(marks) {
  const failures = new Map();
  for (const [at, number, entry, name, words] of marks) {
    const isFailure =
      name === "step-failed" ||
      (name === "save-failed" && !failures.has(entry)) ||
      (name === "run-closed" && !words.endsWith(": finished"));
    if (isFailure) failures.set(entry, ["✕", words, entry, number, at]);
  }
  return [...failures.values()].slice(-4).reverse();
}

// Kinds of trouble that have lines of their own.
const LISTED_TROUBLES = /^(run failed|saves? failed|weights refused)/;

function troublesPanel(view, marks, { scrub }) {
  const lines = [
    ...view.suspects.map((words) => ["!", words]),
    ...failuresOf(marks),
    ...view.troubles
      .filter(([, words, isSerious]) => isSerious && !LISTED_TROUBLES.test(words))
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
