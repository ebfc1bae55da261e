// Sources of what the pages show: a dashboard's server, or the data inside of an exported file.

const TOKEN = "trinity-events-token";

export function takeToken() {
  const found = /^#token=([\w-]+)/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(TOKEN, found[1]);
  history.replaceState(null, "", location.pathname);
}

class LiveSource {
  offline = false;

  async ask(path, query) {
    const asked = new URLSearchParams(
      Object.entries(query ?? {}).filter(
        ([, value]) => value !== null && value !== undefined && value !== "",
      ),
    );
    const answer = await fetch(`/api/${path}?${asked}`, { headers: this.headers() });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error ?? answer.statusText);
    return found;
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

  // Calls `told` with each state, and `lost` while the stream is away; returns what ends it.
  follow(run, told, lost) {
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
            told(data);
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

async function events(body, told) {
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
    if (data.length) told(JSON.parse(data.at(-1).slice(6)));
  }
}

// The versions as they were at a moment of the past, in milliseconds.
function versionsUntil(found, at) {
  const seconds = at / 1000,
    kept = new Map();
  const versions = found.versions.filter(
    (one, column) => one[2] <= seconds && kept.set(column, kept.size),
  );
  const moved = (one) => [kept.get(one[0]), ...one.slice(1)];
  const cells = found.cells.filter((one) => kept.has(one[0]) && one[2] <= seconds).map(moved);
  const applied = (column) => cells.filter((one) => one[0] === column).length;
  return {
    versions: versions.map((one, column) => [
      ...one.slice(0, 3),
      one[3] <= seconds ? one[3] : 0,
      one[4],
      ...one.slice(5, 9),
      applied(column),
    ]),
    explorers: found.explorers,
    later: found.versions.length,
    cells,
    refused: found.refused.filter((one) => kept.has(one[0]) && one[3] <= seconds).map(moved),
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
    const found = this[`_${name}`] ? this[`_${name}`](query ?? {}) : this.data[name];
    if (found === undefined)
      throw new Error("this file does not have it: open the run in trinity-events dashboard");
    return found;
  }

  follow() {
    return () => {};
  }

  // Of the past, a file has some states alone: a step leads to the next of them.
  _at({ number, entry, time, by }) {
    const states = this.data.states;
    if (by) {
      const at = states.findLastIndex((one) => one.number <= number - by);
      return states[Math.max(0, Math.min(states.length - 1, at + by))];
    }
    if (entry)
      number = states.find((one) => one.position === entry)?.number ?? this.numberOf(entry);
    let found = states[0];
    for (const one of states) {
      const reached = time !== undefined ? one.at <= time : one.number <= number;
      if (reached) found = one;
    }
    return found;
  }

  _versions({ number }) {
    const past = this.data.states.find((one) => one.number === number);
    return past ? versionsUntil(this.data.versions, past.at) : this.data.versions;
  }

  // Samples are of the newest recorded steps, and tokens of the best, middle and worst groups.
  _samples({ step }) {
    const steps = this.data.record?.steps ?? {};
    const all = Object.keys(steps).map(Number);
    const trained = all.filter((one) => steps[one].fates.trained);
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
            (one) => one && one[1] === role && rank >= Number(one[2]) && rank <= Number(one[3]),
          );
    });
    const placed = (all) =>
      all.map((one) => [rowOf[one[0]], ...one.slice(1)]).filter((one) => one[0] >= 0);
    const cells = placed(timeline.cells).filter(
      (one) => one[1] >= from - timeline.width && one[1] <= to,
    );
    // Spans are of the newest events; a window that begins long before them shows numbers.
    const detailed = to > timeline.since && to - timeline.since > (to - from) / 2;
    if (!detailed) return { mode: "counts", width: timeline.width, cells };
    const spans = placed(timeline.spans).filter(
      (one) => one[2] >= from && one[1] <= to && !ranges[one[0]],
    );
    return {
      mode: "spans",
      width: timeline.width,
      spans,
      cells: cells.filter((one) => ranges[one[0]] || one[1] < timeline.since - timeline.width),
    };
  }

  _events({ type, producer, step, since, until, before, limit }) {
    const types = type ? type.split(",") : [];
    const wanted = (row) =>
      (!before || row[0] < before) &&
      (!types.length || types.includes(row[4])) &&
      (!producer || row[3] === producer || row[3].replace(/-\d+$/, "") === producer) &&
      (step === undefined || step === null || step === "" || row[5] === Number(step)) &&
      (!since || row[2] >= since) &&
      (!until || row[2] <= until);
    const found = this.data.found.filter(wanted).slice(0, limit ?? 50);
    return { found, before: found.length === (limit ?? 50) ? found.at(-1)[0] : null, until: null };
  }
}

// Returns the source of the pages: the data of an exported file, if the page is one.
export async function openSource() {
  const held = document.getElementById("data");
  if (!held) return new LiveSource();
  const packed = Uint8Array.from(atob(held.textContent.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new FileSource(await new Response(stream).json());
}
