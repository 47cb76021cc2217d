"""Uses the playground of a running server as somebody without a mouse does, and looks whether all of it can be read.

    page.py URL [FOLDER]

Pictures go into the folder. Ends with status 77 where Playwright or Chromium is not installed.
"""

import os
import re
import sys

from browser import FOCUS, URL, ask, launch, stand_in, start, sync_playwright
from page_answers import read_answers
from page_faults import keep_policy, meet_faults
from page_list import keep_list

FOLDER = sys.argv[2] if len(sys.argv) > 2 else None
TEXT = "A stem bolt is tightened to 5 Nm. Carbon bars want paste on the clamp. The rear wheel has 28 spokes."

# Every text that is seen with less contrast than WCAG 2.2 AA wants: 4.5, or 3 where it is large.
FAINT = """() => {
  const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const lightness = c => { const [r, g, b] = c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const found = [];
  const seen = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (seen.nextNode()) {
    const element = seen.currentNode.parentElement, style = getComputedStyle(element);
    const text = seen.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || !element.getClientRects().length || element.closest('script, :disabled')) continue;
    texts++;
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    const under = layers.reverse().reduce((below, layer) => over(layer, below), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
    const [a, b] = [over(parse(style.color), under), under].map(lightness).sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05), size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if (ratio < least) found.push(`${ratio.toFixed(2)} ${element.tagName} ${text.slice(0, 30)}`);
  }
  return [texts, found];
}"""
# Every pattern of the bars, and the border of fields, with less contrast to what lies under it than WCAG 2.2 AA wants of graphics: 3.
PALE = """() => {
  const kinds = ['prefix', 'reused', 'recomputed', 'fresh', 'edge'], style = getComputedStyle(document.documentElement);
  const bytes = c => c.match(/^#(...)$/) ? [...c.slice(1)].map(h => 17 * parseInt(h, 16)) : c.match(/\\w\\w/g).map(h => parseInt(h, 16));
  const lightness = c => { const [r, g, b] = bytes(c).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const color = name => style.getPropertyValue('--' + name).trim();
  const ratio = name => { const [a, b] = [color(name), color(name === 'edge' ? 'paper' : 'card')].map(lightness).sort((x, y) => y - x); return (a + .05) / (b + .05); };
  return kinds.filter(kind => !(ratio(kind) >= 3)).map(kind => kind + ' ' + ratio(kind));
}"""
NAMELESS = """() => [...document.querySelectorAll('button, input, textarea, select, summary')].filter(e => e.checkVisibility())
  .filter(e => !(e.getAttribute('aria-label') || (e.matches('select, textarea') ? '' : e.textContent) || [...e.labels ?? []].map(l => l.textContent).join('')).trim())
  .map(e => e.outerHTML)"""


def reach(page, selector):
    """Tabs until the element has the focus; what had it on the way."""
    way = []
    for _ in range(80):
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return way
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        way.append(focus["what"])
        assert focus["body"] or focus["outline"] >= 2, f"one cannot see that {focus['what']} has the focus"
        assert focus["body"] or focus["seen"], f"{focus['what']} has the focus and is not seen"
    raise AssertionError(f"the keyboard does not reach {selector}: {way}")


def read(page, when):
    texts, faint = page.evaluate(FAINT)
    assert texts > 10, f"{when}: {texts} texts"
    assert not faint, f"{when}: too faint: {faint}"
    nameless = page.evaluate(NAMELESS)
    assert not nameless, f"{when}: without a name: {nameless}"
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{when}: {wide} px too wide"


def open_box(page, box):
    """Unfolds a part of the page that is folded on phones."""
    if page.locator(box).get_attribute("open") is None:
        reach(page, f"{box} > summary")
        page.keyboard.press("Enter")


def tokens(article):
    """Tokens of an answer's prompt by kind, as they are written beside the bar."""
    rows = article.locator(".kinds > div").all()
    found = {row.locator(".swatch").get_attribute("class").split()[-1]: int(row.locator("dd").inner_text().split()[0]) for row in rows}
    label = article.locator(".stack").get_attribute("aria-label")
    whole = int(label.removeprefix("Prompt of ").split()[0])
    assert sum(found.values()) == whole and all(str(n) in label for n in found.values()), (label, found)
    assert article.locator(".stack i").count() == len(found)
    assert "First token after" in article.locator(".numbers").last.inner_text()
    return found


