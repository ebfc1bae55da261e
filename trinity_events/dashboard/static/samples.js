// Recorded samples: the groups of a step, and their answers with shaded tokens.

import { byName, count, empty, figure, h, panel, plural } from "./format.js";

const FIRST = 60; // groups that are shown at once
const SHADES = [
  ["logprob", "log-probability"],
  ["ratio", "ratio"],
  ["advantage", "advantage"],
  ["none", "no shade"],
];
const MEANINGS = {
  logprob: "Orange tokens were unlikely for the model that sampled them.",
  ratio: "Orange tokens were less likely for the trainer than for the explorer, blue ones more likely.",
  advantage: "Orange tokens are made less likely by the step, blue ones more likely.",
  none: "",
};
const ORDERS = {
  "best first": (group) => -group.mean,
  "worst first": (group) => group.mean,
  "most spread": (group) => group.low - group.high,
  "longest first": (group) => -group.longest,
  "by number": (group) => group.ordinal,
};
const chosen = { step: null, shade: "logprob", order: "best first" };
const TRAINED = "trained";
const DISCARDED = "discarded"; // all fates of answers that no step trained on
const filters = {
  fate: TRAINED,
  part: "",
  least: "",
  most: "",
  shortest: "",
  longest: "",
  explorer: "",
  cut: "",
};

export function samplesPage(source, run) {
  const page = h("div", { class: "samples" });
  load(source, run, page);
  return page;
}

async function load(source, run, page) {
  const again = () => load(source, run, page);
  try {
    const listing = await source.of(run, "samples", { step: chosen.step });
    if (listing.step === null) {
      page.replaceChildren(
        panel(
          "Samples",
          "",
          empty(
            "No samples are recorded, or the run's folder is not at hand: train with record.rollouts sample or all, and name the folder of the checkpoints with --checkpoint-root.",
          ),
        ),
      );
      return;
    }
    chosen.step = listing.step;
    const list = h("div", { class: "groups" });
    const summary = h("span", {});
    const meaning = h("p", { class: "muted shade-meaning" });
    const show = () => {
      meaning.textContent = MEANINGS[chosen.shade];
      showGroups(listing, list, summary, source, run);
    };
    page.replaceChildren(
      panel(`Samples of step ${listing.step}`, summary, toolbar(listing, again, show), meaning, list),
    );
    show();
  } catch (error) {
    chosen.step = null;
    page.replaceChildren(
      panel(
        "Samples",
        "",
        h("p", { class: "callout" }, error.message),
        h("button", { class: "more", onclick: again }, "Newest step"),
      ),
    );
  }
}

function choice(label, values, value, change) {
  const options = values.map(([name, words]) =>
    h("option", { value: name, selected: String(name) === String(value) }, words),
  );
  const select = h("select", { "aria-label": label }, options);
  select.addEventListener("change", () => change(select.value));
  return h("label", {}, h("span", {}, label), select);
}

function field(label, name, show, properties) {
  const input = h("input", { value: filters[name], size: 5, ...properties });
  input.addEventListener("input", () => {
    filters[name] = input.value.trim();
    show();
  });
  return h("label", {}, h("span", {}, label), input);
}

function toolbar(listing, again, show) {
  const plain = (values) => values.map((value) => [value, value]);
  const at = listing.steps.indexOf(listing.step);
  const to = (step) => {
    chosen.step = Number(step);
    again();
  };
  const filter = (name) => (value) => {
    filters[name] = value;
    show();
  };
  const move = (by, words, sign) =>
    h(
      "button",
      {
        class: "tool",
        title: words,
        "aria-label": words,
        disabled: !(at + by in listing.steps),
        onclick: () => to(listing.steps[at + by]),
      },
      sign,
    );
  return h(
    "div",
    { class: "search sample-tools" },
    h(
      "div",
      { class: "sample-step" },
      move(-1, "The step before", "‹"),
      choice("Step", plain(listing.steps), listing.step, to),
      move(1, "The step after", "›"),
    ),
    choice("Order", plain(Object.keys(ORDERS)), chosen.order, (value) => {
      chosen.order = value;
      show();
    }),
    choice("Shade", SHADES, chosen.shade, (value) => {
      chosen.shade = value;
      show();
    }),
    choice("Fate", fatesOf(listing), filters.fate, filter("fate")),
    choice(
      "Reward or part",
      [["", "reward"], ...plain(listing.parts)],
      filters.part,
      filter("part"),
    ),
    field("at least", "least", show, { inputmode: "decimal" }),
    field("at most", "most", show, { inputmode: "decimal" }),
    field("Tokens from", "shortest", show, { inputmode: "numeric" }),
    field("to", "longest", show, { inputmode: "numeric" }),
    choice(
      "Explorer",
      [["", "all"], ...plain([...listing.explorers].sort(byName))],
      filters.explorer,
      filter("explorer"),
    ),
    choice(
      "Ended",
      [
        ["", "all"],
        ["cut", "cut off"],
        ["whole", "whole"],
      ],
      filters.cut,
      filter("cut"),
    ),
  );
}

