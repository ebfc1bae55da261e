// What a user looks for first: whether the run learns, how far it is, and when it ends.

import { count, duration, figure, h, plural } from "./format.js";

const WIDE = 200,
  HIGH = 34,
  EDGE = 3; // of a sparkline, in its own units
const WINDOW = 9; // points of the line's running mean: the reward of one step is mostly noise
const STANDS = 6; // steps at the run's pace without one, after which it stands still
const SHORTEST = 60000; // milliseconds, at least: a step may wait for a save

// Returns "step 42 of 150 · 1.9 s a step · 3 min left", as far as the run's log says so.
export function progressLine(view) {
  const { steps, pace, left: secondsLeft } = view.learning;
  if (!view.epoch) return "";
  const parts = [`Step ${count(view.step)}${steps ? ` of ${count(steps)}` : ""}`];
  if (pace && !view.closed) parts.push(`${duration(pace * 1000)} a step`);
  if (secondsLeft && !view.closed) parts.push(`${duration(secondsLeft * 1000)} left`);
  return parts.join(" · ");
}

// Returns the milliseconds since the last step of an open run that takes far longer than others did.
export function standing(view) {
  const { pace, trained_at } = view.learning;
  if (view.closed || !pace || !trained_at) return 0;
  const since = view.now - trained_at;
  return since > Math.max(SHORTEST, STANDS * pace * 1000) ? since : 0;
}

export function learningTiles(learning, go) {
  const tiles = Object.entries(learning?.metrics ?? {}).filter(([, points]) => points.length);
  // Held-out questions come second, whatever their number.
  const rank = ([label]) => (label === "reward" ? 0 : label.startsWith("held-out") ? 1 : 2);
  tiles.sort((a, b) => rank(a) - rank(b));
  if (!tiles.length) return null;
  return h(
    "div",
    { class: "tiles learning", role: "group", "aria-label": "Learning" },
    tiles.map(([label, points]) => learningTile(label, points, go)),
  );
}

// Returns the line of where the seconds and tokens went; null of the past, for which it is not known.
export function goodputLine(learning, go) {
  if (!learning?.goodput) return null;
  return h(
    "p",
    { class: "goodput-line" },
    h("button", { class: "link", onclick: () => go("ledger") }, "Goodput"),
    `: ${learning.goodput.join(". ")}.`,
  );
}

function learningTile(label, points, go) {
  const values = points.map(([, , value]) => value);
  const smooth = label.startsWith("held-out") ? values : runningMean(values);
  const [first, last] = [smooth[0], smooth.at(-1)];
  const from = points.length > 1 ? `${figure(first)} at step ${count(points[0][1])}` : "";
  return h(
    "button",
    {
      class: "tile spark-tile",
      title: "All figures",
      onclick: () => go("figures"),
    },
    h("span", { class: "tile-label" }, label),
    h(
      "span",
      { class: "tile-value" },
      figure(last),
      from ? h("span", { class: "spark-from" }, ` from ${from}`) : "",
    ),
    points.length > 1
      ? spark(values, smooth, `${label}: ${from}, ${figure(last)} at step ${points.at(-1)[1]}`)
      : h("span", { class: "tile-detail" }, `${plural(1, "value")}, at step ${points[0][1]}`),
  );
}

function runningMean(values) {
  return values.map((_, at) => {
    const part = values.slice(Math.max(0, at - WINDOW + 1), at + 1);
    return part.reduce((total, value) => total + value, 0) / part.length;
  });
}

function spark(values, smooth, words) {
  const least = Math.min(...values),
    span = Math.max(...values) - least || 1;
  const place = (value, at) => [
    (at * WIDE) / (values.length - 1),
    HIGH - EDGE - ((value - least) * (HIGH - 2 * EDGE)) / span,
  ];
  const path = (all) =>
    all
      .map((value, at) => (at ? "L" : "M") + place(value, at).map((number) => number.toFixed(1)))
      .join("");
  const box = h("span", {});
  // By the parser, which knows the namespace of SVG; there is nothing but numbers in it.
  box.innerHTML =
    `<svg class="spark" role="img" viewBox="0 0 ${WIDE} ${HIGH}" preserveAspectRatio="none">` +
    `<path class="spark-raw" d="${path(values)}"/><path class="spark-line" d="${path(smooth)}"/></svg>`;
  box.firstChild.setAttribute("aria-label", words);
  return box.firstChild;
}
