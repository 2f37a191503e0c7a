// The data: runs and their columns, held for ever; pieces with texts and tokens, loaded when they are needed.
"use strict";

const Viewer = {};

(function () {
  const KEPT_PIECES = 60;
  const waiting = new Map(); // name -> {resolve, reject}
  const pieces = new Map(); // name -> promise, least recently used first

  // Every data file is one call of this function.
  window.viewerData = (name, value) => {
    const request = waiting.get(name);
    waiting.delete(name);
    if (request) request.resolve(value);
  };

  function loadFile(name, path) {
    return new Promise((resolve, reject) => {
      waiting.set(name, { resolve, reject });
      const script = document.createElement("script");
      script.src = path;
      script.onload = () => {
        script.remove();
        if (waiting.delete(name)) reject(new Error(`${path} holds something else`));
      };
      script.onerror = () => {
        script.remove();
        waiting.delete(name);
        reject(new Error(`${path} cannot be read; was the folder copied whole?`));
      };
      document.head.append(script);
    });
  }

  function loadPiece(name) {
    const known = pieces.get(name);
    if (known) {
      pieces.delete(name);
      pieces.set(name, known);
      return known;
    }
    const promise = loadFile(name, `data/${name}.js`);
    promise.catch(() => pieces.delete(name));
    pieces.set(name, promise);
    if (pieces.size > KEPT_PIECES) pieces.delete(pieces.keys().next().value);
    return promise;
  }

  // All runs' rows as one table: columns are Float64Arrays (NaN where there is no value), names and prompts joined.
  function joined(runs) {
    const total = runs.reduce((sum, run) => sum + run.columns.step.length, 0);
    const table = { size: total, columns: { run: new Float64Array(total) }, names: {}, prompts: [], flags: runs[0].flags };
    const prompts = new Map();
    let offset = 0;
    runs.forEach((run, number) => {
      run.offset = offset;
      run.size = run.columns.step.length;
      table.columns.run.fill(number, offset, offset + run.size);
      const promptOf = run.prompts.key.map((key, i) => {
        if (!prompts.has(key)) {
          prompts.set(key, table.prompts.length);
          table.prompts.push({ preview: run.prompts.preview[i], label: run.prompts.label[i] });
        }
        return prompts.get(key);
      });
      for (const [name, values] of Object.entries(run.columns)) {
        const column = (table.columns[name] ??= new Float64Array(total).fill(NaN));
        const names = run.names[name];
        let place = (value) => (value === null ? NaN : value);
        if (names) {
          const all = (table.names[name] ??= []);
          const codes = names.map((text) => (all.includes(text) ? all.indexOf(text) : all.push(text) - 1));
          place = (value) => codes[value];
        } else if (name === "prompt") {
          place = (value) => promptOf[value];
        }
        for (let i = 0; i < values.length; i++) column[offset + i] = place(values[i]);
      }
      run.columns = null; // the table has them
      offset += run.size;
    });
    table.names.run = runs.map((run) => run.name);
    return table;
  }

  // Where row `row` of the table is: {run, letter, piece, place}.
  function locate(row) {
    const run = Viewer.runs.findLast((run) => run.offset <= row && run.size > 0);
    const local = row - run.offset;
    let low = 0, high = run.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (run.starts[middle] <= local) low = middle;
      else high = middle - 1;
    }
    return { run, local, piece: low, place: local - run.starts[low] };
  }

  const pieceName = (run, kind, number) => `${run.letter}/${kind}/${String(number).padStart(4, "0")}`;

  async function textOf(row) {
    const { run, piece, place } = locate(row);
    const data = await loadPiece(pieceName(run, "texts", piece));
    const sample = data.samples[place];
    return { ...sample, prompt: data.prompts[sample.prompt] };
  }

  // {prompt: [text], response: [text], mask, engine, trainer, advantage: [R] or null}, or null without token texts.
  async function tokensOf(row) {
    const { run, piece, place } = locate(row);
    const data = await loadPiece(pieceName(run, "tokens", piece));
    const record = data.samples[place];
    if (!record) return null;
    const length = record.response.length;
    const words = (places) => places.map((p) => data.vocabulary[p]);
    const spread = (values) => (values === undefined ? null : Array.isArray(values) ? values : Array(length).fill(values));
    return {
      prompt: words(data.prompts[record.prompt]),
      response: words(record.response),
      mask: record.mask.flatMap(([value, count]) => Array(count).fill(value)),
      engine: spread(record.engine),
      trainer: spread(record.trainer),
      advantage: spread(record.advantage),
    };
  }

  // Search. Letters of ASCII match in either case.

  const lower = (text) => text.replace(/[A-Z]+/g, (letters) => letters.toLowerCase());

  // Places of a text's trigrams in a piece's index; pieces.py computes the same.
  function trigrams(text, bits) {
    const places = new Set();
    for (let i = 0; i + 2 < text.length; i++) {
      places.add((text.charCodeAt(i) * 961 + text.charCodeAt(i + 1) * 31 + text.charCodeAt(i + 2)) % bits);
    }
    return [...places];
  }

  async function candidates(run, query) {
    const index = await (run.index ??= loadFile(`${run.letter}/search`, `data/${run.letter}/search.js`));
    const wanted = trigrams(query, index.bits);
    const numbers = [];
    index.pieces.forEach((packed, number) => {
      const bytes = atob(packed);
      if (wanted.every((place) => (bytes.charCodeAt(place >> 3) >> (place & 7)) & 1)) numbers.push(number);
    });
    return numbers;
  }

  // Marks rows that hold `query` in a Uint8Array; `progress(hits, share)` is called as pieces are read.
  async function search(query, progress, stopped) {
    const hits = new Uint8Array(Viewer.table.size);
    const wanted = lower(query);
    const jobs = [];
    for (const run of Viewer.runs) {
      if (run.size) for (const piece of await candidates(run, wanted)) jobs.push([run, piece]);
    }
    for (let done = 0; done < jobs.length; done++) {
      if (stopped()) return;
      const [run, piece] = jobs[done];
      const data = await loadPiece(pieceName(run, "texts", piece));
      data.samples.forEach((sample, place) => {
        const texts = [data.prompts[sample.prompt].text, ...sample.parts.map((part) => part[1]), sample.label, sample.error];
        if (texts.some((text) => text && lower(String(text)).includes(wanted))) {
          hits[run.offset + run.starts[piece] + place] = 1;
        }
      });
      progress(hits, (done + 1) / jobs.length);
    }
    if (!jobs.length) progress(hits, 1);
  }

  async function open() {
    const letters = await loadFile("runs", "data/runs.js");
    Viewer.runs = [];
    for (const letter of letters) {
      const run = await loadFile(`${letter}/run`, `data/${letter}/run.js`);
      Viewer.runs.push({ ...run, letter });
    }
    Viewer.table = joined(Viewer.runs);
  }

  Viewer.store = { open, locate, textOf, tokensOf, search };
})();
