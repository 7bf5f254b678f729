# SPDX-License-Identifier: Apache-2.0
"""Models and tasks that are made on this machine: nothing is downloaded.

:func:`prepare_demo` makes a small transformer, warms it up and writes its task, :func:`prepare_lake` does so for an
environment, :func:`prepare_team` for two agents, :func:`prepare_search_team` for three and :func:`prepare_chain` for
long answers; :func:`prepare_smollm2` turns a pretrained model that comes in a PyPI package into a model folder. All
cache their result.
"""

from __future__ import annotations

from verl_ext.cache import home
from verl_ext.demo.assets import DemoAssets
from verl_ext.demo.prepare import (
    prepare_chain,
    prepare_demo,
    prepare_fuse,
    prepare_lake,
    prepare_search_team,
    prepare_smollm2,
    prepare_sums,
    prepare_team,
)

__all__ = [
    "DemoAssets",
    "home",
    "prepare_chain",
    "prepare_demo",
    "prepare_fuse",
    "prepare_lake",
    "prepare_search_team",
    "prepare_smollm2",
    "prepare_sums",
    "prepare_team",
]
