# SPDX-License-Identifier: Apache-2.0
"""Parts of HTML files that hold everything they need and that a browser opens from disk."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any


def page(package: str, *, title: str, data: Any, charts: bool = False, **fields: str) -> str:
    """A page that asks the network for nothing, of the files ``page.css``, ``page.html`` and ``page.js`` in the
    folder ``assets`` of a package.

    Args:
        charts: whether its script uses uPlot, which is then on the page as well.
        package: whose look and script it has; the one style and the one script that the page may use.
        title: text, escaped here; ``{title}`` in ``page.html``.
        data: becomes JSON in the element with the id ``data``.
        fields: HTML for further ``{names}`` in ``page.html``.
    """
    style, body, script = (_asset(package, f"page.{kind}") for kind in ("css", "html", "js"))
    if charts:
        style, script = _asset("verl_ext", "uPlot.min.css") + style, _asset("verl_ext", "uPlot.iife.min.js") + script
    script = '"use strict";\n' + script
    title = html.escape(title)
    return _asset("verl_ext", "shell.html").format(
        policy=_policy(style, script),
        title=title,
        style=style,
        body=body.format(title=title, **fields),
        data=embedded(data),
        script=script,
    )


def _asset(package: str, name: str) -> str:
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """A content security policy, escaped for an attribute: this one style, this one script, and no request at all."""
    return html.escape(
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(value: Any) -> str:
    """JSON that can stand inside a script element: no character in it can end or open anything."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
