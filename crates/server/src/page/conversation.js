// The conversation: turns of a question and its answers, each of which goes on from what its method answered before.

import { $, choose, make, tell } from "./common.js";
import { Answer, compare, summary } from "./answer.js";

/// A turn has its question and its answers. Its place is where it stands in this list.
export const turns = [];
/// The turns of the conversation before this one.
let left = [];
/// What stops the answers under way; none while there are none.
let stop = null;

export const isAnswering = () => stop !== null;

/// What a method's next question goes on from: the earlier turns as messages, the last documents, whether they are known, and what is to be
/// said of it. A turn that the method did not answer is told as the first method that did; one without an answer is left out.
function history(method) {
  const messages = [];
  const borrowed = new Set();
  let last = null;
  for (const { question, answers } of turns) {
    const told = answers.find((answer) => answer.method === method && answer.said) ?? answers.find((answer) => answer.said);
    if (!told) continue;
    if (told.method !== method) borrowed.add(told.method);
    messages.push({ role: "user", content: question }, { role: "assistant", content: told.said });
    last = told;
  }
  const note = borrowed.size ? `Goes on from what ${[...borrowed].join(" and ")} answered.` : "";
  return { messages, documents: last?.documents ?? [], known: Boolean(last?.result || last?.same), note };
}

/// The request for a method's answer.
function body(method, question, { from, documents, evict, tokens }, before, same) {
  // The documents stand in the first turn: as long as they stay, the prefix cache has all up to this question. An explanation computes
  // the prompt without it, and shows the same tokens.
  return {
    messages: [...before.messages, { role: "user", content: question }], documents: from === "same" ? before.documents : documents, stream: true,
    max_tokens: tokens, refrain: { method, evict, ...(!same && { explain: "tokens" }) },
  };
}

/// Whether the page goes along with an answer that grows: until its reader scrolls up, and again when its end is back in sight.
let follows = true;
let [growing, scrolled] = [null, 0];
/// How far the end of a node lies below what the question leaves free.
const hidden = (node) => node.getBoundingClientRect().bottom + 8 - Math.min($("ask").getBoundingClientRect().top, innerHeight);
function follow(node) {
  growing = node;
  const by = hidden(node);
  if (scrollY < scrolled && by > 1) follows = false;
  if (follows && by > 0) scrollBy({ top: by, behavior: "instant" });
  scrolled = scrollY;
}
window.addEventListener("scroll", () => {
  const by = growing ? hidden(growing) : 0;
  follows = scrollY < scrolled ? follows && by <= 1 : follows || by < 40;
  scrolled = scrollY;
}, { passive: true });

/// Shows a turn at the end.
function place(turn) {
  turns.push(turn);
  const list = make("div", { className: "answers" }, ...turn.answers.map((answer) => answer.node));
  $("turns").append(make("li", { className: "turn" }, make("h3", { dir: "auto", textContent: turn.question }), list));
  offerButtons();
}

/// Asks a question, and shows the answers as they come.
async function ask(question, settings) {
  const before = settings.methods.map(history);
  const answers = settings.methods.map((method, i) => new Answer(method, before[i].note));
  const turn = { question, answers };
  stop = new AbortController();
  const { signal } = stop;
  place(turn);
  follows = true;
  const failed = [];
  // One after the other: side by side they would slow each other down.
  for (const [i, answer] of answers.entries()) {
    $("doing").textContent = `${answer.method} answers${answers.length > 1 ? `, ${i + 1} of ${answers.length}` : ""} …`;
    if (follows) answer.node.scrollIntoView({ block: "nearest", behavior: "instant" });
    scrolled = scrollY;
    follow(answer.node);
    try {
      signal.throwIfAborted();
      const same = settings.from === "same" && before[i].known;
      await answer.run(body(answer.method, question, settings, before[i], same), same, signal, () => follow(answer.text));
      compare(answers);
      follow(answer.node);
    } catch (error) {
      if (signal.aborted) break;
      failed.push({ method: answer.method, message: error.message, code: error.code });
      // The others would not reach the server either.
      if (error.lost) break;
    }
  }
  for (const answer of answers) if (!answer.asked) answer.finish("Not asked.");
  [stop, growing] = [null, null];
  return { turn, failed, stopped: signal.aborted };
}

