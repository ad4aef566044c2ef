// Draws the batch timeline on a canvas: one column for each step, the newest at the right, and one row for each slot.
// The strip below shows the tokens of each step.

import { fit } from "./canvas.js";
import { requestColour, themeColour } from "./colours.js";

const STEP = 5; // width of a column
const SLOTS = 8; // rows are added in groups of this size and stay, so that the page below does not jump
const ROWS = 300; // px shared by all rows
const MAX_ROW = 14;
const LOAD = 34; // height of the strip below
const PADDING = 16; // of the card
const TOP = 4; // space for half of a slot's number
const LABELS = 26; // width of the slots' numbers

export class Timeline {
  #canvas;
  #output;
  #batch;
  #context = null;
  #width = 0;
  #height = 0;
  #numSlots = SLOTS; // rows
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

  /** Sets the size and colours of the canvas and draws everything. */
  layOut() {
    this.#width = this.#canvas.parentElement.clientWidth - 2 * PADDING;
    this.#row = Math.max(1, Math.min(MAX_ROW, Math.floor(ROWS / this.#numSlots)));
    this.#height = TOP + this.#numSlots * this.#row + LOAD + 8;
    this.#context = fit(this.#canvas, this.#width, this.#height);
    this.#theme = Object.fromEntries(["free", "muted", "load", "line"].map((name) => [name, themeColour(name)]));
    this.draw();
  }

  draw() {
    if (!this.#context) return;
    this.#shown = this.#batch.columns.slice(-Math.floor((this.#width - LABELS) / STEP));
    const numSlots = Math.ceil((this.#highestSlot() + 1) / SLOTS) * SLOTS;
    if (numSlots > this.#numSlots) {
      this.#numSlots = numSlots;
      this.layOut();
      return;
    }
    this.#context.clearRect(0, 0, this.#width, this.#height);
    this.#drawSlots();
    this.#drawRuns();
    this.#drawLoad();
  }

  #highestSlot() {
    let highest = 0;
    let last = null;
    for (const column of this.#shown) {
      if (!column || column.cells === last) continue;
      last = column.cells;
      for (const { slot } of last) highest = Math.max(highest, slot);
    }
    return highest;
  }

  #x(position) {
    return this.#width - (this.#shown.length - position) * STEP;
  }

  #drawSlots() {
    const context = this.#context;
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil(14 / this.#row);
    for (let slot = 0; slot < this.#numSlots; slot++) {
      const middle = TOP + slot * this.#row + this.#row / 2;
      if (this.#row >= 6) {
        context.fillStyle = this.#theme.free;
        context.fillRect(LABELS, middle - 0.5, this.#width - LABELS, 1);
      }
      context.fillStyle = this.#theme.muted;
      if (slot % every === 0) context.fillText(slot, LABELS - 7, middle);
    }
  }

  // Columns of an unchanged batch share their cells: such a run is one bar for each slot.
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
    const height = tokens > 1 ? full : Math.max(1, Math.round(full * 0.36));
    this.#context.fillStyle = requestColour(key);
    const top = TOP + slot * this.#row + Math.round((full - height) / 2);
    this.#context.fillRect(left, top, tokens > 1 ? width - 1 : width, height);
  }

  #drawLoad() {
    const context = this.#context;
    const most = Math.max(1, ...this.#shown.map((column) => column?.tokens ?? 0));
    context.fillStyle = this.#theme.line;
    context.fillRect(LABELS, this.#height - 1, this.#width - LABELS, 1);
    context.fillStyle = this.#theme.load;
    this.#shown.forEach((column, i) => {
      // The square root keeps decodes of a few tokens visible beside a prompt of hundreds.
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
    const slot = Math.floor((event.offsetY - TOP) / this.#row);
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
