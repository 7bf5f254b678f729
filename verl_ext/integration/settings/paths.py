# SPDX-License-Identifier: Apache-2.0
"""Paths in ``verl_ext.*`` are meant from where the run is started: a process of a Ray that stands lives elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from verl_ext.integration.settings.options import select

KEYS = {
    "rows_dir": ".*",
    "rollouts_dir": ".*",
    "record_dir": ".*",
    "environment.template": r".*[./].*",  # others are names of templates that ship
    "gateway.agent": r".*\.py:.*",  # others are modules
    "gateway.readable": ".*",
    "kernels.cache_dir": ".*",
    "orchestra.agents.*.role_file": ".*",
    "orchestra.agents.*.examples": ".*",
    "orchestra.retriever.corpus": ".*",
    "orchestra.retriever.cache_dir": ".*",
}
"""Every key of ours whose value may be a path, or a list of them, with the pattern of those that are."""


def complete(config: Any) -> None:
    """Make them absolute, in place."""
    for key, pattern in KEYS.items():
        *owners, last = key.split(".")
        for node in _nodes(select(config, "verl_ext"), owners):
            value = select(node, last)
            if isinstance(value, list | ListConfig):
                node[last] = [_absolute(one, pattern) for one in value]
            elif value is not None:
                node[last] = _absolute(value, pattern)


def _nodes(node: Any, owners: list[str]) -> list[Any]:
    """What lies under `node` at these keys; ``*`` is any."""
    if not isinstance(node, Mapping | DictConfig):
        return []
    if not owners:
        return [node]
    first, *rest = owners
    return [found for name in (list(node) if first == "*" else [first]) for found in _nodes(select(node, name), rest)]


def _absolute(value: Any, pattern: str) -> Any:
    if not isinstance(value, str) or "://" in value or not re.fullmatch(pattern, value):
        return value
    return str(Path(value).expanduser().absolute())