const enable = (running) => {
  [$("go").disabled, $("stop").disabled] = [running, !running];
  offerButtons();
};

/// Takes the question from the form, and gives it back if nobody answers it. Gives the errors of those that failed.
export async function submit(settings) {
  const question = $("question").value.trim();
  if (stop || !question) return [];
  tell();
  $("question").value = "";
  // The button that was pressed cannot keep the focus while it is off.
  $("question").focus({ preventScroll: true });
  enable(true);
  const { turn, failed, stopped } = await ask(question, settings);
  enable(false);
  // The conversation was begun anew meanwhile.
  if (!turns.includes(turn)) return failed;
  $("doing").textContent = stopped ? "Stopped." : "";
  $("told").textContent = turn.answers.filter((answer) => answer.stats).map(summary).join(" ");
  // What failed for the same reason is told once.
  const reasons = new Set(failed.map(({ message }) => message));
  tell([...(reasons.size > 1 ? failed.map(({ method, message }) => `${method}: ${message}`) : reasons)].join(" "));
  if (!turn.answers.some((answer) => answer.said)) {
    $("question").value ||= question;
    if (!turn.answers.some((answer) => answer.result)) drop(turn);
  }
  keepDocuments();
  return failed;
}

/// Takes a turn away.
function drop(turn) {
  $("turns").children[turns.indexOf(turn)].remove();
  turns.splice(turns.indexOf(turn), 1);
  offerButtons();
}

function offerButtons() {
  [$("anew").disabled, $("back").disabled] = [turns.length === 0, turns.length === 0 || isAnswering()];
  $("again").hidden = turns.length > 0 || left.length === 0;
}

let chosenBefore = "search";
/// Offers the documents of the last turn if it had any, and chooses them when they are offered first.
function keepDocuments() {
  const [chosen, wasHidden] = [$("settings").elements.from.value, $("same").hidden];
  const offered = turns.at(-1)?.answers.some((answer) => answer.said && answer.hasDocuments) ?? false;
  $("same").hidden = !offered;
  if (offered && wasHidden) {
    chosenBefore = chosen;
    choose("same");
  }
  if (!offered && chosen === "same") choose(chosenBefore);
}

/// Leaves a document out that was removed.
export function forget(id) {
  for (const { answers } of [...turns, ...left]) for (const answer of answers) answer.forget(id);
  keepDocuments();
}

/// Shows turns again that the page had before it was loaded anew.
export function restore(saved) {
  for (const { question, answers } of saved) {
    const turn = { question, answers: answers.map(Answer.of) };
    place(turn);
    compare(turn.answers);
  }
  keepDocuments();
}

/// Takes the last question back into the form, to be asked again or otherwise.
function takeBack() {
  const turn = turns.at(-1);
  drop(turn);
  $("question").value = [turn.question, $("question").value].filter(Boolean).join("\n");
  $("doing").textContent = "The last question is back in the form.";
  keepDocuments();
  $("question").focus();
}

/// Begins a new conversation. The one before can be brought back.
function anew() {
  stop?.abort();
  left = turns.splice(0);
  $("turns").replaceChildren();
  $("doing").textContent = "A new conversation.";
  tell();
  keepDocuments();
  offerButtons();
  $("question").focus();
}

/// Goes on with the conversation before.
function bringBack() {
  left.splice(0).forEach(place);
  $("doing").textContent = "The conversation is back.";
  tell();
  keepDocuments();
  $("question").focus();
}

$("anew").onclick = anew;
$("again").onclick = bringBack;
$("back").onclick = takeBack;
$("stop").onclick = () => { stop?.abort(); $("question").focus(); };
/// Whether a key is an input method's. Safari ends a composition before the key that confirms it, whose code is 229.
const composes = (event) => event.isComposing || event.keyCode === 229;
window.addEventListener("keydown", (event) => {
  // Escape in a filter with text empties the filter.
  const empties = event.target === $("filter") && $("filter").value;
  if (event.key === "Escape" && !composes(event) && !empties) stop?.abort();
});
// A keyboard on the screen has no Shift+Enter.
if (matchMedia("(pointer: coarse)").matches) $("keys").remove();
else $("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !composes(event)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
// Firefox keeps over a reload which buttons were off.
enable(false);
