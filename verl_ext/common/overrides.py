# SPDX-License-Identifier: Apache-2.0
"""What the commands of ``verl-ext`` share: their errors, whole numbers, and Hydra overrides."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

OVERRIDE = re.compile(r"^(~[^=\s]+(=.*)?|\+{0,2}[^-=\s~+][^=\s]*=.*)$", re.DOTALL)
_PLAIN = re.compile(r"^[\w./\-+%@|:${}]+$")


class Failure(ValueError):
    """What was asked for cannot be done; ``verl-ext`` prints the message and ends with 1."""


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


def hydra_value(value: Any) -> str:
    """A YAML value as Hydra's command line writes it: quoted where its grammar needs that. A text that Hydra reads as a
    number or as true, false or null is left as it is: ``1e-6`` is a text in YAML 1.1.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(hydra_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(one)}" for key, one in value.items()) + "}"
    text = str(value)
    # Braces are fine within an interpolation only.
    if _PLAIN.match(text) and not re.search(r"[{}]", re.sub(r"\$\{[^{}]*\}", "", text)):
        return text
    return "'" + text.replace("\\'", "\\\\'").replace("'", "\\'") + "'"


def count(text: str, least: int = 0) -> int:
    """A whole number of a command line, for argparse."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return count(text, least=1)
