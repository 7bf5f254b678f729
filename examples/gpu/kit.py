#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Takes verl, SGLang and what they need to a machine with a GPU that has torch but no network.

    python3.12 examples/gpu/kit.py fetch             here: wheels by name and hash, into build/gpu/site
    python3.12 examples/gpu/kit.py pack              here: what is used of them, into build/gpu/pieces
    python3 examples/gpu/kit.py install PIECES       there: joins the pieces and unpacks them; prints how to go on
    python3.12 examples/gpu/kit.py venv .venv-gpu    on a machine with a GPU and a network: all of it, from an index
    python3.12 examples/gpu/kit.py relock            a maintainer: versions of requirements/lock.txt, and new hashes

The lists are in `wheels/`: `base.txt` (verl and what it needs), `sglang.txt` (its engine) and `there.txt` (what a
machine with torch is taken to have). Needs Python 3.12 on both sides, and here the uv of `make venv`; `relock` also
packaging.
"""

from __future__ import annotations

import argparse
import ctypes.util
import fnmatch
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS = HERE / "wheels"
BUILD = ROOT / "build" / "gpu"
TORCH = "torch==2.11.0"  #: for which verl 0.9.1 pins its engines
GROUPS = ("base", "sglang")  #: what travels, each a site folder of its own
INDEX = "pieces.json"
CALL = 64 << 20  #: bytes that a call to a lent machine takes there, the checkout's files among them
PRESET = 2  #: of xz: a third of the time of 6, and some 5 % more
BLOCK = 64 << 20  #: bytes of an archive that one processor compresses
LIBRARIES = ("numa",)  #: shared libraries of the system that the engine links and a bare machine may lack


def pins(group: str) -> dict[str, str]:
    """Version by normalised name, of one list."""
    words = (
        line.split()[0] for line in (WHEELS / f"{group}.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    )
    return {normalised(name): version for name, _, version in (word.partition("==") for word in words)}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def uv(*words: str) -> None:
    subprocess.run([str(ROOT / ".venv" / "bin" / "uv"), "pip", *words], check=True)


def fetch(args: argparse.Namespace) -> None:
    """Put what the lists name, by hash, into a site folder for each of them; what exists as source only is built."""
    for group in GROUPS:
        target = args.build / "site" / group
        shutil.rmtree(target, ignore_errors=True)
        words = ["--no-deps", "--require-hashes", "--python", sys.executable, "--target", str(target)]
        uv("install", "--quiet", *words, "--link-mode", "copy", "-r", str(WHEELS / f"{group}.txt"))
        print(f"{group}: {mib(size(target)):.0f} MiB in {target}", flush=True)


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def mib(count: int) -> float:
    return count / (1 << 20)


def left_out() -> list[str]:
    """Patterns of files, relative to the site folder, that do not travel."""
    lines = (WHEELS / "left_out.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pack(args: argparse.Namespace) -> None:
    """Write the pieces, none larger than the limit, and `pieces.json` with their hashes; say what each call carries."""
    patterns, index, sizes, begun = left_out(), {}, {}, time.monotonic()
    pieces = args.build / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    for old in pieces.glob("*.*"):
        old.unlink()
    for group in args.groups:
        site = args.build / "site" / group
        if not site.is_dir():
            raise SystemExit(f"{site} is not there: `kit.py fetch` makes it")
        found = {}
        for path in (path for path in site.rglob("*") if path.is_file()):
            name = path.relative_to(site).as_posix()
            if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                found[f"{group}/{name}"] = (path.read_bytes(), path.stat().st_mode & 0o755)
        if group == "sglang":
            found |= {f"lib/{path.name}": (path.read_bytes(), 0o644) for path in system_libraries()}
        packed = compressed(found, args.preset)
        parts = [packed[start : start + args.limit * (1 << 20)] for start in range(0, len(packed), args.limit << 20)]
        names = [f"{group}.tar.xz.{number:02d}" for number in range(len(parts))]
        for name, part in zip(names, parts, strict=True):
            (pieces / name).write_bytes(part)
            sizes[name] = len(part)
        index[group] = {"pieces": names, "bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
        unpacked = sum(len(content) for content, _ in found.values())
        taken = f"{len(found)} files, {mib(unpacked):.0f} MiB, packed {mib(len(packed)):.1f} MiB"
        print(f"{group}: {taken}: {', '.join(names)}; {time.monotonic() - begun:.0f} s so far", flush=True)
    (pieces / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    checkout, made = checkout_size(), size(pieces / "made") if (pieces / "made").is_dir() else 0
    print(f"every call: the checkout's files, {mib(checkout):.1f} MiB, and {INDEX}")
    print(f"the first one also: models made before, {mib(made):.1f} MiB")
    for number, names in enumerate(calls(sizes, CALL - checkout, made), start=1):
        print(f"call {number}: {', '.join(names)}, {mib(sum(sizes[name] for name in names)):.1f} MiB")


def checkout_size() -> int:
    """Bytes of the files of this checkout that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    return sum((ROOT / name.decode()).stat().st_size for name in names if name and (ROOT / name.decode()).is_file())


