// Draws the pool as a grid on a canvas, block 1 at the top left. Draws only the cells that changed, unless the layout changed.

import { fit } from "./canvas.js";
import { requestColour, themeColour } from "./colours.js";
import { CACHED, FREE } from "./model.js";
import { HEIGHT, layOutPool, nextSize } from "./pool_layout.js";

const COLOURS = ["free", "cached", "many", "spot", "ink", "muted", "card"];

export class PoolGrid {
  #canvas;
  #model;
  #output;
  #context = null;
  #width = 0;
  #layout = null;
  #tallest = 0; // height of the tallest layout in this view, so far
  #view = { cell: 0, isWhole: false }; // what the user chose; cell 0: fit
  #theme = {};
  #pointed = 0; // the block that the mouse or the keys point at; in a gap any of its blocks
  #isolated = null; // the key of the sequence that stands out

  constructor(canvas, output, model) {
    this.#canvas = canvas;
    this.#output = output;
    this.#model = model;
    const follow = (event) => this.#point(this.#layout?.blockAt(event.offsetX, event.offsetY) ?? 0);
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
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

  get isWhole() {
    return this.#view.isWhole;
  }

  /** Lays out all blocks and draws them. */
  layOut(width = this.#width) {
    this.#width = Math.max(100, Math.floor(width));
    this.#tallest = 0;
    this.#show(layOutPool(this.#model.blocks, this.#width, this.#view));
  }

  /** Draws the blocks of these ids; null: all. */
  draw(blocks) {
    if (!this.#context) return;
    const layout = layOutPool(this.#model.blocks, this.#width, this.#view);
    if (!layout.equals(this.#layout)) this.#show(layout);
    else if (blocks) this.#drawBlocks(blocks);
    else this.#drawAll();
    if (this.#pointed) this.#say();
  }

  /** Makes the cells one size larger (1) or smaller (-1); the block that is pointed at stays where it is. */
  zoom(step) {
    if (this.#layout) this.#change({ cell: nextSize(this.#layout.cell, step) });
  }

  /** Makes the cells as large as fits. */
  fit() {
    this.#change({ cell: 0 });
  }

  /** Draws every block (true), or folds long unused runs (false). */
  showWhole(isWhole) {
    this.#change({ isWhole, cell: 0 });
  }

  /** Lets one sequence's blocks stand out; null: none. */
  isolate(key) {
    if (key === this.#isolated) return;
    this.#isolated = key;
    this.draw(null);
  }

  #change(view) {
    const scroller = this.#canvas.parentElement;
    const anchor = this.#pointed || this.#layout?.blockAt(0, scroller.scrollTop) || 1;
    const before = this.#layout?.rectangle(anchor).y ?? 0;
    Object.assign(this.#view, view);
    this.layOut();
    scroller.scrollTop += this.#layout.rectangle(anchor).y - before;
  }

  #show(layout) {
    this.#layout = layout;
    this.#context = fit(this.#canvas, layout.columns * layout.cell, Math.max(layout.cell, layout.height));
    // Gaps open and close at every frame: the height stays, so that the page below does not jump.
    this.#tallest = Math.max(this.#tallest, layout.height);
    this.#canvas.parentElement.style.minHeight = `${Math.min(this.#tallest, HEIGHT)}px`;
    this.#theme = Object.fromEntries(COLOURS.map((name) => [name, themeColour(name)]));
    this.#drawAll();
  }

  #drawAll() {
    for (const band of this.#layout.bands) {
      if (band.isGap) this.#drawGap(band);
      else for (let block = band.first; block <= band.last; block++) this.#drawBlock(block);
    }
  }

  #drawBlocks(blocks) {
    const gaps = new Set();
    for (const block of blocks) {
      const band = this.#layout.bandOf(block);
      if (band.isGap) gaps.add(band);
      else this.#drawBlock(block);
    }
    for (const gap of gaps) this.#drawGap(gap);
  }

  #drawBlock(block) {
    const context = this.#context;
    const { x, y, width: cell } = this.#layout.rectangle(block);
    const size = cell - (cell > 4 ? 2 : 1);
    const value = this.#model.blocks[block];
    const owners = this.#model.owners.get(block);
    context.fillStyle = this.#theme.card;
    context.fillRect(x, y, cell, cell);
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
    if (block === this.#pointed) this.#mark(x, y, size, size);
  }

  #drawGap({ first, last }) {
    const context = this.#context;
    const { x, y, width, height } = this.#layout.rectangle(first);
    context.fillStyle = this.#theme.card;
    context.fillRect(x, y, width, height);
    context.fillStyle = this.#theme.free;
    context.fillRect(x, y + 2, width - 2, height - 6);
    context.fillStyle = this.#theme.muted;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText(this.#model.describeRun(first, last), x + 8, y + height / 2 - 1, width - 16);
    if (first <= this.#pointed && this.#pointed <= last) this.#mark(x + 1, y + 2, width - 4, height - 6);
  }

  #mark(x, y, width, height) {
    this.#context.strokeStyle = this.#theme.ink;
    this.#context.lineWidth = 2;
    this.#context.strokeRect(x, y, width, height);
  }

  #colour(value, owners) {
    if (value === FREE) return this.#theme.free;
    if (value === CACHED) return this.#theme.cached;
    if (!owners) return this.#theme.ink;
    const [first, ...others] = owners;
    const request = parseInt(first, 10);
    return others.every((key) => parseInt(key, 10) === request) ? requestColour(first) : this.#theme.many;
  }

  #move(event) {
    if (!this.#numBlocks || !this.#layout || event.ctrlKey || event.metaKey) return;
    const columns = this.#layout.columns;
    const step = {
      ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns,
      PageUp: -10 * columns, PageDown: 10 * columns, Home: -Infinity, End: Infinity,
    }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    // A gap counts as one cell: a step leaves it at the end that it leads to.
    const { first, last, isGap } = this.#layout.bandOf(this.#pointed || 1);
    const start = isGap ? (step > 0 ? last : first) : this.#pointed || 1;
    const by = isGap && Math.abs(step) <= columns ? Math.sign(step) : step;
    this.#point(Math.max(1, Math.min(this.#numBlocks, start + by)));
    this.#reveal(this.#layout.rectangle(this.#pointed));
  }

  #reveal({ y, height }) {
    const scroller = this.#canvas.parentElement;
    if (y < scroller.scrollTop) scroller.scrollTop = y;
    const hidden = y + height - scroller.scrollTop - scroller.clientHeight;
    if (hidden > 0) scroller.scrollTop += hidden;
  }

  #point(block) {
    const last = this.#pointed;
    if (block === last || !this.#layout) return;
    this.#pointed = block;
    // The mark reaches a pixel beyond its cell.
    const touched = [last, last + 1, last + this.#layout.columns, block];
    this.#drawBlocks(touched.filter((one) => one > 0 && one <= this.#numBlocks));
    this.#say();
  }

  #say() {
    const band = this.#pointed ? this.#layout.bandOf(this.#pointed) : null;
    let words = "";
    if (band?.isGap) words = `Blocks ${band.first} to ${band.last}: ${this.#model.describeRun(band.first, band.last)}`;
    else if (band) words = this.#model.describe(this.#pointed);
    if (this.#output.textContent !== words) this.#output.textContent = words;
  }
}
