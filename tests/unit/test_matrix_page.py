"""The matrix page in a real headless Chromium: what it shows, its keys, its filters, and that it loads nothing."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matrix_samples import make_store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


def page(directory: Path, **sizes: Any) -> str:
    store = make_store(directory / "store", **sizes)
    target = directory / "matrix.html"
    command = [sys.executable, "-m", "kcache", "matrix", "--from", str(store), "--html", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return target.read_text(encoding="utf-8")


def opened(directory: Path, text: str, script: str = "return {};") -> Any:
    """What `script`, run in the page once it is drawn, returns."""
    probe = (
        "<script>(async () => { const wait = (ms) => new Promise((done) => setTimeout(done, ms));"
        "const body = await (async () => {" + script + "})();"
        "document.documentElement.dataset.answer = JSON.stringify(body); })();</script>"
    )
    target = directory / "probed.html"
    target.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=8000", "--dump-dom", target.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    found = re.search(r'data-answer="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


KEYS = """
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const place = () => document.activeElement.place.join();
const seen = [];
document.querySelectorAll("td[tabindex='0']")[0].focus();
for (const key of ["ArrowRight", "ArrowDown", "End", "Home", "PageDown", "ArrowUp", "ArrowLeft"]) {
  press(key);
  seen.push(place());
}
press("Enter");
return {seen, details: document.getElementById("details").innerText, stops: document.querySelectorAll("td[tabindex='0']").length,
  selected: document.querySelectorAll("td[aria-selected=true]").length};
"""


def test_every_cell_is_reached_by_keys_and_says_what_it_holds(tmp_path: Path) -> None:
    answer = opened(tmp_path, page(tmp_path, models=4, archs=3, versions=2), KEYS)
    assert answer["seen"] == ["0,1", "1,1", "1,5", "1,0", "3,0", "2,0", "2,0"]
    assert (answer["stops"], answer["selected"]) == (1, 1)  # one stop of the Tab key
    for text in ("maker/model-002-moe", "1.7 MB", "3.4 MB", "2026-12-01T09:00:00Z", "farm@example.org", "33 s", "nvfp4-tp1-ep1"):
        assert text in answer["details"], text


FILTERS = """
const text = document.getElementById("f-text"), arch = document.getElementById("f-arch");
const status = () => document.getElementById("status").textContent;
const set = async (box, value) => { box.value = value; box.dispatchEvent(new Event("input", {bubbles: true})); await wait(400); };
const all = status();
await set(text, "model-001");
const one = status();
await set(arch, "100a");
const narrow = status();
await set(text, "nothing like it");
const none = document.getElementById("scroll").textContent;
document.querySelector("button[type=reset]").click();
await wait(400);
return {all, one, narrow, none, again: status()};
"""


def test_filters_narrow_and_are_announced(tmp_path: Path) -> None:
    answer = opened(tmp_path, page(tmp_path, models=3, archs=2, versions=2), FILTERS)
    assert answer["all"] == answer["again"] == "12 cells in 3 rows and 4 columns shown."
    assert answer["one"] == "4 cells in 1 row and 4 columns shown."
    assert answer["narrow"] == "2 cells in 1 row and 2 columns shown."
    assert answer["none"] == "Nothing matches these filters."


LABELS = """
const lacking = [...document.querySelectorAll("input, select")].filter((one) => !one.labels.length).length;
const heads = [...document.querySelectorAll("th")].filter((one) => !one.scope).length;
const loaded = performance.getEntriesByType("resource").length;
let refused = 0;
document.addEventListener("securitypolicyviolation", () => refused++);
await fetch("https://example.org/").catch(() => 0);
await wait(200);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
return {lacking, heads, loaded, refused, live: document.querySelectorAll("[aria-live=polite]").length,
  lang: document.documentElement.lang, caption: document.querySelectorAll("caption").length, scheme: style("color-scheme")};
"""


def test_it_is_labelled_for_screen_readers_and_can_load_nothing(tmp_path: Path) -> None:
    answer = opened(tmp_path, page(tmp_path, models=2, archs=2, versions=1), LABELS)
    assert answer == {
        **{"lacking": 0, "heads": 0, "loaded": 0, "refused": 1, "live": 2, "lang": "en", "caption": 1, "scheme": "light dark"},
    }


def test_what_a_store_says_is_text_and_never_markup(tmp_path: Path) -> None:
    text = page(tmp_path, models=1, archs=1, versions=1)
    hostile = text.replace("farm@example.org", "\\u003c/script>\\u003cimg src=x onerror=document.title='bad'>")
    script = "document.querySelector('td.has').click(); await wait(200); return [document.title, document.images.length];"
    assert opened(tmp_path, hostile, script) == ["kcache matrix", 0]


def test_twelve_thousand_cells_are_all_drawn(tmp_path: Path) -> None:
    script = "return [document.querySelectorAll('td.has').length, Number(document.documentElement.dataset.ready)];"
    cells, _milliseconds = opened(tmp_path, page(tmp_path, models=200, archs=6, versions=10), script)
    assert cells == 12_000


def test_a_name_that_would_end_the_data_does_not(tmp_path: Path) -> None:
    from kcache.cli.matrix_html import render
    from kcache.matrix import make_matrix

    text = render(make_matrix(["</script><script>document.title = 'bad'</script>"], []))
    assert opened(tmp_path, text, "return document.title;") == "kcache matrix"
