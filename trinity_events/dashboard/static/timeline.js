// Timeline: a row for each worker, events grouped into spans, from days to milliseconds.

import {
  CATEGORY_COLORS,
  CATEGORY_WORDS,
  byName,
  clock,
  count,
  day,
  duration,
  h,
  hideTip,
  ofTheme,
  showTip,
} from "./format.js";

const ROW = 24,
  LABELS = 132,
  AXIS = 26,
  MOST_LANES = 65;
const NARROWEST = 20; // milliseconds of a window

// Returns the rows of a timeline: each lane, or groups of lanes where there are too many.
export function rowsOf(lanes, filter, important) {
  const shown = lanes.filter((lane) => matches(lane, filter, important));
  const order = (lane) =>
    lane[1] === "reducer" ? 0 : lane[1] === "trainer" ? 1 : lane[1] === "explorer" ? 3 : 2;
  shown.sort((a, b) => order(a) - order(b) || byName(a[0], b[0]));
  if (shown.length <= MOST_LANES) return shown.map((lane) => lane[0]);
  const single = shown.filter((lane) => order(lane) < 2 || important.has(lane[0])).slice(0, 20);
  const groups = [];
  for (const role of [...new Set(shown.map((lane) => lane[1]))]) {
    const ranks = shown.filter((lane) => lane[1] === role).map((lane) => lane[2]);
    if (ranks.length < 2) continue;
    const last = Math.max(...ranks),
      size = Math.ceil((last + 1) / Math.min(36, Math.ceil(ranks.length / 8)));
    for (let at = 0; at <= last; at += size)
      groups.push(`${role}:${at}-${Math.min(last, at + size - 1)}`);
  }
  return [...single.map((lane) => lane[0]), ...groups].slice(0, 80);
}

function matches([name, role, rank, node], filter, important) {
  const words = filter
    .trim()
    .split(/[\s,]+/)
    .filter(Boolean);
  return (
    !words.length ||
    words.some((word) => {
      if (word === "waiting" || word === "trouble") return important.has(name);
      const range = /^(\w+):(\d+)-(\d+)$/.exec(word);
      if (range) return role === range[1] && rank >= range[2] && rank <= range[3];
      return (
        word === role ||
        word === node ||
        word === name ||
        (word.length > 3 && name.startsWith(word) && !/\d$/.test(word))
      );
    })
  );
}

