"""The page of a report: well-formed, self-contained, and at work in a browser."""

import html
import html.parser
import json
import re

import jax
import jax.numpy as jnp
import pytest

import mpx

from ...browser import dump, in_browser

VOID = {"input", "meta", "br", "link", "img"}


class Reader(html.parser.HTMLParser):
    """Checks that elements close in order, and keeps attributes, texts and data."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.data = [], [], {}
        self.tags, self.texts = set(), []

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *item) for item in attributes]
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, f"line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append(data.strip())
        if self.open and self.open[-1][1]:
            self.data[self.open[-1][1]] = data


def model(w, x):
    def body(x, w):
        with jax.named_scope("encoder"), jax.named_scope("mlp"):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    x = jax.lax.scan(body, x, w)[0]
    with jax.named_scope("head"):
        return jnp.sum((x.astype(jnp.float32) @ w[0]) ** 2)


@pytest.fixture(scope="module")
def report():
    w = jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    return mpx.explain(jax.grad(model))(w, x)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_well_formed_and_holds_all_operations(report):
    page = report.to_html()
    reader = read(page)
    data = json.loads(reader.data["data"])
    assert len(data["operations"]) == len(report.operations)
    assert data["totals"]["flops"] == report.totals.flops
    column = data["fields"].index("primitive")
    names = [data["texts"][row[column]] for row in data["operations"]]
    assert names == [o.primitive for o in report.operations]
    # Nothing comes from the network.
    names = {name for _, name, _ in reader.attributes}
    assert not names & {"src", "href", "action", "formaction"}
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|import\(", page)
    # A notebook shows it in a frame.
    attributes = read(report._repr_html_()).attributes
    (source,) = (value for _, name, value in attributes if name == "srcdoc")
    assert source == page


def test_names_cannot_break_the_page():
    def f(x):
        with jax.named_scope("</script><script>alert(1)</script>"):
            return x + 1

    f.__name__ = "<b>&"
    page = mpx.explain(f)(jnp.ones(2)).to_html()
    data = json.loads(read(page).data["data"])
    assert data["texts"][1].startswith("</script><script>")
    assert "<title>&lt;b&gt;&amp;</title>" in page


def quantized_report():
    def loss(w, x):
        return jnp.mean((x @ w[0] @ w[1]).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    func = mpx.autocast(loss, recipe=mpx.MXFP8BlockScaling(), target="cpu")
    return mpx.explain(func)([x, x], x)


def test_the_page_holds_formats():
    data = json.loads(read(quantized_report().to_html()).data["data"])
    column = data["fields"].index("format")
    formats = {data["texts"][row[column]] for row in data["operations"]}
    assert {"MXFP8", "bfloat16", "float32"} <= formats
    assert "% of FLOPs in MXFP8 (emulated on this CPU), " in data["headline"]
    assert any('target="B200"' in note for note in data["notes"])


def opened(page, tmp_path, view, script, *options):
    """The page as a browser shows it after running a script."""
    file = tmp_path / "page.html"
    page = page.replace("</body>", f"<script>{script}</script></body>")
    file.write_text(page, encoding="utf-8")
    return dump(f"{file.as_uri()}#{view}", tmp_path / "profile", *options)[0]


def rows_in_browser(page, tmp_path, view="", script=""):
    document = opened(page, tmp_path, view, script)
    body = re.search(r'<tbody id="rows">(.*?)</tbody>', document, re.DOTALL)[1]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.DOTALL)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
    plain = lambda x: html.unescape(re.sub(r"<[^>]*>", "", x)).strip()  # noqa: E731
    shown = re.search(r'<p id="shown"[^>]*>(.*?)</p>', document)[1]
    return [list(map(plain, row)) for row in cells], shown, document


@in_browser
def test_a_browser_shows_the_most_expensive_first(report, tmp_path):
    rows, shown, _ = rows_in_browser(report.to_html(), tmp_path)
    assert rows[0][1].startswith("dot_general")
    shapes = "bf16[8,16] bf16[16,16] → bf16[8,16]"
    assert rows[0][2:5] == ["bf16", "encoder/mlp", shapes]
    count = len(report.operations)
    assert shown.startswith(f"{count} of {count} operations")


@pytest.mark.slow
@in_browser
def test_a_browser_colours_emulated_products_by_their_format(tmp_path):
    rows, _, document = rows_in_browser(quantized_report().to_html(), tmp_path)
    assert rows[0][1] == "dot_general"
    assert "MXFP8" in {row[2] for row in rows}
    assert re.search(r'"--tone: var\(--blocks\)"[^>]*><i></i>MXFP8 ', document)


@in_browser
def test_a_browser_filters_and_sorts(report, tmp_path):
    view = "scope=head&text=f32&sort=bytes&precision=float32"
    rows, shown, _ = rows_in_browser(report.to_html(), tmp_path, view)
    inside = [o for o in report.operations if o.scope == "head"]
    inside = [o for o in inside if o.precision == "float32"]
    assert shown.startswith(f"{len(inside)} of ")
    assert {(row[2], row[3]) for row in rows} == {("f32", "head")}
    most = max(o.bytes for o in inside)
    assert rows[0][8].startswith(f"{most / 1000:.2f}")


@in_browser
def test_a_browser_reacts_to_clicks(report, tmp_path):
    script = """
      document.querySelectorAll("#head button")[0].click();  // by number, upwards
      document.getElementById("group").click();              // one row for each
      document.querySelector("#rows tr").click();            // details of the first
      document.getElementById("scheme").click();
    """
    rows, _, page = rows_in_browser(report.to_html(), tmp_path, script=script)
    assert len(rows) == len(report.operations) + 1
    first = report.operations[0]
    assert rows[0][0] == "0"
    assert rows[0][1].startswith(first.primitive)
    for line in first.stack:
        assert line in rows[1][0]
    assert [row[0] for row in rows[2:]] == [str(i) for i in range(1, len(rows) - 1)]
    assert re.search(r'<html lang="en" data-scheme="(dark|light)">', page)


@pytest.mark.slow
@in_browser
def test_a_browser_shows_an_empty_program(tmp_path):
    report = mpx.explain(lambda x: x)(jnp.ones(2))
    rows, shown, _ = rows_in_browser(report.to_html(), tmp_path)
    assert shown.startswith("0 of 0 operations")
    assert rows == [["No operation is like that. Reset shows all of them."]]


@in_browser
def test_no_column_is_cut_at_1280_pixels(report, tmp_path):
    script = """
      const box = document.querySelector(".scroll");
      document.getElementById("shown").textContent =
        innerWidth + " " + (box.scrollWidth - box.clientWidth);
    """
    size = "--window-size=1280,900"
    document = opened(report.to_html(), tmp_path, "", script, 2000, size)
    (width, hidden) = re.search(r'id="shown"[^>]*>(\d+) (-?\d+)<', document).groups()
    assert int(width) <= 1280 and int(hidden) <= 0
    assert "% of FLOPs in bfloat16" in document