// Returns the fates of a step with their numbers of samples, those of discarded answers last.
function fatesOf(listing) {
  const fates = Object.keys(listing.fates).filter((fate) => fate !== TRAINED);
  const total = (names) => names.reduce((sum, fate) => sum + (listing.fates[fate] ?? 0), 0);
  const discarded = total(fates);
  const options = [TRAINED, ...fates.sort(byName)].map((fate) => [fate, `${fate} (${total([fate])})`]);
  if (![TRAINED, DISCARDED, ""].includes(filters.fate) && !(filters.fate in listing.fates))
    options.push([filters.fate, `${filters.fate} (0)`]);
  return [
    ...options,
    [DISCARDED, `all discarded (${discarded})`],
    ["", `all (${discarded + total([TRAINED])})`],
  ];
}

function hasFate(group) {
  if (filters.fate === DISCARDED) return group.fate !== TRAINED;
  return !filters.fate || group.fate === filters.fate;
}

// Returns true if a sample passes the filters.
function passes(listing) {
  const part = listing.parts.indexOf(filters.part);
  const explorer = listing.explorers.indexOf(filters.explorer);
  const bound = (text, fallback) => (text === "" || !Number.isFinite(Number(text)) ? fallback : Number(text));
  const least = bound(filters.least, -Infinity);
  const most = bound(filters.most, Infinity);
  const shortest = bound(filters.shortest, 0);
  const longest = bound(filters.longest, Infinity);
  const all = least === -Infinity && most === Infinity;
  return ([, reward, length, cut, by, , , , parts]) => {
    const value = part < 0 ? reward : parts[part];
    return (
      (all || (value !== null && value >= least && value <= most)) &&
      length >= shortest &&
      length <= longest &&
      (explorer < 0 || by === explorer) &&
      (!filters.cut || cut === (filters.cut === "cut"))
    );
  };
}

function showGroups(listing, list, summary, source, run) {
  const pass = passes(listing);
  const groups = listing.groups
    .filter(hasFate)
    .map((group) => {
      const shown = group.samples.filter(pass);
      const rewards = shown.map((sample) => sample[1]);
      return {
        ...group,
        shown,
        mean: rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length,
        low: Math.min(...rewards),
        high: Math.max(...rewards),
        longest: Math.max(...shown.map((sample) => sample[2])),
      };
    })
    .filter((group) => group.shown.length);
  const key = ORDERS[chosen.order];
  groups.sort((a, b) => key(a) - key(b) || a.ordinal - b.ordinal);
  const samples = groups.reduce((sum, group) => sum + group.shown.length, 0);
  const total = groups.reduce((sum, group) => sum + group.mean * group.shown.length, 0);
  const questions = new Set(groups.map((group) => group.ordinal)).size;
  summary.textContent =
    `${plural(samples, "sample")} of ${plural(questions, "question")}, ` +
    `mean reward ${samples ? figure(total / samples) : "–"}, epoch ${listing.epoch}`;
  const add = (from) => {
    list.querySelector(".more")?.remove();
    const following = groups.slice(from, from + FIRST);
    list.append(...following.map((group) => groupRow(group, listing, source, run)));
    const remaining = groups.length - from - FIRST;
    if (remaining > 0)
      list.append(
        h("button", { class: "more", onclick: () => add(from + FIRST) }, `${count(remaining)} more`),
      );
  };
  list.replaceChildren();
  if (groups.length) add(0);
  else if (Object.values(filters).filter(Boolean).length > 1 || !filters.fate)
    list.append(empty("No sample passes the filters."));
  else list.append(empty(`No sample of this step is ${filters.fate}.`));
}

