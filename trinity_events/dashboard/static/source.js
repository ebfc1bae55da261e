// Sources of what the pages show: a dashboard's server, or the data inside of an exported file.

const TOKEN = "trinity-events-token";

export function takeToken() {
  const match = /^#token=([\w-]+)/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(TOKEN, match[1]);
  history.replaceState(null, "", location.pathname);
}

class LiveSource {
  offline = false;

  async ask(path, query) {
    const parameters = new URLSearchParams(
      Object.entries(query ?? {}).filter(
        ([, value]) => value !== null && value !== undefined && value !== "",
      ),
    );
    const answer = await fetch(`/api/${path}?${parameters}`, { headers: this.headers() });
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.error ?? answer.statusText);
    return data;
  }

  headers() {
    const token = sessionStorage.getItem(TOKEN);
    return token ? { authorization: `Bearer ${token}` } : {};
  }

  runs() {
    return this.ask("runs");
  }

  of(run, name, query) {
    return this.ask(`runs/${encodeURIComponent(run)}/${name}`, query);
  }

  // Calls `receive` with each state, and `lost` while the stream is away; returns what ends it.
  follow(run, receive, lost) {
    const ending = new AbortController();
    const read = async () => {
      for (let pause = 500; !ending.signal.aborted; pause = Math.min(pause * 2, 8000)) {
        try {
          const answer = await fetch(`/api/runs/${encodeURIComponent(run)}/live`, {
            headers: this.headers(),
            signal: ending.signal,
          });
          if (!answer.ok) throw new Error((await answer.json()).error);
          await events(answer.body, (data) => {
            pause = 500;
            receive(data);
          });
        } catch (error) {
          if (ending.signal.aborted) return;
          lost(error.message);
        }
        await new Promise((done) => setTimeout(done, pause));
      }
    };
    read();
    return () => ending.abort();
  }
}

async function events(body, receive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    // Only the newest state counts.
    const data = parts
      .flatMap((part) => part.split("\n"))
      .filter((line) => line.startsWith("data: "));
    if (data.length) receive(JSON.parse(data.at(-1).slice(6)));
  }
}

// The versions as they were at a moment of the past, in milliseconds.
function versionsUntil(matrix, at) {
  const seconds = at / 1000,
    columns = new Map();
  const versions = matrix.versions.filter(
    (version, column) => version[2] <= seconds && columns.set(column, columns.size),
  );
  const move = (cell) => [columns.get(cell[0]), ...cell.slice(1)];
  const cells = matrix.cells.filter((cell) => columns.has(cell[0]) && cell[2] <= seconds).map(move);
  const applied = (column) => cells.filter((cell) => cell[0] === column).length;
  return {
    versions: versions.map((version, column) => [
      ...version.slice(0, 3),
      version[3] <= seconds ? version[3] : 0,
      version[4],
      ...version.slice(5, 9),
      applied(column),
    ]),
    explorers: matrix.explorers,
    later: matrix.versions.length,
    cells,
    refused: matrix.refused
      .filter((refusal) => columns.has(refusal[0]) && refusal[3] <= seconds)
      .map(move),
  };
}

class FileSource {
  offline = true;

  constructor(data) {
    this.data = data;
  }

  async runs() {
    return { runs: [{ run: this.data.now.run, recorded: true }] };
  }

  async of(run, name, query) {
    const data = this[`_${name}`] ? this[`_${name}`](query ?? {}) : this.data[name];
    if (data === undefined)
      throw new Error("this file does not have it: open the run in trinity-events dashboard");
    return data;
  }

  follow() {
    return () => {};
  }

  // Of the past, a file has some states alone: a step leads to the next of them.
  _at({ number, entry, time, by }) {
    const states = this.data.states;
    if (by) {
      const at = states.findLastIndex((state) => state.number <= number - by);
      return states[Math.max(0, Math.min(states.length - 1, at + by))];
    }
    if (entry)
      number = states.find((state) => state.position === entry)?.number ?? this.numberOf(entry);
    let nearest = states[0];
    for (const state of states) {
      const reached = time !== undefined ? state.at <= time : state.number <= number;
      if (reached) nearest = state;
    }
    return nearest;
  }

  _versions({ number }) {
    const past = this.data.states.find((state) => state.number === number);
    return past ? versionsUntil(this.data.versions, past.at) : this.data.versions;
  }

  // Samples are of the newest recorded steps, and tokens of the best, middle and worst groups.
  _samples({ step }) {
    const steps = this.data.record?.steps ?? {};
    const all = Object.keys(steps).map(Number);
    const trained = all.filter((number) => steps[number].fates.trained);
    const newest = Math.max(...(trained.length ? trained : all));
    return steps[step ?? newest] ?? { steps: [], step: null };
  }

  _sample({ step, fate, ordinal, attempt, sample }) {
    return this.data.record?.samples[`${step}/${fate}/${ordinal}/${attempt}/${sample}`];
  }

  numberOf(entry) {
    return Number(this.data.found.find((row) => row[1] === entry)?.[0] ?? Infinity);
  }

  _timeline({ from, to, rows }) {
    const { timeline } = this.data;
    const names = rows.split(",");
    const ranges = names.map((name) => /^([\w.-]+):(\d+)-(\d+)$/.exec(name));
    const rowOf = timeline.rows.map((name) => {
      const [, role, rank] = /^(.*)-(\d+)$/.exec(name) ?? [];
      const single = names.indexOf(name);
      return single >= 0
        ? single
        : ranges.findIndex(
            (range) =>
              range && range[1] === role && rank >= Number(range[2]) && rank <= Number(range[3]),
          );
    });
    const placed = (all) =>
      all.map((item) => [rowOf[item[0]], ...item.slice(1)]).filter(([row]) => row >= 0);
    const cells = placed(timeline.cells).filter(
      (cell) => cell[1] >= from - timeline.width && cell[1] <= to,
    );
    // Spans are of the newest events; a window that begins long before them shows numbers.
    const detailed = to > timeline.since && to - timeline.since > (to - from) / 2;
    if (!detailed) return { mode: "counts", width: timeline.width, cells };
    const spans = placed(timeline.spans).filter(
      (span) => span[2] >= from && span[1] <= to && !ranges[span[0]],
    );
    return {
      mode: "spans",
      width: timeline.width,
      spans,
      cells: cells.filter((cell) => ranges[cell[0]] || cell[1] < timeline.since - timeline.width),
    };
  }

  _events({ type, producer, step, since, until, before, limit }) {
    const types = type ? type.split(",") : [];
    const matches = (row) =>
      (!before || row[0] < before) &&
      (!types.length || types.includes(row[4])) &&
      (!producer || row[3] === producer || row[3].replace(/-\d+$/, "") === producer) &&
      (step === undefined || step === null || step === "" || row[5] === Number(step)) &&
      (!since || row[2] >= since) &&
      (!until || row[2] <= until);
    const rows = this.data.found.filter(matches).slice(0, limit ?? 50);
    return { found: rows, before: rows.length === (limit ?? 50) ? rows.at(-1)[0] : null, until: null };
  }
}

// Returns the source of the pages: the data of an exported file, if the page is one.
export async function openSource() {
  const element = document.getElementById("data");
  if (!element) return new LiveSource();
  const packed = Uint8Array.from(atob(element.textContent.trim()), (byte) => byte.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new FileSource(await new Response(stream).json());
}
