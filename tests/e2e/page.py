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


def use(browser, name, width, height, scheme):
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    faults, asked = [], []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
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
    reach(page, "#question")
    page.keyboard.type("How many spokes has the rear wheel?")
    reach(page, "#tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("12")
    reach(page, "#go")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop[disabled]", state="attached", timeout=120_000)
    page.wait_for_selector("article .source", timeout=120_000)
    page.wait_for_selector("#go:not([disabled])", timeout=120_000)
    reach(page, "article .source summary")
    page.keyboard.press("Enter")
    assert page.locator("article .shaded span").count() > 10, "tokens are shaded"
    for source in page.locator("article .source summary").all()[1:]:
        source.click()
    read(page, f"{name}, answered")
    assert page.locator("#problem").inner_text() == "", page.locator("#problem").inner_text()
    if FOLDER:
        page.screenshot(path=os.path.join(FOLDER, f"{name}.png"), full_page=True)
    strangers = [url for url in asked if not url.startswith((URL, "data:"))]
    assert not strangers, f"{name}: asked elsewhere: {strangers}"
    assert not faults, f"{name}: {faults}"
    page.close()


with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
    use(browser, "wide-light", 1280, 900, "light")
    use(browser, "phone-dark", 390, 844, "dark")
    use(browser, "phone-light", 360, 740, "light")
    use(browser, "wide-dark", 1280, 900, "dark")
    browser.close()
print("the page can be read and used")