function groupRow(group, listing, source, run) {
  const answers = ["best", "median", "worst"].map((words, at) => {
    const row = group.samples[[group.best, group.middle, group.worst][at]];
    return h(
      "div",
      { class: "answer-line" },
      h("span", { class: `answer-kind ${words}` }, words),
      h("span", { class: "number" }, figure(row[1])),
      h("span", { class: "answer-text" }, group.previews[at]),
    );
  });
  const body = h("div", { class: "group-body" });
  const box = h(
    "details",
    { class: "group" },
    h(
      "summary",
      {},
      h("span", { class: "strong" }, `Question ${count(group.ordinal)}`),
      group.fate === TRAINED ? null : h("span", { class: "fate" }, group.fate),
      group.set ? h("span", { class: "muted" }, ` ${group.set}`) : null,
      h(
        "span",
        { class: "muted" },
        ` mean reward ${figure(group.mean)} (${figure(group.low)} to ${figure(group.high)}), `,
        `${plural(group.shown.length, "sample")}, up to ${plural(group.longest, "token")}`,
        group.shown.some((sample) => sample[3]) ? ", some cut off" : "",
      ),
      group.question ? h("div", { class: "question" }, group.question) : null,
      h("div", { class: "answers" }, answers),
    ),
    body,
  );
  box.addEventListener("toggle", () => {
    if (box.open && !body.childNodes.length) fillGroup(group, listing, source, run, body);
  });
  return box;
}

function fillGroup(group, listing, source, run, body) {
  const place = h("div", {});
  const buttons = group.shown.map((row) => {
    const [sample, reward, length, cut, , staleness, versions] = row;
    return h(
      "button",
      {
        class: "sample-pick",
        title: `staleness ${staleness}, ${plural(versions, "version")}`,
        onclick: (event) => open(sample, event.currentTarget),
      },
      h("strong", {}, `#${sample}`),
      ` reward ${figure(reward)}`,
      h("span", { class: "muted" }, ` ${plural(length, "token")}${cut ? " ✂" : ""}`),
    );
  });
  let newest = 0;
  const open = async (sample, button) => {
    const opened = (newest += 1);
    for (const pick of buttons) pick.classList.toggle("on", pick === button);
    let view;
    try {
      const { fate, ordinal, attempt } = group;
      const query = { step: listing.step, fate, ordinal, attempt, sample };
      view = sampleView(await source.of(run, "sample", query));
    } catch (error) {
      view = h("p", { class: "callout" }, error.message);
    }
    // Answers of the server may come in another order than the clicks.
    if (opened === newest) place.replaceChildren(view);
  };
  body.append(h("div", { class: "sample-picks" }, buttons), place);
  const best = group.samples[group.best][0];
  const first = Math.max(
    0,
    group.shown.findIndex((row) => row[0] === best),
  );
  open(group.shown[first][0], buttons[first]);
}

