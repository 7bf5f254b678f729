# SPDX-License-Identifier: Apache-2.0
"""One HTML file that compares runs and that a browser opens from disk.

The file holds everything: style, script and numbers, and asks the network for nothing; its content security policy
allows this one script and this one style, by their hashes. Names come from the data and are put on the page as text
nodes, never as markup. The charts are drawn by the script (``assets/page.js``) as SVG.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_ext.html_page import page


def render(data: Mapping[str, Any]) -> str:
    """The page.

    Args:
        data: of `verl_ext.report.data.page_data`.
    """
    return page("verl_ext.report", title=data["title"], data=data)
