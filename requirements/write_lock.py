# SPDX-License-Identifier: Apache-2.0
"""Writes the distributions of the running environment, with exact versions, to a lock file (``make lock``).

Left out: torch and what only its CUDA build brings, since which build fits is the machine's affair; pip; and verl-ext
itself.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

LEFT_OUT = re.compile(r"^(torch|torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*|pip|verl-ext)$")


def main(path: Path) -> None:
    """Write the lock file."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        versions[re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()] = distribution.version
    header = [
        "# Exact versions of the environment that the tests run in; made by `make lock`, installed by `make venv`.",
        f"# Made with Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"torch {versions['torch'].split('+')[0]}.",
        "# Without torch (`make venv` asks for it by itself), torchvision, torchaudio and torchcodec: nothing here",
        "# needs those three, and a build of theirs that does not fit torch's breaks transformers.",
    ]
    pins = [f"{name}=={version}" for name, version in sorted(versions.items()) if not LEFT_OUT.match(name)]
    path.write_text("\n".join(header + pins) + "\n", encoding="utf-8")
    print(f"{path}: {len(pins)} distributions")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
