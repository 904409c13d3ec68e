"""Writes the formulas of a page as MathML when the site is built.

The usual way sends every reader's browser to a script on another server. MathML needs
no script: browsers draw it themselves.
"""

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves behind for a formula in the text or of its own.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_LOG = logging.getLogger("mkdocs.hooks.mathml")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""

    def render(match: re.Match[str], display: str) -> str:
        source = html.unescape(match[1]).strip()
        mathml = convert(source, display=display)
        # What the converter does not know it copies, and `--strict` must see that.
        if "\\" in mathml:
            _LOG.warning("%s: cannot draw the formula %s", page.file.src_uri, source)
        # A formula that is wider than the page scrolls in a box of its own.
        return f'<div class="formula">{mathml}</div>' if display == "block" else mathml

    content = _BLOCK.sub(lambda match: render(match, "block"), content)
    return _INLINE.sub(lambda match: render(match, "inline"), content)
