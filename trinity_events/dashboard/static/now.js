// The state now, or at an event: its headline, who waits for whom, steps, saves and explorers.

import {
  bytes,
  byName,
  count,
  duration,
  empty,
  figure,
  h,
  hideTip,
  moment,
  panel,
  short,
  showTip,
} from "./format.js";

export function culpritsOf(waits) {
  const waiting = new Set(waits.map((one) => one.by));
  const named = waits.filter(
    (one) => one.depth > 0 || waits.some((other) => one.for.includes(other.by)) || one.for.length,
  );
  const found = new Map();
  for (const one of named)
    for (const name of one.for) {
      if (!waiting.has(name))
        found.set(name, Math.max(found.get(name) ?? 0, one.left === null ? 0 : 1));
    }
  return [...found.keys()].sort(byName);
}

function headlineOf(view) {
  if (view.closed === "finished") return ["ok", `The run finished at step ${count(view.step)}.`];
  if (view.closed)
    return [
      "bad",
      `The run ${view.closed === "failed" ? "failed" : "was interrupted"} at step ${count(view.step)}.`,
    ];
  const worst = view.waits.find((one) => one.by.startsWith("trainer")) ?? view.waits[0];
  if (worst) return ["held", `${worst.by} waits for ${worst.what}.`];
  if (view.failures.length) return ["bad", view.failures.at(-1)];
  if (view.epoch === 0) return ["idle", "The run was not opened yet."];
  if (!view.step) return ["idle", "The run is open, and no step is trained yet."];
  return ["ok", `Step ${count(view.step)} is trained; nothing is reported to wait.`];
}

export function renderNow(view, actions) {
  const [mood, words] = headlineOf(view);
  const culprits = culpritsOf(view.waits);
  const heading = h(
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
      culprits.length
        ? h(
            "p",
            {},
            "Culprits: ",
            culprits.slice(0, 6).flatMap((name, at) => [at ? ", " : "", h("strong", {}, name)]),
            culprits.length > 6 ? ` and ${culprits.length - 6} more` : "",
            ".",
          )
        : null,
      view.closed_error ? h("p", {}, view.closed_error) : null,
    ),
  );
  return [
    heading,
    tiles(view, actions),
    h(
      "div",
      { class: "columns" },
      h("div", {}, waitsPanel(view, actions), stepsPanel(view)),
      h("div", {}, explorersPanel(view, actions), troublePanel(view, actions)),
    ),
  ];
}

function tile(label, value, detail, mood, action) {
  return h(
    action ? "button" : "div",
    { class: `tile ${mood ?? ""}`, onclick: action },
    h("span", { class: "tile-label" }, label),
    h("span", { class: "tile-value" }, value),
    h("span", { class: "tile-detail" }, detail ?? ""),
  );
}

function tiles(view, { go }) {
  const weights = view.ready.weights;
  const checkpoint = view.ready.checkpoint;
  const serving = view.explorers.filter((one) => one[3] !== null);
  const newest = serving.filter((one) => one[6] === 0).length;
  const late = Math.max(0, ...serving.map((one) => one[6] ?? 0));
  const odd = Object.values(view.anomaly_counts).reduce((sum, one) => sum + one, 0);
  const ledger = view.ledger;
  const dropped = ledger ? Object.values(ledger.dropped).reduce((sum, one) => sum + one, 0) : 0;
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
      weights ? `${duration(view.now - weights.since)} ago · ${short(weights.digest)}` : "",
      "",
      () => go("versions"),
    ),
    tile(
      "Checkpoint ready",
      checkpoint ? `step ${count(checkpoint.step)}` : "none",
      checkpoint ? `${duration(view.now - checkpoint.since)} ago` : "",
    ),
    tile(
      "Explorers on it",
      `${count(newest)} of ${count(view.explorers.length)}`,
      late ? `the latest is ${late} behind` : "none is behind",
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
      "Troubles",
      count(view.failures.length + view.refused + odd + view.dead_letters),
      `${view.failures.length} failed · ${view.refused} refused · ${odd + view.dead_letters} odd`,
      view.failures.length + view.refused ? "warn" : "",
      () => go("health"),
    ),
  );
}

