// Line charts, drawn as SVG: figures by step, times by version.

import { empty, figure, h, hideTip, panel, showTip, svg } from "./format.js";

const WIDE = 420,
  HIGH = 170,
  LEFT = 46,
  RIGHT = 10,
  TOP = 10,
  BOTTOM = 24;

function nice(low, high) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / 4,
    scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * scale).find((one) => one >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(at);
  return found;
}

export function lineChart(title, lines, { unit = "", pick } = {}) {
  const all = lines.flatMap((line) => line.points);
  if (!all.length) return panel(title, "", empty("No figures yet."));
  let low = Math.min(...all.map((one) => one[2])),
    high = Math.max(...all.map((one) => one[2]));
  if (unit === "s") low = 0;
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  [low, high] = [unit === "s" ? 0 : low - margin, high + margin];
  const first = Math.min(...all.map((one) => one[1])),
    last = Math.max(...all.map((one) => one[1]), first + 1);
  const x = (step) => LEFT + ((step - first) / (last - first)) * (WIDE - LEFT - RIGHT);
  const y = (value) => HIGH - BOTTOM - ((value - low) / (high - low)) * (HIGH - TOP - BOTTOM);
  const newest = Math.max(...all.map((one) => one[0]));
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDE} ${HIGH}`,
    class: "chart",
    role: "img",
    "aria-label": `${title}, by step: last ${figure(lines[0].points.at(-1)?.[2])} ${unit}`,
  });
  for (const at of nice(low, high))
    drawing.append(
      svg("line", { x1: LEFT, x2: WIDE - RIGHT, y1: y(at), y2: y(at), class: "grid" }),
      text(LEFT - 6, y(at) + 3.5, figure(at), "end"),
    );
  for (const at of nice(first, last))
    if (Number.isInteger(at)) drawing.append(text(x(at), HIGH - 7, at, "middle"));
  for (const { color, dash, points } of lines) {
    for (const part of byEpoch(points)) {
      const path = part
        .map((one, at) => `${at ? "L" : "M"}${x(one[1]).toFixed(1)} ${y(one[2]).toFixed(1)}`)
        .join("");
      drawing.append(
        svg("path", {
          d: path,
          class: "line",
          stroke: color,
          "stroke-dasharray": dash,
          opacity: part.discarded ? 0.35 : 1,
        }),
      );
      if (part.length === 1)
        drawing.append(
          svg("circle", { cx: x(part[0][1]), cy: y(part[0][2]), r: 2.5, fill: color }),
        );
    }
  }
  const rule = svg("line", { y1: TOP, y2: HIGH - BOTTOM, class: "rule", visibility: "hidden" });
  drawing.append(rule);
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const at =
      first +
      ((((event.clientX - box.left) / box.width) * WIDE - LEFT) / (WIDE - LEFT - RIGHT)) *
        (last - first);
    return lines
      .map((line) => [
        line,
        line.points.reduce(
          (best, one) =>
            Math.abs(one[1] - at) < Math.abs(best[1] - at) ||
            (one[1] === best[1] && one[0] > best[0])
              ? one
              : best,
          line.points[0],
        ),
      ])
      .filter((one) => one[1]);
  };
  drawing.addEventListener("mousemove", (event) => {
    const near = nearest(event);
    const point = near[0][1];
    rule.setAttribute("x1", x(point[1]));
    rule.setAttribute("x2", x(point[1]));
    rule.setAttribute("visibility", "visible");
    showTip(event.clientX, event.clientY, [
      `step ${point[1]}${newest > 1 ? ` of epoch ${point[0]}` : ""}`,
      ...near.map(([line, one]) => `${line.name} ${figure(one[2])} ${unit}`),
    ]);
  });
  drawing.addEventListener("mouseleave", () => {
    rule.setAttribute("visibility", "hidden");
    hideTip();
  });
  if (pick) drawing.addEventListener("click", (event) => pick(nearest(event)[0][1][1]));
  const value =
    lines.length === 1
      ? h("strong", {}, `${figure(lines[0].points.at(-1)[2])} ${unit}`)
      : h(
          "div",
          { class: "legend" },
          lines.map((line) =>
            h("span", {}, key(line), `${line.name} ${figure(line.points.at(-1)?.[2])} ${unit}`),
          ),
        );
  return panel(title, value, drawing);
}

function key({ color, dash }) {
  return svg(
    "svg",
    { viewBox: "0 0 18 8", class: "key" },
    svg("path", { d: "M1 4H17", stroke: color, class: "line", "stroke-dasharray": dash }),
  );
}

function text(x, y, words, anchor) {
  const found = svg("text", { x, y, "text-anchor": anchor });
  found.textContent = words;
  return found;
}

// Returns the parts of a line: each epoch's, up to the step from which a later epoch went on, and the discarded rest.
function byEpoch(points) {
  const found = [];
  const firsts = new Map();
  for (const [epoch, step] of points) if (!firsts.has(epoch)) firsts.set(epoch, step);
  for (const one of points) {
    const discarded = [...firsts].some(([epoch, first]) => epoch > one[0] && first <= one[1]);
    const last = found.at(-1);
    if (last && last[0][0] === one[0] && last.discarded === discarded) last.push(one);
    else
      found.push(
        Object.assign(last && last[0][0] === one[0] ? [last.at(-1), one] : [one], { discarded }),
      );
  }
  return found;
}

const FIRST = ["reward/mean", "reward", "loss", "kl", "entropy"];

// The figures as they were at a moment of the past: those of steps up to that one.
export function figuresUntil(figures, { epoch, step }) {
  const known = (one) => one[0] < epoch || (one[0] === epoch && one[1] <= step);
  const cut = (series) =>
    Object.fromEntries(
      Object.entries(series)
        .map(([name, points]) => [name, points.filter(known)])
        .filter((one) => one[1].length),
    );
  return { metrics: cut(figures.metrics), times: cut(figures.times), staleness: null };
}

export function renderFigures(figures, pick) {
  const times = [
    ["stall", "#0072b2", null],
    ["transfer", "#e69f00", "6 3"],
    ["pause", "#cc79a7", "2 2.5"],
  ]
    .map(([name, color, dash]) => ({ name, color, dash, points: figures.times[name] ?? [] }))
    .filter((one) => one.points.length);
  const names = Object.keys(figures.metrics).sort(
    (one, other) =>
      (FIRST.indexOf(one) + 1 || 99) - (FIRST.indexOf(other) + 1 || 99) || one.localeCompare(other),
  );
  return [
    h(
      "div",
      { class: "charts" },
      times.length
        ? lineChart("Stall, transfer, pause by version", times, { unit: "s", pick })
        : panel("Stall, transfer, pause by version", "", empty("No version is ready yet.")),
      names.map((name) =>
        lineChart(name, [{ name, color: "var(--accent)", points: figures.metrics[name] }], {
          pick,
        }),
      ),
    ),
    ...(names.length ? [] : [empty("No step has told its metrics yet.")]),
  ];
}
