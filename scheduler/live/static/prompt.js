// The prompt box: streams one request at a time. Cancelling closes the connection, which ends the request.

import { completion } from "./resumption.js";

const NUMBERS = ["stopping.max_tokens", "sampling.temperature", "sampling.n"];
const BROKEN_OFF = "the stream broke off; trying to continue it";

export class Prompt {
  #form = document.getElementById("prompt");
  #send = document.getElementById("prompt-send");
  #cancel = document.getElementById("prompt-cancel");
  #status = document.getElementById("prompt-status");
  #error = document.getElementById("prompt-error");
  #output = document.getElementById("prompt-output");
  #chat = document.getElementById("prompt-chat");
  #abort = null;
  #given = ""; // the text of the request, which the box need not hold any more
  #started = ""; // the status while the stream goes on
  #ends = []; // of the samples that have ended, in words
  #samples = []; // by index: {words, unpainted}
  #frame = 0; // id of the animation frame that will show new text, or 0

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#abort) this.#generate();
    });
    this.#form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    this.#cancel.addEventListener("click", () => this.#abort?.abort());
    this.#chat.addEventListener("change", () => this.#showKind());
    this.#offerChat();
  }

  /** Shows the chat option if the model has a chat template. */
  async #offerChat() {
    const response = await fetch("/live/prompt").catch(() => null);
    const canChat = response?.ok && (await response.json()).has_chat_template;
    document.getElementById("prompt-chat-choice").hidden = !canChat;
    if (!canChat) this.#chat.checked = false;
    this.#showKind();
  }

  #showKind() {
    const words = this.#chat.checked ? "Message to answer" : "Text to continue";
    document.getElementById("prompt-label").textContent = words;
  }

  async #generate() {
    this.#clear();
    this.#abort = new AbortController();
    this.#setBusy(true);
    try {
      const breaks = () => (this.#status.textContent = BROKEN_OFF);
      for await (const message of completion(this.#request(), this.#abort.signal, breaks)) this.#take(message);
      if (!this.#error.textContent && this.#ends.length) this.#status.textContent = `done: ${this.#ends.join("; ")}`;
    } catch (error) {
      if (error.name === "AbortError") this.#status.textContent = "cancelled; its blocks are free";
      else throw error;
    } finally {
      this.#paint();
      this.#abort = null;
      this.#setBusy(false);
    }
  }

  /** Builds the request. A value that is not a number is sent unchanged, and the server says what is wrong with it. */
  #request() {
    const text = this.#field("text").value;
    this.#given = this.#chat.checked ? `${text}\n` : text;
    const prompt = this.#chat.checked ? { chat: { messages: [{ role: "user", content: text }] } } : { text };
    const request = { ...prompt, sampling: {}, stopping: {} };
    for (const path of NUMBERS) {
      const value = this.#field(path).value.trim();
      const [group, name] = path.split(".");
      if (value) request[group][name] = Number.isFinite(Number(value)) ? Number(value) : value;
    }
    return request;
  }

  #take({ started, delta, finished, error }) {
    if (started) {
      const cached = started.cached_tokens ? `, ${started.cached_tokens} of them from the prefix cache` : "";
      this.#started = `${started.request_id}: ${started.prompt_tokens} prompt tokens${cached}`;
      this.#status.textContent = this.#started;
    } else if (delta) {
      if (this.#status.textContent === BROKEN_OFF) this.#status.textContent = this.#started;
      this.#sample(delta.index).unpainted += delta.text;
      this.#frame ||= requestAnimationFrame(() => this.#paint());
    } else if (finished) {
      const reason = finished.reason.replace("FINISH_REASON_", "").toLowerCase();
      this.#sample(finished.index);
      this.#paint();
      this.#ends.push(`${finished.usage.completion_tokens} tokens, ended by ${reason}`);
    } else if (error) {
      this.#refuse(error);
    }
  }

  /**
   * Shows the text that arrived since the last animation frame. Each change lays out whole paragraphs: done for every
   * delta, a fast server would keep the page too busy to react to the Cancel button.
   */
  #paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const isAtEnd = this.#output.scrollTop + this.#output.clientHeight >= this.#output.scrollHeight - 4;
    for (const sample of this.#samples) {
      if (!sample?.unpainted) continue;
      sample.words.appendData(sample.unpainted);
      sample.unpainted = "";
    }
    if (isAtEnd) this.#output.scrollTop = this.#output.scrollHeight;
  }

  #sample(index) {
    if (!this.#samples[index]) {
      const element = document.createElement("p");
      const given = element.appendChild(document.createElement("span"));
      given.className = "given";
      given.textContent = this.#given;
      const words = element.appendChild(document.createTextNode(""));
      this.#output.append(element);
      this.#samples[index] = { words, unpainted: "" };
    }
    return this.#samples[index];
  }

  /** Shows each error at its field, and the others above the buttons. */
  #refuse({ message, violations }) {
    const unplaced = [];
    for (const { field, problem } of violations) {
      const input = this.#field(field === "prompt" || field.startsWith("chat") ? "text" : field);
      if (!input) {
        unplaced.push(`${field}: ${problem}`);
        continue;
      }
      const words = document.createElement("span");
      words.className = "error";
      words.id = `error-${field.replaceAll(".", "-")}`;
      words.textContent = problem;
      input.after(words);
      input.setAttribute("aria-invalid", "true");
      input.setAttribute("aria-describedby", words.id);
    }
    this.#error.textContent = violations.length ? unplaced.join("; ") : message;
    this.#status.textContent = violations.length ? "refused" : "";
    this.#form.querySelector("[aria-invalid]")?.focus();
  }

  #clear() {
    for (const words of this.#form.querySelectorAll("span.error")) words.remove();
    for (const input of this.#form.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
    this.#error.textContent = this.#status.textContent = "";
    this.#output.replaceChildren();
    this.#samples = [];
    this.#ends = [];
  }

  #setBusy(isBusy) {
    const [last, next] = isBusy ? [this.#send, this.#cancel] : [this.#cancel, this.#send];
    next.disabled = false;
    if (document.activeElement === last) next.focus(); // a disabled button cannot keep the focus
    last.disabled = true;
    this.#output.setAttribute("aria-busy", isBusy);
  }

  #field(path) {
    return this.#form.querySelector(`[data-field="${path}"]`);
  }
}
