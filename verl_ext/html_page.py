# SPDX-License-Identifier: Apache-2.0
"""Parts of HTML files that hold everything they need and that a browser opens from disk."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import Any

SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(*, title: str, style: str, body: str, data: Any, script: str) -> str:
    """A page that asks the network for nothing.

    Args:
        title: text, escaped here.
        style: the one style that the page may use.
        body: HTML.
        data: becomes JSON in the element with the id ``data``.
        script: the one script that may run.
    """
    return SHELL.format(
        policy=_policy(style, script),
        title=html.escape(title),
        style=style,
        body=body,
        data=embedded(data),
        script=script,
    )


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
