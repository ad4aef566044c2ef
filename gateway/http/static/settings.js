// The system prompt and the parameters. They stay in this browser, and an empty field leaves the choice to the server.

const PLACE = "quire-chat";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

export class Settings {
  #fields;

  constructor(form) {
    this.#fields = form.elements;
    const stored = recall();
    for (const name of ["system", ...NUMBERS]) this.#fields[name].value = stored[name] ?? "";
    form.addEventListener("input", () => this.#store());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** The messages before those of the conversation. */
  get messages() {
    const content = this.#fields.system.value.trim();
    return content ? [{ role: "system", content }] : [];
  }

  /** The fields of a request. A value that is not a number goes out unchanged, and the server says what is wrong with it. */
  get parameters() {
    const given = NUMBERS.map((name) => [name, this.#fields[name].value.trim()]).filter(([, text]) => text);
    return Object.fromEntries(given.map(([name, text]) => [name, asNumber(text)]));
  }

  /** Marks the field that the server refused, and goes there. */
  refuse(name, message) {
    const field = NUMBERS.includes(name) && this.#fields[name];
    if (!field) return;
    document.getElementById("settings").open = true;
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-description", message);
    field.focus();
  }

  accept() {
    for (const name of NUMBERS) {
      this.#fields[name].removeAttribute("aria-invalid");
      this.#fields[name].removeAttribute("aria-description");
    }
  }

  #store() {
    const values = ["system", ...NUMBERS].map((name) => [name, this.#fields[name].value]);
    try {
      localStorage.setItem(PLACE, JSON.stringify(Object.fromEntries(values)));
    } catch {
      // The browser stores nothing, so the values last as long as the page.
    }
  }
}

/** JavaScript would round larger whole numbers, such as some seeds. */
function asNumber(text) {
  const number = Number(text);
  return Number.isFinite(number) && (Number.isSafeInteger(number) || !Number.isInteger(number)) ? number : text;
}

function recall() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? {};
  } catch {
    return {};
  }
}
