// Shows the block tables of the running sequences and the queue as lists. Keeps its elements and changes only what differs.

import { requestColour } from "./colours.js";
import { prefillShare } from "./model.js";

const MAX_SEQUENCES = 24;
const MAX_BLOCKS = 40; // of one block table

export class BlockTables {
  #list;
  #words;
  #isolate;
  #elements = new Map(); // key → {root, state, bar, blocks}

  /** Calls `isolate` with the key of the sequence under the pointer, or null. */
  constructor(list, words, isolate) {
    this.#list = list;
    this.#words = words;
    this.#isolate = isolate;
  }

  show(model) {
    const shown = [...model.sequences.values()].slice(0, MAX_SEQUENCES);
    const keys = new Set(shown.map(({ key }) => key));
    for (const [key, { root }] of this.#elements) {
      if (!keys.has(key)) {
        if (root.matches(":hover, :focus-within")) this.#isolate(null);
        root.remove();
        this.#elements.delete(key);
      }
    }
    for (const sequence of shown) this.#showSequence(sequence, model);
    const hidden = model.sequences.size - shown.length;
    const what = "Logical block → physical block. A double frame marks a shared block.";
    const none = "No sequence is running. For each running sequence, this table shows which physical block holds each logical block.";
    say(this.#words, model.sequences.size ? `${what}${hidden ? ` ${hidden} more sequences run.` : ""}` : none);
  }

  /** Called after a change of theme. */
  recolour() {
    for (const [key, { root }] of this.#elements) root.style.setProperty("--own", requestColour(key));
  }

  #showSequence({ key, name, slot, promptTokens, tokens, computed, table }, model) {
    if (!this.#elements.has(key)) this.#elements.set(key, this.#create(key, name));
    const { state, bar, blocks } = this.#elements.get(key);
    const share = prefillShare({ tokens, computed });
    const prefill = `prefill ${computed.toLocaleString("en")} of ${tokens.toLocaleString("en")}`;
    say(state, `${slot < 0 ? "last step" : `slot ${slot}`} · ${share === null ? `${promptTokens} + ${tokens - promptTokens}` : prefill} tokens`);
    bar.hidden = share === null;
    bar.value = share ?? 1;
    const cells = table.slice(0, MAX_BLOCKS).map((block, i) => ({ words: `${i}→${block}`, isShared: model.blocks[block] > 1 }));
    if (table.length > MAX_BLOCKS) cells.push({ words: `and ${table.length - MAX_BLOCKS} more`, isMore: true });
    while (blocks.children.length > cells.length) blocks.lastChild.remove();
    cells.forEach(({ words, isShared = false, isMore = false }, i) => {
      const cell = blocks.children[i] ?? blocks.appendChild(document.createElement("li"));
      say(cell, words);
      cell.classList.toggle("shared", isShared);
      cell.classList.toggle("more", isMore);
      cell.title = isShared ? "shared" : "";
    });
  }

  #create(key, name) {
    const root = element("div", "sequence");
    root.style.setProperty("--own", requestColour(key));
    const about = root.appendChild(element("div"));
    const title = about.appendChild(element("h3"));
    const dot = title.appendChild(element("i", "dot"));
    dot.style.background = "var(--own)";
    const sample = key.split(".")[1];
    title.append(sample === "0" ? name : `${name} · sample ${sample}`);
    const state = about.appendChild(element("p", "muted"));
    const bar = about.appendChild(element("progress"));
    bar.setAttribute("aria-label", "Prefill");
    const blocks = root.appendChild(element("ol"));
    blocks.setAttribute("aria-label", "Block table");
    root.addEventListener("pointerenter", () => this.#isolate(key));
    root.addEventListener("pointerleave", () => this.#isolate(null));
    this.#list.append(root);
    return { root, state, bar, blocks };
  }
}

/** Shows the head of the queue. */
export function showQueue({ waiting, numbers, server }) {
  const list = document.getElementById("queue-list");
  const oldest = numbers.waiting ? `The oldest has waited ${numbers.oldest_waiting_s.toFixed(1)} s.` : "The queue is empty.";
  const more = numbers.waiting > waiting.length ? ` First ${waiting.length} of ${numbers.waiting}.` : "";
  const why = server.state === "serving" ? "" : ` The server is ${server.state}.`;
  say(document.getElementById("queue-words"), oldest + more + why);
  list.replaceChildren(...waiting.map(({ key, name, tokens, isPreempted }) => {
    const item = element("li");
    const dot = item.appendChild(element("i", "dot"));
    dot.style.background = requestColour(key);
    item.append(`${name}, ${tokens} tokens${isPreempted ? ", preempted" : ""}`);
    return item;
  }));
}

function element(tag, className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  return made;
}

function say(target, words) {
  if (target.textContent !== words) target.textContent = words;
}
