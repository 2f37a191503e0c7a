// One sample: the conversation as the model saw it, its tokens in colours, its group, its prompt over the steps.
"use strict";

(function () {
  const { el, number, visible } = Viewer;
  const CHARACTERS = 20_000; // of one part that are drawn at once; a button shows more
  const TOKENS = 4_000;
  const CARDS = 12; // samples side by side at once

  // [name, what it shows, colour of (value, scale) or null for none]
  const COLOURINGS = {
    mask: "learned tokens are blue, a tool's are orange, the prompt has no colour",
    advantage: "green raises a token's probability, red lowers it",
    "log-prob": "the darker, the less the engine expected the token",
    difference: "engine minus trainer: red where the engine's log-prob is higher, blue where it is lower",
    none: "no colours",
  };

  let current = null; // {row, tab}
  let colouring = "mask";
  let turn = 0; // counts what was asked for, so that a slow piece never overwrites a later sample
  const place = () => document.getElementById("sample");

  // Parts of text

  // `text` in steps of CHARACTERS, each drawn by `draw`.
  function inSteps(text, draw) {
    const box = el("div", { class: "steps" });
    let end = 0;
    const more = el("button", { class: "more" });
    const next = () => {
      const from = end;
      end = Math.min(text.length, end + CHARACTERS);
      more.before(draw(text.slice(from, end)));
      more.textContent = `show more (${(text.length - end).toLocaleString("en")} characters are left)`;
      more.hidden = end === text.length;
    };
    more.addEventListener("click", next);
    box.append(more);
    next();
    return box;
  }

  // Text with its marks (<|im_start|>, <tool_call>) dimmed.
  function marked(text) {
    const box = el("span", { class: "said" });
    let end = 0;
    for (const match of text.matchAll(/<\|[^<>|\s]{1,40}\|>|<\/?[a-z_]{1,30}>/g)) {
      box.append(visible(text.slice(end, match.index)), el("span", { class: "mark", text: match[0] }));
      end = match.index + match[0].length;
    }
    box.append(visible(text.slice(end)));
    return box;
  }

  const plain = (text) => el("span", { class: "said", text: visible(text) });

  function modelPart(text) {
    const found = text.length > CHARACTERS ? [] : Viewer.code.blocks(text);
    if (!found.length) return inSteps(text, marked);
    const box = el("div");
    let end = 0;
    for (const block of found) {
      box.append(marked(text.slice(end, block.start)));
      box.append(
        el("figure", { class: "code" },
          el("figcaption", { text: block.raw ? `call of ${visible(block.name)}` : "code" }),
          el("pre", { tabindex: 0 }, Viewer.code.python(block.code)),
          block.raw ? el("details", {}, el("summary", { text: "as written" }), el("pre", { tabindex: 0, text: visible(block.raw) })) : null,
        ),
      );
      end = block.end;
    }
    box.append(marked(text.slice(end)));
    return box;
  }

  const NAMES = { prompt: "Prompt", model: "Model", tool: "Tool" };

  function part(kind, text, note = "") {
    return el("section", { class: `part ${kind}` },
      el("h4", {}, el("span", { text: NAMES[kind] }), el("span", { class: "dim", text: note })),
      kind === "model" ? modelPart(text) : inSteps(text, marked),
    );
  }

  function conversation(text) {
    let model = 0;
    const note = (kind) => {
      if (kind === "model") {
        const version = text.versions[model++];
        return `turn ${model}` + (version === undefined ? "" : `, weights ${version}`);
      }
      const calls = text.spans.filter((span) => span.name === "tool" && span.turn === model);
      return ["not learned", ...calls.map((span) => `${span.status}, ${number(span.seconds)} s`)].join("; ");
    };
    return el("div", { class: "conversation" },
      text.prompt.tools ? el("details", { class: "offered" },
        el("summary", { text: `${text.prompt.tools.length} tool(s) offered` }),
        el("pre", { tabindex: 0, text: visible(JSON.stringify(text.prompt.tools, null, 2)) })) : null,
      part("prompt", text.prompt.text, text.prompt.rendered ? "as rendered" : "messages; the dump has no rendered text"),
      ...text.parts.map(([kind, said]) => part(kind, said, note(kind))),
      text.error ? el("div", { class: "error" }, inSteps(text.error, plain)) : null,
    );
  }

  // Tokens

  const extent = (values) => (values ?? []).reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);

  function colourer(tokens) {
    const most = { advantage: extent(tokens.advantage), difference: 0 };
    const gap = (i) =>
      tokens.trainer && tokens.mask[i] && tokens.trainer[i] !== null && tokens.engine ? tokens.engine[i] - tokens.trainer[i] : null;
    for (let i = 0; i < tokens.mask.length; i++) most.difference = Math.max(most.difference, Math.abs(gap(i) ?? 0));
    const both = (value, scale, above, below) =>
      value ? `rgb(var(--${value > 0 ? above : below}) / ${(0.08 + 0.5 * Math.min(1, Math.abs(value) / (scale || 1))).toFixed(3)})` : "";
    const colours = {
      mask: (i) => `rgb(var(--${tokens.mask[i] ? "learned" : "tool"}) / 0.25)`,
      advantage: (i) => (tokens.mask[i] && tokens.advantage ? both(tokens.advantage[i], most.advantage, "good", "bad") : ""),
      "log-prob": (i) => (tokens.mask[i] && tokens.engine ? both(Math.min(0, tokens.engine[i] ?? 0), 5, "unlikely", "unlikely") : ""),
      difference: (i) => both(gap(i), most.difference, "bad", "learned"),
      none: () => "",
    };
    return { colour: (i) => colours[colouring](i), gap, most };
  }

  function tokenView(tokens) {
    if (!tokens) {
      return el("p", { class: "note", text: "The dump does not hold the tokens' texts. `slime-retool view RUN --out DIR --hf-checkpoint MODEL` reads them with the model's tokenizer." });
    }
    const { colour, gap, most } = colourer(tokens);
    const info = el("p", { class: "info", role: "status", text: "Point at a token, or walk with ← and →" });
    const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys walk through them" });
    const spans = []; // of the response
    let at = -1, drawn = 0;

    const word = (text) => visible(text).replace(/\n/g, "⏎\n") || "∅";
    const describe = (i) => {
      const facts = [
        `${tokens.prompt.length + i}: ${JSON.stringify(tokens.response[i]).slice(0, 60)}`,
        tokens.mask[i] ? "learned" : "not learned",
      ];
      if (tokens.mask[i]) {
        facts.push(`engine ${number(tokens.engine?.[i])}`);
        if (tokens.trainer) facts.push(`trainer ${number(tokens.trainer[i])}`, `difference ${number(gap(i))}`);
        if (tokens.advantage) facts.push(`advantage ${number(tokens.advantage[i])}`);
      }
      info.textContent = visible(facts.join("  ·  "));
    };
    const go = (i) => {
      while (drawn <= i && drawn < tokens.response.length) drawMore();
      if (!spans[i]) return;
      spans[at]?.classList.remove("at");
      at = i;
      spans[at].classList.add("at");
      spans[at].scrollIntoView({ block: "nearest" });
      describe(at);
    };
    const more = el("button", { class: "more", onclick: () => drawMore() });
    function drawMore() {
      const end = Math.min(tokens.response.length, drawn + TOKENS);
      for (; drawn < end; drawn++) {
        const span = el("span", { class: "tok", text: word(tokens.response[drawn]) });
        span.style.backgroundColor = colour(drawn);
        spans.push(span);
        more.before(span);
      }
      more.textContent = `show more (${tokens.response.length - drawn} tokens are left)`;
      more.hidden = drawn === tokens.response.length;
    }
    const prompt = tokens.prompt.slice(-TOKENS);
    if (prompt.length < tokens.prompt.length) box.append(el("span", { class: "dim", text: `… ${tokens.prompt.length - prompt.length} tokens before ` }));
    for (const text of prompt) box.append(el("span", { class: "tok of-prompt", text: word(text) }));
    box.append(more);
    drawMore();
    box.addEventListener("mouseover", (event) => {
      const i = spans.indexOf(event.target);
      if (i >= 0) describe(i);
    });
    const worst = () => {
      let best = -1;
      for (let i = 0; i < tokens.mask.length; i++) if (gap(i) !== null && (best < 0 || Math.abs(gap(i)) > Math.abs(gap(best)))) best = i;
      if (best >= 0) go(best);
    };
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) go(Math.min(Math.max(at + step, 0), tokens.response.length - 1));
      if (event.key === "w") worst();
      if (step || event.key === "w") event.preventDefault(), event.stopPropagation();
    });

    const legend = el("span", { class: "dim" });
    const missing = { advantage: !tokens.advantage, difference: !tokens.trainer };
    const choices = Object.keys(COLOURINGS).map((name) =>
      el("button", { role: "radio", "data-colouring": name, text: name, onclick: () => recolour(name), disabled: missing[name] }),
    );
    function recolour(name) {
      if (missing[name]) name = "mask";
      colouring = name;
      for (const choice of choices) choice.setAttribute("aria-checked", choice.dataset.colouring === name);
      spans.forEach((span, i) => (span.style.backgroundColor = colour(i)));
      const scale = name === "advantage" || name === "difference" ? ` (full colour: ${number(most[name])})` : "";
      legend.textContent = COLOURINGS[name] + scale;
    }
    recolour(colouring);
    Viewer.sample.recolour = () => {
      const names = Object.keys(COLOURINGS).filter((name) => !missing[name]);
      recolour(names[(names.indexOf(colouring) + 1) % names.length]);
    };
    return el("div", {},
      el("div", { class: "bar" },
        el("div", { role: "radiogroup", "aria-label": "Colour of tokens", class: "choices" }, ...choices),
        tokens.trainer ? el("button", { text: "worst difference", onclick: worst }) : null),
      el("p", { class: "legend-line" }, legend), info, box);
  }

  // Samples side by side

  const value = (name, row) => Viewer.table.columns[name][row];
  const verdict = (row) => ({ 0: "wrong", 1: "right" })[value("right", row)] ?? "not judged";
  const statusOf = (row) => Viewer.table.names.status[value("status", row)];

  function heading(row, note) {
    return el("header", {},
      el("button", { class: "open", text: `sample ${value("index", row)}`, onclick: () => Viewer.app.open(row) }),
      el("span", { class: `verdict ${verdict(row)}`, text: verdict(row) }),
      el("span", { text: `reward ${number(value("reward", row))}` }),
      Number.isNaN(value("advantage", row)) ? null : el("span", { text: `advantage ${number(value("advantage", row))}` }),
      el("span", { class: "dim", text: `${note} ${statusOf(row)}, ${value("turns", row)} turns, ${value("response_tokens", row)} tokens` }),
    );
  }

  async function sideBySide(rows, noteOf) {
    const list = el("div", { class: "cards", tabindex: 0, role: "group", "aria-label": "Samples side by side" });
    const more = el("button", { class: "more" });
    let end = 0;
    const next = async () => {
      const chosen = rows.slice(end, (end += CARDS));
      const texts = await Promise.all(chosen.map((row) => Viewer.store.textOf(row)));
      chosen.forEach((row, i) =>
        more.before(el("section", { class: `card ${row === current.row ? "this" : ""}`, "aria-label": `sample ${value("index", row)}` },
          heading(row, noteOf(row)), ...texts[i].parts.map(([kind, said]) => part(kind, said)))),
      );
      more.textContent = `${rows.length - end} more`;
      more.hidden = end >= rows.length;
    };
    more.addEventListener("click", next);
    list.append(more);
    await next();
    return list;
  }

  function rowsWhere(test) {
    const rows = [];
    for (let row = 0; row < Viewer.table.size; row++) if (test(row)) rows.push(row);
    return rows;
  }

  const same = (name, row, other) => value(name, row) === value(name, other);
  const groupOf = (row) =>
    rowsWhere((other) => ["group", "step", "kind", "run"].every((name) => same(name, row, other)));
  const promptOf = (row) =>
    rowsWhere((other) => same("prompt", row, other) && same("run", row, other)).sort((a, b) => value("step", a) - value("step", b));

  // The same prompt in both runs: pairs at the same step where there are such, else the steps nearest to it.
  function pairsOf(row) {
    const step = value("step", row);
    const near = (other) => Math.abs(value("step", other) - step);
    const found = rowsWhere((other) => same("prompt", row, other) && same("kind", row, other)).sort((a, b) => near(a) - near(b) || a - b);
    const of = (run) => found.filter((other) => value("run", other) === run);
    const [a, b] = [of(0), of(1)];
    return a.flatMap((other, i) => (b[i] === undefined ? [] : [other, b[i]]));
  }

  // Details

  function facts(pairs) {
    return el("dl", { class: "facts" }, ...pairs.flatMap(([name, said]) => [el("dt", { text: name }), el("dd", {}, inSteps(String(said), plain))]));
  }

  function details(row, text) {
    const json = (thing) => (thing === null || typeof thing !== "object" ? String(thing) : JSON.stringify(thing, null, 1));
    const { columns, names } = Viewer.table;
    const known = Object.keys(columns).filter((name) => name !== "prompt" && name !== "flags" && !Number.isNaN(columns[name][row]));
    return el("div", {},
      facts([
        ["label", text.label ?? "–"], ["reward", json(text.reward)], ["error", text.error ?? "–"],
        ["weight versions", text.versions.join(", ") || "–"],
        ...known.filter((name) => name !== "reward").map((name) => [name.replaceAll("_", " "), names[name]?.[columns[name][row]] ?? number(columns[name][row], 5)]),
        ["suspicious", Viewer.table.flags.filter(([bit]) => columns.flags[row] & bit).map(([, , meaning]) => meaning).join("; ") || "–"],
        ["metadata", json(text.metadata)],
      ]),
      text.spans?.length ? el("table", { class: "plain" },
        el("caption", { text: "Spans" }),
        el("thead", {}, el("tr", {}, ...["what", "after (s)", "seconds", "status"].map((name) => el("th", { scope: "col", text: name })))),
        el("tbody", {}, ...text.spans.map((span) => el("tr", {},
          ...[span.name, number(span.start - text.spans[0].start), number(span.seconds), span.status].map((cell) => el("td", { text: visible(String(cell)) })))))) : null,
    );
  }

  // The pane

  const TABS = {
    conversation: { label: "Conversation", show: async (row) => conversation(await Viewer.store.textOf(row)) },
    tokens: { label: "Tokens", show: async (row) => tokenView(await Viewer.store.tokensOf(row)) },
    group: { label: "Group", rows: groupOf, show: (row) => sideBySide(groupOf(row), () => "") },
    prompt: { label: "Over steps", rows: promptOf, show: (row) => sideBySide(promptOf(row), (other) => `step ${value("step", other)},`) },
    runs: { label: "Both runs", rows: pairsOf, show: (row) => sideBySide(pairsOf(row), (other) => `run ${"AB"[value("run", other)]}, step ${value("step", other)},`) },
    details: { label: "Details", show: async (row) => details(row, await Viewer.store.textOf(row)) },
  };

  const tabs = () => Object.keys(TABS).filter((name) => name !== "runs" || Viewer.runs.length > 1);

  async function show(row, tab = current?.tab ?? "conversation") {
    current = { row, tab };
    const asked = ++turn;
    Viewer.sample.recolour = null;
    const bar = el("div", { role: "tablist", class: "tabs", "aria-label": "Views of the sample" },
      ...tabs().map((name) => el("button", {
        role: "tab", id: `sample-tab-${name}`, "aria-controls": "sample-body", "aria-selected": name === tab, tabindex: name === tab ? 0 : -1,
        text: TABS[name].label + (TABS[name].rows ? ` (${TABS[name].rows(row).length})` : ""), onclick: () => show(row, name).then(() => document.getElementById(`sample-tab-${name}`)?.focus()),
      })),
    );
    Viewer.arrowKeys(bar);
    const bits = value("flags", row);
    const body = el("div", { id: "sample-body", role: "tabpanel", class: "sample-body", "aria-labelledby": `sample-tab-${tab}` },
      el("p", { class: "dim", text: "…" }));
    place().replaceChildren(
      el("div", { class: "sample-head" },
        el("button", { class: "back", text: "← table", onclick: () => Viewer.app.close() }),
        el("h2", { text: `Sample ${value("index", row)}` }),
        el("span", { class: `verdict ${verdict(row)}`, text: verdict(row) }),
        el("span", { text: `reward ${number(value("reward", row))}` }),
        el("span", { text: `label ${visible(Viewer.table.prompts[value("prompt", row)].label)}` }),
        el("span", { class: "dim", text: `step ${value("step", row)}, ${Viewer.table.names.kind[value("kind", row)]}, ${statusOf(row)}` }),
        ...Viewer.table.flags.filter(([bit]) => bits & bit).map(([, name, meaning]) => el("span", { class: "flag", title: meaning, text: name })),
      ), bar, body);
    let content;
    try {
      content = await TABS[tab].show(row);
    } catch (error) {
      content = el("p", { class: "error", text: error.message });
    }
    if (asked === turn) body.replaceChildren(content);
  }

  function nextTab(step) {
    if (!current) return;
    const names = tabs();
    show(current.row, names[(names.indexOf(current.tab) + step + names.length) % names.length]);
  }

  Viewer.sample = { show, nextTab, recolour: null, get row() { return current?.row ?? -1; } };
})();
