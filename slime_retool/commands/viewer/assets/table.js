// The table of samples: only the rows in sight are elements, however many there are.
"use strict";

(function () {
  const { el, number } = Viewer;
  const ROW = 30; // px, as in viewer.css
  const MARGIN = 8; // rows drawn beyond what is in sight

  // [column, heading, class, what a cell says]
  const SHOWN = [
    ["run", "run", "narrow", (t, r) => "AB"[t.columns.run[r]]],
    ["step", "step", "num", null],
    ["index", "sample", "num", null],
    ["prompt", "prompt", "wide", (t, r) => t.prompts[t.columns.prompt[r]].preview],
    ["reward", "reward", "num", null],
    ["right", "right", "narrow", (t, r) => ({ 0: "✗", 1: "✓" })[t.columns.right[r]] ?? "–"],
    ["status", "status", "text", (t, r) => t.names.status[t.columns.status[r]]],
    ["turns", "turns", "num", null],
    ["calls", "calls", "num", null],
    ["errors", "errors", "num less", null],
    ["response_tokens", "tokens", "num", null],
    ["advantage", "advantage", "num less", null],
    ["mismatch", "mismatch", "num less", null],
    ["log_prob", "log-prob", "num less", null],
    ["seconds", "seconds", "num less", null],
    ["version", "weights", "num less", null],
    ["source", "source", "text less", (t, r) => t.names.source[t.columns.source[r]]],
    ["kind", "from", "text less", (t, r) => t.names.kind[t.columns.kind[r]]],
    ["flags", "suspicious", "text", (t, r) => flagNames(t, t.columns.flags[r])],
  ];

  function flagNames(table, bits) {
    return table.flags.filter(([bit]) => bits & bit).map(([, name]) => name).join(", ");
  }

  class Table {
    constructor(place, { onSelect }) {
      this.data = Viewer.table;
      this.onSelect = onSelect;
      this.rows = new Uint32Array(0); // rows of the table, filtered and sorted
      this.selected = -1; // place in this.rows
      this.sort = { column: null, down: false };
      this.shown = SHOWN.filter(([name]) => this.varies(name));
      this.head = el("div", { role: "row", class: "row head", "aria-rowindex": 1 });
      this.space = el("div", { role: "presentation", class: "space" });
      this.body = el("div", { role: "rowgroup", class: "body" }, this.space);
      this.grid = el(
        "div",
        { role: "grid", class: "grid", "aria-label": "Samples", "aria-colcount": this.shown.length },
        el("div", { role: "rowgroup", class: "headgroup" }, this.head),
        this.body,
      );
      place.append(this.grid);
      this.drawHead();
      this.body.addEventListener("scroll", () => this.draw(), { passive: true });
      this.body.addEventListener("click", (event) => {
        const row = event.target.closest("[data-at]");
        if (row) this.select(Number(row.dataset.at));
      });
      new ResizeObserver(() => this.draw()).observe(this.body);
    }

    // A column that says the same of every sample is left out.
    varies(name) {
      if (["index", "prompt", "reward", "status"].includes(name)) return true;
      const values = this.data.columns[name];
      if (name === "flags") return values.some((value) => value > 0);
      return values.some((value) => !Number.isNaN(value) && value !== values[0]);
    }

    drawHead() {
      this.head.replaceChildren(
        ...this.shown.map(([name, heading, kind]) => {
          const on = this.sort.column === name;
          return el(
            "div",
            { role: "columnheader", class: `cell ${kind} c-${name}`, "aria-sort": on ? (this.sort.down ? "descending" : "ascending") : "none" },
            el("button", { text: heading + (on ? (this.sort.down ? " ▾" : " ▴") : ""), onclick: () => this.sortBy(name) }),
          );
        }),
      );
    }

    sortBy(name, down = null) {
      const same = this.sort.column === name;
      this.sort = { column: name, down: down ?? (same ? !this.sort.down : this.first(name)) };
      this.drawHead();
      this.setRows(this.rows, true);
    }

    // Numbers begin with the largest.
    first(name) {
      return !["step", "index", "prompt", "status", "run", "kind", "source"].includes(name);
    }

    setRows(rows, keep = false) {
      const row = keep && this.selected >= 0 ? this.rows[this.selected] : -1;
      this.rows = this.sorted(rows);
      this.selected = row >= 0 ? this.rows.indexOf(row) : -1;
      this.space.style.height = `${this.rows.length * ROW}px`;
      this.grid.setAttribute("aria-rowcount", this.rows.length + 1);
      if (!keep) this.body.scrollTop = 0;
      this.draw(true);
    }

    // Stable, and missing values always last.
    sorted(rows) {
      const { column, down } = this.sort;
      if (!column) return rows;
      const values = this.data.columns[column];
      const sign = down ? -1 : 1;
      const known = rows.filter((row) => !Number.isNaN(values[row]));
      const unknown = rows.filter((row) => Number.isNaN(values[row]));
      known.sort((a, b) => sign * (values[a] - values[b]) || a - b);
      const result = new Uint32Array(rows.length);
      result.set(known);
      result.set(unknown, known.length);
      return result;
    }

    draw(always = false) {
      const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - MARGIN);
      const last = Math.min(this.rows.length, first + Math.ceil(this.body.clientHeight / ROW) + 2 * MARGIN);
      if (!always && first === this.firstDrawn && last === this.lastDrawn) return;
      this.firstDrawn = first;
      this.lastDrawn = last;
      const drawn = [];
      const reached = this.selected >= first && this.selected < last ? this.selected : first;
      for (let at = first; at < last; at++) drawn.push(this.row(at, at === reached));
      const focused = this.space.contains(document.activeElement);
      this.space.replaceChildren(...drawn);
      if (focused) this.focus();
    }

    // One row can be reached by Tab: the selected one if it is in sight, else the first.
    focus() {
      this.space.querySelector("[tabindex='0']")?.focus({ preventScroll: true });
    }

    row(at, reached) {
      const row = this.rows[at];
      const { columns } = this.data;
      const selected = at === this.selected;
      const element = el(
        "div",
        {
          role: "row", "data-at": at, tabindex: reached ? 0 : -1, "aria-rowindex": at + 2, "aria-selected": selected,
          class: `row ${columns.right[row] === 1 ? "right" : ""} ${selected ? "selected" : ""}`,
        },
        ...this.shown.map(([name, , kind, say]) =>
          el("div", { role: "gridcell", class: `cell ${kind} c-${name}`, text: say ? Viewer.visible(say(this.data, row)) : number(columns[name][row]) }),
        ),
      );
      element.style.top = `${at * ROW}px`;
      return element;
    }

    select(at, { tell = true } = {}) {
      if (!this.rows.length) return;
      this.selected = Math.min(Math.max(at, 0), this.rows.length - 1);
      const top = this.selected * ROW;
      if (top < this.body.scrollTop) this.body.scrollTop = top;
      const height = this.body.clientHeight;
      if (top + ROW > this.body.scrollTop + height) this.body.scrollTop = top + ROW - height;
      this.draw(true);
      if (tell) this.onSelect(this.rows[this.selected]);
    }

    move(step) {
      this.select(this.selected < 0 ? 0 : this.selected + step);
    }

    // Select this row of the table if it is among those listed.
    selectRow(row) {
      const at = this.rows.indexOf(row);
      if (at >= 0) this.select(at, { tell: false });
    }
  }

  Viewer.Table = Table;
  Viewer.flagNames = flagNames;
})();