def letters(text):
    return re.sub(r"\W", "", text)


def add(page, text, kept):
    """Adds a text by keyboard. What is typed meanwhile is not lost."""
    reach(page, "#text")
    page.keyboard.type(text)
    reach(page, "#add button")
    page.keyboard.press("Enter")
    assert page.locator("#text").input_value() == "", "the form is free for the next text at once"
    page.locator("#text").fill("Typed meanwhile")
    page.wait_for_function("n => document.querySelectorAll('#documents li input').length === n", arg=kept + 1, timeout=60_000)
    page.wait_for_function("() => document.getElementById('adding').textContent.startsWith('Added')")
    assert page.locator("#text").input_value() == "Typed meanwhile"
    page.locator("#text").fill("")


def choose(page):
    """What the next answers are from, where the server's answers do not matter."""
    source = lambda: page.locator("#settings").evaluate("form => form.elements.from.value")
    asked = lambda: page.evaluate("asked.at(-1).documents")
    answer = stand_in(page)
    reach(page, "#question")
    ask(page, "Is there anything?", 1)
    assert source() == "search", "where no document was found there are none to keep"
    assert page.get_by_text("No document was found").count() == 2
    tick = page.locator("#documents li input").first
    tick.check()
    assert source() == "chosen", "a tick chooses the document"
    tick.uncheck()
    assert source() == "search"
    tick.check()
    page.locator("#question").focus()
    known = {"id": tick.get_attribute("value"), "title": "", "chunks": [{"part": 0, "of": 1}]}
    answer(documents=[known], end="length")
    ask(page, "And now?", 2)
    assert asked() == [{"id": known["id"]}] and source() == "same", (asked(), source())
    assert page.locator(".turn").nth(1).get_by_text("Cut off at 512 tokens").count() == 2
    tick.uncheck()
    page.locator("#anew").click()
    assert source() == "search"
    answer(lines=200, pause=10)
    page.keyboard.type("A long one?")
    page.keyboard.press("Enter")
    lines = "n => document.querySelector('.turn .text')?.textContent.split('Line').length > n"
    page.wait_for_function(lines, arg=50)
    end = "() => document.querySelector('.turn .text').getBoundingClientRect().bottom - document.getElementById('ask').getBoundingClientRect().top"
    assert page.evaluate(end) <= 1, "the end of an answer stays in sight"
    up = page.evaluate("() => { scrollBy({ top: -200, behavior: 'instant' }); return scrollY; }")
    page.wait_for_function(lines, arg=70)
    assert page.evaluate("scrollY") == up and page.evaluate(end) > 200, "who scrolls up stays there"
    page.keyboard.press("Escape")
    page.wait_for_selector("#go:not([disabled])")
    assert source() == "search"
    answer()
    ask(page, "And then?", 2)
    assert asked() == "search", "of an answer that was stopped no document is known"
    page.locator("#anew").click()


def tend(page):
    """Pins and removes a document by keyboard. The focus stays, or goes to the next."""
    page.on("dialog", lambda dialog: dialog.accept())
    rows = page.locator("#documents li")
    kept, after = rows.count(), rows.nth(1).locator("bdi").inner_text()
    reach(page, "#documents li button")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.textContent === 'unpin'")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('#documents li').length === n", arg=kept - 1)
    assert page.evaluate("document.activeElement.ariaLabel") == f"remove {after}"


def load_anew(page):
    """What was said, and what was not yet asked, is there when the page is loaded anew."""
    said = page.locator("#turns").text_content()
    page.locator("#question").fill("A draft")
    page.reload()
    page.wait_for_selector("#documents li", state="attached")
    assert page.locator("#turns").text_content() == said
    page.wait_for_function("() => document.getElementById('same').querySelector('input').checked")
    assert page.locator("#question").input_value() == "A draft" and page.locator("#tokens").input_value() == "12"
    page.locator("#question").fill("")


