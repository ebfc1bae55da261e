// The event that led to a state of the past, what it changed, and the whole state.

import { empty, h, panel } from "./format.js";

const NOT_IN_FILE = "This file does not have it: open the run in trinity-events dashboard.";
let showsChanges = false; // once they were asked for, they are shown of each event

// `ask` returns the answer about the shown state, with one part more.
export function eventPanel(view, ask) {
  if (!view.event)
    return view.problem
      ? panel("This event", "dead letter", h("p", {}, `It could not be decoded: ${view.problem}`))
      : null;
  const { event } = view;
  const { stacks } = event.fields;
  return panel(
    "This event",
    `${event.producer} on ${event.node} · epoch ${event.epoch}`,
    h("p", {}, h("strong", {}, event.type), " ", h("span", { class: "mono muted" }, event.line)),
    typeof stacks === "string" && stacks ? h("pre", {}, stacks) : null,
    view.announcements.map((announcement) =>
      h(
        "p",
        { class: "callout" },
        "announced: ",
        h("strong", {}, announcement.type),
        " ",
        h("span", { class: "mono" }, announcement.line),
      ),
    ),
    changesOf(ask),
    h(
      "details",
      {},
      h("summary", {}, "All fields"),
      h("pre", {}, JSON.stringify(event.fields, null, 2)),
    ),
  );
}

function changesOf(ask) {
  const lines = h("div", {});
  const load = async () => {
    const { changed } = await ask({ changed: 1 });
    const none = changed ? "It changed nothing but counters." : NOT_IN_FILE;
    lines.replaceChildren(changed?.length ? h("pre", {}, changed.join("\n")) : empty(none));
  };
  const toggled = (event) => {
    showsChanges = event.target.open;
    if (showsChanges && !lines.childElementCount)
      load().catch((error) => lines.append(error.message));
  };
  return h(
    "details",
    { open: showsChanges, ontoggle: toggled },
    h("summary", {}, "What it changed"),
    lines,
  );
}

export function wholePanel(ask) {
  const text = h("pre", {});
  const toggled = async (event) => {
    if (!event.target.open || text.textContent) return;
    text.textContent = "…";
    const { whole } = await ask({ whole: 1 });
    text.textContent = whole ? JSON.stringify(whole, null, 2) : NOT_IN_FILE;
  };
  return panel(
    "Whole state",
    "",
    h("details", { ontoggle: toggled }, h("summary", {}, "As replay --json shows it"), text),
  );
}
