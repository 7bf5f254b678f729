# SPDX-License-Identifier: Apache-2.0
"""Reading ``<tag>...</tag>`` in what a model wrote, in time linear in the text: its author may be hostile."""

from __future__ import annotations

import string

_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def tagged(text: str, tag: str, *, any_case: bool = False, most: int | None = None) -> list[str]:
    """The texts between each ``<tag>`` and the next ``</tag>``, in order.

    Args:
        text: any text.
        tag: a bare name of ASCII letters, digits, ``_`` and ``-``.
        any_case: ``<TAG>`` is the same as ``<tag>``.
        most: stop after so many; None: all.
    """
    seen, tag = (text.translate(_LOWER), tag.translate(_LOWER)) if any_case else (text, tag)
    opening, closing = f"<{tag}>", f"</{tag}>"
    found: list[str] = []
    start = seen.find(opening)
    while start >= 0 and (most is None or len(found) < most):
        start += len(opening)
        end = seen.find(closing, start)
        if end < 0:  # nothing later is closed either
            break
        found.append(text[start:end])
        start = seen.find(opening, end + len(closing))
    return found