function waitsPanel(view, { lane }) {
  const rows = view.waits.map((one) =>
    h(
      "li",
      { class: "wait", css: { "--depth": one.depth } },
      h("button", { class: "chip", onclick: () => lane(one.by) }, one.by),
      h(
        "span",
        { class: "wait-what" },
        ` waits for ${one.what}`,
        one.for.length
          ? [
              " from ",
              ...one.for
                .slice(0, 6)
                .flatMap((name, at) => [
                  at ? ", " : "",
                  h("button", { class: "chip culprit", onclick: () => lane(name) }, name),
                ]),
            ]
          : "",
        one.unnamed || one.for.length > 6
          ? ` and ${one.unnamed + Math.max(0, one.for.length - 6)} more`
          : "",
      ),
      h(
        "span",
        { class: "wait-time" },
        duration(view.now - one.since),
        one.left === null ? "" : ` · gives up in ${duration(one.left * 1000)}`,
      ),
      one.left === null
        ? null
        : meter((view.now - one.since) / (view.now - one.since + one.left * 1000)),
    ),
  );
  return panel(
    "Who waits for whom",
    rows.length ? `${rows.length} open` : "",
    rows.length
      ? h("ul", { class: "waits" }, rows)
      : empty(view.closed ? "The run is over." : "No process has reported a wait."),
  );
}

function meter(share, mood) {
  const filled = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
  return h(
    "div",
    {
      class: `meter ${mood ?? ""}`,
      role: "meter",
      "aria-valuenow": filled,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    },
    h("div", { css: { width: `${filled}%` } }),
  );
}

function stepsPanel(view) {
  const open = new Map();
  for (const { step, kinds } of view.steps.slice().reverse())
    for (const kind of kinds) open.set(`${step}/${kind.kind}`, [step, kind]);
  const settled = ([, kind]) => (kind.outcome ? 1 : 0);
  const rows = [...open.values()]
    .sort((one, other) => settled(one) - settled(other))
    .slice(0, 6)
    .map(([step, kind]) => {
      const mood = kind.outcome === "failed" ? "bad" : kind.outcome ? "ok" : "going";
      const word =
        kind.outcome === "failed"
          ? "✕ failed"
          : kind.outcome === "ready"
            ? "✓ ready"
            : kind.outcome || `${kind.have} of ${kind.expected || "?"}`;
      return h(
        "tr",
        { title: kind.failure ?? "" },
        h("td", { class: "number" }, count(step)),
        h("td", {}, kind.kind.replace("_", " ")),
        h(
          "td",
          { class: "wide" },
          kind.compacted
            ? meter(1, mood)
            : meter(kind.expected ? kind.have / kind.expected : 0, mood),
        ),
        h("td", { class: `state ${mood}` }, word),
      );
    });
  const more = view.saves.length - 5;
  const saves = view.saves
    .slice(0, more > 0 ? 4 : 5)
    .map((one) =>
      h(
        "li",
        {},
        h("span", { class: "strong" }, one.holder),
        ` on ${one.node} ${one.started ? "saves" : "waits to save"} `,
        one.slot,
        h(
          "span",
          { class: "muted" },
          ` · ${duration(view.now - one.since)}${one.bytes ? ` · ${bytes(one.bytes)}` : ""}`,
        ),
      ),
    );
  return panel(
    "Steps",
    view.saves.length ? `${view.saves.length} under way` : "",
    rows.length
      ? h(
          "table",
          { class: "steps" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "step"),
              h("th", {}, "kind"),
              h("th", {}, "saves or parts"),
              h("th", {}, ""),
            ),
          ),
          h("tbody", {}, rows),
        )
      : empty("No step yet."),
    saves.length
      ? h(
          "ul",
          { class: "plain" },
          saves,
          more > 0 ? h("li", { class: "muted" }, `and ${more + 1} more`) : null,
        )
      : null,
    view.unfinished.length
      ? h(
          "ul",
          { class: "plain words" },
          view.unfinished.slice(0, 4).map((line) => h("li", {}, line)),
        )
      : null,
  );
}

