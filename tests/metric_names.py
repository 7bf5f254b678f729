# SPDX-License-Identifier: Apache-2.0
"""Names of metrics as MLflow's file store takes them: each is a file, and its beginnings up to a slash are folders."""

from __future__ import annotations

from collections.abc import Iterable


def collisions(names: Iterable[str]) -> set[str]:
    """The names that are a file and a folder at once."""
    files = set(names)
    folders = {name.rsplit("/", end)[0] for name in files for end in range(1, name.count("/") + 1)}
    return files & folders
