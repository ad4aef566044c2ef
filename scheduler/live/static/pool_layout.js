// Where each block of the pool lies on the canvas. Long unused runs of blocks fold into a gap, so that a large pool shows
// the blocks that are in use. Nothing here draws.
//
//     ┌─┬─┬─┬─┬─┬─┬─┬─┐
//     │1│2│3│4│5│6│7│8│   band of rows: blocks 1 to 16
//     │9│…              │
//     ├─────────────────┤
//     │ 112 free blocks │   gap: blocks 17 to 128
//     ├─┬─┬─┬─┬─┬─┬─┬─┬─┤
//     │129│…              band of rows: blocks 129 and following

import { FREE } from "./model.js";

export const HEIGHT = 350; // px that the pool should fit into
const GAP_HEIGHT = 24;
const MIN_FOLDED_ROWS = 3; // shorter runs are drawn
const SIZES = [3, 4, 5, 6, 8, 10, 13, 16, 20, 26, 32, 40]; // of a cell, in px
const WHOLE_SIZES = [20, 16, 13, 10]; // a pool that fits with these is drawn without gaps
const FOLDED_SIZES = [...WHOLE_SIZES, 8];
const KEEPS = [(value) => value !== FREE, (value) => value > 0]; // first the free blocks fold, then cached ones too

export class PoolLayout {
  /** `bands` are {first, last, isGap, top}, in the order of their blocks; blocks are numbered from 1. */
  constructor(blocks, width, cell, keeps) {
    this.width = width;
    this.cell = cell;
    this.columns = Math.max(1, Math.floor(width / cell));
    this.numBlocks = blocks.length - 1;
    this.keeps = keeps;
    this.bands = keeps ? folded(blocks, this.columns, keeps) : [{ first: 1, last: this.numBlocks, isGap: false }];
    this.height = 0;
    for (const band of this.bands) {
      band.top = this.height;
      const numRows = Math.ceil((band.last - band.first + 1) / this.columns);
      this.height += band.isGap ? GAP_HEIGHT : numRows * cell;
    }
  }

  bandOf(block) {
    return this.bands.find(({ last }) => block <= last);
  }

  /** The rectangle of a block, or of the gap that holds it. */
  rectangle(block) {
    const { first, top, isGap } = this.bandOf(block);
    if (isGap) return { x: 0, y: top, width: this.columns * this.cell, height: GAP_HEIGHT };
    const row = Math.floor((block - first) / this.columns);
    const column = (block - first) % this.columns;
    return { x: column * this.cell, y: top + row * this.cell, width: this.cell, height: this.cell };
  }

  /** The block at a point; in a gap its first block; 0 outside of the pool. */
  blockAt(x, y) {
    const band = this.bands.findLast(({ top }) => top <= y);
    const column = Math.floor(x / this.cell);
    if (!band || y >= this.height || column >= this.columns) return 0;
    if (band.isGap) return band.first;
    const block = band.first + Math.floor((y - band.top) / this.cell) * this.columns + column;
    return block <= band.last ? block : 0;
  }

  equals(other) {
    return (
      this.cell === other.cell && this.width === other.width && this.bands.length === other.bands.length &&
      this.bands.every((band, i) => band.last === other.bands[i].last && band.isGap === other.bands[i].isGap)
    );
  }
}

/** Lays out the pool; `cell` is the size that the user chose, or 0 for the largest that fits. */
export function layOutPool(blocks, width, { cell = 0, isWhole = false } = {}) {
  const fitting = isWhole ? wholePool(blocks, width) : foldedPool(blocks, width);
  return cell ? new PoolLayout(blocks, width, cell, fitting.keeps) : fitting;
}

/** The next larger (`step` 1) or smaller (-1) size of a cell; the same at the end. */
export function nextSize(cell, step) {
  const sizes = step > 0 ? SIZES.filter((size) => size > cell) : SIZES.filter((size) => size < cell).reverse();
  return sizes[0] ?? cell;
}

function wholePool(blocks, width) {
  const room = Math.sqrt((width * HEIGHT) / Math.max(1, blocks.length - 1));
  return new PoolLayout(blocks, width, Math.max(SIZES[0], Math.min(WHOLE_SIZES[0], Math.floor(room))), null);
}

function foldedPool(blocks, width) {
  const candidates = [
    ...WHOLE_SIZES.map((cell) => [cell, null]),
    ...KEEPS.flatMap((keeps) => FOLDED_SIZES.map((cell) => [cell, keeps])),
  ];
  let layout;
  for (const [cell, keeps] of candidates) {
    layout = new PoolLayout(blocks, width, cell, keeps);
    if (layout.height <= HEIGHT) break;
  }
  return layout; // if nothing fits, the last one scrolls
}

function folded(blocks, columns, keeps) {
  const numBlocks = blocks.length - 1;
  const lastOf = (row) => Math.min(numBlocks, (row + 1) * columns);
  const runs = []; // {isGap, start, end}, of rows
  for (let row = 0; row * columns < numBlocks; row++) {
    // The first row is always drawn: an idle pool is not a gap alone.
    const isGap = row > 0 && !blocks.subarray(row * columns + 1, lastOf(row) + 1).some(keeps);
    if (runs.at(-1)?.isGap === isGap) runs.at(-1).end = row + 1;
    else runs.push({ isGap, start: row, end: row + 1 });
  }
  const bands = [];
  for (const { isGap: isUnused, start, end } of runs) {
    const isGap = isUnused && end - start >= MIN_FOLDED_ROWS;
    if (bands.length && !isGap && !bands.at(-1).isGap) bands.at(-1).last = lastOf(end - 1);
    else bands.push({ first: start * columns + 1, last: lastOf(end - 1), isGap });
  }
  return bands;
}