const staleWords = (one) =>
  one[3] === null
    ? "serves nothing yet"
    : one[6] === -1
      ? "serves an earlier epoch"
      : one[6]
        ? `${one[6]} steps behind`
        : "serves the newest";
const staleMood = (one) =>
  one[1] === "stopped"
    ? "s-off"
    : one[3] === null
      ? "s-none"
      : one[6] === 0
        ? "s-0"
        : one[6] === 1
          ? "s-1"
          : "s-2";

function explorersPanel(view, { lane }) {
  const waiting = new Set(view.waits.flatMap((one) => [one.by]));
  const cells = view.explorers
    .slice()
    .sort((one, other) => byName(one[0], other[0]))
    .map((one) =>
      h("button", {
        class: `cell ${staleMood(one)} ${waiting.has(one[0]) ? "waiting" : ""} ${one[5] === "differs" ? "differs" : ""}`,
        "aria-label": `${one[0]}: ${staleWords(one)}`,
        onclick: () => lane(one[0]),
        onmousemove: (event) =>
          showTip(event.clientX, event.clientY, [
            one[0],
            `${one[1]} · ${staleWords(one)}`,
            one[3] === null ? "" : `step ${one[3]} of epoch ${one[2]} · ${one[5]} ${short(one[4])}`,
            one[8] ? `heard of ${duration(view.now - one[8])} ago` : "",
            waiting.has(one[0]) ? "reports a wait" : "",
          ]),
        onmouseleave: hideTip,
      }),
    );
  const legend = h(
    "div",
    { class: "legend" },
    [
      ["s-0", "newest"],
      ["s-1", "1 behind"],
      ["s-2", "2 or more"],
      ["s-none", "nothing yet"],
      ["s-off", "stopped"],
    ].map(([name, words]) => h("span", {}, h("i", { class: `cell ${name}` }), words)),
    h("span", {}, h("i", { class: "cell s-0 waiting" }), "waits"),
  );
  return panel(
    "Explorers",
    `${count(view.explorers.length)}`,
    cells.length ? [h("div", { class: "cells" }, cells), legend] : empty("No explorer has joined."),
  );
}

function troublePanel(view, { scrub }) {
  const lines = [
    ...view.failures.slice(-4).map((line) => ["✕", line, null]),
    ...view.suspects.map((line) => ["!", line, null]),
    ...view.anomalies
      .slice(-4)
      .reverse()
      .map(([entry, name, detail]) => ["~", `${name}: ${detail}`, entry]),
  ];
  return panel(
    "Troubles",
    "",
    lines.length
      ? h(
          "ul",
          { class: "plain troubles" },
          lines
            .slice(0, 7)
            .map(([mark, words, entry]) =>
              h(
                "li",
                {},
                h("span", { class: "mark", "aria-hidden": "true" }, mark),
                h("span", {}, words),
                entry
                  ? h("button", { class: "link", onclick: () => scrub({ entry }) }, entry)
                  : null,
              ),
            ),
        )
      : empty("None."),
  );
}

