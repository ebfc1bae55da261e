// The pages: which run and which page is shown, what is asked for it, and the keyboard.

import { eventPanel, wholePanel } from "./event.js";
import { FigureWall, figuresUntil } from "./figures.js";
import {
  CATEGORY_COLORS,
  CATEGORY_WORDS,
  clock,
  count,
  day,
  empty,
  h,
  hideTip,
  panel,
} from "./format.js";
import { deadUntil, renderHealth } from "./health.js";
import { renderLedger } from "./ledger.js";
import { culpritsOf, renderOverview } from "./overview.js";
import { runsPanel } from "./runs.js";
import { Scrubber } from "./scrubber.js";
import { samplesPage } from "./samples.js";
import { searchFor, searchPage } from "./search.js";
import { openSource, takeToken } from "./source.js";
import { Timeline, rowsOf } from "./timeline.js";
import { renderVersions } from "./versions.js";

const PAGES = [
  ["overview", "Overview"],
  ["versions", "Versions"],
  ["figures", "Figures"],
  ["ledger", "Ledger"],
  ["health", "Health"],
  ["samples", "Samples"],
  ["search", "Search"],
];
const LONGEST = 240000; // milliseconds of the timeline's first window, at most
const SHORTEST = 5000; // and at least
const RUNS_EVERY = 5000; // milliseconds between two looks at the list of runs
const state = {
  run: null,
  page: "overview",
  newest: null,
  past: null,
  lanes: null,
  filter: "",
  problem: null,
  busy: 0,
};
let source,
  scrubber,
  timeline,
  wall,
  stop = () => {},
  main,
  shownAt = 0;

const actions = {
  go: (page) => go(page),
  search: (conditions) => {
    searchFor(conditions);
    main.dataset.page = "";
    go("search");
  },
  scrub: (to) => scrub(to),
  scrubTime: (time) => scrub({ time }),
  lane: (name) => {
    state.filter = name;
    go("overview");
    setRows();
    document.querySelector(".timeline")?.scrollIntoView({ behavior: "smooth", block: "center" });
  },
  again: () => renderPage(),
};

const view = () => state.past ?? state.newest;
const ask = (name, query) => source.of(state.run, name, query);

async function begin() {
  takeToken();
  main = document.getElementById("main");
  source = await openSource();
  scrubber = new Scrubber({ scrub, live: backToNewest });
  document.getElementById("scrubber").append(...scrubber.element);
  document.addEventListener("keydown", pressed);
  window.addEventListener("hashchange", route);
  // A page that a browser keeps for its back button would keep its stream, of the few that a host may have.
  window.addEventListener("pagehide", () => stop());
  window.addEventListener("pageshow", (event) => event.persisted && location.reload());
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stop();
    else if (state.run) follow();
    else route(); // the list of runs is looked at again
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  setTheme(stored("theme") ?? "auto");
  await route();
}

function stored(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`trinity-events-${name}`, value);
    return localStorage.getItem(`trinity-events-${name}`);
  } catch {
    return null;
  } // storage may be off
}

function setTheme(theme) {
  stored("theme", theme);
  document.documentElement.dataset.theme = theme;
  repaint();
}

function repaint() {
  timeline?.draw();
  scrubber?.paint();
  wall?.redraw();
}

