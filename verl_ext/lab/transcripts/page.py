# SPDX-License-Identifier: Apache-2.0
"""One HTML file of transcripts that a browser opens from disk.

The file holds everything: style, script and data, and asks the network for nothing; its content security policy
allows this one script and this one style, by their hashes, and no request at all. Text of the model is data in it:
the script (``assets/page.js``) puts it on the page as text nodes, never as markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.lab.pages.html_page import page
from verl_ext.lab.transcripts.read import OUTCOMES, new_part


def render(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """The page of transcripts, as `verl_ext.lab.transcripts.read.read` returns them."""
    outcomes = "".join(f'<option value="{name}">{name}</option>' for name in OUTCOMES)
    return page(
        "verl_ext.lab.transcripts", title=title, data=[_condensed(record) for record in records], outcomes=outcomes
    )


def _condensed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with each prompt that continues the turn before it cut to what is new; the script puts it back."""
    turns = []
    for turn, before in zip(record["turns"], [None, *record["turns"]], strict=False):
        continued, added = new_part(turn, before)
        turns.append({**turn, "continued": continued})
        if continued:
            turns[-1]["added"] = added
            del turns[-1]["prompt"]
    return {**record, "turns": turns}
