// Scrubber: the whole run as a strip, and the event whose state the pages show.

import { CATEGORY_COLORS, clock, count, day, h, ofTheme } from "./format.js";

export class Scrubber {
  constructor({ scrub, live }) {
    this.scrub = scrub;
    this.strip = h("canvas", { "aria-hidden": "true" });
    this.at = h("i", { class: "scrub-at", "aria-hidden": "true" });
    this.range = h("input", {
      type: "range",
      min: 0,
      max: 1,
      step: 1,
      "aria-label": "Time of the state that is shown",
    });
    this.range.addEventListener("input", () =>
      this.scrub({ time: Number(this.range.value) }, true),
    );
    this.words = h("span", { class: "scrub-words" });
    this.number = h("input", {
      class: "scrub-number",
      inputmode: "numeric",
      "aria-label": "Number of the event",
      size: 9,
    });
    this.number.addEventListener("change", () => {
      const text = this.number.value.replaceAll(",", "").trim();
      this.scrub(/^\d+-\d+$/.test(text) ? { entry: text } : { number: Number(text) || 0 });
    });
    const step = (by, label, words) =>
      h(
        "button",
        { class: "tool", title: label, "aria-label": label, onclick: () => this.step(by) },
        words,
      );
    this.liveButton = h(
      "button",
      { class: "live", onclick: live, title: "Back to the newest state (L)" },
      "Newest",
    );
    this.element = [
      h(
        "div",
        { class: "scrub-tools" },
        step(-1, "Previous event (,)", "‹"),
        this.number,
        step(1, "Next event (.)", "›"),
        this.words,
        this.liveButton,
      ),
      h("div", { class: "scrub-strip" }, this.strip, this.at, this.range),
    ];
    new ResizeObserver(() => this.paint()).observe(this.strip.parentElement ?? this.element[1]);
  }

  step(by) {
    if (this.view)
      this.scrub({ number: Math.max(this.first, Math.min(this.last, this.view.number + by)), by });
  }

  setOverview(overview, marks, categories) {
    this.overview = overview;
    this.marks = marks;
    this.categories = categories;
    this.range.min = overview.begin;
    this.range.max = overview.end;
    this.paint();
  }

  show(view, past, last) {
    this.view = view;
    this.first = view.first;
    this.last = last;
    if (document.activeElement !== this.number) this.number.value = count(view.number);
    if (document.activeElement !== this.range || !past)
      this.range.value = past ? view.at : this.range.max;
    this.range.setAttribute("aria-valuetext", `event ${view.number}, ${clock(view.at)}`);
    this.words.textContent = `of ${count(last)} · ${day(view.at)} ${clock(view.at, true)}`;
    this.liveButton.classList.toggle("on", !past);
    this.mark();
  }

  // Moves the mark of the shown state; the strip below it stays as it is painted.
  mark() {
    const { overview } = this;
    if (!overview) return;
    const at = this.view ? Number(this.range.value) : overview.end;
    const share = (at - overview.begin) / spanOf(overview);
    this.at.style.left = `calc(8px + (100% - 16px) * ${Math.min(1, Math.max(0, share))})`;
  }

  paint() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paintNow());
  }

  paintNow() {
    const { strip, overview } = this;
    const wide = strip.parentElement.clientWidth,
      high = 34,
      scale = window.devicePixelRatio || 1;
    if (!overview || !wide) return;
    strip.width = wide * scale;
    strip.height = high * scale;
    const pen = strip.getContext("2d");
    pen.scale(scale, scale);
    const span = spanOf(overview);
    const x = (at) => 8 + ((at - overview.begin) / span) * (wide - 16);
    const columns = new Map();
    for (const [bucket, category, number] of overview.cells) {
      const column = Math.round(x(overview.begin + bucket * overview.width));
      const byCategory = columns.get(column) ?? new Map();
      byCategory.set(category, (byCategory.get(category) ?? 0) + number);
      columns.set(column, byCategory);
    }
    const sums = [...columns.values()]
      .map((byCategory) => [...byCategory.values()].reduce((sum, number) => sum + number, 0))
      .sort((a, b) => a - b);
    const most = sums[Math.floor(sums.length * 0.98)] || 1;
    const thick = Math.max(1, x(overview.begin + overview.width) - x(overview.begin) - 0.2);
    for (const [column, byCategory] of columns) {
      let up = 0;
      for (const [category, number] of [...byCategory].sort((a, b) => a[0] - b[0])) {
        const share = Math.min(high - 10 - up, (number / most) * (high - 12));
        if (share <= 0) continue;
        pen.fillStyle = CATEGORY_COLORS[this.categories[category]];
        pen.globalAlpha = 0.75;
        pen.fillRect(column, high - 4 - up - share, thick, share);
        up += share;
      }
    }
    pen.globalAlpha = 1;
    for (const [at, , , name] of this.marks) {
      const bad = !["run-opened", "run-resumed"].includes(name);
      pen.fillStyle = bad ? CATEGORY_COLORS.failure : ofTheme("--ink");
      pen.beginPath();
      pen.moveTo(x(at) - 3.5, 1);
      pen.lineTo(x(at) + 3.5, 1);
      pen.lineTo(x(at), 7);
      pen.fill();
    }
    if (overview.indexed < overview.end) {
      pen.fillStyle = ofTheme("--line");
      pen.fillRect(x(overview.indexed), 8, x(overview.end) - x(overview.indexed), high - 12);
    }
    this.mark();
  }
}

const spanOf = (overview) => Math.max(1000, overview.end - overview.begin);
