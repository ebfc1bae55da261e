// Charts of metrics by step and of times by version, by uPlot: they share cursor and zoom.

import { byName, empty, figure, h, ofTheme, panel, plural } from "./format.js";

const HIGH = 190; // pixels of a chart
const FIRST = [
  ...["reward", "reward/mean", "score", "reward_std", "reward/std", "response_length", "entropy", "rollout_entropy"],
  ...["approx_kl", "kl", "loss"],
];
const LEARNING = "learning"; // group of the first charts, by which a user sees if the run learns
const UNSMOOTHED = /learning_rate$|staleness$/; // they have no noise
const BOUNDS = [
  ["_low", "_high"], // of a mean's interval
  ["_min", "_max"], // of all samples
];
// Units by the ends of names; a metric that has none is a share, a score or a plain number.
const UNITS = [
  [/tokens_per_second$/, "tokens/s"],
  [/seconds$/, "s"],
  [/bytes$/, "B"],
  [/(response_length|tokens)(_min|_max)?$/, "tokens"],
  [/(^|[_/])(kl|entropy)$|^kl_loss$/, "nats"],
  [/staleness(_max)?$/, "steps"],
];
const SMOOTHED = 0.9; // share of the mean so far in a smoothed point
const SMOOTHED_FROM = 20; // points
const TIMES = [
  ["stall", "#0072b2", null],
  ["transfer", "#e69f00", [6, 3]],
  ["pause", "#cc79a7", [2, 2.5]],
];
const TIMES_TITLE = "Stall, transfer and pause by version";

// Returns the figures as they were at a moment of the past: those of steps up to that one.
export function figuresUntil(figures, { epoch, step }) {
  const isPast = (point) => point[0] < epoch || (point[0] === epoch && point[1] <= step);
  const cut = (all) =>
    Object.fromEntries(
      Object.entries(all)
        .map(([name, points]) => [name, points.filter(isPast)])
        .filter(([, points]) => points.length),
    );
  return { metrics: cut(figures.metrics), times: cut(figures.times), staleness: null };
}

// Returns the points that stand, and those that a later epoch discarded. A point is epoch, step, value.
export function lineage(points) {
  const firsts = new Map();
  for (const [epoch, step] of points) if (!firsts.has(epoch)) firsts.set(epoch, step);
  const discarded = ([epoch, step]) =>
    [...firsts].some(([later, first]) => later > epoch && first <= step);
  return [points.filter((point) => !discarded(point)), points.filter(discarded)];
}

function smoothed(points) {
  let mean = null;
  return points.map(([epoch, step, value]) => {
    mean = mean === null ? value : SMOOTHED * mean + (1 - SMOOTHED) * value;
    return [epoch, step, mean];
  });
}

// Returns the charts of some figures: title, lines, and the band of an interval where there is one.
export function chartsOf({ metrics, times }) {
  const charts = [];
  const timed = TIMES.filter(([name]) => times[name]?.length);
  if (timed.length)
    charts.push({
      title: TIMES_TITLE,
      group: "weights",
      unit: "s",
      log: true,
      lines: timed.map(([name, color, dash]) => ({ name, color, dash, points: times[name] })),
    });
  const isBound = (name) =>
    BOUNDS.flat().some((end) => name.endsWith(end) && name.slice(0, -end.length) in metrics);
  for (const [name, points] of Object.entries(metrics)) {
    if (isBound(name)) continue;
    const bounds = BOUNDS.map((ends) => ends.map((end) => metrics[name + end])).find(
      ([low, high]) => low && high,
    );
    charts.push({
      title: name,
      group: FIRST.includes(name)
        ? LEARNING
        : name.includes("/")
          ? name.slice(0, name.lastIndexOf("/"))
          : "training",
      unit: UNITS.find(([end]) => end.test(name))?.[1],
      lines: [{ name, color: "--accent", points }],
      band: bounds ?? null,
    });
  }
  const rank = (chart) => FIRST.indexOf(chart.title) + 1 || (chart.title === TIMES_TITLE ? 0.5 : 99);
  const groups = [LEARNING, "eval", "reward_parts", "training"];
  const place = (chart) =>
    groups.indexOf(chart.group.replace(/^eval\/.*/, "eval")) + 1 ||
    (chart.group === "weights" ? 9 : 8);
  return charts.sort(
    (a, b) =>
      place(a) - place(b) ||
      byName(a.group, b.group) ||
      rank(a) - rank(b) ||
      byName(a.title, b.title),
  );
}