export function renderLedger(view, figures) {
  const ledger = view.ledger;
  if (!ledger)
    return [panel("Ledger of prompts", "", empty("The run has dispatched no rollouts."))];
  const parts = [
    ["trained", ledger.trained, "train"],
    ...Object.entries(ledger.dropped).map(([name, number]) => [
      `dropped: ${name}`,
      number,
      "failure",
    ]),
    ["open", ledger.open, "rollouts"],
  ];
  const sum = parts.reduce((total, one) => total + one[1], 0);
  const holds = sum === ledger.dispatched;
  const staleness = figures?.staleness ?? [];
  const samples = staleness.reduce((total, one) => total + one[1], 0);
  return [
    panel(
      "Ledger of prompts",
      holds ? "✓ the books balance" : "✕ the books do not balance",
      h(
        "p",
        { class: "equation" },
        h("strong", {}, count(ledger.dispatched)),
        " dispatched = ",
        parts.flatMap(([name, number], at) => [
          at ? " + " : "",
          h("strong", {}, count(number)),
          ` ${name}`,
        ]),
      ),
      h(
        "div",
        { class: "stack", role: "img", "aria-label": ledger.words },
        parts
          .filter((one) => one[1])
          .map(([name, number, color]) =>
            h("div", {
              class: `c-${color}`,
              css: { flex: String(number) },
              title: `${name}: ${count(number)}`,
            }),
          ),
      ),
      h(
        "div",
        { class: "legend" },
        parts.map(([name, number, color]) =>
          h("span", {}, h("i", { class: `dot c-${color}` }), `${name} ${count(number)}`),
        ),
      ),
      h(
        "dl",
        { class: "facts" },
        h("dt", {}, "Every prompt below"),
        h("dd", {}, `${count(ledger.mark)} has a fate`),
        ledger.settled
          ? [h("dt", {}, "Above it, these have one"), h("dd", {}, ledger.settled)]
          : null,
      ),
    ),
    panel(
      "Staleness of trained samples",
      samples ? `${count(samples)} samples` : "",
      samples
        ? h(
            "table",
            { class: "bars" },
            h(
              "tbody",
              {},
              staleness.map(([steps, number]) =>
                h(
                  "tr",
                  {},
                  h("th", {}, steps ? `${steps} behind` : "on-policy"),
                  h("td", { class: "wide" }, meter(number / samples)),
                  h("td", { class: "number" }, `${figure((100 * number) / samples)} %`),
                  h("td", { class: "number muted" }, count(number)),
                ),
              ),
            ),
          )
        : empty(
            figures?.staleness === null
              ? "It is summed up for the newest state alone."
              : "No step tells it.",
          ),
    ),
  ];
}

// The dead letters up to a moment of the past, in milliseconds.
export function deadUntil(found, at) {
  return { dead: found.dead.filter((one) => Number(one[0].split("-")[0]) <= at) };
}

export function renderHealth(view, dead, actions) {
  const { scrub } = actions;
  const link = (entry) => h("button", { class: "link", onclick: () => scrub({ entry }) }, entry);
  const groups = view.groups ?? [];
  const behind =
    view.live && view.committed
      ? Number(view.position.split("-")[0]) - Number(view.committed.split("-")[0])
      : null;
  const list = (rows, none) =>
    rows.length ? h("table", { class: "list" }, h("tbody", {}, rows)) : empty(none);
  return [
    panel(
      "Reducer and consumer groups",
      behind === null
        ? ""
        : behind > 1000
          ? `the reducer is ${duration(behind)} behind`
          : "the reducer has folded everything",
      groups.length
        ? h(
            "table",
            { class: "list" },
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                ["group", "stream", "members", "pending", "oldest pending", "idle", ""].map((one) =>
                  h("th", {}, one),
                ),
              ),
            ),
            h(
              "tbody",
              {},
              groups.map((one) =>
                h(
                  "tr",
                  {},
                  h("td", { class: "strong" }, one[1]),
                  h("td", {}, one[0]),
                  h("td", { class: "number" }, one[2]),
                  h("td", { class: "number" }, count(one[3])),
                  h("td", {}, one[5] ?? "–"),
                  h("td", { class: "number" }, duration(one[6] * 1000)),
                  h(
                    "td",
                    { class: `state ${one[7] ? "ok" : "going"}` },
                    one[7] ? "✓ caught up" : "behind",
                  ),
                ),
              ),
            ),
          )
        : empty("No consumer group reads this run now."),
      view.detached.length
        ? h(
            "ul",
            { class: "plain" },
            view.detached.map((one) =>
              h(
                "li",
                {},
                `Group ${one[0]} was idle for ${duration(one[3] * 1000)} and was detached at `,
                link(one[1]),
                `, with ${count(one[2])} entries not acknowledged.`,
              ),
            ),
          )
        : null,
    ),
    panel(
      "Failures",
      "",
      list(
        view.failures.map((line) => h("tr", {}, h("td", {}, line))),
        "No step is failed.",
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
            h("tr", {}, h("td", { class: "muted nowrap" }, moment(at)), h("td", {}, line)),
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
            h(
              "tr",
              {},
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
            h(
              "tr",
              {},
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
