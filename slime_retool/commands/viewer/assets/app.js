// The page: views, filters, jumps and keys.
"use strict";

(function () {
  const { el } = Viewer;
  const byId = (id) => document.getElementById(id);
  const VIEWS = ["curves", "samples", "timeline"];
  let table = null;
  let view = "curves";
  let search = { query: "", hits: null, asked: 0 };

  // Filters: each gives a test of a row, or null when it is not set.

  const FILTERS = [];

  function choice(label, name, options) {
    const select = el("select", { name }, el("option", { value: "", text: "any" }), ...options.map(([value, text]) => el("option", { value, text })));
    FILTERS.push({ select, test: (columns) => select.value === "" ? null : options.find(([value]) => String(value) === select.value)[2](columns) });
    return el("label", {}, `${label} `, select);
  }

  function range(label, name) {
    const low = el("input", { type: "number", step: "any", name: `${name}-low`, placeholder: "from", "aria-label": `${label} from` });
    const high = el("input", { type: "number", step: "any", name: `${name}-high`, placeholder: "to", "aria-label": `${label} to` });
    const test = (columns) => {
      if (low.value === "" && high.value === "") return null;
      const values = columns[name];
      const [least, most] = [low.value === "" ? -Infinity : Number(low.value), high.value === "" ? Infinity : Number(high.value)];
      return (row) => values[row] >= least && values[row] <= most;
    };
    FILTERS.push({ low, high, name, test });
    return el("span", { class: "range" }, `${label} `, low, high);
  }

  const coded = (name) => Viewer.table.names[name].map((text, code) => [code, text || "(none)", (columns) => (row) => columns[name][row] === code]);

  function makeFilters() {
    const used = (name) => Viewer.table.names[name].length > 1;
    const { flags } = Viewer.table;
    byId("filters").append(
      el("label", { class: "search" }, "Search ", el("input", { id: "search", type: "search", placeholder: "in prompts and responses ( / )" })),
      ...(used("run") ? [choice("Run", "run", coded("run").map(([value, text, test]) => [value, `${"AB"[value]} ${text}`, test]))] : []),
      ...(used("kind") ? [choice("From", "kind", coded("kind"))] : []),
      choice("Verdict", "right", [
        [1, "right", (c) => (row) => c.right[row] === 1],
        [0, "wrong", (c) => (row) => c.right[row] === 0],
        ["no", "not judged", (c) => (row) => Number.isNaN(c.right[row])],
      ]),
      range("Reward", "reward"),
      ...(used("status") ? [choice("Status", "status", coded("status"))] : []),
      range("Turns", "turns"),
      range("Step", "step"),
      ...(used("source") ? [choice("Source", "source", coded("source"))] : []),
      choice("Tools", "tools", [
        ["used", "called", (c) => (row) => c.calls[row] > 0],
        ["unused", "not called", (c) => (row) => c.calls[row] === 0],
        ["errors", "with errors", (c) => (row) => c.errors[row] > 0],
        ["malformed", "malformed call", (c) => (row) => c.malformed[row] > 0],
      ]),
      choice("Suspicious", "flags", [
        ["any", "any reason", (c) => (row) => c.flags[row] > 0],
        ...flags.map(([bit, name]) => [bit, name, (c) => (row) => (c.flags[row] & bit) > 0]),
      ]),
    );
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("input", (event) => (event.target.id === "search" ? searchSoon() : apply()));
  }

  function setFilter(name, value) {
    for (const control of byId("filters").elements) if (control.name === name) control.value = value;
  }

  function clearFilters() {
    byId("filters").reset();
    search = { query: "", hits: null, asked: search.asked + 1 };
  }

  function apply({ keep = true } = {}) {
    const { size, columns } = Viewer.table;
    const tests = FILTERS.map((filter) => filter.test(columns)).filter(Boolean);
    if (search.hits) tests.push((row) => search.hits[row] === 1);
    const rows = new Uint32Array(size);
    let count = 0;
    next: for (let row = 0; row < size; row++) {
      for (const test of tests) if (!test(row)) continue next;
      rows[count++] = row;
    }
    table.setRows(rows.slice(0, count), keep);
    byId("count").textContent = `${count.toLocaleString("en")} of ${size.toLocaleString("en")} samples${search.note ?? ""}`;
  }

  let timer = 0;
  function searchSoon() {
    clearTimeout(timer);
    timer = setTimeout(runSearch, 150);
  }

  async function runSearch() {
    const query = byId("search").value;
    const asked = search.asked + 1;
    search = { query, hits: null, asked };
    if (!query) return apply();
    byId("count").textContent = "searching"; // the index may have to be loaded first
    let drawn = 0;
    try {
      await Viewer.store.search(query, (hits, share) => {
        search.hits = hits;
        search.note = share < 1 ? `, searching ${Math.round(100 * share)} %` : "";
        if (share === 1 || performance.now() - drawn > 200) {
          apply();
          drawn = performance.now();
        }
      }, () => search.asked !== asked);
    } catch (error) {
      byId("count").textContent = error.message;
    }
  }

  // Jumps

  const JUMPS = {
    mismatch: () => table.sortBy("mismatch", true),
    longest: () => table.sortBy("response_tokens", true),
    failed: () => {
      const code = Viewer.table.names.status.indexOf("failed");
      setFilter("status", code < 0 ? "" : code);
      return code >= 0 || "no sample failed";
    },
    suspicious: () => setFilter("flags", "any"),
    reset: () => table.sortBy(null, false),
  };

  function jump(name) {
    clearFilters();
    const result = JUMPS[name]();
    apply({ keep: false });
    if (typeof result === "string") byId("count").textContent = result;
    else if (name !== "reset") table.select(0);
  }

  // Where we are

  function show(name) {
    view = name;
    for (const one of VIEWS) {
      byId(`view-${one}`).hidden = one !== name;
      byId(`tab-${one}`).setAttribute("aria-selected", one === name);
      byId(`tab-${one}`).tabIndex = one === name ? 0 : -1;
    }
    if (name === "curves") Viewer.charts.show();
    if (name === "samples") table.draw(true);
    if (name === "timeline") Viewer.timeline.show();
    remember();
  }

  function open(row) {
    show("samples");
    table.selectRow(row);
    opened(row);
  }

  function opened(row) {
    byId("split").classList.add("opened");
    Viewer.sample.show(row);
    remember();
  }

  function close() {
    byId("split").classList.remove("opened");
    table.focus();
  }

  function showStep(step) {
    clearFilters();
    setFilter("step-low", step);
    setFilter("step-high", step);
    apply({ keep: false });
    show("samples");
    if (table.rows.length) table.select(0);
  }

  // The address after # says view and sample, so that it can be kept or passed on.
  function remember() {
    const row = Viewer.sample.row;
    const where = view === "samples" && row >= 0 ? Viewer.store.locate(row) : null;
    history.replaceState(null, "", where ? `#samples/${where.run.letter}/${where.local}` : `#${view}`);
  }

  function recall() {
    const [name, letter, local] = location.hash.slice(1).split("/");
    const run = Viewer.runs.find((run) => run.letter === letter);
    if (name === "samples" && run && Number(local) < run.size) return open(run.offset + Number(local));
    const has = Viewer.runs.some((run) => run.metrics.step?.length);
    show(VIEWS.includes(name) ? name : has ? "curves" : "samples");
  }

  // Keys

  const KEYS = {
    "?": () => byId("help").showModal(),
    "/": () => (show("samples"), byId("search").focus(), byId("search").select()),
    1: () => show("curves"),
    2: () => show("samples"),
    3: () => show("timeline"),
    j: () => table.move(1),
    k: () => table.move(-1),
    ArrowDown: () => table.move(1),
    ArrowUp: () => table.move(-1),
    PageDown: () => table.move(15),
    PageUp: () => table.move(-15),
    Enter: () => Viewer.sample.row >= 0 && byId("sample").focus(),
    Escape: () => close(),
    "[": () => Viewer.sample.nextTab(-1),
    "]": () => Viewer.sample.nextTab(1),
    c: () => Viewer.sample.recolour?.(),
    x: () => {
      const { flags } = Viewer.table.columns;
      const at = table.rows.findIndex((row, place) => place > table.selected && flags[row]);
      if (at >= 0) table.select(at);
    },
  };
  const ANYWHERE = ["?", "/", "1", "2", "3"];

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    const { target, key } = event;
    if (target.matches("input, select, textarea")) {
      if (key === "Escape") target.blur(), table.focus();
      return;
    }
    if (key === "Enter" && target.matches("button, summary, a")) return;
    if (key.startsWith("Arrow") || key.startsWith("Page")) {
      if (target.closest("#sample")) return; // it scrolls
    }
    if (!(key in KEYS) || (view !== "samples" && !ANYWHERE.includes(key))) return;
    KEYS[key]();
    event.preventDefault();
  }

  async function start() {
    await Viewer.store.open();
    const title = Viewer.runs.map((run) => run.name).join("  vs  ");
    byId("title").textContent = title;
    document.title = `${title} – slime-retool`;
    table = new Viewer.Table(byId("table"), { onSelect: opened });
    makeFilters();
    apply({ keep: false });
    byId("sample").append(el("p", { class: "note", text: Viewer.table.size ? "Choose a sample: click one, or press j." : "This run has no samples: --dump-rollouts writes them." }));
    Viewer.timeline.init();
    byId("loading").remove();
    document.querySelectorAll("[data-view]").forEach((tab) => tab.addEventListener("click", () => show(tab.dataset.view)));
    document.querySelectorAll("[data-jump]").forEach((button) => button.addEventListener("click", () => jump(button.dataset.jump)));
    Viewer.arrowKeys(document.querySelector("header .tabs"));
    byId("help-open").addEventListener("click", KEYS["?"]);
    document.addEventListener("keydown", onKey);
    recall();
  }

  Viewer.app = { open, close, showStep };
  start().catch((error) => (byId("loading").textContent = `The page cannot be shown: ${error.message}`));
})();
