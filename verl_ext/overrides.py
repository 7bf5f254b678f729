# SPDX-License-Identifier: Apache-2.0
"""The Hydra overrides at the end of a command line of ``verl-ext``."""

from __future__ import annotations

import re
from collections.abc import Sequence

OVERRIDE = re.compile(r"^(~[^=\s]+(=.*)?|\+{0,2}[^-=\s~+][^=\s]*=.*)$", re.DOTALL)


class UsageError(ValueError):
    """The command line cannot be carried out; the message says what to type instead."""


def check_overrides(words: Sequence[str], command: str) -> None:
    """Refuse what is left of a command line unless it is an override for verl's trainer.

    Args:
        words: left over.
        command: of verl-ext, for the message.

    Raises:
        UsageError: a word is no Hydra override.
    """
    for override in words:
        if not OVERRIDE.match(override):
            raise UsageError(
                f"{override!r} is neither an option of `verl-ext {command}` (see --help) nor a Hydra override: "
                "write KEY=VALUE, +KEY=VALUE for a new key, or ~KEY to drop one."
            )
