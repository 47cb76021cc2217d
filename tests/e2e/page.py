"""Uses the playground of a running server as somebody without a mouse does, and looks whether all of it can be read.

    page.py URL [FOLDER]

Pictures go into the folder. Ends with status 77 where Playwright or Chromium is not installed.
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

URL, FOLDER = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
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
FOCUS = """() => {
  const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
  return { what: e.id || e.name || e.textContent.trim().slice(0, 20) || e.tagName, body: e === document.body,
    outline: style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth), seen: box.width > 0 && box.height > 0 };
}"""
# Every pattern of the bars with less contrast to its card than WCAG 2.2 AA wants of graphics: 3.
PALE = """() => {
  const kinds = ['prefix', 'reused', 'recomputed', 'fresh'], style = getComputedStyle(document.documentElement);
  const bytes = c => c.match(/^#(...)$/) ? [...c.slice(1)].map(h => 17 * parseInt(h, 16)) : c.match(/\\w\\w/g).map(h => parseInt(h, 16));
  const lightness = c => { const [r, g, b] = bytes(c).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const color = name => style.getPropertyValue('--' + name).trim();
  const ratio = name => { const [a, b] = [color(name), color('card')].map(lightness).sort((x, y) => y - x); return (a + .05) / (b + .05); };
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
    assert texts > 20, f"{when}: {texts} texts"
    assert not faint, f"{when}: too faint: {faint}"
    nameless = page.evaluate(NAMELESS)
    assert not nameless, f"{when}: without a name: {nameless}"
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{when}: {wide} px too wide"


def ask(page, question, turns):
    """Asks by keyboard, the question having the focus, and waits for the answers of the turn."""
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.turn').length === n", arg=turns)
    assert page.evaluate(FOCUS)["what"] == "question", "a further question can be typed at once"
    page.wait_for_selector("#go:not([disabled])", timeout=120_000)
    assert page.locator("#problem").inner_text() == "", page.locator("#problem").inner_text()


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
        assert roles == ["user", "assistant", "user"] and body["messages"][1]["content"].strip() == said, body
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


def use(browser, name, width, height, scheme):
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    faults, asked, sent = [], [], []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.on("request", lambda request: sent.append(request.post_data_json) if request.url.endswith("/chat/completions") else None)
    page.goto(URL)
    # The documents come last.
    page.wait_for_selector("#documents li")
    read(page, f"{name}, at first")
    kept = page.locator("#documents li input").count()
    reach(page, "#text")
    page.keyboard.type(f"{TEXT} This is page {name}.")
    reach(page, "#add button")
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('#documents li input').length === n", arg=kept + 1, timeout=60_000)
    reach(page, "#tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("12")
    reach(page, "#question")
    converse(page, name, sent)
    assert not faults, f"{name}: {faults}"
    begin_anew(page)
    strangers = [url for url in asked if not url.startswith((URL, "data:"))]
    assert not strangers, f"{name}: asked elsewhere: {strangers}"
    # The one refused request of each method.
    assert all("503" in fault for fault in faults) and len(faults) == 2, f"{name}: {faults}"
    page.close()


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
    use(browser, "wide-light", 1280, 900, "light")
    use(browser, "phone-dark", 390, 844, "dark")
    use(browser, "phone-light", 360, 740, "light")
    use(browser, "wide-dark", 1280, 900, "dark")
    browser.close()
print("the page can be read and used")
