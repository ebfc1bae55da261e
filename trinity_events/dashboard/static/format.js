// Elements, numbers and times, as all pages show them.

export const CATEGORY_COLORS = {
  run: "#8591a1",
  train: "#0072b2",
  rollouts: "#56b4e9",
  save: "#009e73",
  publish: "#e69f00",
  apply: "#cc79a7",
  wait: "#8a8f98",
  failure: "#d55e00",
  ready: "#0b7a5c",
};
export const CATEGORY_WORDS = {
  run: "run",
  train: "training",
  rollouts: "rollouts",
  save: "saves",
  publish: "publishes",
  apply: "applies",
  wait: "waits",
  failure: "failures",
  ready: "announced",
};

export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  setAll(element, properties);
  element.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

function setAll(element, properties) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "css")
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
}

const numbers = new Intl.NumberFormat("en");

export function count(number) {
  return number === null || number === undefined ? "–" : numbers.format(number);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function figure(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return size >= 0.001 || size === 0
    ? String(Number(value.toPrecision(3)))
    : value.toExponential(1);
}

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (number >= 1000 && at < units.length - 1) {
    number /= 1000;
    at += 1;
  }
  return `${at ? number.toFixed(1) : number} ${units[at]}`;
}

export function duration(milliseconds) {
  const seconds = Math.max(0, milliseconds) / 1000;
  if (seconds < 1) return `${Math.round(milliseconds)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 172800)
    return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

const pad = (number, length = 2) => String(number).padStart(length, "0");

export function clock(milliseconds, fine = false) {
  const at = new Date(milliseconds);
  const text = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  return fine ? `${text}.${pad(at.getMilliseconds(), 3)}` : text;
}

export function day(milliseconds) {
  const at = new Date(milliseconds);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

export function moment(milliseconds) {
  return milliseconds ? `${day(milliseconds)} ${clock(milliseconds)}` : "–";
}

export function short(digest) {
  return digest ? `${digest.replace(/^[a-z0-9]+:/, "").slice(0, 10)}` : "–";
}

// Compares names so that explorer-9 comes before explorer-10. One collator serves all: a thousand names
// that are each compared by localeCompare take a tenth of a second.
export const byName = new Intl.Collator("en", { numeric: true }).compare;

export function ofTheme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function panel(title, aside, ...children) {
  const head = h(
    "div",
    { class: "panel-head" },
    h("h2", {}, title),
    aside ? h("div", { class: "aside" }, aside) : null,
  );
  return h("section", { class: "panel", "aria-label": title }, head, ...children);
}

// Returns a table; a heading is a text, or a text and the class of its column.
export function table(heads, rows, kind) {
  const head = heads.map((heading) =>
    Array.isArray(heading) ? h("th", { class: heading[1] }, heading[0]) : h("th", {}, heading),
  );
  return h(
    "table",
    { class: kind },
    heads.length ? h("thead", {}, h("tr", {}, head)) : null,
    h("tbody", {}, rows),
  );
}

// Returns a bar of a share from 0 to 1.
export function meter(share, mood) {
  const filled = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
  return h(
    "div",
    {
      class: `meter ${mood ?? ""}`,
      role: "meter",
      "aria-valuenow": filled,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    },
    h("div", { css: { width: `${filled}%` } }),
  );
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

const tip = () => document.getElementById("tip");

export function showTip(x, y, lines) {
  const box = tip();
  box.replaceChildren(
    ...lines.filter(Boolean).map((line, at) => h("div", { class: at ? "" : "strong" }, line)),
  );
  box.hidden = false;
  const { innerWidth, innerHeight } = window;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${Math.max(8, y + 18 + height > innerHeight ? y - height - 12 : y + 18)}px`;
}

export function hideTip() {
  tip().hidden = true;
}
