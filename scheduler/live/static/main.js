// Connects the parts: each frame updates the model, and the page draws what changed.

import { Batch } from "./batch.js";
import { onThemeChange } from "./colours.js";
import { listen } from "./feed.js";
import { Model } from "./model.js";
import { Numbers } from "./numbers.js";
import { PoolGrid } from "./pool_grid.js";
import { attachZoom } from "./pool_zoom.js";
import { Prompt } from "./prompt.js";
import { BlockTables, showQueue } from "./tables.js";
import { Timeline } from "./timeline.js";

const find = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const CALM_MS = 1000; // between two movements of the timeline, for users who asked for reduced motion
const IDLE_MS = 1500;

const model = new Model();
const batch = new Batch();
const numbers = new Numbers();
const grid = new PoolGrid(find("pool-grid"), document.querySelector("#pool-readout output"), model);
const timeline = new Timeline(find("batch-timeline"), find("batch-readout"), batch);
const tables = new BlockTables(find("tables-list"), find("tables-words"), (key) => grid.isolate(key));
attachZoom(grid, find("pool-grid"), find);
new Prompt();

let idle = 0;
let movedMs = 0;

listen(take, (isOpen) => showState(isOpen ? model.server.state : "connection lost"));
onThemeChange(() => {
  grid.layOut();
  timeline.layOut();
  tables.recolour();
});

function take(frame) {
  const changed = model.apply(frame);
  batch.apply(frame);
  if (changed) grid.draw(changed);
  else grid.layOut();
  if (frame.server) showServer(frame.server);
  numbers.show(model, performance.now());
  tables.show(model);
  showQueue(model);
  moveTimeline();
  clearTimeout(idle);
  // A step of a long prompt can take longer than this.
  if (!model.sequences.size) idle = setTimeout(() => numbers.rest(), IDLE_MS);
}

function moveTimeline() {
  const nowMs = performance.now();
  if (calm.matches && nowMs - movedMs < CALM_MS) return;
  movedMs = nowMs;
  timeline.draw();
  const column = batch.columns.at(-1);
  if (!column) return;
  const prefills = column.cells.filter(({ tokens }) => tokens > 1).length;
  const decodes = column.cells.length - prefills;
  find("batch-now").textContent =
    `Step ${column.step.toLocaleString("en")}: ${prefills} prefilling, ${decodes} decoding, ${column.tokens} tokens. ` +
    "A row is a slot, a column is a step; the newest is at the right.";
}

function showServer(server) {
  showState(server.state);
  if (!server.model_name) return;
  find("model").textContent = `${server.model_name} · ${server.dtype} · ${server.device}`;
}

function showState(state) {
  const badge = find("state");
  badge.textContent = state;
  badge.classList.toggle("good", state === "serving");
  badge.classList.toggle("bad", state === "connection lost");
}