// Wall of charts, which stays while its figures grow.
export class FigureWall {
  constructor() {
    this.charts = new Map();
    this.smooth = true;
    this.window = null;
    this.figures = null;
    this.body = h("div", { class: "figure-groups" });
    const toggle = h("input", { type: "checkbox", checked: true });
    toggle.addEventListener("change", () => {
      this.smooth = toggle.checked;
      this.show(this.figures);
    });
    this.reset = h(
      "button",
      { class: "tool wide-tool", hidden: true, onclick: () => this.zoom(null) },
      "Show all steps",
    );
    this.element = h(
      "div",
      { class: "figures" },
      h(
        "div",
        { class: "tools figure-tools" },
        h("label", { class: "muted" }, toggle, " smooth"),
        h("span", { class: "muted" }, "drag over a chart to zoom, double-click to show all"),
        this.reset,
      ),
      this.body,
    );
    this.sized = new ResizeObserver(() => {
      for (const chart of this.charts.values()) chart.resize();
    });
    this.sized.observe(this.element);
  }

  close() {
    this.sized.disconnect();
    for (const chart of this.charts.values()) chart.close();
    this.charts.clear();
  }

  redraw() {
    for (const chart of this.charts.values()) chart.plot?.redraw(false);
  }

  show(figures) {
    this.figures = figures;
    const all = chartsOf(figures);
    const isZero = (chart) => chart.lines.every(({ points }) => points.every((point) => !point[2]));
    const charts = all.filter((chart) => !isZero(chart));
    const names = [...charts, {}, ...all.filter(isZero)].map((chart) => chart.title).join("\n");
    if (names !== this.names) this.arrange(charts, all.filter(isZero));
    this.names = names;
    for (const chart of charts) this.charts.get(chart.title).show(chart, this.smooth, this.window);
  }

  // `zero` are the charts that show nothing but zeros: a line names them.
  arrange(charts, zero) {
    for (const chart of this.charts.values()) chart.close();
    this.charts = new Map(charts.map((chart) => [chart.title, new Chart(chart.title, this)]));
    const groups = [...new Set(charts.map((chart) => chart.group))];
    this.body.replaceChildren(
      ...groups.map((group) =>
        h(
          "section",
          { class: "figure-group", "aria-label": group },
          h("h3", {}, group),
          h(
            "div",
            { class: "charts" },
            charts
              .filter((chart) => chart.group === group)
              .map((chart) => this.charts.get(chart.title).element),
          ),
        ),
      ),
      ...(zero.length
        ? [
            h(
              "details",
              { class: "muted zero" },
              h("summary", {}, `${plural(zero.length, "metric")} always zero`),
              zero.map((chart) => chart.title).join(", "),
            ),
          ]
        : []),
      ...(charts.length || zero.length ? [] : [empty("No step has reported its metrics yet.")]),
    );
  }

  zoom(window) {
    this.window = window;
    this.reset.hidden = window === null;
    for (const chart of this.charts.values()) chart.zoom(window);
  }
}

// One chart of a wall.
class Chart {
  constructor(title, wall) {
    this.title = title;
    this.wall = wall;
    this.values = h("div", { class: "chart-values" });
    this.place = h("div", { class: "chart", role: "img" });
    this.element = panel(title, this.values, this.place);
    this.plot = null;
  }

  close() {
    this.plot?.destroy();
    this.plot = null;
  }

  resize() {
    if (this.plot && this.place.clientWidth)
      this.plot.setSize({ width: this.place.clientWidth, height: HIGH });
  }

  show(chart, smooth, window) {
    const lines = drawnLines(chart, smooth);
    const shape = lines.map((line) => line.name + line.kind).join();
    if (this.shape !== shape || !this.plot) {
      this.close();
      this.shape = shape;
      this.chart = chart;
      this.lines = lines;
      if (this.place.isConnected && this.place.clientWidth) this.draw(window);
      else requestAnimationFrame(() => this.place.isConnected && !this.plot && this.draw(window));
      return;
    }
    this.lines = lines;
    this.plot.setData(aligned(lines, chart.log), window === null);
    if (window) this.zoom(window);
    this.read();
  }

