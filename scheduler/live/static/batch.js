// The batch over time. A step arrives as a list of changes and becomes a column: what each slot computed.

const MAX_COLUMNS = 400;

export class Batch {
  columns = []; // {step, tokens, micros, cells}, oldest first; null where steps are missing
  #rows = new Map(); // slot → {key, tokens}: before the next step
  #cells = []; // cells of the last column; columns of an unchanged batch share them

  apply(frame) {
    if (frame.is_key || frame.rows) {
      this.#rows = new Map((frame.rows ?? []).map(([slot, key, tokens]) => [slot, { key, tokens }]));
      this.#cells = this.#cellsNow();
      if (this.columns.at(-1)) this.columns.push(null);
    }
    for (const step of frame.steps ?? []) this.#add(...step);
    for (const [step, micros] of frame.durations ?? []) {
      const column = this.columns.findLast((one) => one?.step === step);
      if (column) column.micros = micros;
    }
    if (this.columns.length > MAX_COLUMNS) this.columns.splice(0, this.columns.length - MAX_COLUMNS);
  }

  #add(step, tokens, retired = [], entered = [], rowCounts = [], forked = [], paused = []) {
    const rows = this.#rows;
    if (step === 1) rows.clear(); // a new executor: every slot is empty
    for (const slot of retired) rows.delete(slot);
    for (let i = 0; i < entered.length; i += 2) rows.set(entered[i], { key: entered[i + 1], tokens: 0 });
    for (let i = 0; i < rowCounts.length; i += 2) {
      const row = rows.get(rowCounts[i]);
      if (row) rows.set(rowCounts[i], { key: row.key, tokens: rowCounts[i + 1] });
    }
    if (step === 1 || retired.length || entered.length || rowCounts.length) this.#cells = this.#cellsNow();
    this.columns.push({ step, tokens, micros: 0, cells: this.#cells });
    // Samples fork from this step's logits and compute their first token in the next step.
    for (let i = 0; i < forked.length; i += 2) rows.set(forked[i], { key: forked[i + 1], tokens: 1 });
    for (const slot of paused) rows.set(slot, { key: rows.get(slot).key, tokens: 0 }); // beams, until the scheduler has decided on them
    if (forked.length || paused.length) this.#cells = this.#cellsNow();
  }

  #cellsNow() {
    return [...this.#rows].filter(([, row]) => row.tokens).map(([slot, { key, tokens }]) => ({ slot, key, tokens }));
  }
}
