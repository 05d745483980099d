// The live coverage map. Python owns the grid; the selection goes both ways as [[rows, frames], …].

const MOST_NUMBERED_COLUMNS = 16;
const LEAST_SLICE = 0.1; // of a cell, so that a single fallback among many hits is seen
const format = new Intl.NumberFormat("en");
const counted = (count, noun) => `${format.format(count)} ${noun}${count === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function shortCount(count) {
  for (const [size, letter] of [[1e6, "M"], [1e3, "k"]]) {
    if (count >= size) {
      const value = count / size;
      return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)}${letter}`;
    }
  }
  return String(count);
}

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "style") for (const [key, v] of Object.entries(value)) made.style.setProperty(key, v);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function swatch(category) {
  return element("span", { class: `vgl-map-swatch vgl-map-${category.pattern}`, style: { "--colour": category.colour }, "aria-hidden": "true" });
}

class CoverageMap {
  constructor(model, root) {
    this.model = model;
    this.focus = null; // [rows, frames] of the cell that Tab reaches
    this.anchor = null; // where a range begins
    this.shown = null; // the cell that the detail line tells of
    this.elements = new Map(); // "rows,frames" → its element
    root.classList.add("vgl-map");
    this.summary = element("span", { class: "vgl-map-summary" });
    this.clear = element("button", { type: "button", class: "vgl-map-clear" }, "Clear");
    this.scroll = element("div", { class: "vgl-map-scroll" });
    this.legend = element("div", { class: "vgl-map-legend", role: "group", "aria-label": "Legend: choose all cells of a kind" });
    this.detail = element("div", { class: "vgl-map-detail", "aria-live": "polite" });
    root.append(
      element("div", { class: "vgl-map-head" }, element("strong", {}, "Calls by shape"), this.summary, this.clear),
      this.scroll, this.legend, this.detail,
    );
    this.clear.addEventListener("click", () => this.choose([]));
    this.scroll.addEventListener("click", (event) => this.onClick(event));
    this.scroll.addEventListener("keydown", (event) => this.onKey(event));
    this.scroll.addEventListener("pointerover", (event) => this.tell(this.cellAt(event.target)));
    this.scroll.addEventListener("pointerleave", () => this.tell(null));
    this.scroll.addEventListener("focusin", (event) => this.tell(this.cellAt(event.target)));
    this.scroll.addEventListener("focusout", () => this.tell(null));
    this.onGrid = () => this.draw();
    this.onSelection = () => this.mark();
    model.on("change:grid", this.onGrid);
    model.on("change:selection", this.onSelection);
    this.draw();
  }

  destroy() {
    this.model.off("change:grid", this.onGrid);
    this.model.off("change:selection", this.onSelection);
  }

  // ---------------------------------------------------------------------------------------------- drawing

  draw() {
    const grid = this.model.get("grid");
    const hadFocus = this.scroll.contains(document.activeElement);
    this.shown = null;
    this.grid = grid;
    this.cells = new Map(grid.cells.map((cell) => [`${grid.rows[cell.row]},${grid.columns[cell.column]}`, cell]));
    this.elements.clear();
    this.scroll.replaceChildren();
    this.drawLegend();
    if (!grid.cells.length) {
      this.scroll.append(element("p", { class: "vgl-map-empty" }, "No calls yet, and no graphs."));
      this.focus = this.anchor = null;
      this.mark();
      return;
    }
    const isNumbered = grid.columns.length <= MOST_NUMBERED_COLUMNS;
    const every = isNumbered ? 1 : Math.ceil((0.7 * String(grid.columns.at(-1)).length) / 1.2);
    const table = element("div", {
      class: `vgl-map-grid ${isNumbered ? "vgl-map-wide" : "vgl-map-narrow"}`, role: "grid", "aria-multiselectable": "true",
      "aria-label": "Calls by rows and codec frames asked for. Arrow keys move, Space chooses, Escape clears.",
      "data-lm-suppress-shortcuts": "true", style: { "--columns": grid.columns.length },
    });
    for (const rows of [...grid.rows].reverse()) {
      const line = element("div", { role: "row", class: "vgl-map-row" }, element("div", { role: "rowheader", class: "vgl-map-rowhead" }, String(rows)));
      for (const frames of grid.columns) line.append(this.drawCell(rows, frames, isNumbered));
      table.append(line);
    }
    const foot = element("div", { role: "row", class: "vgl-map-row vgl-map-foot" }, element("div", { role: "columnheader", class: "vgl-map-rowhead" }, "rows"));
    grid.columns.forEach((frames, place) =>
      foot.append(element("div", { role: "columnheader", class: "vgl-map-colhead", "aria-label": `${frames} frames` }, place % every ? "" : String(frames))));
    table.append(foot);
    this.scroll.append(table, element("div", { class: "vgl-map-axis", "aria-hidden": "true" }, "codec frames asked for, each size that occurred"));
    if (!this.focus || !this.elements.has(String(this.focus))) this.focus = [grid.rows.at(-1), grid.columns[0]];
    if (this.anchor && !this.elements.has(String(this.anchor))) this.anchor = null;
    this.elements.get(String(this.focus)).tabIndex = 0;
    if (hadFocus) this.elements.get(String(this.focus)).focus();
    this.mark();
  }

