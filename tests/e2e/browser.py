"""What the tests of the playground share: the browser, questions by keyboard, and a stand-in for the server's answers.

Ends with status 77 where Playwright or Chromium is not installed.
"""

import os
import shutil
import sys

try:
    from playwright.sync_api import sync_playwright
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("REFRAIN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
if not CHROMIUM:
    print("skipped: no Chromium (REFRAIN_CHROMIUM says where it is)")
    sys.exit(77)

URL = sys.argv[1]
FOCUS = """() => {
  const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
  return { what: e.id || e.name || e.textContent.trim().slice(0, 20) || e.tagName, body: e === document.body,
    outline: style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth), seen: box.width > 0 && box.height > 0 };
}"""
# Answers questions in the server's place with `answer`: its pieces, the milliseconds before each, why it ends, its documents, those of its
# numbers that are others, and whether the connection is lost meanwhile. What it is asked is in `asked`.
STAND_IN = """() => {
  const real = fetch, bytes = new TextEncoder();
  Object.assign(window, { asked: [], answer: null, fetch: (path, options) => {
    if (!path.endsWith('/chat/completions')) return real(path, options);
    const { pieces, pause, end, documents, stats: more } = window.answer;
    const stats = { prompt_tokens: 9, document_tokens: 0, prefix_tokens: 0, cached_tokens: 0, reused_tokens: 0,
      recomputed_tokens: 0, left_out_tokens: 0, ttft: 1, kv_bytes_held: 1, ...more };
    const choice = (content, finish_reason) => JSON.stringify({ choices: [{ delta: { content }, finish_reason }] });
    const events = pieces.map(piece => choice(piece, null));
    events.push(choice('', end), JSON.stringify({ refrain: { stats, documents } }), '[DONE]');
    window.asked.push(JSON.parse(options.body));
    return Promise.resolve(new Response(new ReadableStream({ async pull(stream) {
      await new Promise(resume => setTimeout(resume, pause));
      if (options.signal.aborted) return stream.error(options.signal.reason);
      if (window.answer.isLost) return stream.error(new Error('the connection is lost'));
      stream.enqueue(bytes.encode(`data: ${events.shift()}\\n\\n`));
      if (!events.length) stream.close();
    } })));
  } });
}"""


def launch(playwright):
    return playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


def start(page):
    page.goto(URL)
    # The documents come last.
    page.wait_for_selector("#documents li", state="attached")


def ask(page, question, turns):
    """Asks by keyboard, the question having the focus, and waits for the answers of the turn."""
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=turns)
    assert page.evaluate(FOCUS)["what"] == "question", "a further question can be typed at once"
    page.wait_for_selector("#go:not([disabled])", timeout=120_000)
    assert page.locator("#problem").inner_text() == "", page.locator("#problem").inner_text()


def stand_in(page):
    """Puts STAND_IN in the server's place. Gives a function that sets its answer."""
    page.evaluate(STAND_IN)

    def answer(lines=1, **how):
        pieces = [f"Line {line}.\n" for line in range(lines)]
        page.evaluate("how => { answer = how; }", {"pieces": pieces, "pause": 0, "end": "stop", "documents": [], **how})

    answer()
    return answer
