# SPDX-License-Identifier: Apache-2.0
"""Makes the enumeration of `examples/truth` importable, which tests and page share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "truth"))