  drawCell(rows, frames, isNumbered) {
    const cell = this.cells.get(`${rows},${frames}`);
    const made = element("div", { role: "gridcell", class: "vgl-map-cell", "data-rows": rows, "data-frames": frames, tabindex: "-1", "aria-label": this.words(rows, frames) });
    if (cell) {
      if (cell.has_graph) made.classList.add("vgl-map-captured");
      made.classList.add("vgl-map-choosable");
      if (cell.parts.length) {
        const least = Math.min(LEAST_SLICE, 1 / cell.parts.length);
        const parts = cell.parts.map((part) => {
          const { colour, pattern } = this.grid.categories[part.category];
          return element("span", { class: `vgl-map-part vgl-map-${pattern}`, style: { "flex-grow": Math.max(part.calls / cell.calls, least), "--colour": colour } });
        });
        made.append(element("span", { class: "vgl-map-parts", style: { opacity: cell.strength } }, ...parts));
        if (isNumbered) made.append(element("span", { class: "vgl-map-count" }, shortCount(cell.calls)));
      }
      made.append(element("span", { class: "vgl-map-tick" }, "✓"));
    }
    this.elements.set(`${rows},${frames}`, made);
    return made;
  }

  drawLegend() {
    const items = this.grid.categories.map((category, place) => {
      const button = element("button", { type: "button", class: "vgl-map-key", title: `Choose all cells with: ${category.name}` }, swatch(category), category.name);
      button.addEventListener("click", () => {
        const those = this.grid.cells.filter((cell) => cell.parts.some((part) => part.category === place)).map((cell) => this.name(cell));
        const chosen = new Set(this.selection().map(String));
        this.toggle(those, !those.every((cell) => chosen.has(String(cell))));
      });
      return button;
    });
    if (this.grid.cells.some((cell) => cell.has_graph)) {
      items.push(element("span", { class: "vgl-map-key" }, element("span", { class: "vgl-map-swatch vgl-map-outline", "aria-hidden": "true" }), this.grid.graph_label));
    }
    this.legend.replaceChildren(...items);
  }

  // What is chosen, without drawing anything anew.
  mark() {
    const chosen = new Set(this.selection().map(String));
    for (const [name, made] of this.elements) {
      const cell = this.cells.get(name);
      if (cell) made.setAttribute("aria-selected", chosen.has(name) ? "true" : "false");
    }
    const calls = [...chosen].reduce((sum, name) => sum + (this.cells.get(name)?.calls ?? 0), 0);
    const all = this.grid.calls;
    this.summary.textContent = chosen.size
      ? `${counted(chosen.size, "cell")} chosen: ${format.format(calls)} of ${counted(all, "call")}${all ? ` (${percent(calls / all)})` : ""}`
      : counted(all, "call");
    if (this.grid.unplaced_calls) this.summary.textContent += `; ${format.format(this.grid.unplaced_calls)} more without a shape`;
    this.clear.hidden = !chosen.size;
    this.tell(this.shown);
  }

  // ------------------------------------------------------------------------------------------------ words

  words(rows, frames) {
    const cell = this.cells.get(`${rows},${frames}`);
    const shape = `${counted(rows, "row")} × ${counted(frames, "frame")}`;
    if (!cell) return `${shape}: not asked for`;
    const parts = cell.parts.map((part) => `${format.format(part.calls)} ${this.grid.categories[part.category].name}`);
    return `${shape}: ${counted(cell.calls, "call")}${parts.length ? `: ${parts.join(", ")}` : ""}${cell.has_graph ? "; has a graph" : ""}`;
  }

