# SPDX-License-Identifier: Apache-2.0
"""Where the package keeps what it has made and may make again."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Folder of everything that this package caches.

    ``$VERL_EXT_HOME``, else ``$XDG_CACHE_HOME/verl_ext``, else ``~/.cache/verl_ext``.
    """
    if os.environ.get("VERL_EXT_HOME"):
        return Path(os.environ["VERL_EXT_HOME"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "verl_ext"