  draw(window) {
    const band = this.lines.findIndex((line) => line.kind === "low");
    this.plot = new uPlot(
      {
        width: this.place.clientWidth || 300,
        height: HIGH,
        padding: [8, 14, 0, 0],
        legend: { show: false },
        cursor: {
          y: false,
          drag: { x: true, y: false, setScale: false },
          sync: { key: "figures", scales: ["x", null] },
        },
        scales: {
          x: { time: false, range: this.rangeOfSteps },
          y: this.chart.log ? { distr: 3 } : { range: padded },
        },
        axes: [
          axis({ incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] }),
          axis({
            size: 52,
            values: (_, all) => all.map((value) => (value === null ? "" : figure(value))),
            grid: {
              stroke: () => ofTheme("--line"),
              width: 1,
              ...(this.chart.log ? { filter: (_, all) => all.map(powerOfTen) } : {}),
            },
          }),
        ],
        series: [{}, ...this.lines.map(seriesOf)],
        bands:
          band < 0 ? [] : [{ series: [band + 2, band + 1], fill: () => faint("--accent", 0.14) }],
        hooks: {
          setCursor: [() => this.read()],
          setSelect: [(plot) => this.selected(plot)],
        },
      },
      aligned(this.lines, this.chart.log),
      this.place,
    );
    this.plot.over.addEventListener("dblclick", () => this.wall.zoom(null));
    if (window) this.zoom(window);
    this.read();
  }

  rangeOfSteps = (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);

  selected(plot) {
    const { left, width } = plot.select;
    if (width > 3) this.wall.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  zoom(window) {
    if (!this.plot) return;
    const steps = this.plot.data[0];
    const [min, max] = window ?? [steps[0], steps.at(-1)];
    this.plot.setScale("x", { min, max });
  }

  // Shows the values at the cursor, or the last ones.
  read() {
    if (!this.plot) return;
    const { data, cursor } = this.plot;
    const at = cursor.idx ?? null;
    const shown = this.lines
      .map((line, number) => [line, data[number + 1]])
      .filter(([line]) => line.kind === "line");
    const several = shown.length > 1;
    const step = at === null ? "" : h("span", { class: "muted" }, `step ${data[0][at]}`);
    this.values.replaceChildren(
      step,
      ...shown.map(([line, values]) => {
        const value = at === null ? values.findLast((point) => point !== null) : values[at];
        const words = `${figure(value ?? NaN)}${this.chart.unit ? ` ${this.chart.unit}` : ""}`;
        return h(
          "span",
          { class: "strong" },
          several
            ? [h("i", { class: "key", css: { background: line.color } }), `${line.name} `]
            : "",
          words,
        );
      }),
    );
    this.place.setAttribute("aria-label", `${this.title} by step: ${this.values.innerText}`);
  }
}

// Returns the lines that a chart draws: bounds, discarded points, raw points and the line itself.
function drawnLines(chart, smooth) {
  const lines = [];
  if (chart.band)
    chart.band.forEach((points, at) =>
      lines.push({
        name: chart.title,
        kind: at ? "high" : "low",
        color: "--accent",
        points: lineage(points)[0],
      }),
    );
  for (const { name, color, dash, points } of chart.lines) {
    const [current, discarded] = lineage(points);
    if (discarded.length) lines.push({ name, kind: "discarded", color, dash, points: discarded });
    // Few points are no noise: evaluations have an interval instead.
    const isNoisy = current.length >= SMOOTHED_FROM && !UNSMOOTHED.test(name);
    const isSmooth = smooth && isNoisy && !chart.group.startsWith("eval/");
    if (isSmooth) lines.push({ name, kind: "raw", color, dash, points: current });
    lines.push({ name, kind: "line", color, dash, points: isSmooth ? smoothed(current) : current });
  }
  return lines;
}

// Returns the lines as uPlot takes them: all steps, and for each line a value or null for each step.
function aligned(lines, isLog) {
  const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[1])))];
  steps.sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const columns = lines.map(({ points }) => {
    const column = new Array(steps.length).fill(null);
    // A logarithm knows no zero.
    for (const [, step, value] of points)
      column[place.get(step)] = isLog && value <= 0 ? null : value;
    return column;
  });
  return [steps, ...columns];
}

function seriesOf({ name, kind, color, dash, points }) {
  const faded = kind === "raw" || kind === "discarded";
  const isBound = kind === "low" || kind === "high";
  return {
    label: name,
    stroke: () => (isBound ? faint(color, 0.01) : faint(color, faded ? 0.3 : 1)),
    width: kind === "line" ? 1.6 : 1,
    dash: kind === "discarded" ? [3, 3] : (dash ?? undefined),
    spanGaps: true,
    points: { show: kind === "line" && points.length < 30, size: 5 },
  };
}

function axis(more) {
  return {
    stroke: () => ofTheme("--muted"),
    grid: { stroke: () => ofTheme("--line"), width: 1 },
    ticks: { show: false, size: 0 },
    font: "11px system-ui, sans-serif",
    gap: 4,
    size: 22,
    ...more,
  };
}

const powerOfTen = (value) => (Number.isInteger(Math.log10(value)) ? value : null);

// Range with a margin, so that no line lies on the border.
function padded(_, low, high) {
  if (low === null) return [0, 1];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - margin, high + margin];
}

// Returns a color, or that of a name of the theme, with an opacity.
function faint(color, opacity) {
  const hex = color.startsWith("--") ? ofTheme(color) : color;
  return opacity === 1
    ? hex
    : `${hex}${Math.round(opacity * 255)
        .toString(16)
        .padStart(2, "0")}`;
}
