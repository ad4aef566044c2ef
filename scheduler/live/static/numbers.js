// Shows the numbers: running and waiting requests, occupancy, rates and waste.

const whole = new Intl.NumberFormat("en");
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const SPAN_MS = 2000; // rates are averages over this span, or over the time between two frames if that is longer

export class Numbers {
  #history = []; // {at, steps, tokens}

  show(model, nowMs) {
    const { server, numbers } = model;
    say("running", whole.format(numbers.running));
    say("running-of", server.max_num_seqs ? `of ${server.max_num_seqs} slots` : "");
    say("waiting", whole.format(numbers.waiting));
    say("waiting-of", numbers.waiting ? `${whole.format(numbers.waiting_prompt_tokens)} prompt tokens` : "");
    const usable = numbers.free + numbers.cached + numbers.active;
    say("occupancy", ratio(numbers.active, usable));
    say("occupancy-of", usable ? `${whole.format(numbers.active)} of ${whole.format(usable)} blocks` : "");
    say("hits", ratio(numbers.prefix_hit_tokens, numbers.prefix_queried_tokens));
    say("hits-of", `${count(numbers.cow_copies, "copy", "copies")} on write · ${count(numbers.preemptions, "preemption")}`);
    say("pool-sizes", poolWords(server, numbers));
    this.#showSpeed(numbers, nowMs);
    showWaste(server, numbers);
  }

  /** Shows the rates between two frames SPAN_MS apart. A server sends none while it is idle, or one step computes. */
  #showSpeed({ steps, generated_tokens: tokens }, nowMs) {
    // A scheduler that has started again counts from 0; by now it may have more steps than before, or more tokens.
    const known = this.#history.filter((then) => then.steps <= steps && then.tokens <= tokens);
    this.#history = known.filter(({ at }, i) => nowMs - at < SPAN_MS || i === known.length - 1);
    this.#history.push({ at: nowMs, steps, tokens });
    const first = this.#history[0];
    const seconds = (nowMs - first.at) / 1000;
    if (seconds < 0.2) return;
    say("speed", whole.format(Math.round((tokens - first.tokens) / seconds)));
    const stepsEach = (steps - first.steps) / seconds;
    say("speed-of", stepsEach && stepsEach < 1 ? `${(1 / stepsEach).toFixed(1)} s a step` : `${whole.format(Math.round(stepsEach))} steps a second`);
  }

  /** Called when no frame has arrived for a while: nothing is running. */
  rest() {
    if (!this.#history.length) return;
    this.#history = [];
    say("speed", "0");
    say("speed-of", "");
  }
}

function poolWords({ block_size: size }, numbers) {
  if (!size) return "";
  const counts = [
    [numbers.active, "active"], [numbers.shared, "of them shared"], [numbers.cached, "cached"], [numbers.free, "free"],
  ];
  return `${counts.map(([n, word]) => `${whole.format(n)} ${word}`).join(" · ")} · ${size} tokens a block`;
}

function showWaste(server, numbers) {
  const allocated = numbers.used_slots + numbers.wasted_slots;
  say("paged-waste", ratio(numbers.wasted_slots, allocated));
  fill("paged-bar", numbers.used_slots, allocated);
  say("paged-words", allocated ? `${whole.format(numbers.used_slots)} of ${whole.format(allocated)} token slots used` : "nothing is running");
  const { contiguous_slots: slots, contiguous_used: used, contiguous_fitting: fitting } = numbers;
  if (server.max_model_len) say("contiguous-len", whole.format(server.max_model_len));
  say("contiguous-waste", ratio(slots - used, slots));
  fill("contiguous-bar", used, slots);
  const reserved = slots ? `${whole.format(used)} of ${whole.format(slots)} token slots used; ` : "";
  say("contiguous-words", server.max_model_len ? `${reserved}this pool could run ${whole.format(fitting)} at once` : "");
}

function ratio(part, all) {
  return all ? percent.format(part / all) : "–";
}

function count(number, noun, nouns = `${noun}s`) {
  return `${whole.format(number ?? 0)} ${number === 1 ? noun : nouns}`;
}

function fill(id, part, all) {
  document.getElementById(id).style.width = all ? `${(100 * part) / all}%` : "0";
}

function say(id, words) {
  const element = document.getElementById(id);
  if (element.textContent !== words) element.textContent = words;
}
