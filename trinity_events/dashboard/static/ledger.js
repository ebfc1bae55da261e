// The ledger of prompts, and the staleness of trained samples.

import { count, empty, figure, h, meter, panel, plural, table } from "./format.js";

export function renderLedger(view, figures) {
  const { ledger } = view;
  if (!ledger)
    return [panel("Ledger of prompts", "", empty("The run has dispatched no rollouts."))];
  return [ledgerPanel(ledger), stalenessPanel(figures?.staleness)];
}

function ledgerPanel(ledger) {
  const dropped = Object.entries(ledger.dropped);
  const parts = [
    ["trained", ledger.trained, "train"],
    ...dropped.map(([name, number]) => [`dropped: ${name}`, number, "failure"]),
    ["open", ledger.open, "rollouts"],
  ];
  const holds = parts.reduce((total, one) => total + one[1], 0) === ledger.dispatched;
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
  );
}

function stalenessPanel(staleness) {
  const found = staleness ?? [];
  const samples = found.reduce((total, one) => total + one[1], 0);
  const none =
    staleness === null ? "It is summed up for the newest state alone." : "No step tells it.";
  const rows = found.map(([steps, number]) =>
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