def converse(page, name, sent):
    """Two turns, and a new conversation."""
    ask(page, "How many spokes has the rear wheel?", 1)
    page.wait_for_selector("article .source", timeout=120_000)
    for answer in page.locator(".turn article").all():
        found = tokens(answer)
        reuses = answer.locator("h4").inner_text() != "vanilla"
        assert ("reused" in found) == reuses and "prefix" not in found and found["fresh"] > 0, found
    reach(page, "article .source summary")
    page.keyboard.press("Enter")
    assert page.locator("article .shaded span").count() > 10, "tokens are shaded"
    for source in page.locator("article .source summary").all()[1:]:
        source.click()
    read(page, f"{name}, answered")
    first = [answer.inner_text().strip() for answer in page.locator(".turn article .text").all()]
    reach(page, "#question")
    sent.clear()
    ask(page, "And how tight is a stem bolt?", 2)
    second = page.locator(".turn").nth(1).locator("article").all()
    for answer, body, said in zip(second, sent, first, strict=True):
        found = tokens(answer)
        assert found["prefix"] > found["fresh"] and "reused" not in found, f"{name}: the second turn goes on from the first: {found}"
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["user", "assistant", "user"], body
        # Markdown's marks are not shown.
        assert letters(body["messages"][1]["content"]) == letters(said), body
        assert body["documents"][0]["parts"], body
    assert page.locator("#same input").is_checked()
    reach(page, "#legend summary")
    page.keyboard.press("Enter")
    read(page, f"{name}, two turns")
    pale = page.evaluate(PALE)
    assert not pale, f"{name}: too pale: {pale}"
    if FOLDER:
        page.screenshot(path=os.path.join(FOLDER, f"{name}.png"), full_page=True)


def begin_anew(page):
    """An error keeps the conversation and gives the question back; a new one begins with nothing."""
    failure = {"status": 503, "json": {"error": {"message": "The server is being restarted."}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**failure))
    reach(page, "#question")
    page.keyboard.type("Is it still there?")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('problem').textContent.includes('restarted')")
    page.wait_for_selector("#go:not([disabled])")
    assert page.locator(".turn article .stack").count() == 4, "the turns before stay"
    assert page.locator("#question").input_value() == "Is it still there?"
    page.unroute("**/v1/chat/completions")
    reach(page, "#anew")
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 0 and page.evaluate(FOCUS)["what"] == "question"
    assert page.locator("#same").is_hidden() and page.locator("input[value=search]").is_checked()
    reach(page, "#again")
    page.keyboard.press("Enter")
    assert page.locator(".turn article .stack").count() == 4, "the conversation before can be brought back"
    assert page.locator("#same input").is_checked() and page.locator("#again").is_hidden()
    page.locator("#anew").click()


def use(browser, name, width, height, scheme):
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    faults, asked, sent = [], [], []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.on("request", lambda request: sent.append(request.post_data_json) if request.url.endswith("/chat/completions") else None)
    start(page)
    read(page, f"{name}, at first")
    for box in ("#drop", "#next"):
        open_box(page, box)
    read(page, f"{name}, unfolded")
    add(page, f"{TEXT} This is page {name}.", page.locator("#documents li input").count())
    if name == "wide-light":
        choose(page)
        # The server answers again.
        start(page)
    open_box(page, "#next")
    reach(page, "#tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("12")
    reach(page, "#question")
    converse(page, name, sent)
    load_anew(page)
    assert not faults, f"{name}: {faults}"
    begin_anew(page)
    if name == "wide-dark":
        tend(page)
    strangers = [url for url in asked if not url.startswith((URL, "data:"))]
    assert not strangers, f"{name}: asked elsewhere: {strangers}"
    # The one refused request of each method.
    assert all("503" in fault for fault in faults) and len(faults) == 2, f"{name}: {faults}"
    page.close()


with sync_playwright() as playwright:
    browser = launch(playwright)
    use(browser, "wide-light", 1280, 900, "light")
    use(browser, "phone-dark", 390, 844, "dark")
    use(browser, "phone-light", 360, 740, "light")
    use(browser, "wide-dark", 1280, 900, "dark")
    read_answers(browser)
    keep_list(browser)
    keep_policy(browser)
    meet_faults(browser)
    browser.close()
print("the page can be read and used")
