// What each phase and each sample of one step did, and when.
"use strict";

(function () {
  const { el, svg, number } = Viewer;
  const WIDTH = 1100, LEFT = 90, LANE = 9, PHASE = 22, TOP = 24;
  const MOST = 600; // samples drawn
  let asked = 0;

  const stepsOf = (run) => {
    const steps = new Set(run.metrics.step ?? []);
    for (let i = 0; i < run.size; i++) steps.add(Viewer.table.columns.step[run.offset + i]);
    return [...steps].filter((step) => step >= 0).sort((a, b) => a - b);
  };

  function rowsOf(run, step) {
    const { columns, names } = Viewer.table;
    const rows = [];
    for (let row = run.offset; row < run.offset + run.size; row++) {
      if (columns.step[row] === step && names.kind[columns.kind[row]] === "train") rows.push(row);
    }
    return rows;
  }

  // [name, seconds] in the order in which a step does them.
  function phasesOf(run, step) {
    const i = run.metrics.step?.indexOf(step) ?? -1;
    if (i < 0) return [];
    return Viewer.charts.PHASES.map((name) => [name, run.metrics[`perf/${name}_seconds`]?.[i] ?? 0]).filter(([, seconds]) => seconds > 0);
  }

  function describe(span) {
    const parts = [`${span.name}: ${number(span.seconds)} s`, span.status];
    if (span.turn) parts.push(`turn ${span.turn}`);
    if (span.tokens !== undefined) parts.push(`${span.tokens} tokens`);
    if (span.cached_tokens !== undefined) parts.push(`${span.cached_tokens} of ${span.prompt_tokens} prompt tokens cached`);
    if (span.waited) parts.push(`waited ${number(span.waited)} s`);
    return parts.join(", ");
  }

  async function draw(run, step) {
    const turn = ++asked;
    const box = document.getElementById("timeline");
    const rows = rowsOf(run, step);
    const texts = await Promise.all(rows.slice(0, MOST).map((row) => Viewer.store.textOf(row)));
    if (turn !== asked) return;
    const lanes = texts.map((text, i) => ({ row: rows[i], spans: text.spans ?? [] })).filter((lane) => lane.spans.length);
    lanes.sort((a, b) => a.spans[0].start - b.spans[0].start);
    const phases = phasesOf(run, step);
    const begin = Math.min(...lanes.map((lane) => lane.spans[0].start));
    const total = Math.max(
      phases.reduce((sum, [, seconds]) => sum + seconds, 0),
      ...lanes.flatMap((lane) => lane.spans.map((span) => span.start + span.seconds - begin)),
      1e-3,
    );
    const x = (seconds) => LEFT + (seconds / total) * (WIDTH - LEFT - 10);
    const height = TOP + PHASE + 10 + lanes.length * LANE + 10;
    const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `Step ${step}: ${phases.map(([name, seconds]) => `${name} ${number(seconds)} s`).join(", ")}; ${lanes.length} samples` });
    for (const at of Viewer.charts.ticks(0, total, 10)) {
      picture.append(svg("line", { class: "gridline", x1: x(at), x2: x(at), y1: TOP - 4, y2: height }),
        svg("text", { class: "tick", x: x(at), y: 14, "text-anchor": "middle", text: `${number(at)} s` }));
    }
    let at = 0;
    picture.append(svg("text", { class: "tick", x: LEFT - 8, y: TOP + 15, "text-anchor": "end", text: "phases" }));
    for (const [name, seconds] of phases) {
      picture.append(svg("rect", { class: `phase p-${name}`, x: x(at), y: TOP, width: Math.max(1, x(at + seconds) - x(at)), height: PHASE },
        svg("title", { text: `${name}: ${number(seconds)} s` })));
      if (x(at + seconds) - x(at) > 6.5 * name.length) picture.append(svg("text", { class: "phase-name", x: x(at) + 5, y: TOP + 15, text: name }));
      at += seconds;
    }
    lanes.forEach((lane, i) => {
      const y = TOP + PHASE + 10 + i * LANE;
      const index = Viewer.table.columns.index[lane.row];
      const group = svg("g", { class: "lane", onclick: () => Viewer.app.open(lane.row) });
      if (i % 4 === 0) group.append(svg("text", { class: "tick", x: LEFT - 8, y: y + 7, "text-anchor": "end", text: `sample ${index}` }));
      for (const span of lane.spans) {
        group.append(svg("rect", { class: `span s-${["generate", "request", "tool", "reward", "queue"].includes(span.name) ? span.name : "other"} ${span.status === "ok" ? "" : "not-ok"}`,
          x: x(span.start - begin), y: y + (span.turn ? 2 : 0), width: Math.max(1, x(span.seconds) - x(0)), height: span.turn ? LANE - 5 : LANE - 1 },
          svg("title", { text: `sample ${index}, ${describe(span)}` })));
      }
      picture.append(group);
    });
    const notes = [];
    if (!phases.length) notes.push("metrics.jsonl has no phases of this step.");
    if (!lanes.length) notes.push("The dump has no spans of this step's samples.");
    if (rows.length > MOST) notes.push(`${rows.length - MOST} samples are not drawn.`);
    box.replaceChildren(picture, ...notes.map((text) => el("p", { class: "note", text })));
  }

  function init() {
    const bar = document.getElementById("timeline-bar");
    const runs = el("select", {}, ...Viewer.runs.map((run, i) => el("option", { value: i, text: `${"AB"[i]} ${run.name}` })));
    const steps = el("select");
    const show = () => draw(Viewer.runs[runs.value], Number(steps.value));
    const refill = () => steps.replaceChildren(...stepsOf(Viewer.runs[runs.value]).map((step) => el("option", { value: step, text: step })));
    const move = (by) => {
      steps.selectedIndex = Math.min(Math.max(steps.selectedIndex + by, 0), steps.options.length - 1);
      show();
    };
    runs.addEventListener("change", () => (refill(), show()));
    steps.addEventListener("change", show);
    bar.append(
      ...(Viewer.runs.length > 1 ? [el("label", {}, "Run ", runs)] : []),
      el("label", {}, "Step ", steps),
      el("button", { text: "‹ before", onclick: () => move(-1) }),
      el("button", { text: "next ›", onclick: () => move(1) }),
      el("span", { class: "legend" }, 
        el("span", { class: "dim", text: "phases" }), ...Viewer.charts.PHASES.map((name) => el("span", { class: `value p-${name}`, text: name })),
        el("span", { class: "dim", text: "samples" }), ...["generate", "request", "tool", "reward"].map((name) => el("span", { class: `value s-${name}`, text: name }))),
    );
    refill();
    Viewer.timeline.show = () => steps.value !== "" && show();
  }

  Viewer.timeline = { init, show: () => {} };
})();
