// The conversation: sends questions, streams answers, stops and regenerates them.

import { ApiError, chat, modelName } from "./api.js";
import { correctLink } from "./live_page.js";
import { Settings } from "./settings.js";
import { Turn } from "./turn.js";

const find = (id) => document.getElementById(id);
const KEY_PLACE = "quire-api-key";
const settings = new Settings(find("parameters"));
const question = find("question");
const turns = [];
let key = storedKey();
let abort = null; // of the answer that streams, or null

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (abort || !question.value.trim()) return;
  const turn = new Turn(question.value, find("log"));
  question.value = "";
  turns.push(turn);
  find("turns").append(turn.element);
  answer(turn);
});
question.addEventListener("keydown", (event) => {
  // In Safari, the Enter that accepts a word of an input method arrives after its composition; its code is 229.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  find("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && abort?.abort());
find("stop").addEventListener("click", () => abort?.abort());
find("new").addEventListener("click", () => {
  abort?.abort();
  turns.length = 0;
  find("turns").replaceChildren();
  question.focus();
});
find("turns").addEventListener("click", ({ target }) => {
  const action = target.dataset.action;
  if (abort || !action) return;
  const turn = turns.at(-1); // only the last turn shows its buttons
  if (action === "regenerate") {
    find("stop").disabled = false;
    find("stop").focus();
    answer(turn);
  } else {
    turns.pop().element.remove();
    question.value = turn.question;
    question.focus();
  }
});
find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("api-key").value.trim();
  try {
    sessionStorage.setItem(KEY_PLACE, key);
  } catch {
    // The browser stores nothing, so the key lasts as long as the page.
  }
  find("api-key").value = "";
  find("key").hidden = true;
  question.focus();
  greet();
  if (turns.length && !abort && !turns.at(-1).messages.length) answer(turns.at(-1));
});

async function answer(turn) {
  abort = new AbortController();
  const isAtSend = document.activeElement === find("send");
  setBusy(true);
  if (isAtSend) find("stop").focus();
  settings.accept();
  turn.begin();
  let reason = "";
  let usage = null;
  try {
    for await (const chunk of chat(request(), key, abort.signal)) {
      if (chunk.model) showModel(chunk.model);
      const choice = chunk.choices[0];
      turn.append(choice?.delta ?? {});
      reason = choice?.finish_reason ?? reason;
      usage = chunk.usage ?? usage;
    }
    turn.end({ note: describe(usage, reason) });
    showState("ready");
  } catch (error) {
    turn.fail(error.name === "AbortError" ? { note: "stopped" } : { error: error.message });
    refuse(error);
  } finally {
    const isAtStop = document.activeElement === find("stop");
    abort = null;
    setBusy(false);
    // A disabled button cannot keep the focus.
    if (isAtStop && isAtSend) find("send").focus();
    else if (isAtStop) turn.focus();
  }
}

function request() {
  const earlier = turns.slice(0, -1).flatMap((turn) => turn.messages);
  const messages = [...settings.messages, ...earlier, { role: "user", content: turns.at(-1).question }];
  // Without a name, the model is the one that is served: a server can have been started again with another one.
  return { messages, ...settings.parameters };
}

/** Reacts to what the user can change: the key, a parameter. Throws what is a bug of this page. */
function refuse(error) {
  if (error.name === "AbortError") return showState("ready");
  if (!(error instanceof ApiError)) throw error;
  showState(error.status ? "refused" : "no connection", "bad");
  if (error.status === 401) askForKey();
  else settings.refuse(error.param, error.message);
}

function askForKey() {
  showState("needs a key", "bad");
  find("key-words").textContent = key ? "The server does not accept this key." : "The server asks for a key.";
  find("key").hidden = false;
  find("api-key").focus();
}

/** Asks for the model's name, which also shows whether the server answers, and whether it wants a key. */
async function greet() {
  try {
    showModel(await modelName(key));
    if (!abort) showState("ready");
  } catch (error) {
    refuse(error);
    if (error.status !== 401) showModel(error.message);
  }
}

function describe(usage, reason) {
  const end = reason === "length" ? "ended by the limit of tokens" : "";
  if (!usage) return end;
  const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = usage;
  const cached = details?.cached_tokens ? `, ${details.cached_tokens} of them cached` : "";
  return [`${prompt} prompt tokens${cached}`, `${completion} generated`, end].filter(Boolean).join(" · ");
}

function setBusy(isBusy) {
  find("send").disabled = isBusy;
  find("stop").disabled = !isBusy;
  find("log").setAttribute("aria-busy", isBusy);
  if (isBusy) showState("answering", "good");
}

function showModel(words) {
  if (find("model").textContent !== words) find("model").textContent = words;
}

function showState(text, kind = "good") {
  find("state").textContent = text;
  find("state").className = `badge ${kind}`;
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY_PLACE) ?? "";
  } catch {
    return "";
  }
}

correctLink(find("live-page"), location.hostname);
const isWide = matchMedia("(min-width: 861px)").matches;
find("settings").open = isWide;
if (isWide) question.focus(); // a phone would cover the page with its keyboard
greet();
