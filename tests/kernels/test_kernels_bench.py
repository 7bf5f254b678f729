# SPDX-License-Identifier: Apache-2.0
"""``verl-ext kernels bench`` at its smallest: that it measures all it says, not what comes out."""

from __future__ import annotations

import json
import math

import pytest

from verl_ext.cli import main
from verl_ext.lab.kernels import bench
from verl_ext.lab.kernels.bench import candidates
from verl_ext.rollout.kernels.judge import Judge


@pytest.mark.slow
def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in {"HONEST": bench.HONEST[:2], "SHARES": (0.6,), "SHARE_LOOKS": 40}.items():
        monkeypatch.setattr(bench, name, few)
    sizes = {"workers": 1, "submitted": 2, "cached": 3, "programs": 2, "repeats": 2}
    judge = {"pairs": 3, "max-pairs": 3, "looks": 10}
    words = [word for name, size in (sizes | judge).items() for word in (f"--{name}", str(size))]
    assert main(["kernels", "bench", "--pairs", "9", "--max-pairs", "4"]) == 2
    assert "max_pairs is 4; it must be at least pairs" in capsys.readouterr().err
    assert main(["kernels", "bench", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.items() >= {name: sizes[name] for name in ("workers", "submitted", "programs", "repeats")}.items()
    for name in ("distinct_a_second", "cached_a_second", "busy_share", "seconds_to_verdict", "seconds_to_verdict_p90"):
        assert found[name] > 0
    assert found["seconds_to_verdict"] <= found["seconds_to_verdict_p90"]
    assert found["speedup"] > 0 and -1 <= found["rank_correlation"] <= 1
    assert all(math.isfinite(found[f"speedup_{name}"]) for name in ("std", "std_busy", "shift_busy"))
    assert found["honest"] == len(found["honest_spread"]) == 2 >= found["honest_paid"]
    assert [row["share"] for row in found["coverage"]] == [0.6]
    assert all(0 < row["coverage"] <= 1 and row["largest_error"] >= 0 for row in found["coverage"])


@pytest.mark.seconds
def test_random_programs_are_right_and_all_different(judge: Judge) -> None:
    made = candidates(60)
    assert len(set(made)) == 60 and made == candidates(60) != candidates(60, seed=1)
    for task, text in made[:6]:
        assert judge.evaluate(task, text, "fuse").status == "right", text
    with_kernels = candidates(20, seed=1, kernels=True)
    assert all("k" in [part.split()[0][0] for part in text.split(";")] for _, text in with_kernels)
    assert with_kernels == [one for one in candidates(60, seed=1) if one in with_kernels]


def test_one_value_has_no_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "bench", "--repeats", "1"]) == 2
    assert "at least 2" in capsys.readouterr().err