function sampleView(sample) {
  const parts = Object.entries(sample.reward_parts).map(([name, value]) => `${name} ${figure(value)}`);
  const facts = [
    `reward ${figure(sample.reward)}${parts.length ? ` (${parts.join(", ")})` : ""}`,
    sample.fate === TRAINED ? null : sample.fate,
    sample.advantage === null ? null : `advantage ${figure(sample.advantage)}`,
    `staleness ${sample.staleness}`,
    `by ${sample.explorer}${sample.attempt > 1 ? `, attempt ${sample.attempt}` : ""}`,
    sample.proof ? `weights ${sample.proof}` : null,
    sample.is_truncated ? "cut off" : null,
    sample.is_redacted ? "redacted" : null,
  ];
  const blocks = [];
  let at = 0;
  const marks = versionMarks(sample);
  sample.turns.forEach(([role, content, length], place) => {
    const messages = sample.messages.filter((message) => message[0] === place);
    if (role === "policy") {
      const tokens = shadedTokens(sample, at, Math.min(at + length, sample.tokens.length), marks);
      blocks.push(turnBlock(role, [...tokens, ...messages.flatMap((message) => toolCalls(message[4]))]));
    } else if (messages.length) {
      blocks.push(...messages.map((message) => messageBlock(role, message)));
    } else {
      const tokens = shadedTokens(sample, at, Math.min(at + length, sample.tokens.length), marks);
      blocks.push(turnBlock(role, role === "prompt" ? h("span", {}, content) : tokens));
    }
    if (role !== "prompt") at += length;
  });
  return h(
    "div",
    { class: "sample-view" },
    h("p", { class: "muted" }, facts.filter(Boolean).join(" · ")),
    sample.reward_error ? h("p", { class: "callout" }, `The reward failed: ${sample.reward_error}`) : null,
    blocks,
    sample.judge_reply ? turnBlock("judge", h("span", {}, sample.judge_reply)) : null,
    sample.tokens.length < sample.length
      ? empty(`${count(sample.length - sample.tokens.length)} more tokens are in the record.`)
      : null,
  );
}

function messageBlock(turn, [, role, name, content, calls]) {
  const title = name ? `${role} ${name}` : role;
  return turnBlock(turn, [h("span", {}, content), ...toolCalls(calls)], title);
}

function toolCalls(calls) {
  return calls.map(([name, text]) => h("div", { class: "tool-call" }, `calls ${name}(${text})`));
}

function turnBlock(role, content, title = role) {
  return h(
    "div",
    { class: `turn turn-${role}` },
    h("div", { class: "turn-role" }, title),
    h("div", { class: "turn-text" }, content),
  );
}

// Returns the versions that begin at a token, by the token's place in the answer.
function versionMarks(sample) {
  const marks = new Map();
  let remaining = 0;
  let next = 0;
  let before = null;
  sample.mask.forEach((isPolicy, place) => {
    if (!isPolicy) return;
    while (remaining === 0 && next < sample.versions.length) {
      const [epoch, step, length] = sample.versions[next];
      remaining = length;
      next += 1;
      if (length && before !== `${epoch}/${step}`)
        marks.set(place, epoch === sample.epoch ? `step ${step}` : `epoch ${epoch}, step ${step}`);
      before = `${epoch}/${step}`;
    }
    remaining -= 1;
  });
  return marks;
}

function shadedTokens(sample, from, to, marks) {
  const spans = [];
  for (let at = from; at < to; at += 1) {
    if (marks.has(at)) spans.push(h("span", { class: "version-mark" }, marks.get(at)));
    const shade = sample.mask[at] ? shadeOf(sample, at) : null;
    const texts = [
      sample.mask[at] ? `log-probability ${figure(sample.logprobs[at])}` : "environment",
      sample.mask[at] && sample.trainer_logprobs.length
        ? `trainer's ${figure(sample.trainer_logprobs[at])}`
        : null,
      sample.mask[at] && sample.advantages.length ? `advantage ${figure(sample.advantages[at])}` : null,
    ];
    spans.push(
      h(
        "span",
        {
          class: "token",
          title: texts.filter(Boolean).join("\n"),
          css: shade ? { background: shade } : {},
        },
        sample.tokens[at],
      ),
    );
  }
  return spans;
}

// Orange is what was unlikely, or is made less likely; blue the opposite. Colour-blind readers see both.
function shadeOf(sample, at) {
  const tint = (color, share) =>
    `color-mix(in srgb, ${color} ${Math.round(60 * Math.min(1, share))}%, transparent)`;
  if (chosen.shade === "logprob") return tint("#d55e00", -sample.logprobs[at] / 6);
  if (chosen.shade === "ratio") {
    if (!sample.trainer_logprobs.length) return null;
    const difference = sample.trainer_logprobs[at] - sample.logprobs[at];
    return tint(difference < 0 ? "#d55e00" : "#0072b2", Math.abs(difference) / 0.5);
  }
  if (chosen.shade === "advantage") {
    const advantage = sample.advantages[at] ?? 0;
    return tint(advantage < 0 ? "#d55e00" : "#0072b2", Math.abs(advantage) / 2);
  }
  return null;
}
