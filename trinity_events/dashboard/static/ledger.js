// The ledger of prompts, goodput, and the staleness of trained samples.

import { CATEGORY_COLORS, count, empty, figure, h, meter, panel, plural, table } from "./format.js";

export function renderLedger(view, figures) {
  const { ledger } = view;
  const goodput = goodputPanel(figures?.goodput);
  if (!ledger)
    return [
      panel("Ledger of prompts", "", empty("The run has dispatched no rollouts.")),
      goodput,
    ].filter(Boolean);
  return [ledgerPanel(ledger), goodput, stalenessPanel(figures?.staleness)].filter(Boolean);
}

// Colors of fates; all others are waits.
const FATE_COLORS = {
  training: "train",
  generating: "ready",
  judging: "rollouts",
  environment: "rollouts",
  evaluating: "rollouts",
  installing: "apply",
  publishing: "publish",
  saving: "save",
  recomputing: "failure",
  lost: "failure",
  down: "failure",
};

function goodputPanel(goodput) {
  if (goodput === null) return null; // its processes report no times: a loop of its own
  if (!goodput) return panel("Goodput", "", empty("It is summed up for the newest state alone."));
  const bar = ([role, shares]) =>
    h(
      "tr",
      {},
      h("th", {}, role),
      h(
        "td",
        { class: "wide" },
        h(
          "div",
          { class: "stack", role: "img", "aria-label": `${role}: ${wordsOf(shares)}` },
          shares.map(([name, fate, share]) =>
            h("div", {
              css: {
                flex: String(share),
                background: CATEGORY_COLORS[FATE_COLORS[fate] ?? "wait"],
              },
              title: `${name}: ${percent(share)}`,
            }),
          ),
        ),
      ),
      h("td", { class: "muted" }, wordsOf(shares.toSorted((a, b) => b[2] - a[2]).slice(0, 3))),
    );
  const sampled = goodput.tokens.reduce((total, [, number]) => total + number, 0);
  const tokens = goodput.tokens.map(([fate, number]) =>
    h(
      "tr",
      {},
      h("th", {}, fate),
      h("td", { class: "wide" }, meter(number / sampled)),
      h("td", { class: "number" }, percent(number / sampled)),
      h("td", { class: "number muted" }, count(number)),
    ),
  );
  const lines = (title, rows) =>
    rows.length
      ? [
          h("h3", {}, title),
          h(
            "ul",
            { class: "plain" },
            rows.map((line) => h("li", {}, line)),
          ),
        ]
      : [];
  return panel(
    "Goodput",
    goodput.rates,
    h("p", {}, goodput.words),
    table([], Object.entries(goodput.roles).map(bar), "bars"),
    h("p", { class: "muted" }, goodput.unmeasured),
    ...(tokens.length ? [h("h3", {}, "Sampled tokens"), table([], tokens, "bars")] : []),
    ...lines("Wasted or waited, by cause", goodput.waste),
    ...lines("Slow processes", goodput.slow),
  );
}

const percent = (share) => `${figure(100 * share)} %`;
const wordsOf = (shares) =>
  shares.map(([name, , share]) => `${name} ${percent(share)}`).join(", ");

function ledgerPanel(ledger) {
  const dropped = Object.entries(ledger.dropped);
  const parts = [
    ["trained", ledger.trained, "train"],
    ...dropped.map(([name, number]) => [`dropped: ${name}`, number, "failure"]),
    ["open", ledger.open, "rollouts"],
  ];
  const holds = parts.reduce((total, [, number]) => total + number, 0) === ledger.dispatched;
  return panel(
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
        .filter(([, number]) => number)
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
  );
}

function stalenessPanel(staleness) {
  const bins = staleness ?? [];
  const samples = bins.reduce((total, [, number]) => total + number, 0);
  const none =
    staleness === null ? "It is summed up for the newest state alone." : "No step tells it.";
  const rows = bins.map(([steps, number]) =>
    h(
      "tr",
      {},
      h("th", {}, steps ? `${plural(steps, "step")} behind` : "on-policy"),
      h("td", { class: "wide" }, meter(number / samples)),
      h("td", { class: "number" }, `${figure((100 * number) / samples)} %`),
      h("td", { class: "number muted" }, count(number)),
    ),
  );
  return panel(
    "Staleness of trained samples",
    samples ? `${count(samples)} samples` : "",
    samples ? table([], rows, "bars") : empty(none),
  );
}
