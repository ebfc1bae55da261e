// Search of events by type, producer, step and time.

import { CATEGORY_COLORS, clock, count, day, empty, h, panel } from "./format.js";

const asked = { type: "", producer: "", step: "", since: "", until: "" };

export function searchPage(source, run, lanes, { scrub }) {
  const results = h("tbody", {});
  const note = h("p", { class: "empty" });
  let before = null,
    number = 0;
  const field = (name, label, properties) =>
    h("label", {}, h("span", {}, label), h("input", { name, value: asked[name], ...properties }));
  const moments = (name) => (asked[name] ? new Date(asked[name]).getTime() : null);
  const find = async (more) => {
    if (!more) {
      before = null;
      number = 0;
      results.replaceChildren();
    }
    note.textContent = "Searching…";
    const from = before;
    try {
      const found = await source.of(run, "events", {
        type: asked.type,
        producer: asked.producer,
        step: asked.step,
        since: moments("since"),
        until: moments("until"),
        before: from,
        limit: 50,
      });
      number += found.found.length;
      results.append(
        ...found.found.map((row) =>
          h(
            "tr",
            { onclick: () => scrub({ entry: row[1] }) },
            h("td", { class: "muted nowrap", title: day(row[2]) }, clock(row[2], true)),
            h(
              "td",
              {},
              h(
                "button",
                { class: "link", onclick: () => scrub({ entry: row[1] }) },
                count(row[0]),
              ),
            ),
            h("td", { class: "nowrap" }, row[3]),
            h(
              "td",
              { class: "nowrap" },
              h("i", {
                class: "dot",
                css: { background: CATEGORY_COLORS[lanes.categories[row[6]]] ?? "#d55e00" },
              }),
              row[4] || "dead letter",
            ),
            h("td", { class: "mono line-cell" }, row[7]),
          ),
        ),
      );
      before = found.before;
      further.hidden = before === null;
      note.textContent =
        before !== null && found.until
          ? `${count(number)} found; searched back to ${day(found.until)} ${clock(found.until)}.`
          : `${count(number)} found.`;
    } catch (error) {
      note.textContent = error.message;
    }
  };
  const further = h(
    "button",
    { class: "more", hidden: true, onclick: () => find(true) },
    "Search on",
  );
  const form = h(
    "form",
    {
      class: "search",
      onsubmit: (event) => {
        event.preventDefault();
        for (const [name, value] of new FormData(form)) asked[name] = value;
        find(false);
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
    h(
      "datalist",
      { id: "types" },
      lanes.types.map((one) => h("option", { value: one })),
    ),
    h(
      "datalist",
      { id: "producers" },
      lanes.lanes.slice(0, 200).map((one) => h("option", { value: one[0] })),
    ),
  );
  find(false);
  return [
    panel(
      "Search",
      "newest first; a row leads to the state after its event",
      form,
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
              ["time", "event", "producer", "type", "fields"].map((one) => h("th", {}, one)),
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

export function eventPanel(view) {
  if (!view.event)
    return view.problem
      ? panel("This event", "dead letter", h("p", {}, `It could not be decoded: ${view.problem}`))
      : null;
  const { event } = view;
  return panel(
    "This event",
    `${event.producer} on ${event.node} · epoch ${event.epoch}`,
    h("p", {}, h("strong", {}, event.type), " ", h("span", { class: "mono muted" }, event.line)),
    view.announcements.map((one) =>
      h(
        "p",
        { class: "callout" },
        "announced: ",
        h("strong", {}, one.type),
        " ",
        h("span", { class: "mono" }, one.line),
      ),
    ),
    h(
      "details",
      {},
      h("summary", {}, "All fields"),
      h("pre", {}, JSON.stringify(event.fields, null, 2)),
    ),
  );
}

export function wholePanel(load) {
  const text = h("pre", {});
  return panel(
    "Whole state",
    "",
    h(
      "details",
      {
        ontoggle: async (event) => {
          if (event.target.open && !text.textContent) {
            text.textContent = "…";
            text.textContent = await load();
          }
        },
      },
      h("summary", {}, "As replay --json shows it"),
      text,
    ),
    h("p", { class: "empty" }),
  );
}
