// Curves of metrics.jsonl, drawn as SVG.
"use strict";

(function () {
  const { el, svg, number } = Viewer;
  const WIDTH = 380, HEIGHT = 170, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
  const MOST = 400; // points of a curve that are drawn; longer ones are thinned

  // [title, names or patterns of the metrics in it]; patterns take every metric that fits.
  const CHARTS = [
    ["Reward", [/^rollout\/(trained_)?reward_mean$/]],
    ["Accuracy", [/^rollout\/accuracy$/, /^eval\/.*\/accuracy$/]],
    ["Turns", [/^rollout\/mean_turns$/, /^eval\/.*\/mean_turns$/]],
    ["Tool use", [/^rollout\/(tool_call_rate|tool_calls_mean)$/]],
    ["Tool errors and malformed calls", [/^rollout\/(tool_error_rate|malformed_call_rate)$/]],
    ["Response tokens", [/^rollout\/(response_tokens_mean|model_tokens_mean)$/]],
    ["Cut and failed", [/^rollout\/(truncated_ratio|failed_ratio|aborted_ratio)$/]],
    ["Groups", [/^rollout\/groups_(kept|dropped|failed|all_wrong|all_right)$/]],
    ["Entropy", [/^train\/entropy(_loss)?$/]],
    ["KL", [/^train\/.*kl.*$/]],
    ["Engine and trainer", [/^train\/logprob_abs_diff$/, /^mismatch\/(abs_diff|kl|k3_kl)$/]],
    ["Gradient norm", [/^(train|critic)\/grad_norm$/]],
    ["Loss", [/^train\/loss$/, /^critic\/loss$/, /^eval\/.*\/loss$/]],
    ["Clipped", [/^train\/.*clip.*$/]],
    ["Staleness", [/staleness/, /^rollout\/weight_version_(min|max)$/]],
    ["Learning rate", [/^train\/lr$/]],
  ];
  const PHASES = ["generate", "offload", "log_probs", "train", "sync", "idle"];

  const metricNames = () => [...new Set(Viewer.runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !["step", "time"].includes(name)).sort();

  const smoothed = (values, share) => {
    let mean = null;
    return values.map((value) => (value === null ? null : (mean = mean === null ? value : share * mean + (1 - share) * value)));
  };

  // {label, run, place, xs, ys}: a metric of each run that has it, without the steps at which it is missing.
  function seriesOf(names, share) {
    return names.flatMap((name, place) =>
      Viewer.runs.flatMap((run, number) => {
        const values = run.metrics[name];
        if (!values) return [];
        const points = run.metrics.step.map((x, i) => [x, values[i]]).filter(([, y]) => y !== null);
        const stride = Math.ceil(points.length / MOST);
        const ys = smoothed(points.map(([, y]) => y), share);
        const kept = points.map(([x], i) => [x, ys[i]]).filter((_, i) => i % stride === 0 || i === points.length - 1);
        return kept.length ? [{ name, run: number, place, xs: kept.map(([x]) => x), ys: kept.map(([, y]) => y) }] : [];
      }),
    );
  }

  function ticks(low, high, count) {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(6)));
    return found;
  }

  // Ticks of one axis in as many digits as tell them apart.
  function tickText(value, values) {
    const step = values.length > 1 ? Math.abs(values[1] - values[0]) : Math.abs(value);
    return number(value, value && step ? Math.max(3, Math.ceil(Math.log10(Math.abs(value) / step)) + 1) : 3);
  }

  function scales(xs, low, high) {
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    const x = (value) => LEFT + ((value - x0) / (x1 - x0 || 1)) * (WIDTH - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
    return { x, y, x0, x1 };
  }

  function frame(title, low, high, { x, y, x0, x1 }) {
    const grid = ticks(low, high, 4).flatMap((value, _, values) => [
      svg("line", { class: "gridline", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end", text: tickText(value, values) }),
    ]);
    const steps = ticks(x0, x1, 6).filter(Number.isInteger).map((value) =>
      svg("text", { class: "tick", x: x(value), y: HEIGHT - 5, "text-anchor": "middle", text: String(value) }));
    return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, ...grid, ...steps);
  }

  // What tells a series from the others of its chart: the end of the metric's name, and the run where there are two.
  function labels(series) {
    const names = [...new Set(series.map((one) => one.name))];
    let length = 1;
    const end = (name) => name.split("/").slice(-length).join("/");
    while (length < 4 && new Set(names.map(end)).size < names.length) length++;
    return series.map((one) => {
      const run = Viewer.runs.length > 1 ? ["AB"[one.run]] : [];
      return [...run, ...(names.length > 1 || !run.length ? [end(one.name)] : [])].join(" ");
    });
  }

  // Reads out a chart at the step below the pointer; a click shows that step's samples.
  function pointer(picture, xs, { x }, say) {
    const line = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    picture.append(line);
    let step = null;
    picture.addEventListener("mousemove", (event) => {
      const box = picture.getBoundingClientRect();
      const wanted = ((event.clientX - box.left) / box.width) * WIDTH;
      step = xs.reduce((best, value) => (Math.abs(x(value) - wanted) < Math.abs(x(best) - wanted) ? value : best), xs[0]);
      line.setAttribute("x1", x(step));
      line.setAttribute("x2", x(step));
      line.setAttribute("visibility", "visible");
      say(step);
    });
    picture.addEventListener("mouseleave", () => {
      line.setAttribute("visibility", "hidden");
      say(null);
    });
    picture.addEventListener("click", () => step !== null && Viewer.app.showStep(step));
  }

  function lineChart(title, names, share) {
    const series = seriesOf(names, share);
    if (!series.length) return null;
    const xs = [...new Set(series.flatMap((one) => one.xs))].sort((a, b) => a - b);
    const ys = series.flatMap((one) => one.ys);
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    const scale = scales(xs, low, high);
    const named = labels(series);
    const said = series.map((one, i) => `${named[i]} ${number(one.ys.at(-1))} at step ${one.xs.at(-1)}`).join(", ");
    const picture = frame(`${title}: ${said}`, low, high, scale);
    for (const one of series) {
      const points = one.xs.map((x, i) => `${scale.x(x).toFixed(1)},${scale.y(one.ys[i]).toFixed(1)}`);
      const kind = `c${one.place % 6} run${one.run}`;
      if (points.length > 1) picture.append(svg("polyline", { class: `curve ${kind}`, points: points.join(" ") }));
      if (points.length < 30) points.forEach((point) => picture.append(svg("circle", { class: `dot ${kind}`, cx: point.split(",")[0], cy: point.split(",")[1], r: 2 })));
    }
    const values = series.map((one) => el("span", { class: `value c${one.place % 6} run${one.run}`, title: one.name }));
    const say = (step) => series.forEach((one, i) => {
      const at = step === null ? one.xs.length - 1 : one.xs.indexOf(step);
      values[i].textContent = `${named[i]} ${at < 0 ? "–" : number(one.ys[at])}`;
    });
    const when = el("span", { class: "dim" });
    pointer(picture, xs, scale, (step) => {
      when.textContent = step === null ? "" : `step ${step}`;
      say(step);
    });
    say(null);
    return el("figure", { class: "chart" }, el("figcaption", {}, el("strong", { text: title }), when, el("span", { class: "values" }, ...values)), picture);
  }

  // Seconds of each phase, one bar a step.
  function phaseChart(run) {
    const { metrics } = run;
    const parts = PHASES.filter((name) => metrics[`perf/${name}_seconds`]);
    if (!parts.length) return null;
    const seconds = (name, i) => Math.max(0, metrics[`perf/${name}_seconds`][i] ?? 0);
    const known = metrics.step.map((_, i) => i).filter((i) => metrics["perf/step_seconds"]?.[i] !== null);
    if (!known.length) return null;
    const stride = Math.ceil(known.length / 120);
    const shown = known.filter((_, i) => i % stride === 0);
    const xs = shown.map((i) => metrics.step[i]);
    const high = Math.max(...shown.map((i) => parts.reduce((sum, name) => sum + seconds(name, i), 0)));
    const title = "Phase times (s)" + (Viewer.runs.length > 1 ? `, run ${run.letter.toUpperCase()}` : "");
    const scale = scales([...xs, xs[0] - 0.5, xs.at(-1) + 0.5], 0, high);
    const picture = frame(title, 0, high, scale);
    const width = Math.max(1, 0.8 * Math.min((WIDTH - LEFT - RIGHT) / shown.length, scale.x(xs[0] + 1) - scale.x(xs[0])));
    for (const i of shown) {
      let base = 0;
      for (const name of parts) {
        const top = base + seconds(name, i);
        picture.append(svg("rect", { class: `phase p-${name}`, x: scale.x(metrics.step[i]) - width / 2, width, y: scale.y(top), height: scale.y(base) - scale.y(top) }));
        base = top;
      }
    }
    const values = parts.map((name) => el("span", { class: `value p-${name}` }));
    const when = el("span", { class: "dim" });
    const say = (step) => {
      const i = step === null ? known.at(-1) : metrics.step.indexOf(step);
      when.textContent = `step ${metrics.step[i]}`;
      parts.forEach((name, p) => (values[p].textContent = `${name} ${number(seconds(name, i))}`));
    };
    pointer(picture, xs, scale, say);
    say(null);
    return el("figure", { class: "chart" }, el("figcaption", {}, el("strong", { text: title }), when, el("span", { class: "values" }, ...values)), picture);
  }

  function draw() {
    const box = document.getElementById("charts");
    const wanted = document.getElementById("metric-filter").value.trim().toLowerCase();
    const share = Number(document.getElementById("smooth").value);
    const names = metricNames();
    const charts = [];
    if (wanted) {
      for (const name of names.filter((name) => name.toLowerCase().includes(wanted)).slice(0, 120)) charts.push(lineChart(name, [name], share));
    } else {
      const used = new Set();
      for (const [title, patterns] of CHARTS) {
        const chosen = names.filter((name) => patterns.some((pattern) => pattern.test(name))).slice(0, 6);
        chosen.forEach((name) => used.add(name));
        charts.push(lineChart(title, chosen, share));
      }
      charts.push(...Viewer.runs.map(phaseChart));
      const rest = names.filter((name) => !used.has(name) && !PHASES.some((phase) => name === `perf/${phase}_seconds`));
      if (rest.length) {
        const inside = el("div", { class: "charts" });
        const more = el("details", { class: "rest" }, el("summary", { text: `${rest.length} more metrics` }), inside);
        more.addEventListener("toggle", () => {
          if (more.open && !inside.firstChild) inside.append(...rest.slice(0, 200).map((name) => lineChart(name, [name], share)).filter(Boolean));
        });
        charts.push(more);
      }
    }
    const found = charts.filter(Boolean);
    box.replaceChildren(...(found.length ? found : [el("p", { class: "note", text: names.length ? "No metric has that in its name." : "This run has no metrics.jsonl." })]));
  }

  let begun = false;
  function show() {
    if (begun) return;
    begun = true;
    document.getElementById("metric-filter").addEventListener("input", draw);
    document.getElementById("smooth").addEventListener("input", draw);
    const legend = document.getElementById("legend");
    if (Viewer.runs.length > 1) legend.append(...Viewer.runs.map((run, i) => el("span", { class: `value run${i}`, text: `${"AB"[i]} ${i ? "- - -" : "——"} ${run.name}` })));
    draw();
  }

  Viewer.charts = { show, ticks, PHASES };
})();
