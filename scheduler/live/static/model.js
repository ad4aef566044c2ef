// The state of the server, updated by frames. scheduler/live/frames.py documents the fields of a frame.
// A sequence's key is "request.index". Nothing here depends on the screen.

export const FREE = 0;
export const CACHED = -1;

/** Returns the share of a sequence's known tokens that is computed, or null if no more than its newest one is missing. */
export function prefillShare({ tokens, computed }) {
  return computed < tokens - 1 ? computed / tokens : null;
}

export class Model {
  server = { state: "connecting" };
  numbers = {};
  blocks = new Int32Array(1); // by block id: ref count, FREE or CACHED
  owners = new Map(); // block id → keys of the sequences whose block tables contain it
  sequences = new Map(); // key → {key, name, slot, promptTokens, tokens, computed, table}
  waiting = []; // {key, name, tokens, isPreempted}, the head of the queue

  /** Applies a frame. Returns the ids of the blocks that look different now, or null for all of them. */
  apply(frame) {
    if (frame.server) this.server = frame.server;
    if (frame.is_key) this.#clear();
    const changed = new Set();
    this.#applyBlocks(frame.blocks ?? [], changed);
    for (const key of frame.gone ?? []) this.#leave(key, changed);
    for (const [key, name, promptTokens] of frame.come ?? []) {
      this.sequences.set(key, { key, name, promptTokens, slot: -1, tokens: 0, computed: 0, table: [] });
    }
    for (const [key, slot, tokens, computed, kept, ...blocks] of frame.sequences ?? []) {
      const sequence = this.sequences.get(key);
      Object.assign(sequence, { slot, tokens, computed });
      for (const block of sequence.table.splice(kept, Infinity, ...blocks)) this.#disown(block, key, changed);
      for (const block of blocks) this.#own(block, key, changed);
    }
    this.waiting = (frame.waiting ?? []).map(([key, name, tokens, isPreempted]) => ({ key, name, tokens, isPreempted }));
    this.numbers = frame.numbers;
    return frame.is_key ? null : changed;
  }

  /** Describes a run of blocks in words: how many are free, cached and active. */
  describeRun(first, last) {
    let [numCached, numActive] = [0, 0];
    for (let block = first; block <= last; block++) {
      if (this.blocks[block] === CACHED) numCached++;
      else if (this.blocks[block] !== FREE) numActive++;
    }
    const counts = [[last - first + 1 - numCached - numActive, "free"], [numCached, "cached"], [numActive, "active"]];
    const words = counts.filter(([count]) => count).map(([count, word]) => `${count.toLocaleString("en")} ${word}`);
    return `${words.join(", ")} blocks`;
  }

  /** Describes a block in words. */
  describe(block) {
    const value = this.blocks[block];
    if (value === FREE) return `Block ${block}: free`;
    if (value === CACHED) return `Block ${block}: cached. No sequence uses it; a prompt with the same prefix will find it`;
    const owners = [...(this.owners.get(block) ?? [])].map((key) => this.#ownership(block, key));
    const users = owners.length ? owners.slice(0, 6).join(", ") : "a sequence that has just ended";
    const more = owners.length > 6 ? ` and ${owners.length - 6} more` : "";
    return `Block ${block}: active, ref count ${value}. ${users}${more}`;
  }

  #ownership(block, key) {
    const { name, table } = this.sequences.get(key);
    const sample = key.split(".")[1];
    return `${name}${sample === "0" ? "" : ` sample ${sample}`} (logical ${table.indexOf(block)})`;
  }

  #clear() {
    this.blocks = new Int32Array((this.server.num_blocks ?? 0) + 1);
    this.owners.clear();
    this.sequences.clear();
  }

  #applyBlocks(runs, changed) {
    let block = 1;
    for (let i = 0; i < runs.length; i += 3) {
      block += runs[i];
      for (let left = runs[i + 1]; left > 0; left--) {
        this.blocks[block] = runs[i + 2];
        changed.add(block++);
      }
    }
  }

  #leave(key, changed) {
    for (const block of this.sequences.get(key).table) this.#disown(block, key, changed);
    this.sequences.delete(key);
  }

  #own(block, key, changed) {
    if (!this.owners.has(block)) this.owners.set(block, new Set());
    this.owners.get(block).add(key);
    changed.add(block);
  }

  #disown(block, key, changed) {
    const keys = this.owners.get(block);
    keys.delete(key);
    if (!keys.size) this.owners.delete(block);
    changed.add(block);
  }
}