def calls(sizes: Mapping[str, int], room: int, first: int = 0) -> list[list[str]]:
    """Pieces by call, in their order; the first call has less room by `first`."""
    found: list[list[str]] = [[]]
    left = room - first
    for name, weight in sizes.items():
        if weight > left and found[-1]:
            found.append([])
            left = room
        found[-1].append(name)
        left -= weight
    return found


def system_libraries() -> list[Path]:
    """Files of `LIBRARIES` on this machine."""
    found = []
    for name in LIBRARIES:
        soname = ctypes.util.find_library(name)
        places = [
            Path(folder, soname or "") for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib")
        ]
        path = next((place for place in places if soname and place.is_file()), None)
        if path is None:
            print(f"lib{name} is not on this machine and will not travel: the other one needs its own", file=sys.stderr)
        else:
            found.append(path)
    return found


def compressed(files: Mapping[str, tuple[bytes, int]], preset: int) -> bytes:
    """An archive of these files, the same for the same files: like beside like, so that one compresses the next.

    It is cut into blocks, which all processors compress and which are one .xz after another.
    """
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name in sorted(files, key=lambda name: (Path(name).suffix, Path(name).name, name)):
            content, mode = files[name]
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            archive.addfile(entry, io.BytesIO(content))
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": BLOCK}]
    whole = raw.getbuffer()
    blocks = [whole[start : start + BLOCK] for start in range(0, len(whole), BLOCK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # lzma lets other threads run
        return b"".join(pool.map(partial(lzma.compress, format=lzma.FORMAT_XZ, filters=filters), blocks))


def unpack(pieces: Path, to: Path) -> None:
    """Join and unpack the groups whose pieces are all there; one that an earlier call brought stays.

    Raises:
        SystemExit: the pieces are not those of the index.
    """
    index = json.loads((pieces / INDEX).read_text(encoding="utf-8"))
    to.mkdir(parents=True, exist_ok=True)
    for group, known in index.items():
        if (to / group).is_dir():
            continue
        lacking = [name for name in known["pieces"] if not (pieces / name).is_file()]
        if lacking:
            print(f"{group}: not installed, {', '.join(lacking)} did not come", file=sys.stderr)
            continue
        packed = b"".join((pieces / name).read_bytes() for name in known["pieces"])
        if hashlib.sha256(packed).hexdigest() != known["sha256"]:
            raise SystemExit(f"{group}: the pieces in {pieces} are not those that {INDEX} names; pack and send anew")
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as archive:
            # Packed here: all of it as it was. Pythons before 3.10.12 and 3.11.4 do so anyway, and have no `filter=`.
            archive.extraction_filter = lambda member, path: member
            archive.extractall(to)


def environment(to: Path) -> Path:
    """Write `env.sh`, which puts what was unpacked, and this checkout, before what Python has."""
    paths = [str(to / group) for group in GROUPS if (to / group).is_dir()]
    lines = [f"export PYTHONPATH={':'.join([*paths, str(ROOT)])}${{PYTHONPATH:+:$PYTHONPATH}}"]
    if (to / "lib").is_dir():
        lines.append(f"export LD_LIBRARY_PATH={to / 'lib'}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}")
    (to / "env.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return to / "env.sh"


def install(args: argparse.Namespace) -> None:
    """Unpack the pieces, compile them, and print the command that takes them into use."""
    to: Path = args.to.absolute()
    unpack(args.pieces, to)
    # verl finds its plugins by their metadata, which a checkout has after this.
    subprocess.run([sys.executable, "setup.py", "--quiet", "egg_info"], cwd=ROOT, check=True)
    # Once, by all cores: a run is ten processes with the same imports. Some files are for other versions of Python.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", str(to)])
    print(f". {environment(to)}")


def make_venv(args: argparse.Namespace) -> None:
    """An environment with all of it, from an index, and this checkout in it."""
    venv.create(args.folder, with_pip=True)
    python = str(args.folder / "bin" / "python")
    lists = [word for group in ("there", *GROUPS) for word in ("-r", str(WHEELS / f"{group}.txt"))]
    for words in ([TORCH], ["--no-deps", *lists], ["--no-deps", "-e", str(ROOT)]):
        subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *words], check=True)
    print(f"{python} {(HERE / 'run.py').relative_to(ROOT)} --out runs/gpu")


def fitting(package: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a package's files the wheel that this Python likes best, else its source."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    rank = {tag: place for place, tag in enumerate(sys_tags())}

    def place(wheel: Mapping[str, Any]) -> int:
        tags = parse_wheel_filename(wheel["url"].rsplit("/", 1)[1])[3]
        return min((rank[tag] for tag in tags if tag in rank), default=len(rank))

    best = min(package.get("wheels", []), key=place, default=None)
    return best if best is not None and place(best) < len(rank) else package["sdist"]


def relock(args: argparse.Namespace) -> None:
    """Write the lists anew: the lock's version where it has one, and the hash of the file that fits this Python."""
    text = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
    lock = dict(line.split("==") for line in text.splitlines() if "==" in line)
    for group in ("there", *GROUPS):
        path = WHEELS / f"{group}.txt"
        head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        wanted = {name: lock.get(name, version) for name, version in sorted(pins(group).items())}
        with tempfile.TemporaryDirectory() as folder:
            request, locked = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
            request.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()), encoding="utf-8")
            words = ["--quiet", "--no-deps", "--format", "pylock.toml", "--python-version", "3.12", "-o", str(locked)]
            uv("compile", *words, str(request))
            packages = tomllib.loads(locked.read_text(encoding="utf-8"))["packages"]
        lines = [
            f"{one['name']}=={one['version']} --hash=sha256:{fitting(one)['hashes']['sha256']}" for one in packages
        ]
        path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (
        ("fetch", fetch),
        ("pack", pack),
        ("install", install),
        ("venv", make_venv),
        ("relock", relock),
    ):
        command = commands.add_parser(name, help=(function.__doc__ or "").split("\n")[0])
        command.set_defaults(function=function)
        if name in ("fetch", "pack"):
            command.add_argument("--build", type=Path, default=BUILD, help="default: %(default)s")
        if name == "pack":
            command.add_argument("--limit", type=int, default=48, help="MiB of a piece (default: %(default)s)")
            command.add_argument(
                "--preset", type=int, default=PRESET, help="of xz: lower is quicker and larger (default: %(default)s)"
            )
            command.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="default: all")
        if name == "install":
            command.add_argument("pieces", type=Path, help="folder with the pieces")
            command.add_argument("--to", type=Path, default=Path("/tmp/verl-ext-gpu"), help="default: %(default)s")
        if name == "venv":
            command.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
