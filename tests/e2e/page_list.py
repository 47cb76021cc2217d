"""The part of `page.py` in which there are many documents, or another window, or another key, changes which there are."""

import json
import re
from urllib.parse import parse_qs, urlsplit

from browser import start, stand_in


def document(number):
    return {"id": f"doc-{number:05}", "object": "document", "title": f"Chapter {number}", "created": 1, "pinned": False, "tokens": 9}


class Stored:
    """Documents in the server's place, in the order of their ids. A listing that is held is answered later with what there was then."""

    def __init__(self, page, count):
        self.documents = {made["id"]: made for made in map(document, range(count))}
        self.holds, self.held = False, []
        page.route(re.compile(r"/v1/documents"), self.serve)

    def serve(self, route):
        url = urlsplit(route.request.url)
        method, name = route.request.method, url.path.rpartition("/")[2]
        if method == "POST":
            added = document(len(self.documents))
            self.documents[added["id"]] = added
            event = json.dumps({"object": "list", "data": [added]})
            route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\ndata: [DONE]\n\n")
        elif name == "documents":
            after = parse_qs(url.query).get("after", [""])[0]
            rest = [stored for stored in self.documents.values() if stored["id"] > after]
            page = {"object": "list", "data": rest[:1000], "has_more": len(rest) > 1000, "last_id": rest[:1000][-1]["id"] if rest else None}
            if self.holds:
                self.held.append(lambda: route.fulfill(json=page))
            else:
                route.fulfill(json=page)
        elif name not in self.documents:
            route.fulfill(status=404, json={"error": {"message": f'there is no document "{name}"', "code": "not_found"}})
        else:
            found = self.documents.pop(name) if method == "DELETE" else self.documents[name]
            route.fulfill(json=found)


def source(page):
    return page.locator("#settings").evaluate("form => form.elements.from.value")


def has_rows(page, count):
    page.wait_for_function("n => document.querySelectorAll('#documents li input').length === n", arg=count)


def look_again(page):
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def list_many(page):
    """The filter tells of what is not listed yet. A tick behind the first page is there again when the page is loaded anew."""
    Stored(page, 1500)
    start(page)
    has_rows(page, 1000)
    page.locator("#filter").fill("Chapter 1400")
    page.get_by_text("None of the titles listed so far has that: list more.").wait_for()
    page.locator("#more").click()
    has_rows(page, 1500)
    # Rows are hidden and shown, and not put in anew.
    page.evaluate("window.put = 0; new MutationObserver(() => put++).observe(document.getElementById('documents'), { childList: true })")
    page.locator("#filter").fill("Chapter 140")
    assert page.locator("#documents li:visible").count() == 11 and page.evaluate("put") == 0
    page.locator("#documents li input[value=doc-01400]").check()
    page.reload()
    page.wait_for_selector("#documents li input:checked", state="attached")
    assert page.locator("#documents li input:checked").evaluate_all("ticks => ticks.map(tick => tick.value)") == ["doc-01400"]
    page.wait_for_function("() => document.getElementById('settings').elements.from.value === 'chosen'")
    page.unroute_all()


def escape(page):
    """Escape empties the filter, and stops an answer only where there is nothing to empty."""
    answer = stand_in(page)
    answer(lines=500, pause=10)
    page.locator("#question").fill("What?")
    page.locator("#question").press("Enter")
    page.locator("#filter").fill("Chapter")
    page.locator("#filter").press("Escape")
    assert page.locator("#stop").is_enabled()
    page.locator("#question").press("Escape")
    page.wait_for_selector("#stop[disabled]")


def remove_elsewhere(page):
    """A document that was removed in another window leaves this one: by a question from it, and by being removed."""
    stored = Stored(page, 8)
    page.on("dialog", lambda dialog: dialog.accept())
    start(page)
    has_rows(page, 8)
    escape(page)
    page.reload()
    has_rows(page, 8)
    page.locator("#anew").click()
    page.locator("#documents li input[value=doc-00003]").check()
    assert source(page) == "chosen"
    del stored.documents["doc-00003"]
    missing = {"status": 404, "json": {"error": {"message": 'there is no document "doc-00003"', "code": "not_found"}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**missing))
    page.locator("#question").fill("What?")
    page.locator("#question").press("Enter")
    page.wait_for_function("() => document.getElementById('problem').textContent.includes('A document was removed')")
    has_rows(page, 7)
    assert source(page) == "search"
    del stored.documents["doc-00004"]
    page.get_by_role("button", name="remove Chapter 4").click()
    has_rows(page, 6)
    assert page.locator("#unread").inner_text() == ""
    # A window beside another one is not hidden while that changes the documents.
    del stored.documents["doc-00005"]
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    has_rows(page, 5)
    # Who wants the ticked documents, and has not ticked one yet, is not sent back to a search.
    page.locator("input[value=chosen]").check()
    look_again(page)
    page.wait_for_timeout(100)
    assert source(page) == "chosen"
    page.unroute_all()


def add_meanwhile(page):
    """A listing from before a document was added does not take it away."""
    stored = Stored(page, 2)
    start(page)
    has_rows(page, 2)
    stored.holds = True
    look_again(page)
    while not stored.held:
        page.wait_for_timeout(10)
    page.locator("#text").fill("A third text.")
    page.locator("#add button").first.click()
    has_rows(page, 3)
    stored.holds = False
    stored.held.pop()()
    page.wait_for_timeout(200)
    has_rows(page, 3)
    page.unroute_all()


def change_key(page):
    """Another key does not show the documents of the one before, and a late answer to the one before is not taken."""
    late = []

    def serve(route):
        key = route.request.headers.get("authorization")
        if key == "Bearer slow":
            late.append(route)
        elif key == "Bearer wrong":
            route.fulfill(status=401, json={"error": {"message": "unknown"}})
        else:
            route.continue_()

    Stored(page, 2)
    page.route("**/v1/models", serve)
    start(page)
    has_rows(page, 2)
    methods = page.locator("#methods input").count()
    page.evaluate("document.getElementById('unread').textContent = 'Not added: the server does not know this API key'")
    page.locator("#access summary").click()
    for key in ("wrong", "slow", ""):
        page.locator("#key").fill(key)
        page.locator("#key").blur()
        if key == "wrong":
            page.wait_for_function("() => document.getElementById('problem').textContent.includes('does not know this API key')")
            assert page.locator("#documents li").count() == 0 and page.locator("#counted").inner_text() == ""
        while key == "slow" and not late:
            page.wait_for_timeout(10)
    has_rows(page, 2)
    late[0].continue_()
    page.wait_for_timeout(100)
    assert page.locator("#methods input").count() == methods and page.locator("#unread").inner_text() == ""
    page.unroute_all()


def keep_list(browser):
    faults = []
    for part in (list_many, remove_elsewhere, add_meanwhile, change_key):
        page = browser.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        part(page)
        page.close()
    assert not faults, faults
