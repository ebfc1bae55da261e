// The matrix of explorers and weight versions: what each applied, with its proof and staleness.

import {
  bytes,
  byName,
  count,
  duration,
  empty,
  figure,
  h,
  hideTip,
  moment,
  panel,
  plural,
  short,
  showTip,
} from "./format.js";

let shownRows = 64;

export function renderVersions(found, view, { lane, scrubTime, again }) {
  if (!found.versions.length)
    return [
      panel(
        "Versions",
        "",
        empty(
          found.later
            ? `The file has the last ${found.later} versions, which all came later. The overview shows who served what.`
            : "No weight version was opened yet.",
        ),
      ),
    ];
  const serving = new Map(view.explorers.map((one) => [one[0], one]));
  const cells = new Map(found.cells.map((one) => [`${one[0]}/${one[1]}`, one]));
  const refused = new Map(
    found.refused.map(([column, name, reason]) => [`${column}/${name}`, reason]),
  );
  const behind = (name) => {
    const one = serving.get(name);
    return !one || one[3] === null ? 1e9 : one[6] === -1 ? 1e8 : (one[6] ?? 0);
  };
  const names = found.explorers
    .slice()
    .sort((one, other) => behind(other) - behind(one) || byName(one, other));
  const head = h(
    "tr",
    {},
    h("th", { class: "corner" }, "explorer"),
    found.versions.map((one) =>
      h(
        "th",
        { class: one[3] ? "" : "unready" },
        h(
          "button",
          {
            class: "link",
            onclick: () => scrubTime((one[3] || one[2]) * 1000 + 1),
            onmousemove: (event) =>
              showTip(event.clientX, event.clientY, [
                `step ${one[1]} of epoch ${one[0]}`,
                one[3] ? `ready ${moment(one[3] * 1000)}` : "not ready",
                `${one[5]} parts · ${bytes(one[6])} by ${one[4] || "?"}`,
                `stall ${figure(one[7])} s`,
                one[8] ? `digest ${short(one[8])}` : "",
                `${count(one[9])} explorers applied it`,
              ]),
            onmouseleave: hideTip,
          },
          String(one[1]),
        ),
      ),
    ),
    h("th", { class: "number" }, "behind"),
    h("th", {}, "digest"),
    h("th", { title: "What the explorer's checks proved of what it serves" }, "proof"),
    h("th", {}, "since"),
  );
  const row = (name) => {
    const one = serving.get(name);
    const late = behind(name);
    return h(
      "tr",
      {},
      h("th", {}, h("button", { class: "link", onclick: () => lane(name) }, name)),
      found.versions.map((version, column) => {
        const cell = cells.get(`${column}/${name}`),
          why = refused.get(`${column}/${name}`);
        const now = one && one[2] === version[0] && one[3] === version[1];
        const mood = why && !cell ? "refused" : !cell ? "none" : cell[6];
        const sign = { refused: "✕", none: "", proven: "✓", differs: "≠", unknown: "?" }[mood];
        return h(
          "td",
          {
            class: `v v-${mood} ${now ? "now" : ""}`,
            "aria-label": `${name}, step ${version[1]}: ${why ? "refused" : cell ? mood : "not applied"}`,
            onmousemove:
              cell || why
                ? (event) =>
                    showTip(event.clientX, event.clientY, [
                      `${name} · step ${version[1]}`,
                      why ? `refused: ${why}` : "",
                      cell ? `applied ${moment(cell[2] * 1000)}` : "",
                      cell ? `fetch ${figure(cell[3])} s · pause ${figure(cell[4])} s` : "",
                      cell
                        ? `${mood === "proven" ? "its digest is the announced one" : mood === "differs" ? "its digest is NOT the announced one" : "no announced digest to compare with"}: ${short(cell[5])}`
                        : "",
                      cell && cell[7] ? `what it serves is ${cell[7]}` : "",
                    ])
                : null,
            onmouseleave: hideTip,
          },
          sign,
        );
      }),
      h(
        "td",
        { class: `number ${late > 1 ? "late" : ""}` },
        late >= 1e9 ? "–" : late >= 1e8 ? "epoch" : late,
      ),
      h(
        "td",
        { class: `mono ${one?.[5] === "differs" ? "late" : ""}` },
        one ? `${{ proven: "✓ ", differs: "≠ ", unknown: "" }[one[5]]}${short(one[4])}` : "–",
      ),
      h("td", { class: one?.[10] === "proven" ? "" : "muted" }, one?.[10] || "–"),
      h("td", { class: "muted nowrap" }, one?.[7] ? `${duration(view.now - one[7])} ago` : "–"),
    );
  };
  const more = names.length - shownRows;
  return [
    panel(
      "Which explorer serves what",
      `${plural(names.length, "explorer")} · the last ${plural(found.versions.length, "version")}`,
      h(
        "div",
        { class: "scroll to-newest" },
        h(
          "table",
          { class: "matrix" },
          h("thead", {}, head),
          h("tbody", {}, names.slice(0, shownRows).map(row)),
        ),
      ),
      more > 0
        ? h(
            "button",
            {
              class: "more",
              onclick: () => {
                shownRows += 256;
                again();
              },
            },
            `Show ${Math.min(256, more)} of ${count(more)} more`,
          )
        : null,
      h(
        "div",
        { class: "legend" },
        [
          ["proven", "✓", "applied, digest proven"],
          ["unknown", "?", "applied, no digest to compare"],
          ["differs", "≠", "another digest"],
          ["refused", "✕", "refused"],
        ].map(([mood, sign, words]) =>
          h("span", {}, h("i", { class: `v v-${mood}` }, sign), words),
        ),
        h("span", {}, h("i", { class: "v v-proven now" }), "serves it now"),
      ),
    ),
  ];
}
