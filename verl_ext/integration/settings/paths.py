# SPDX-License-Identifier: Apache-2.0
"""Paths in ``verl_ext.*`` are meant from where the run is started: a process of a Ray that stands lives elsewhere."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.integration.settings.options import select
from verl_ext.recipes import leaves_of

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
    node = select(config, "verl_ext")
    for key, _ in leaves_of(OmegaConf.to_container(node)) if OmegaConf.is_dict(node) else ():
        for known, pattern in KEYS.items():
            if fnmatchcase(key, known):
                value = OmegaConf.select(node, key)
                several = OmegaConf.is_list(value)
                found = [_absolute(one, pattern) for one in (value if several else [value])]
                OmegaConf.update(node, key, found if several else found[0])


def _absolute(value: Any, pattern: str) -> Any:
    if not isinstance(value, str) or "://" in value or not re.fullmatch(pattern, value):
        return value
    return str(Path(value).expanduser().absolute())
