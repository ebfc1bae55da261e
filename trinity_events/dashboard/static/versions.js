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

export function renderVersions(matrix, view, { lane, scrubTime, again }) {
  if (!matrix.versions.length)
    return [
      panel(
        "Versions",
        "",
        empty(
          matrix.later
            ? `The file has the last ${matrix.later} versions, which all came later. The overview shows who served what.`
            : "No weight version was opened yet.",
        ),
      ),
    ];
  const serving = new Map(view.explorers.map((explorer) => [explorer[0], explorer]));
  const cells = new Map(matrix.cells.map((cell) => [`${cell[0]}/${cell[1]}`, cell]));
  const refused = new Map(
    matrix.refused.map(([column, name, reason]) => [`${column}/${name}`, reason]),
  );
  const behind = (name) => {
    const explorer = serving.get(name);
    return !explorer || explorer[3] === null ? 1e9 : explorer[6] === -1 ? 1e8 : (explorer[6] ?? 0);
  };
  const names = matrix.explorers
    .slice()
    .sort((a, b) => behind(b) - behind(a) || byName(a, b));
  const head = h(
    "tr",
    {},
    h("th", { class: "corner" }, "explorer"),
    matrix.versions.map((version) =>
      h(
        "th",
        { class: version[3] ? "" : "unready" },
        h(
          "button",
          {
            class: "link",
            onclick: () => scrubTime((version[3] || version[2]) * 1000 + 1),
            onmousemove: (event) =>
              showTip(event.clientX, event.clientY, [
                `step ${version[1]} of epoch ${version[0]}`,
                version[3] ? `ready ${moment(version[3] * 1000)}` : "not ready",
                `${version[5]} parts · ${bytes(version[6])} by ${version[4] || "?"}`,
                `stall ${figure(version[7])} s`,
                version[8] ? `digest ${short(version[8])}` : "",
                `${count(version[9])} explorers applied it`,
              ]),
            onmouseleave: hideTip,
          },
          String(version[1]),
        ),
      ),
    ),
    h("th", { class: "number" }, "behind"),
    h("th", {}, "digest"),
    h("th", { title: "What the explorer's checks proved of what it serves" }, "proof"),
    h("th", {}, "since"),
  );
  const row = (name) => {
    const explorer = serving.get(name);
    const late = behind(name);
    return h(
      "tr",
      {},
      h("th", {}, h("button", { class: "link", onclick: () => lane(name) }, name)),
      matrix.versions.map((version, column) => {
        const cell = cells.get(`${column}/${name}`),
          why = refused.get(`${column}/${name}`);
        const now = explorer && explorer[2] === version[0] && explorer[3] === version[1];
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
        { class: `mono ${explorer?.[5] === "differs" ? "late" : ""}` },
        explorer ? `${{ proven: "✓ ", differs: "≠ ", unknown: "" }[explorer[5]]}${short(explorer[4])}` : "–",
      ),
      h("td", { class: explorer?.[10] === "proven" ? "" : "muted" }, explorer?.[10] || "–"),
      h("td", { class: "muted nowrap" }, explorer?.[7] ? `${duration(view.now - explorer[7])} ago` : "–"),
    );
  };
  const more = names.length - shownRows;
  return [
    panel(
      "Which explorer serves what",
      `${plural(names.length, "explorer")} · the last ${plural(matrix.versions.length, "version")}`,
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
