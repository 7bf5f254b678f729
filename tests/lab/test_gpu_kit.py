# SPDX-License-Identifier: Apache-2.0
"""`examples/gpu`: the lists of wheels and the lock say the same; what is packed here is what is unpacked there.

The stages themselves are in `tests/gpu_stages`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "gpu"))
import kit  # noqa: E402
import trainer  # noqa: E402

LOCK = dict(line.split("==") for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines() if "==" in line)


@pytest.mark.parametrize("group", ["base", "sglang", "there"])
def test_a_list_has_the_locks_versions_and_a_hash_for_each(group: str) -> None:
    lines = [line for line in (kit.WHEELS / f"{group}.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(" --hash=sha256:" in line for line in lines)
    found = kit.pins(group)
    assert len(found) == len(lines) > 40
    # setuptools: torch 2.11.0 wants it below 82.
    other = {name: (version, LOCK[name]) for name, version in found.items() if LOCK.get(name, version) != version}
    assert not other or list(other) == ["setuptools"]


def test_no_distribution_is_in_two_lists_and_what_verl_needs_is_in_one() -> None:
    lists = [set(kit.pins(group)) for group in ("base", "sglang", "there")]
    assert len(set.union(*lists)) == sum(map(len, lists))
    needed = {"verl", "ray", "transferqueue", "tensordict", "hydra-core", "omegaconf", "transformers", "tokenizers"}
    assert needed <= lists[0] and kit.pins("sglang")["sglang"] == "0.5.12"


def test_pieces_are_joined_to_what_was_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And an archive of several blocks is one; what is said of the calls is what fits."""
    monkeypatch.setattr(kit, "BLOCK", 1 << 20)
    monkeypatch.setattr(kit, "CALL", kit.checkout_size() + (2 << 20))
    site = tmp_path / "site"
    for name, content in {
        "base/one/__init__.py": b"NAME = 'one'\n",
        "base/ray/jars/ray_dist.jar": b"java",
        "base/ray/core/raylet": os.urandom(3 << 20),
        "sglang/two.py": b"import one\n",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    (site / "base/ray/core/raylet").chmod(0o755)
    kit.pack(SimpleNamespace(build=tmp_path, groups=list(kit.GROUPS), limit=1, preset=1))
    pieces = tmp_path / "pieces"
    assert len(list(pieces.glob("base.tar.xz.*"))) == 4
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("call ")]
    names = [f"base.tar.xz.{number:02d}" for number in range(4)]
    assert [line.split(": ")[1].split(", ")[:-1] for line in said] == [names[:2], [*names[2:], "sglang.tar.xz.00"]]
    assert all(piece.stat().st_size <= 1 << 20 for piece in pieces.iterdir())

    last = sorted(pieces.glob("base.tar.xz.*"))[-1]
    content, to = last.read_bytes(), tmp_path / "to"
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit, match="pack and send anew"):
        kit.unpack(pieces, to)
    last.unlink()
    kit.unpack(pieces, to)
    assert sorted(path.name for path in to.iterdir() if path.is_dir() and path.name in kit.GROUPS) == ["sglang"]
    last.write_bytes(content)
    kit.unpack(pieces, to)  # what came with an earlier call stays
    assert (to / "base/ray/core/raylet").read_bytes() == (site / "base/ray/core/raylet").read_bytes()
    assert os.access(to / "base/ray/core/raylet", os.X_OK) and not (to / "base/ray/jars").exists()
    said = subprocess.run(
        ["bash", "-c", f". {kit.environment(to)} && {sys.executable} -c 'import two; print(two.one.NAME)'"],
        capture_output=True,
        text=True,
    )
    assert said.stdout == "one\n", said.stderr


def test_a_step_is_read_of_one_model_and_of_several(tmp_path: Path) -> None:
    """And neither a validation nor a line that is still written is one."""
    one = {"timing_s/update_actor": 2.0, "actor/grad_norm": 0.5, "trajectory/turns/mean": 3.0}
    two = {"timing_s/update_actor": 2.0, "actor/policy/grad_norm": 0.5, "actor/small/grad_norm": 0.7}
    lines = [{"step": 0, "data": one}, {"step": 1, "data": one}, {"step": 1, "data": {"val/score": 1.0}}]
    lines.append({"step": 2, "data": two})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "da', encoding="utf-8")
    assert trainer.read_steps(path) == {
        1: {"update_s": 2.0, "grad_norm": 0.5, "turns": 3.0},
        2: {"update_s": 2.0, "grad_norm": 0.7},
    }


@pytest.mark.slow
def test_an_engine_that_does_not_start_costs_its_share_and_the_embedded_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And a run that hangs is killed with all of its processes."""
    import stages

    package = tmp_path / "verl" / "trainer"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "main_ppo.py").write_text(
        "import json, os, subprocess, sys, time\n"
        "if 'engine=sglang' in sys.argv:\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], start_new_session=True)\n"
        "    print('it hangs', flush=True)\n"
        "    time.sleep(300)\n"
        "line = {'step': 1, 'data': {'timing_s/update_actor': 1.0, 'timing_s/step': 2.0}}\n"
        "open(os.environ['VERL_FILE_LOGGER_PATH'], 'a').write(json.dumps(line) + '\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    saved: list[dict[str, Any]] = []
    record = stages.Record({}, lambda content: saved.append(json.loads(json.dumps(content))))
    settings = stages.Settings(tmp_path / "stage", "cuda", "sglang", True, 10.0)
    found = stages.run(settings, record, "demo", lambda engine, folder: [f"engine={engine}"])
    assert found.engine == "embedded" and found.ended == "well" and found.column("step_s") == [2.0]
    hung = record.content["demo_sglang"]
    assert hung["ended"] == "no step in 6 s" and hung["said"] == ["it hangs"]
    assert record.content["go_on_with"] == "embedded"
    assert saved[-1]["demo_embedded"]["steps"] == {"1": {"update_s": 1.0, "step_s": 2.0}}
    assert not trainer.marked(f"PYTHONPATH={tmp_path}")

    settings = stages.Settings(tmp_path / "other", "cuda", "sglang", True, 60.0)
    stages.other_engine(settings, record)  # vLLM is not installed here
    assert record.content["result"]["engine"] == "embedded" and record.content["result"]["steps"] == 1
