// The batch timeline on a canvas: a column a step, the newest at the right; a row a slot; below, the tokens of each step.

import { fit } from "./canvas.js";
import { requestColour, themeColour } from "./colours.js";

const STEP = 5; // a column's width
const MIN_SLOTS = 8;
const LOAD = 34; // height of the strip below
const LABELS = 26; // width of the slots' numbers

export class Timeline {
  #canvas;
  #output;
  #batch;
  #context = null;
  #width = 0;
  #height = 0;
  #shown = []; // columns on the screen
  #row = 1; // a slot's height
  #theme = {};

  constructor(canvas, output, batch) {
    this.#canvas = canvas;
    this.#output = output;
    this.#batch = batch;
    canvas.addEventListener("pointermove", (event) => this.#say(event));
    canvas.addEventListener("pointerleave", () => (output.textContent = ""));
    new ResizeObserver(([entry]) => {
      if (entry.contentRect.width !== this.#width) this.layOut();
    }).observe(canvas.parentElement);
  }

  layOut() {
    this.#canvas.style.width = this.#canvas.style.height = ""; // as the style sheet has it
    const { width, height } = this.#canvas.getBoundingClientRect();
    [this.#width, this.#height] = [this.#canvas.parentElement.clientWidth, height];
    this.#context = fit(this.#canvas, width, height);
    this.#theme = Object.fromEntries(["free", "muted", "load", "line", "card"].map((n) => [n, themeColour(n)]));
    this.#width = width;
    this.draw();
  }

  draw() {
    const context = this.#context;
    if (!context) return;
    context.clearRect(0, 0, this.#width, this.#height);
    this.#shown = this.#batch.columns.slice(-Math.floor((this.#width - LABELS) / STEP));
    const numSlots = this.#numSlots();
    this.#row = Math.max(1, Math.floor((this.#height - LOAD - 8) / numSlots));
    this.#drawSlots(numSlots);
    this.#drawRuns();
    this.#drawLoad();
  }

  #numSlots() {
    let highest = MIN_SLOTS - 1;
    let last = null;
    for (const column of this.#shown) {
      if (!column || column.cells === last) continue;
      last = column.cells;
      for (const { slot } of last) highest = Math.max(highest, slot);
    }
    return highest + 1;
  }

  #x(position) {
    return this.#width - (this.#shown.length - position) * STEP;
  }

  #drawSlots(numSlots) {
    const context = this.#context;
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil(14 / this.#row);
    for (let slot = 0; slot < numSlots; slot++) {
      const middle = slot * this.#row + this.#row / 2;
      if (this.#row >= 6) {
        context.fillStyle = this.#theme.free;
        context.fillRect(LABELS, middle - 0.5, this.#width - LABELS, 1);
      }
      context.fillStyle = this.#theme.muted;
      if (slot % every === 0) context.fillText(slot, LABELS - 7, middle);
    }
  }

  // Columns of an unchanged batch share their cells: such a run is one bar a slot.
  #drawRuns() {
    const shown = this.#shown;
    for (let start = 0, end; start < shown.length; start = end) {
      end = start + 1;
      if (!shown[start]) continue;
      while (shown[end]?.cells === shown[start].cells) end++;
      const [left, width] = [this.#x(start), (end - start) * STEP];
      for (const cell of shown[start].cells) this.#drawBar(cell, left, width);
    }
  }

  #drawBar({ slot, key, tokens }, left, width) {
    const gap = this.#row >= 6 ? 1 : 0;
    const full = this.#row - gap;
    const height = tokens > 1 ? full : Math.max(1, Math.round(full * 0.42));
    this.#context.fillStyle = requestColour(key);
    this.#context.fillRect(left, slot * this.#row + Math.round((full - height) / 2), tokens > 1 ? width - 1 : width, height);
  }

  #drawLoad() {
    const context = this.#context;
    const most = Math.max(1, ...this.#shown.map((column) => column?.tokens ?? 0));
    context.fillStyle = this.#theme.line;
    context.fillRect(LABELS, this.#height - 1, this.#width - LABELS, 1);
    context.fillStyle = this.#theme.load;
    this.#shown.forEach((column, i) => {
      // A square root: a prompt of hundreds of tokens beside decodes of a few, and both are seen.
      const height = column ? Math.max(1, Math.sqrt(column.tokens / most) * (LOAD - 6)) : 0;
      context.fillRect(this.#x(i), this.#height - 1 - height, STEP - 1, height);
    });
    context.fillStyle = this.#theme.muted;
    context.fillText(most, LABELS - 7, this.#height - LOAD + 8);
  }

  #say(event) {
    const column = this.#shown[Math.floor((event.offsetX - this.#x(0)) / STEP)];
    if (!column || event.offsetX < LABELS) {
      this.#output.textContent = "";
      return;
    }
    const slot = Math.floor(event.offsetY / this.#row);
    const cell = column.cells.find((one) => one.slot === slot);
    const time = column.micros ? `, ${(column.micros / 1000).toFixed(1)} ms on the executor` : "";
    const where = cell ? ` Slot ${slot}: request ${cell.key.split(".")[0]}, ${plural(cell.tokens, "token")}.` : "";
    const size = `${plural(column.tokens, "token")} of ${plural(column.cells.length, "sequence")}`;
    this.#output.textContent = `Step ${column.step}: ${size}${time}.${where}`;
  }
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
