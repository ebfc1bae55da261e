// The event that led to a state of the past, and the whole state.

import { h, panel } from "./format.js";

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