  tell(at) {
    const where = at ?? (this.scroll.contains(document.activeElement) ? this.cellAt(document.activeElement) : null);
    this.shown = at;
    const cell = where && this.cells.get(String(where));
    if (!where) {
      this.detail.replaceChildren(element("span", { class: "vgl-map-hint" }, this.grid.cells.length ? "Click cells, or move with the arrow keys and press Space. Shift extends." : ""));
      return;
    }
    const share = cell && this.grid.calls ? `, ${percent(cell.calls / this.grid.calls)} of all` : "";
    const head = element("span", {}, element("strong", {}, `${counted(where[0], "row")} × ${counted(where[1], "frame")}`),
      cell ? `  ${counted(cell.calls, "call")}${share}${cell.has_graph ? ", has a graph" : ""}` : "  not asked for");
    const parts = (cell?.parts ?? []).map((part) => {
      const category = this.grid.categories[part.category];
      const graphs = part.graphs.length ? ` in ${part.graphs.join(", ")}` : "";
      return element("span", { class: "vgl-map-fate" }, swatch(category), `${format.format(part.calls)} × ${category.name}${graphs}`);
    });
    if (cell?.padding_frames) parts.push(element("span", { class: "vgl-map-fate" }, `${counted(cell.padding_frames, "frame")} of padding`));
    this.detail.replaceChildren(head, element("span", { class: "vgl-map-fates" }, ...parts));
  }

  // ---------------------------------------------------------------------------------------------- choosing

  selection() {
    return this.model.get("selection");
  }

  name(cell) {
    return [this.grid.rows[cell.row], this.grid.columns[cell.column]];
  }

  choose(cells) {
    this.model.set("selection", cells.filter((cell) => this.cells.has(String(cell))));
    this.model.save_changes();
    this.mark();
  }

  toggle(cells, isOn) {
    const kept = new Map(this.selection().map((cell) => [String(cell), cell]));
    for (const cell of cells) {
      if (isOn) kept.set(String(cell), cell);
      else kept.delete(String(cell));
    }
    this.choose([...kept.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]));
  }

  press(at, isRange) {
    this.moveTo(at);
    if (isRange && this.anchor) {
      const between = (value, one, other) => value >= Math.min(one, other) && value <= Math.max(one, other);
      const cells = this.grid.cells.map((cell) => this.name(cell));
      this.toggle(cells.filter(([rows, frames]) => between(rows, this.anchor[0], at[0]) && between(frames, this.anchor[1], at[1])), true);
      return;
    }
    this.anchor = at;
    if (this.cells.has(String(at))) this.toggle([at], !this.selection().some((cell) => String(cell) === String(at)));
  }

  moveTo(at) {
    this.elements.get(String(this.focus)).tabIndex = -1;
    this.focus = at;
    const made = this.elements.get(String(at));
    made.tabIndex = 0;
    made.focus();
    this.tell(at);
  }

  cellAt(target) {
    const made = target.closest?.(".vgl-map-cell");
    return made ? [Number(made.dataset.rows), Number(made.dataset.frames)] : null;
  }

  onClick(event) {
    const at = this.cellAt(event.target);
    if (at) this.press(at, event.shiftKey);
  }

  onKey(event) {
    const at = this.cellAt(event.target);
    if (!at) return;
    const { rows, columns } = this.grid;
    const row = rows.indexOf(at[0]);
    const column = columns.indexOf(at[1]);
    const clamped = (list, place) => list[Math.max(0, Math.min(list.length - 1, place))];
    const isCommand = event.ctrlKey || event.metaKey;
    const moves = {
      ArrowLeft: [at[0], clamped(columns, column - 1)],
      ArrowRight: [at[0], clamped(columns, column + 1)],
      ArrowUp: [clamped(rows, row + 1), at[1]],
      ArrowDown: [clamped(rows, row - 1), at[1]],
      Home: [isCommand ? rows.at(-1) : at[0], columns[0]],
      End: [isCommand ? rows[0] : at[0], columns.at(-1)],
    };
    if (event.key in moves) this.moveTo(moves[event.key]);
    else if (event.key === " " || event.key === "Enter") this.press(at, event.shiftKey);
    else if (event.key === "Escape") this.choose([]);
    else if (event.key === "a" && isCommand) this.choose(this.grid.cells.map((cell) => this.name(cell)));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

export default {
  render({ model, el }) {
    const map = new CoverageMap(model, el);
    return () => map.destroy();
  },
};
