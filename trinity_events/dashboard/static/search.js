// Search of events by type, producer, step and time, and the proof of a step.

import { CATEGORY_COLORS, clock, count, day, h, panel, table } from "./format.js";

const PAGE = 50; // results of one answer
const query = { type: "", producer: "", step: "", since: "", until: "" };

// Fills in the conditions of the next search.
export function searchFor(conditions) {
  for (const name of Object.keys(query)) query[name] = conditions[name] ?? "";
}

export function searchPage(source, run, lanes, actions) {
  const results = h("tbody", {});
  const note = h("p", { class: "empty" });
  const proof = h("div", { class: "proof" });
  const moment = (name) => (query[name] ? new Date(query[name]).getTime() : null);
  let before = null;
  let number = 0;
  const further = h("button", { class: "more", hidden: true, onclick: () => add() }, "Search on");

  const find = () => {
    before = null;
    number = 0;
    results.replaceChildren();
    add();
    proof.replaceChildren();
    if (/^\d+$/.test(query.step)) prove(source, run, query.step, proof, actions);
  };
  const add = async () => {
    note.textContent = "Searching…";
    try {
      const answer = await source.of(run, "events", {
        ...query,
        since: moment("since"),
        until: moment("until"),
        before,
        limit: PAGE,
      });
      number += answer.found.length;
      results.append(...answer.found.map((row) => resultRow(row, lanes, actions)));
      before = answer.before;
      further.hidden = before === null;
      const back = `; searched back to ${day(answer.until)} ${clock(answer.until)}`;
      note.textContent = `${count(number)} found${before !== null && answer.until ? back : ""}.`;
    } catch (error) {
      note.textContent = error.message;
    }
  };

  find();
  return [
    panel(
      "Search",
      "newest first; a row leads to the state after its event",
      searchForm(lanes, find),
      proof,
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "list found" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              HEADS.map((heading) => h("th", {}, heading)),
            ),
          ),
          results,
        ),
      ),
      note,
      further,
    ),
  ];
}

const HEADS = ["time", "event", "producer", "type", "fields"];

function searchForm(lanes, find) {
  const field = (name, label, properties) =>
    h("label", {}, h("span", {}, label), h("input", { name, value: query[name], ...properties }));
  const choices = (id, all) =>
    h(
      "datalist",
      { id },
      all.map((value) => h("option", { value })),
    );
  const form = h(
    "form",
    {
      class: "search",
      onsubmit: (event) => {
        event.preventDefault();
        searchFor(Object.fromEntries(new FormData(form)));
        find();
      },
    },
    field("type", "Type", {
      list: "types",
      placeholder: "step-failed",
      id: "search-type",
      autocomplete: "off",
    }),
    field("producer", "Producer", {
      list: "producers",
      placeholder: "explorer-3 or actor",
      autocomplete: "off",
    }),
    field("step", "Step", { inputmode: "numeric", size: 6 }),
    field("since", "Since", { type: "datetime-local", step: 1 }),
    field("until", "Until", { type: "datetime-local", step: 1 }),
    h("button", { class: "primary" }, "Search"),
    choices("types", lanes.types),
    choices(
      "producers",
      lanes.lanes.slice(0, 200).map(([name]) => name),
    ),
  );
  return form;
}

function resultRow(row, lanes, { scrub }) {
  const [number, entry, at, producer, type, , category, line] = row;
  const color = CATEGORY_COLORS[lanes.categories[category]] ?? CATEGORY_COLORS.failure;
  const open = () => scrub({ entry });
  return h(
    "tr",
    { onclick: open },
    h("td", { class: "muted nowrap", title: day(at) }, clock(at, true)),
    h("td", {}, h("button", { class: "link", onclick: open }, count(number))),
    h("td", { class: "nowrap" }, producer),
    h(
      "td",
      { class: "nowrap" },
      h("i", { class: "dot", css: { background: color } }),
      type || "dead letter",
    ),
    h("td", { class: "mono line-cell" }, line),
  );
}

// Shows why a step is as it is, and the entries that prove it; a file has no proofs.
async function prove(source, run, step, place, { scrub }) {
  let explanation;
  try {
    explanation = await source.of(run, "explain", { step });
  } catch {
    return;
  }
  const rows = explanation.proof.map((entry) =>
    h(
      "tr",
      { class: entry.final ? "final" : "" },
      h("td", { title: entry.final ? "the outcome follows from it" : "" }, entry.final ? "➤" : ""),
      h(
        "td",
        { class: "nowrap" },
        h("button", { class: "link", onclick: () => scrub({ entry: entry.id }) }, entry.id),
      ),
      h("td", {}, entry.kind.replace("_", " ")),
      h("td", {}, entry.part),
      h("td", { class: "nowrap" }, entry.by),
      h("td", { class: "line-cell" }, entry.what.replace(/(:[0-9a-f]{12})[0-9a-f]{20,}/, "$1…")),
    ),
  );
  const heads = ["", "entry", "kind", "part", "by", "what"];
  place.replaceChildren(
    ...explanation.words
      .split("\n")
      .filter(Boolean)
      .map((line) => h("p", { class: "strong" }, line)),
    ...(rows.length
      ? [
          h(
            "details",
            { open: true },
            h("summary", {}, `Proof: ${count(rows.length)} entries`),
            h("div", { class: "scroll" }, table(heads, rows, "list proof-entries")),
          ),
        ]
      : []),
  );
}