export class Timeline {
  constructor({ ask, scrub, window, rows }) {
    Object.assign(this, { ask, scrub, rows });
    this.begin = window[0];
    this.end = window[1];
    this.bounds = window;
    this.data = null;
    this.at = null;
    this.hot = null;
    this.axis = h("canvas", { class: "axis", "aria-hidden": "true" });
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "img",
      "aria-label": "Timeline of all workers. Arrow keys move, plus and minus zoom, 0 shows all.",
    });
    this.body = h("div", { class: "lanes" }, this.canvas);
    this.note = h("span", { class: "muted" });
    const button = (words, label, act) =>
      h("button", { class: "tool", title: label, "aria-label": label, onclick: act }, words);
    this.tools = h(
      "div",
      { class: "tools" },
      this.note,
      button("−", "Zoom out (−)", () => this.zoom(1.6)),
      button("+", "Zoom in (+)", () => this.zoom(1 / 1.6)),
      button("All", "Show all (0)", () => this.fit()),
    );
    this.element = h("div", { class: "timeline" }, this.axis, this.body);
    this.listen();
    this.measure();
    this.sized = new ResizeObserver(() => {
      this.measure();
      this.draw();
      this.load();
    });
    this.sized.observe(this.element);
  }

  close() {
    this.sized.disconnect();
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, begin: this.begin, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const by = ((event.clientX - drag.x) / this.wide) * (this.end - this.begin);
        if (Math.abs(event.clientX - drag.x) > 3) {
          drag.moved = true;
          this.move(drag.begin - by - this.begin);
        }
      } else this.hover(event);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) this.pick(event);
      drag = null;
    });
    canvas.addEventListener("pointerleave", () => {
      this.hot = null;
      hideTip();
      this.draw();
    });
    canvas.addEventListener("dblclick", (event) => this.zoom(1 / 3, this.timeAt(event)));
    const wheel = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.currentTarget === this.axis) {
        event.preventDefault();
        this.zoom(1.0018 ** (event.deltaY || event.deltaX), this.timeAt(event));
      } else if (event.deltaX) {
        event.preventDefault();
        this.move((event.deltaX / this.wide) * (this.end - this.begin));
      }
    };
    canvas.addEventListener("wheel", wheel, { passive: false });
    this.axis.addEventListener("wheel", wheel, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      if (this.key(event.key)) event.preventDefault();
    });
  }

  key(key) {
    const span = this.end - this.begin;
    const act = {
      ArrowLeft: () => this.move(-span / 8),
      ArrowRight: () => this.move(span / 8),
      "+": () => this.zoom(1 / 1.6),
      "=": () => this.zoom(1 / 1.6),
      "-": () => this.zoom(1.6),
      0: () => this.fit(),
    }[key];
    if (act) act();
    return Boolean(act);
  }

  // Measures the element; a question for each span would lay out the page anew each time.
  measure() {
    this.outer = this.element.clientWidth;
    this.labels = this.outer < 560 ? 84 : LABELS;
    this.wide = Math.max(80, this.outer - this.labels);
  }

  x(time) {
    return this.labels + ((time - this.begin) / (this.end - this.begin)) * this.wide;
  }

  timeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return (
      this.begin + ((event.clientX - box.left - this.labels) / this.wide) * (this.end - this.begin)
    );
  }

  fit() {
    [this.begin, this.end] = this.bounds;
    this.changed();
  }

  show(begin, end) {
    this.begin = begin;
    this.end = Math.max(end, begin + NARROWEST);
    this.changed();
  }

  move(by) {
    this.begin += by;
    this.end += by;
    this.changed();
  }

  zoom(factor, around = (this.begin + this.end) / 2) {
    const span = Math.max(
      NARROWEST,
      Math.min((this.end - this.begin) * factor, (this.bounds[1] - this.bounds[0]) * 1.5),
    );
    const share = (around - this.begin) / (this.end - this.begin);
    this.begin = around - share * span;
    this.end = this.begin + span;
    this.changed();
  }

  grow(end) {
    const follows = this.end >= this.bounds[1] && this.end < end;
    const by = end - this.bounds[1];
    this.bounds = [this.bounds[0], end];
    if (follows && by > 0) {
      if (this.begin <= this.bounds[0]) this.end = end;
      else this.move(by);
      this.changed(true);
    }
  }

  setRows(rows) {
    if (rows.join() === this.rows.join()) return;
    this.rows = rows;
    this.data = null;
    this.changed();
  }

  // Draws, and asks for the window: at once for a person who moves it, every so often for a run that grows.
  changed(calm) {
    this.draw();
    if (calm) {
      // A run that tells something four times a second must not put the question off each time.
      this.growth ??= setTimeout(() => {
        this.growth = null;
        this.load();
      }, 400);
      return;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), 90);
  }

  async load() {
    if (this.asking) {
      this.again = true;
      return;
    }
    this.asking = true;
    try {
      this.data = await this.ask({
        from: Math.floor(this.begin),
        to: Math.ceil(this.end),
        pixels: Math.round(this.wide),
        rows: this.rows.join(","),
      });
      this.most = Math.log2(1 + Math.max(3, ...(this.data.cells ?? []).map(([, , , number]) => number)));
      this.note.textContent =
        this.data.mode === "counts"
          ? "events by time: zoom in to see spans"
          : this.data.left_out
            ? `${count(this.data.left_out)} spans left out: zoom in`
            : "";
    } catch (error) {
      this.note.textContent = error.message;
    }
    this.asking = false;
    if (this.again) {
      this.again = false;
      this.load();
    }
    this.draw();
  }

  canvasOf(canvas, high) {
    const scale = window.devicePixelRatio || 1,
      wide = this.outer;
    canvas.width = wide * scale;
    canvas.height = high * scale;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    if (!this.outer) this.measure();
    if (!this.outer) return;
    this.ink = ofTheme("--ink");
    this.muted = ofTheme("--muted");
    this.line = ofTheme("--line");
    this.surface = ofTheme("--surface");
    const high = Math.max(ROW, this.rows.length * ROW);
    const pen = this.canvasOf(this.canvas, high);
    this.grid(pen, high);
    pen.save();
    pen.beginPath();
    pen.rect(this.labels, 0, this.wide, high);
    pen.clip();
    if (this.data) {
      this.element.dataset.shown = this.data.mode;
      for (const cell of this.data.cells ?? []) this.cell(pen, cell);
      for (const span of this.data.spans ?? []) this.span(pen, span);
    }
    pen.restore();
    if (this.at !== null && this.at >= this.begin && this.at <= this.end) {
      pen.fillStyle = ofTheme("--accent");
      pen.fillRect(this.x(this.at) - 0.75, 0, 1.5, high);
    }
  }

  grid(pen, high) {
    const axis = this.canvasOf(this.axis, AXIS);
    const ticks = ticksOf(this.begin, this.end, this.wide / 92);
    axis.fillStyle = this.muted;
    for (const at of ticks.at) {
      const x = this.x(at);
      if (x < this.labels - 1) continue;
      pen.fillStyle = this.line;
      pen.fillRect(x, 0, 1, high);
      if (x < this.labels + this.wide - 40) axis.fillText(ticks.words(at), x + 3, AXIS / 2);
    }
    axis.fillText(day(this.begin), 4, AXIS / 2);
    pen.textAlign = "left";
    this.rows.forEach((name, row) => {
      pen.fillStyle = this.line;
      pen.fillRect(0, (row + 1) * ROW - 1, this.outer, 1);
      pen.fillStyle = name === this.hotRow ? this.ink : this.muted;
      pen.fillText(name.replace(":", " "), 6, row * ROW + ROW / 2, this.labels - 10);
    });
  }

  cell(pen, [row, at, category, number]) {
    const { width } = this.data;
    const x = this.x(at),
      wide = Math.max(1, this.x(at + width) - x - 0.3);
    const high = (Math.log2(1 + number) / this.most) * (ROW - 7);
    const key = `${row}/${at}`;
    if (this.stackFor !== this.data) {
      this.stackFor = this.data;
      this.stack = new Map();
    }
    if (this.stackFrame !== this.frame) {
      this.stackFrame = this.frame;
      this.stack = new Map();
    }
    const below = this.stack.get(key) ?? 0;
    const up = Math.min(high, ROW - 5 - below);
    if (up <= 0) return;
    this.stack.set(key, below + up);
    pen.fillStyle = this.color(category);
    pen.fillRect(x, (row + 1) * ROW - 3 - below - up, wide, up);
  }

  color(category) {
    return CATEGORY_COLORS[this.categories[category]];
  }

  box(span) {
    const [row, begin, end, category] = span;
    const name = this.categories[category],
      top = row * ROW;
    const x = this.x(begin),
      wide = Math.max(end > begin ? 2 : 0, this.x(end) - x);
    if (name === "train" && end > begin) return [x, top + ROW - 7, wide, 5];
    if (name === "wait") return [x, top + 3, wide, ROW - 8];
    if (name === "save" || (name === "failure" && end > begin)) return [x, top + 3, wide, 7];
    if (end > begin) return [x, top + 9, wide, 8];
    // Those of the trainer lie on the strip of its steps.
    if (["train", "rollouts", "run"].includes(name)) return [x, top + ROW - 8, 0, 7];
    return [x, top + 3, 0, ROW - 10];
  }

  span(pen, span) {
    const [x, y, wide, high] = this.box(span);
    if (x > this.labels + this.wide || x + wide < this.labels) return;
    const name = this.categories[span[3]],
      color = this.color(span[3]);
    pen.globalAlpha = span === this.hot ? 1 : 0.9;
    pen.fillStyle = color;
    if (!wide) this.instant(pen, name, x, y + high / 2, span);
    else if (name === "wait") this.hatched(pen, x, y, wide, high);
    else {
      pen.beginPath();
      pen.roundRect(x, y, wide, high, Math.min(2.5, wide / 2));
      pen.fill();
      if (name === "train") this.named(pen, x, y - 7, wide, span[8] > 1 ? "" : span[4], this.muted);
      else if (wide > 64) this.named(pen, x, y + high / 2, wide, "", "");
    }
    if (span === this.hot) {
      pen.strokeStyle = this.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x - 1.5, y - 1.5, Math.max(wide, 1) + 3, high + 3);
    }
    pen.globalAlpha = 1;
  }

  named(pen, x, y, wide, words, color) {
    if (!words || wide < pen.measureText(words).width + 8) return;
    pen.fillStyle = color;
    pen.fillText(words, Math.max(x, this.labels) + 4, y);
  }

  hatched(pen, x, y, wide, high) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, wide, high);
    pen.clip();
    pen.globalAlpha = 0.22;
    pen.fillRect(x, y, wide, high);
    pen.globalAlpha = 0.9;
    pen.strokeStyle = CATEGORY_COLORS.wait;
    pen.lineWidth = 1.2;
    pen.beginPath();
    const left = Math.max(x, this.labels),
      right = Math.min(x + wide, this.labels + this.wide);
    for (let at = left - high - ((left - x) % 6); at < right; at += 6) {
      pen.moveTo(at, y + high);
      pen.lineTo(at + high, y);
    }
    pen.stroke();
    pen.restore();
    pen.strokeStyle = CATEGORY_COLORS.wait;
    pen.strokeRect(x + 0.5, y + 0.5, Math.max(wide - 1, 1), high - 1);
  }

  instant(pen, name, x, y, span) {
    pen.beginPath();
    if (name === "ready") {
      pen.moveTo(x - 4, y + 4);
      pen.lineTo(x + 4, y + 4);
      pen.lineTo(x, y - 5);
      pen.fill();
    } else if (name === "failure") {
      pen.strokeStyle = CATEGORY_COLORS.failure;
      pen.lineWidth = 2.4;
      pen.moveTo(x - 4, y - 4);
      pen.lineTo(x + 4, y + 4);
      pen.moveTo(x + 4, y - 4);
      pen.lineTo(x - 4, y + 4);
      pen.stroke();
    } else if (name === "apply" || name === "publish") {
      pen.moveTo(x, y - 4);
      pen.lineTo(x + 3.2, y);
      pen.lineTo(x, y + 4);
      pen.lineTo(x - 3.2, y);
      pen.fill();
    } else {
      pen.arc(x, y, span[8] > 1 ? 3.4 : 2.6, 0, 7);
      pen.fill();
    }
  }

  near(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left,
      y = event.clientY - box.top;
    this.hotRow = this.rows[Math.floor(y / ROW)];
    let best = null,
      distance = 9;
    for (const span of this.data?.spans ?? []) {
      const [left, top, wide, high] = this.box(span);
      const dx = Math.max(left - x, 0, x - left - wide),
        dy = Math.max(top - y, 0, y - top - high);
      // Of two spans below the pointer, the shorter one is meant.
      const far = dx + dy * 2 + (dx || dy ? 0 : Math.min(1, wide / 4000));
      if (far < distance) {
        distance = far;
        best = span;
      }
    }
    return best;
  }

  hover(event) {
    this.hot = this.near(event);
    this.draw();
    const time = this.timeAt(event);
    if (!this.hot) {
      showTip(event.clientX, event.clientY, [
        `${this.hotRow ?? ""}`,
        clock(time, this.end - this.begin < 600000),
      ]);
      return;
    }
    const [row, begin, end, category, label, , step, outcome, number, detail] = this.hot;
    showTip(event.clientX, event.clientY, [
      `${this.rows[row]} · ${label}${number > 1 ? ` and ${number - 1} more` : ""}`,
      `${CATEGORY_WORDS[this.categories[category]]}${outcome ? ` · ${outcome}` : ""}${step === null ? "" : ` · step ${step}`}`,
      end > begin ? `${clock(begin, true)} for ${duration(end - begin)}` : clock(begin, true),
      detail.slice(0, 160),
      "click: the state after it",
    ]);
  }

  pick(event) {
    const span = this.near(event);
    if (span) this.scrub({ entry: span[5] });
    else this.scrub({ time: Math.round(this.timeAt(event)) });
  }
}

export function ticksOf(begin, end, most) {
  const steps = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4, 3e5, 6e5, 9e5,
    18e5, 36e5, 72e5, 108e5, 216e5, 432e5, 864e5, 1728e5, 6048e5,
  ];
  const step = steps.find((candidate) => (end - begin) / candidate <= Math.max(2, most)) ?? steps.at(-1);
  const shift = new Date(begin).getTimezoneOffset() * 60000;
  const at = [];
  for (let tick = Math.ceil((begin - shift) / step) * step + shift; tick <= end; tick += step)
    at.push(tick);
  const words = (tick) =>
    step >= 864e5
      ? day(tick).slice(5)
      : step >= 6e4
        ? clock(tick).slice(0, 5)
        : step >= 1e3
          ? clock(tick)
          : clock(tick, true).slice(3);
  return { at, words };
}
