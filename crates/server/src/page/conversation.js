// The conversation: turns of a question and its answers, each of which goes on from what its method answered before.

import { $, make, tell } from "./common.js";
import { Answer, compare, summary } from "./answer.js";

/// A turn has its question and its answers. Its place is where it stands in this list.
const turns = [];
/// What stops the answers under way; none while there are none.
let stop = null;

/// What a method's next question goes on from: the earlier turns as messages, their last documents, and what is to be said of them. A turn
/// that the method did not answer is told as the first method that did; one without an answer is left out.
function history(method) {
  const messages = [];
  const borrowed = new Set();
  let documents = [];
  for (const { question, answers } of turns) {
    const told = answers.find((answer) => answer.method === method && answer.said) ?? answers.find((answer) => answer.said);
    if (!told) continue;
    if (told.method !== method) borrowed.add(told.method);
    messages.push({ role: "user", content: question }, { role: "assistant", content: told.said });
    documents = told.documents ?? documents;
  }
  return { messages, documents, note: borrowed.size ? `Goes on from what ${[...borrowed].join(" and ")} answered.` : "" };
}

/// The request for a method's answer.
function body(method, question, { documents, evict, tokens }, before, same) {
  // The documents stand in the first turn: as long as they stay, the prefix cache has all up to this question. An explanation computes
  // the prompt without it, and shows the same tokens.
  return {
    messages: [...before.messages, { role: "user", content: question }], documents: same ? before.documents : documents, stream: true,
    max_tokens: tokens, refrain: { method, evict, ...(!same && { explain: "tokens" }) },
  };
}

/// Asks a question, and shows the answers as they come.
async function ask(question, settings) {
  const before = settings.methods.map(history);
  const answers = settings.methods.map((method, i) => new Answer(method, before[i].note));
  const turn = { question, answers };
  const list = make("div", { className: "answers" }, ...answers.map((answer) => answer.node));
  turns.push(turn);
  $("turns").append(make("li", { className: "turn" }, make("h3", { textContent: question }), list));
  $("anew").disabled = false;
  stop = new AbortController();
  const { signal } = stop;
  const failed = [];
  // One after the other: side by side they would slow each other down.
  for (const [i, answer] of answers.entries()) {
    $("doing").textContent = `${answer.method} answers${answers.length > 1 ? `, ${i + 1} of ${answers.length}` : ""} …`;
    answer.node.scrollIntoView({ block: "nearest" });
    try {
      signal.throwIfAborted();
      const same = settings.from === "same" && before[i].messages.length > 0;
      await answer.run(body(answer.method, question, settings, before[i], same), same, signal);
      compare(answers);
    } catch (error) {
      if (signal.aborted) break;
      failed.push(`${answer.method}: ${error.message}`);
    }
  }
  stop = null;
  return { turn, failed, stopped: signal.aborted };
}

const enable = (running) => { [$("go").disabled, $("stop").disabled] = [running, !running]; };

/// Takes the question from the form, and gives it back if nobody answers it.
export async function submit(settings) {
  const question = $("question").value.trim();
  if (stop || !question) return;
  tell();
  $("question").value = "";
  // The button that was pressed cannot keep the focus while it is off.
  $("question").focus({ preventScroll: true });
  enable(true);
  const { turn, failed, stopped } = await ask(question, settings);
  enable(false);
  // The conversation was begun anew meanwhile.
  if (!turns.includes(turn)) return;
  $("doing").textContent = stopped ? "Stopped." : "";
  $("told").textContent = turn.answers.filter((answer) => answer.stats).map(summary).join(" ");
  tell(failed.join(" "));
  if (!turn.answers.some((answer) => answer.said)) {
    $("question").value ||= question;
    if (stopped) drop(turn);
    return;
  }
  if ($("same").hidden) keepDocuments(true);
}

/// Takes a turn away that has nothing to show.
function drop(turn) {
  $("turns").children[turns.indexOf(turn)].remove();
  turns.splice(turns.indexOf(turn), 1);
  $("anew").disabled = turns.length === 0;
}

let chosenBefore = "search";
/// Offers the documents of the turns before, or no longer.
function keepDocuments(offered) {
  const [same, chosen] = [$("same").querySelector("input"), $("settings").elements.from];
  if (offered) chosenBefore = chosen.value;
  if (offered || same.checked) chosen.value = offered ? "same" : chosenBefore;
  $("same").hidden = !offered;
}

/// Begins a new conversation.
function anew() {
  stop?.abort();
  turns.length = 0;
  $("turns").replaceChildren();
  $("doing").textContent = "A new conversation.";
  tell();
  keepDocuments(false);
  $("anew").disabled = true;
  $("question").focus();
}

$("anew").onclick = anew;
$("stop").onclick = () => { stop?.abort(); $("question").focus(); };
window.addEventListener("keydown", (event) => { if (event.key === "Escape") stop?.abort(); });
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
