// Elements from data. Text goes in by textContent alone, so that no sample can become markup.
"use strict";

(function () {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, properties, children) {
    for (const [name, value] of Object.entries(properties)) {
      if (value === null || value === undefined) continue;
      if (name.startsWith("aria-")) element.setAttribute(name, value);
      else if (value === false) continue;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "text") element.textContent = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  }

  const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
  const svg = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

  function number(value, digits = 3) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    return size >= 1e5 || size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
  }

  // Control characters as pictures (␀ ...), so that they can be seen and do nothing; newline and tab stay.
  const visible = (text) =>
    text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (char) => {
      const code = char.charCodeAt(0);
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      return code === 0x7f ? "␡" : `⟨${code.toString(16)}⟩`;
    });

  // Tabs of one bar: arrows move between them, as the ARIA pattern has it.
  function arrowKeys(bar) {
    bar.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const tabs = [...bar.querySelectorAll("[role=tab]")];
      const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
      next.focus();
      next.click();
      event.preventDefault();
      event.stopPropagation();
    });
  }

  Object.assign(Viewer, { el, svg, number, visible, arrowKeys });
})();