async function route() {
  const [run, page, entry] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  try {
    if (!run) return await listRuns();
    if (run !== state.run) await openRun(run);
    go(PAGES.some(([name]) => name === page) ? page : "overview");
    if (entry && entry !== state.past?.position) await scrub({ entry });
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  main.replaceChildren(
    panel(
      "This cannot be shown",
      "",
      h("p", { class: "callout" }, error.message),
      h("p", {}, h("a", { href: "#/" }, "All runs")),
    ),
  );
}

async function listRuns() {
  closeRun();
  renderHead();
  const { runs } = await source.runs();
  if (runs.length === 1 && runs[0].recorded) {
    location.hash = `#/${runs[0].run}`;
    return;
  }
  if (state.run) return;
  main.replaceChildren(runsPanel(runs));
  if (source.offline) return;
  const again = setTimeout(() => listRuns().catch(fail), RUNS_EVERY);
  stop = () => clearTimeout(again);
}

function closeRun() {
  stop();
  stop = () => {};
  timeline?.close();
  wall?.close();
  Object.assign(state, {
    run: null,
    newest: null,
    past: null,
    lanes: null,
    problem: null,
  });
  timeline = wall = null;
  document.body.classList.remove("in-run");
}

async function openRun(run) {
  closeRun();
  state.run = run;
  main.replaceChildren(empty("Reading the log…"));
  document.title = `${run} · Trinity Events`;
  document.body.classList.add("in-run");
  renderHead();
  await receiveState(await ask("now"));
  await loadLanes();
  shown();
  follow();
}

// Follows the shown run, unless its page is in the background: a browser opens six streams of a host.
function follow() {
  if (document.hidden) return;
  stop();
  stop = source.follow(state.run, receiveState, (why) => {
    state.problem = why;
    renderHead();
  });
}

async function loadLanes() {
  const [lanes, overview] = await Promise.all([ask("lanes"), ask("overview")]);
  state.lanes = lanes;
  state.lanesAt = performance.now();
  scrubber.setOverview(overview, lanes.marks, lanes.categories);
  if (timeline) {
    timeline.categories = lanes.categories;
    timeline.grow(lanes.end);
    setRows();
  }
}

async function receiveState(data) {
  const isIndexed = data.progress === 1 && state.newest?.progress < 1;
  state.newest = data;
  state.problem = data.problem;
  const now = performance.now();
  const calm = data.progress < 1 ? 700 : 3000;
  if (state.lanes && (isIndexed || now - state.lanesAt > calm)) {
    state.lanesAt = now;
    loadLanes().then(shown).catch(fail);
    if (isIndexed) timeline?.load();
  }
  if (!data.live && data.progress === 1) stop(); // nothing follows
  if (timeline) timeline.grow(data.end);
  if (!state.past) shown();
  else renderHead();
}

function shown() {
  renderHead();
  if (!state.lanes) return;
  scrubber.show(view(), Boolean(state.past), Math.max(state.newest.number, state.newest.indexed));
  if (timeline) {
    timeline.at = state.past ? view().at : null;
    setRows();
    timeline.draw();
  }
  const now = performance.now();
  clearTimeout(state.later);
  const calm = ["overview", "ledger", "health"].includes(state.page) ? 240 : 2500;
  if (state.past || now - shownAt > calm) renderPage();
  else state.later = setTimeout(renderPage, calm);
}

// --- time travel --------------------------------------------------------------------------

let nextTarget = null;

async function scrub(to, dragged) {
  nextTarget = to;
  if (state.busy) return;
  state.busy = 1;
  while (nextTarget) {
    const target = nextTarget;
    nextTarget = null;
    try {
      state.past = await ask("at", target);
      history.replaceState(null, "", `${address(state.page)}/${state.past.position}`);
      shown();
    } catch (error) {
      note(error.message);
    }
  }
  state.busy = 0;
  if (timeline && !dragged && view() && (view().at < timeline.begin || view().at > timeline.end)) {
    const half = (timeline.end - timeline.begin) / 2;
    timeline.show(view().at - half, view().at + half);
  }
}

function backToNewest() {
  state.past = null;
  history.replaceState(null, "", address(state.page));
  shown();
}

let noteTimer;

function note(words) {
  const box =
    document.querySelector(".note") ??
    document.body.appendChild(h("div", { class: "note", role: "alert" }));
  box.textContent = words;
  clearTimeout(noteTimer);
  noteTimer = setTimeout(() => box.remove(), 6000);
}

// --- pages --------------------------------------------------------------------------------

function renderHead() {
  const { newest, past, run, problem } = state;
  const live = newest?.live && !newest.closed;
  const pill = problem
    ? ["bad", "not connected"]
    : !newest
      ? ["", "…"]
      : newest.progress < 1
        ? ["going", `indexing ${Math.floor(newest.progress * 100)} %`]
        : past
          ? ["past", "a past state"]
          : live
            ? ["ok", "live"]
            : ["", newest.closed ?? (source?.offline ? "file" : "recorded")];
  const tabs = run
    ? h(
        "nav",
        { "aria-label": "Pages" },
        PAGES.map(([name, words], at) =>
          h(
            "a",
            {
              href: `#/${encodeURIComponent(run)}/${name}`,
              class: name === state.page ? "on" : "",
              "aria-current": name === state.page ? "page" : null,
              title: `${words} (${at + 1})`,
            },
            words,
          ),
        ),
      )
    : null;
  const theme = document.documentElement.dataset.theme;
  const next = { auto: "light", light: "dark", dark: "auto" }[theme] ?? "light";
  const parts = [
    h(
      "div",
      { class: "brand" },
      h(
        "a",
        { href: "#/", class: "logo", "aria-label": "All runs" },
        logo(),
        h("span", {}, "Trinity Events"),
      ),
      run ? h("span", { class: "run-name", title: run }, run) : null,
      run ? h("span", { class: `pill ${pill[0]}`, title: problem ?? "" }, pill[1]) : null,
    ),
    tabs,
    h(
      "div",
      { class: "head-tools" },
      h(
        "button",
        {
          class: "tool",
          title: `Colours: ${theme} (T)`,
          "aria-label": `Colours: ${theme}`,
          onclick: () => {
            setTheme(next);
            renderHead();
          },
        },
        { auto: "◐", light: "☀", dark: "☾" }[theme] ?? "◐",
      ),
      h("button", { class: "tool", title: "Keys (?)", "aria-label": "Keys", onclick: keys }, "?"),
    ),
  ];
  document.getElementById("top").replaceChildren(...parts.filter(Boolean));
}

function showTab() {
  document.querySelector("nav a.on")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function logo() {
  return h(
    "span",
    { class: "mark-box", "aria-hidden": "true" },
    h("i", {}),
    h("i", {}),
    h("i", {}),
  );
}

function go(page) {
  if (!state.run) return;
  if (state.page !== page || !main.dataset.page) {
    state.page = page;
    main.dataset.page = "";
  }
  if (!location.hash.startsWith(`${address(page)}`)) history.pushState(null, "", address(page));
  hideTip();
  renderHead();
  showTab();
  renderPage();
}

function address(page) {
  return `#/${encodeURIComponent(state.run)}/${page}`;
}

function important() {
  const names = new Set(view().waits.flatMap((wait) => [wait.by, ...wait.for]));
  for (const mark of state.lanes.marks.slice(-40)) {
    const who = /^([\w.-]+-\d+):/.exec(mark[4]);
    if (who) names.add(who[1]);
  }
  for (const name of culpritsOf(view().waits)) names.add(name);
  return names;
}

function setRows() {
  if (!timeline || !state.lanes) return;
  timeline.setRows(rowsOf(state.lanes.lanes, state.filter, important()));
}

// Returns the milliseconds of the timeline's first window: the last steps, of seconds or of minutes.
function firstWindow() {
  const committed = view().steps.flatMap((step) => step.kinds.map((kind) => kind.committed ?? 0));
  const first = Math.min(...committed.filter(Boolean));
  const steps = Number.isFinite(first) ? timeline.end - first : LONGEST;
  return Math.min(LONGEST, Math.max(SHORTEST, steps));
}

// Returns the failures, and the openings and ends of epochs, up to the shown state.
const marks = () => state.lanes.marks.filter((mark) => mark[1] <= view().number);

function timelinePanel() {
  if (!timeline) {
    timeline = new Timeline({
      ask: (query) => ask("timeline", query),
      scrub,
      window: [state.lanes.begin, Math.max(state.lanes.end, state.lanes.begin + 1000)],
      rows: rowsOf(state.lanes.lanes, state.filter, important()),
    });
    timeline.categories = state.lanes.categories;
    timeline.begin = Math.max(timeline.begin, timeline.end - firstWindow());
    const filter = h("input", {
      class: "filter",
      placeholder: "lanes: explorer:0-15 node-03 waiting",
      "aria-label": "Lanes to show",
      value: state.filter,
    });
    filter.addEventListener("input", () => {
      state.filter = filter.value;
      setRows();
    });
    timeline.filter = filter;
    timeline.panel = panel(
      "Timeline",
      h("div", { class: "tools" }, filter, timeline.tools),
      timeline.element,
      h(
        "div",
        { class: "legend" },
        state.lanes.categories.map((name) =>
          h(
            "span",
            {},
            h("i", { class: `dot shape-${name}`, css: { background: CATEGORY_COLORS[name] } }),
            CATEGORY_WORDS[name],
          ),
        ),
      ),
    );
  }
  if (timeline.filter.value !== state.filter) timeline.filter.value = state.filter;
  return timeline.panel;
}

async function renderPage() {
  const { page } = state;
  shownAt = performance.now();
  if (!state.newest || !state.lanes) return;
  document.body.classList.toggle("past", Boolean(state.past));
  if (page === "search") {
    if (main.dataset.page !== "search") {
      main.dataset.page = "search";
      main.replaceChildren(
        h("div", { class: "page-event" }),
        ...searchPage(source, state.run, state.lanes, actions),
      );
    }
    main
      .querySelector(".page-event")
      ?.replaceChildren(...[state.past && eventPanel(state.past, more)].filter(Boolean));
    return;
  }
  if (page === "samples") {
    // It asks for itself: what was trained on does not change with the newest state.
    if (main.dataset.page !== "samples") {
      main.dataset.page = "samples";
      main.replaceChildren(samplesPage(source, state.run));
    }
    return;
  }
  const shownView = view();
  const parts = await partsOf(page, shownView);
  if (state.page !== page) return;
  const above = [banner(), state.past ? eventPanel(shownView, more) : null].filter(Boolean);
  if (page === "overview" && main.dataset.page === "overview") {
    // The timeline stays in its place: moving it would lose the keyboard's focus.
    main.querySelector(".page-top").replaceChildren(...above, ...parts);
  } else if (page === "overview") {
    main.replaceChildren(
      h("div", { class: "page-top" }, above, parts),
      timelinePanel(),
      wholePanel(more),
    );
  } else {
    const open = document.activeElement?.closest("details");
    if (open && main.dataset.page === page) return;
    // A matrix that is wider than the screen opens at its newest column, and stays where it is read.
    const before = main.dataset.page === page ? main.querySelector(".to-newest")?.scrollLeft : null;
    main.replaceChildren(...above, ...parts.filter(Boolean));
    const matrix = main.querySelector(".to-newest");
    if (matrix) matrix.scrollLeft = before ?? newestColumn(matrix);
  }
  main.dataset.page = page;
}

// Returns how far a matrix is scrolled when the last version is at its right end.
function newestColumn(matrix) {
  const last = matrix.querySelector("thead th:nth-last-child(5)");
  return last ? last.offsetLeft + last.offsetWidth - matrix.clientWidth + 8 : 0;
}

async function partsOf(page, shownView) {
  try {
    const { past } = state;
    if (page === "overview") {
      const learning = await ask("learning");
      const shownLearning = past
        ? { metrics: figuresUntil({ times: {}, ...learning }, past).metrics }
        : learning;
      return renderOverview(shownView, shownLearning, marks(), actions);
    }
    if (page === "versions") {
      const versions = await ask("versions", past ? { number: past.number } : {});
      return renderVersions(versions, shownView, actions);
    }
    if (page === "health") {
      const dead = await ask("dead");
      return renderHealth(shownView, past ? deadUntil(dead, shownView.at) : dead, actions);
    }
    const all = await ask("figures");
    const figures = past ? figuresUntil(all, shownView) : all;
    if (page === "ledger") return renderLedger(shownView, figures);
    wall ??= new FigureWall();
    wall.show(figures);
    return [wall.element];
  } catch (error) {
    return [panel("This cannot be shown", "", h("p", { class: "callout" }, error.message))];
  }
}

// Returns the answer about the shown state, with parts that are asked for alone.
const more = (parts) => ask("at", { number: view().number, ...parts });

function banner() {
  const { past, newest } = state;
  if (past)
    return h(
      "div",
      { class: "banner" },
      h(
        "span",
        {},
        "You see the state after event ",
        h("strong", {}, count(past.number)),
        ` (${past.position}), ${day(past.at)} ${clock(past.at, true)}.`,
      ),
      h("button", { class: "link", onclick: backToNewest }, "Back to the newest"),
    );
  return newest.note ? h("div", { class: "banner" }, newest.note) : null;
}

// --- keyboard -----------------------------------------------------------------------------

const KEYS = [
  ["1 – 7", "open a page"],
  [", and .", "the event before, the event after"],
  ["L", "back to the newest state"],
  ["← →", "move the timeline"],
  ["+ − 0", "zoom the timeline; show all of it"],
  ["/", "search"],
  ["R", "all runs"],
  ["T", "light, dark, or as the system"],
  ["?", "these keys"],
];

function keys() {
  const box = h(
    "dialog",
    { class: "keys", "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    h(
      "dl",
      { class: "facts" },
      KEYS.flatMap(([key, words]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)]),
    ),
    h("form", { method: "dialog" }, h("button", { class: "primary" }, "Close")),
  );
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}

function pressed(event) {
  if (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.target.closest("input, select, textarea, dialog")
  )
    return;
  const { key } = event;
  if (/^[1-7]$/.test(key) && state.run) go(PAGES[key - 1][0]);
  else if (key === ",") scrubber.step(-1);
  else if (key === ".") scrubber.step(1);
  else if (key === "l" && state.run) backToNewest();
  else if (key === "r") location.hash = "#/";
  else if (key === "t") {
    setTheme(
      { auto: "light", light: "dark", dark: "auto" }[document.documentElement.dataset.theme] ??
        "light",
    );
    renderHead();
  } else if (key === "?") keys();
  else if (key === "/" && state.run) {
    event.preventDefault();
    go("search");
    setTimeout(() => document.getElementById("search-type")?.focus(), 50);
  } else if (
    timeline &&
    state.page === "overview" &&
    event.target !== timeline.canvas &&
    timeline.key(key)
  )
    event.preventDefault();
}

begin().catch(fail);
