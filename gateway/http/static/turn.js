// One question and its answer. Text of the model enters the page as text, never as HTML.

export class Turn {
  #answer = "";
  #thoughts = "";
  #earlier = { answer: "", note: "" }; // what the newest try replaces
  #frame = 0; // id of the animation frame that will show new text, or 0
  #answerNode = document.createTextNode("");
  #thoughtsNode = document.createTextNode("");
  #log;

  constructor(question, log) {
    this.question = question;
    this.#log = log;
    this.element = document.getElementById("turn").content.firstElementChild.cloneNode(true);
    this.#part("question").textContent = question;
    this.#part("answer").append(this.#answerNode);
    this.#part("thoughts p").append(this.#thoughtsNode);
  }

  /** The messages that later requests repeat: none if the answer failed before its first word. Thoughts are left out. */
  get messages() {
    if (!this.#answer) return [];
    return [{ role: "user", content: this.question }, { role: "assistant", content: this.#answer }];
  }

  /** Removes the answer, before another try. */
  begin() {
    this.#earlier = { answer: this.#answer, note: this.#part("usage").textContent };
    this.#answer = this.#thoughts = this.#answerNode.data = this.#thoughtsNode.data = "";
    this.#part("thoughts").hidden = true;
    this.#part("error").textContent = this.#part("usage").textContent = "";
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  /** Adds the texts of a `delta` of a chunk. Thoughts are open until the answer begins. */
  append({ content, reasoning_content: thoughts }) {
    if (thoughts && !this.#thoughts) this.#part("thoughts").open = true;
    if (content && !this.#answer) this.#part("thoughts").open = false;
    this.#answer += content ?? "";
    this.#thoughts += thoughts ?? "";
    // A fast server sends more chunks than a browser can lay out, so an animation frame shows those that have arrived.
    if (content || thoughts) this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  /** Ends a try that was stopped or has failed. Without a word of a new answer, the earlier one returns. */
  fail({ note = "", error = "" }) {
    const returns = !this.#answer && !this.#thoughts && this.#earlier.answer;
    if (returns) this.append({ content: this.#earlier.answer });
    this.end({ note: returns ? this.#earlier.note : note, error });
  }

  /** Ends the answer with a line about it, or with an error. */
  end({ note = "", error = "" }) {
    this.#paint();
    this.#change(() => {
      this.#part("usage").textContent = note;
      this.#part("error").textContent = error;
    });
  }

  focus() {
    this.element.querySelector("[data-action=regenerate]").focus();
  }

  #part(name) {
    return this.element.querySelector(`.${name}`);
  }

  #paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.#change(() => {
      this.#part("thoughts").hidden = !this.#thoughts;
      this.#thoughtsNode.appendData(this.#thoughts.slice(this.#thoughtsNode.length));
      this.#answerNode.appendData(this.#answer.slice(this.#answerNode.length));
    });
  }

  /** Keeps the end of the conversation in view, unless the reader has scrolled up. */
  #change(apply) {
    const { scrollTop, clientHeight, scrollHeight } = this.#log;
    const isAtEnd = scrollTop + clientHeight >= scrollHeight - 8;
    apply();
    if (isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
  }
}
