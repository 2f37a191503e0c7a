// Python in colours: a small tokenizer of its own, for reading only.
"use strict";

(function () {
  const KEYWORDS = new Set(
    ("False None True and as assert async await break class continue def del elif else except finally for from " +
      "global if import in is lambda match nonlocal not or pass raise return try while with yield").split(" "),
  );
  const TOKEN = new RegExp(
    [
      "(?<comment>#[^\\n]*)",
      "(?<string>(?:[rRbBfFuU]{0,2})(?:'''[\\s\\S]*?(?:'''|$)|\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'(?:\\\\.|[^'\\\\\\n])*'?|\"(?:\\\\.|[^\"\\\\\\n])*\"?))",
      "(?<number>\\b(?:0[xXoObB][\\da-fA-F_]+|\\d[\\d_]*\\.?[\\d_]*(?:[eE][+-]?\\d+)?)j?\\b)",
      "(?<name>[A-Za-z_]\\w*)",
      "(?<operator>[-+*/%@&|^~<>=!:]+)",
    ].join("|"),
    "g",
  );
  const MOST = 100_000; // characters; longer code stays plain

  function python(text) {
    const code = Viewer.el("code", { class: "python" });
    if (text.length > MOST) {
      code.textContent = Viewer.visible(text);
      return code;
    }
    let end = 0;
    for (const match of text.matchAll(TOKEN)) {
      const { comment, string, number, name, operator } = match.groups;
      let kind = comment ? "comment" : string ? "string" : number ? "number" : operator ? "operator" : null;
      if (name) kind = KEYWORDS.has(name) ? "keyword" : text[match.index + name.length] === "(" ? "call" : null;
      if (!kind) continue;
      code.append(Viewer.visible(text.slice(end, match.index)));
      code.append(Viewer.el("span", { class: `py-${kind}`, text: Viewer.visible(match[0]) }));
      end = match.index + match[0].length;
    }
    code.append(Viewer.visible(text.slice(end)));
    return code;
  }

  // Where code stands in what a model wrote: [{start, end, code, name}], for both formats of calls and for fences.
  const BLOCK = /<tool_call>\s*([\s\S]*?)\s*(?:<\/tool_call>|$)|```(?:python3?|py)?[ \t]*\n([\s\S]*?)(?:```|$)/g;

  function blocks(text) {
    const found = [];
    for (const match of text.matchAll(BLOCK)) {
      const block = { start: match.index, end: match.index + match[0].length, code: match[2], name: "python" };
      if (match[1] !== undefined) {
        try {
          const call = JSON.parse(match[1]);
          const given = typeof call.arguments === "string" ? JSON.parse(call.arguments) : call.arguments;
          block.name = String(call.name);
          block.code = typeof given.code === "string" ? given.code : JSON.stringify(given, null, 2);
          block.raw = match[0];
        } catch {
          continue; // malformed: it stays as the model wrote it
        }
      }
      found.push(block);
    }
    return found;
  }

  Viewer.code = { python, blocks };
})();
