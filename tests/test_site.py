"""The site in a browser: nothing overflows or is cut, and search needs no server."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .browser import dump, in_browser

ROOT = Path(__file__).parents[1]

pytestmark = [in_browser, pytest.mark.slow]

# Loads each page in a frame of each width and writes down what does not fit into it.
HARNESS = """
<body><iframe id="frame" style="height: 900px; border: 0"></iframe><script>
const frame = document.getElementById("frame"), found = []
async function look(page, width) {
  frame.style.width = width + "px"
  await new Promise((resolve) => { frame.onload = resolve; frame.src = page })
  for (const scheme of ["default", "slate"]) judge(page, width, scheme)
}
function judge(page, width, scheme) {
  const doc = frame.contentDocument
  const say = (what) => found.push([page, width, scheme, what])
  doc.body.setAttribute("data-md-color-scheme", scheme)
  const room = doc.documentElement.clientWidth
  if (doc.documentElement.scrollWidth > room + 1) say("the page overflows")
  if (room < width - 30) say("the frame is " + room)
  if (width > 1000)
    for (const box of doc.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
      if (box.scrollWidth > box.clientWidth + 1)
        say("cut: " + box.textContent.trim().slice(0, 60))
  for (const image of doc.images)
    if (!image.loading && image.complete && !image.naturalWidth) say(image.src)
  const color = (name) => frame.contentWindow.getComputedStyle(doc.body)[name]
  if (color("color") === color("backgroundColor")) say("text without contrast")
}
async function run() {
  for (const page of PAGES)
    for (const width of [1280, 400]) await look(page, width)
  const result = document.createElement("pre")
  result.id = "result"
  result.textContent = JSON.stringify(found)
  document.body.append(result)
}
run()
</script></body>
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([*command, folder], cwd=ROOT, env=environment, check=True)
    return folder


def test_pages_fit_a_desktop_and_a_telephone(site: Path, tmp_path: Path):
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))
    pages = [page for page in pages if page != "404.html"]
    assert len(pages) > 40
    harness = site / "harness.html"
    harness.write_text(HARNESS.replace("PAGES", json.dumps(pages)), encoding="utf-8")
    flags = ("--allow-file-access-from-files", "--disable-web-security")
    document, log = dump(harness.as_uri(), tmp_path, 120_000, *flags)
    harness.unlink()
    result = re.search(r'<pre id="result">(.*?)</pre>', document, re.DOTALL)
    assert result, log
    assert json.loads(html.unescape(result[1])) == []
    assert "Uncaught" not in log and "ERR_" not in log, log


def test_search_works_from_files(site: Path, tmp_path: Path):
    url = f"{(site / 'index.html').as_uri()}?q=overflow"
    document, log = dump(url, tmp_path, 8000)
    assert re.search(r'md-search-result__meta">\d+ matching documents', document), log
