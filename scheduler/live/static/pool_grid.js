// The pool as a grid on a canvas: block 1 at the top left. Only cells that changed are drawn again.

import { fit } from "./canvas.js";
import { requestColour, themeColour } from "./colours.js";
import { CACHED, FREE } from "./model.js";

const HEIGHT = 350; // that a grid likes to fill
const MIN_CELL = 3;
const MAX_CELL = 20;

export class PoolGrid {
  #canvas;
  #model;
  #output;
  #context = null;
  #width = 0;
  #cell = MAX_CELL;
  #columns = 1;
  #theme = {};
  #pointed = 0; // the block that is pointed at, by mouse or keys
  #isolated = null; // the key of a sequence that is to stand out

  constructor(canvas, output, model) {
    this.#canvas = canvas;
    this.#output = output;
    this.#model = model;
    canvas.addEventListener("pointermove", (event) => this.#point(this.#blockAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.#point(this.#blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.#point(0));
    canvas.addEventListener("blur", () => this.#point(0));
    canvas.addEventListener("focus", () => this.#pointed || this.#point(1));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    new ResizeObserver(([entry]) => {
      if (entry.contentRect.width !== this.#width) this.layOut(entry.contentRect.width);
    }).observe(canvas.parentElement);
  }

  get #numBlocks() {
    return this.#model.blocks.length - 1;
  }

  /** The cells' size and place; draws them all. */
  layOut(width = this.#width) {
    this.#width = Math.max(100, Math.floor(width));
    const room = Math.sqrt((this.#width * HEIGHT) / Math.max(1, this.#numBlocks));
    this.#cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(room)));
    this.#columns = Math.floor(this.#width / this.#cell);
    const rows = Math.max(1, Math.ceil(this.#numBlocks / this.#columns));
    this.#context = fit(this.#canvas, this.#columns * this.#cell, rows * this.#cell);
    this.#theme = Object.fromEntries(["free", "cached", "many", "spot", "ink", "card"].map((n) => [n, themeColour(n)]));
    this.draw(null);
  }

  /** Draws the blocks of these ids; null: all. */
  draw(blocks) {
    if (!this.#context) return;
    if (blocks) for (const block of blocks) this.#drawBlock(block);
    else for (let block = 1; block <= this.#numBlocks; block++) this.#drawBlock(block);
    if (this.#pointed) this.#say();
  }

  /** Lets one sequence's blocks stand out; null: none. */
  isolate(key) {
    if (key === this.#isolated) return;
    this.#isolated = key;
    this.draw(null);
  }

  #drawBlock(block) {
    const context = this.#context;
    const x = ((block - 1) % this.#columns) * this.#cell;
    const y = Math.floor((block - 1) / this.#columns) * this.#cell;
    const size = this.#cell - (this.#cell > 4 ? 2 : 1);
    const value = this.#model.blocks[block];
    const owners = this.#model.owners.get(block);
    context.fillStyle = this.#theme.card;
    context.fillRect(x, y, this.#cell, this.#cell);
    context.globalAlpha = this.#isolated && !owners?.has(this.#isolated) ? 0.25 : 1;
    context.fillStyle = this.#colour(value, owners);
    context.fillRect(x, y, size, size);
    if (value > 0 && !owners) {
      // Hollow: its sequence has just ended.
      context.fillStyle = this.#theme.card;
      context.fillRect(x + 1, y + 1, size - 2, size - 2);
    } else if (value > 1) {
      context.fillStyle = this.#theme.spot;
      const spot = Math.max(1, size / 3);
      context.fillRect(x + (size - spot) / 2, y + (size - spot) / 2, spot, spot);
    }
    context.globalAlpha = 1;
    if (block === this.#pointed) {
      context.strokeStyle = this.#theme.ink;
      context.lineWidth = 2;
      context.strokeRect(x, y, size, size);
    }
  }

  #colour(value, owners) {
    if (value === FREE) return this.#theme.free;
    if (value === CACHED) return this.#theme.cached;
    if (!owners) return this.#theme.ink;
    const [first, ...others] = owners;
    const request = parseInt(first, 10);
    return others.every((key) => parseInt(key, 10) === request) ? requestColour(first) : this.#theme.many;
  }

  #blockAt(event) {
    const column = Math.floor(event.offsetX / this.#cell);
    const block = Math.floor(event.offsetY / this.#cell) * this.#columns + column + 1;
    return column < this.#columns && block <= this.#numBlocks ? block : 0;
  }

  #move(event) {
    const step = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns,
      PageUp: -10 * this.#columns, PageDown: 10 * this.#columns, Home: -Infinity, End: Infinity,
    }[event.key];
    if (step === undefined || !this.#numBlocks) return;
    event.preventDefault();
    this.#point(Math.max(1, Math.min(this.#numBlocks, (this.#pointed || 1) + step)));
    const row = Math.floor((this.#pointed - 1) / this.#columns) * this.#cell;
    const scroller = this.#canvas.parentElement;
    if (row < scroller.scrollTop) scroller.scrollTop = row;
    if (row + this.#cell > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = row + this.#cell - scroller.clientHeight;
    }
  }

  #point(block) {
    const last = this.#pointed;
    if (block === last) return;
    this.#pointed = block;
    // The mark reaches a pixel beyond its cell.
    this.draw([last, last + 1, last + this.#columns, block].filter((one) => one > 0 && one <= this.#numBlocks));
    this.#say();
  }

  #say() {
    const words = this.#pointed ? this.#model.describe(this.#pointed) : "";
    if (this.#output.textContent !== words) this.#output.textContent = words;
  }
}
