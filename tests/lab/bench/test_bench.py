# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run and report, and the page `examples/truth` states what its numbers say."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import copies
import numpy as np
import pytest
import torch

from verl_ext import cli
from verl_ext.lab.bench import advantages, logits
from verl_ext.lab.bench._memory import GROUP, TURN, make_batch
from verl_ext.methods.logits.logits_pass import token_statistics

TRUTH = Path(__file__).resolve().parents[3] / "examples" / "truth"

FIGURES = (
    "otb_speedup_vs_verl",
    "otb_speedup_vs_verl_long_rows",
    "otb_speedup_vs_verl_tool_tokens",
    "otb_leave_one_out_speedup_vs_verl",
    "trloo_vs_rloo_vectorized",
    "trloo_token_rewards_vs_rloo_vectorized",
    "dr_mas_vs_rloo_vectorized",
    "trloo_vs_rloo_vectorized_long_rows",
    "dr_mas_vs_rloo_vectorized_long_rows",
    "hgpo_6400x512_seconds",
    "kpo_vs_vanilla",
    "exact_kl_fraction_of_step",
    "exact_kl_bytes",
    "growth_exponent",
    "memory_exponent",
)


@pytest.mark.slow
def test_the_last_line_of_the_benchmark_is_one_json_object() -> None:
    command = ["-m", "verl_ext.cli", "bench", "advantages", "--quick", "--json"]
    done = copies.python(*command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in FIGURES:
        assert math.isfinite(found[name]) and found[name] > 0, name
    assert set(found["fraction_of_step"]) == {"trloo", "dr_mas", "hgpo", "gigpo", "maxrl", "otb", "rejection"}
    assert all(0 < fraction < 1 for fraction in found["fraction_of_step"].values())
    # Memory does not depend on the machine's load: one extra [B, T] tensor beyond the outputs, and a few MB of blocks.
    assert found["max_extra_bt_tensors"] <= 1.2
    assert found["threads"] == 1 and found["quick"] is True
    assert "ours/verl" in done.stdout and "kpo against vanilla" in done.stdout


def test_the_benchmark_refuses_no_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "advantages", "--threads", "0"])
    assert "--threads 0 must be at least 1" in capsys.readouterr().err


@pytest.mark.slow
def test_one_pass_over_the_logits_meets_its_goals() -> None:
    command = ["-m", "verl_ext.cli", "bench", "logits", "--quick", "--json"]
    done = copies.python(*command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ratios = ("forward_ratio", "forward_backward_ratio", "forward_same_ratio", "forward_backward_same_ratio")
    assert all(found[name] > 0 for name in ratios)
    machine = found["machine"]
    assert machine["cpu"] and machine["vectors"] and machine["block_elements"] >= 1 << 16
    assert {"l1_bytes", "l2_bytes", "l3_bytes", "huge_pages"} < machine.keys() and machine["warm_plain_share"] > 0
    assert found["extra_memory_fraction"] <= 0.10
    assert found["quick"] is True and found["dtype"] == "float32"
    assert set(found["details"]) == {f"{d}_{v}" for d in ("float32", "bfloat16") for v in (32_768, 152_064)}
    for name in ratios:
        assert found[name] == max(found["details"][f"float32_{v}"][name] for v in (32_768, 152_064))
    assert found["extra_memory_fraction"] == max(case["extra_memory_fraction"] for case in found["details"].values())


def test_the_benchmark_of_the_logits_compares_like_with_like() -> None:
    """Every variant runs, at any size, and a copy of the logits is what traffic is measured by."""
    clock = logits.Clock(torch.device("cpu"), 1)
    for dtype in (torch.float32, torch.bfloat16):
        lines = logits.compare_variants(clock, 512, dtype, torch.device("cpu"), 1 << 18, 3)
        assert len({line.name for line in lines}) == 5
        for line in lines:
            assert all(math.isfinite(value) and value > 0 for value in line[2:])
            assert (line.forward_exact == line.forward_ratio) is (dtype == torch.float32)
    made = logits.make_logits(100, 64, torch.float32, torch.device("cpu"))
    labels = torch.arange(100) % 64
    for options in ({}, {"rho": 1e-3, "entropy": True, "sum_pi_squared": True, "temperature": 0.7}):
        found = (of(made, labels, **options) for of in (logits.plain_statistics, token_statistics))
        pairs = zip(*found, strict=True)
        for plain, ours in ((a, b) for a, b in pairs if a is not None or b is not None):
            inside = slice(None) if plain.dtype != torch.float32 else torch.isfinite(plain)
            torch.testing.assert_close(ours[inside], plain[inside], atol=1e-5, rtol=1e-5)
    assert bool((made.argmax(-1) == 0).all()) and len(made[:, 1].unique()) == 100


def test_the_benchmark_of_the_logits_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "logits", "--threads", "0"])
    assert "--threads 0 must be at least 1" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            cli.main(["bench", "logits", "--device", "cuda"])
        assert "use --device cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_the_benchmark_of_turns_compares_the_same_turns(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", "verl_ext.cli", "bench", "turns", "--turns", "2,4", "--total", "8", "--json"]
    done = copies.python(*command, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tokens = {(case["turns"], case["stored"]): case["tokens"] for case in found["cases"]}
    assert tokens == {
        (2, "merged"): 56,
        (2, "a sequence a call"): 88,
        (4, "merged"): 104,
        (4, "a sequence a call"): 272,
    }
    assert found["tokens_over_context"] == 1.0 and found["token_ratio"]["4"] == pytest.approx(104 / 272, rel=1e-2)
    assert all(found["time_ratio"][turns] > 0 for turns in ("2", "4")) and math.isfinite(found["exponent of merged"])
    assert "4 turns: merged takes" in done.stdout and "(goal: at most 1.2)" in done.stdout
    with pytest.raises(SystemExit):
        cli.main(["bench", "turns", "--turns", "4,none"])
    assert "--turns 4,none: give whole numbers" in capsys.readouterr().err


def test_slope_finds_the_exponent() -> None:
    tokens = [1e5, 1e6, 1e7]
    assert advantages.slope(tokens, [3e-9 * n**1.5 for n in tokens]) == pytest.approx(1.5)


@pytest.mark.parametrize("tools", [False, True])
def test_the_benchmark_batch_is_what_its_docstring_says(tools: bool) -> None:
    batch = make_batch(4 * GROUP, 1024, tools=tools)
    last = 1023 - batch.mask.flip(-1).argmax(-1)
    assert (batch.rewards.sum(-1).numpy() == batch.turn_reward).all() and 0 < batch.turn_reward.mean() < 1
    assert torch.equal(batch.rewards.gather(1, last[:, None])[:, 0], batch.rewards.sum(-1))
    assert bool((batch.mask[:, :TURN].sum(-1) == (last + 1).clamp(max=TURN)).all())
    assert bool((batch.mask.sum(-1) < last + 1).any()) is tools
    assert [list(batch.index).count(uid) for uid in dict.fromkeys(batch.index)] == [GROUP] * 4


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    sys.path.insert(0, str(TRUTH))
    try:
        return importlib.import_module("make").numbers()
    finally:
        sys.path.remove(str(TRUTH))


@pytest.mark.seconds
def test_leave_one_out_is_unbiased_and_the_mean_shrinks(numbers: dict[str, Any]) -> None:
    found = numbers["leave_one_out"]
    np.testing.assert_allclose(found["trloo"], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["mean"], [1 - 1 / n for n in found["sizes"]], atol=1e-6)
    np.testing.assert_allclose(found["early_trloo"], 1.0, atol=1e-6)
    first, second = np.array(found["early_mean"]).T
    np.testing.assert_allclose(first, [1 - 1 / n for n in found["early_sizes"]], atol=1e-5)
    assert (np.abs(first - second) > 0.02).all()


def test_agents_keep_their_share_under_agent_wise_statistics_only(numbers: dict[str, Any]) -> None:
    found = numbers["agents"]
    np.testing.assert_allclose(found["agent_share"], 0.5, atol=1e-4)
    assert found["global_rows_share"][0] == pytest.approx(0.5, abs=1e-4)
    assert max(found["global_rows_share"][2:]) < 0.2
    np.testing.assert_allclose(found["agent_noise"], found["agent_noise"][0], rtol=1e-3)
    # Common statistics are the better ones without an offset and far worse with a large one.
    assert found["global_rows_noise"][0] < found["agent_noise"][0] < 0.01 * found["global_rows_noise"][-1]


def test_token_baseline_bias_and_variance(numbers: dict[str, Any]) -> None:
    found = numbers["token_baseline"]
    at = found["sizes"].index(4)
    ratio = {}
    for problem in found["problems"]:
        for method in ("leave_one_out", "mean"):
            assert max(found[problem][method]["bias"]) < 1e-5
        bias = found[problem]["self_inclusive"]["bias"]
        assert bias == sorted(bias, reverse=True) and bias[at] > 0.2
        for method in ("leave_one_out", "self_inclusive"):
            ratio[problem, method] = found[problem][method]["variance"][at] / found[problem]["mean"]["variance"][at]
    assert ratio["equal energy", "leave_one_out"] == pytest.approx(1.0, rel=1e-4)
    assert ratio["stop or go on", "leave_one_out"] < 0.75
    for problem in ("ragged", "confident", "rare answer"):
        assert ratio[problem, "leave_one_out"] > 1.0
    assert ratio["rare answer", "self_inclusive"] > 1.5


def test_histories_buy_variance_at_the_cost_of_direction(numbers: dict[str, Any]) -> None:
    found = numbers["histories"]
    sizes = found["sizes"]
    np.testing.assert_allclose(found["gigpo, gap 5"]["along"], [2 * (1 - 1 / n) for n in sizes], rtol=1e-4)
    for name in ("gigpo", "hgpo K=0"):
        np.testing.assert_allclose(found[f"{name}, gap 5"]["cosine"], 1.0, atol=1e-6)
    for name in ("hgpo K=1", "finest level"):
        np.testing.assert_allclose(found[f"{name}, gap 0"]["cosine"], 1.0, atol=1e-3)
        assert found[f"{name}, gap 5"]["variance"][-1] < 0.9 * found["gigpo, gap 5"]["variance"][-1]
    assert found["finest level, gap 5"]["cosine"][-1] < found["hgpo K=1, gap 5"]["cosine"][-1] < 0.97


def test_the_page_holds_the_numbers_of_the_script(numbers: dict[str, Any]) -> None:
    stored = json.loads((TRUTH / "numbers.json").read_text(encoding="utf-8"))

    def same(a: Any, b: Any) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                same(a[key], b[key])
        elif isinstance(a, list) and a and not isinstance(a[0], str):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
        else:
            assert a == (pytest.approx(b, abs=1e-9) if isinstance(b, float) else b)

    same(numbers, stored)
    for name in ("leave_one_out", "agents", "token_baseline", "histories", "masking"):
        assert f"({name}.png)" in (TRUTH / "README.md").read_text(encoding="utf-8")
        assert (TRUTH / f"{name}.png").stat().st_size < 150_000


def test_agents_are_dealt_out_to_the_models_of_the_benchmark() -> None:
    from verl_ext.lab.bench import models
    from verl_ext.rollout.orchestra.registry import find

    agents = models.demo_task("five").agents
    assert agents == tuple(one.name for one in find("five").agents)
    assert models.dealt(agents, 1) == []
    assert models.dealt(agents, 3) == [
        "+verl_ext.models.model_1.trained=true",
        "+verl_ext.models.model_2.trained=true",
        "+verl_ext.orchestra.agents.second.model=model_1",
        "+verl_ext.orchestra.agents.third.model=model_2",
        "+verl_ext.orchestra.agents.fifth.model=model_1",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "1,6"], "--models 6: the team five has 5 agents; name 1 to 5"),
        (["--models", "1,3", "--team", "second_try"], "--models 3: the team second_try has 2 agents; name 1 to 2"),
        (["--steps", "1"], "--steps 1 must be at least 2: the first is part of the start"),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
    ],
)
def test_the_benchmark_of_models_refuses_what_it_cannot_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "models", *arguments])
    assert said in capsys.readouterr().err


def test_the_benchmark_of_models_reads_what_runs_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of one model and one of two, as their files say; two rounds, of which the better figure counts."""
    from verl_ext.lab.bench import models

    order = []

    def run(task: Any, count: int, steps: int, out: Path, overrides: list[str]) -> int:
        order.append(count)
        out.mkdir(parents=True)
        slow = 1.0 if len(order) < 3 else 2.0
        turns = {"agent/first/turns": 4.0, "agent/second/turns": 6.0}
        lines = [
            {"step": step, "data": {"timing_s/step": slow * count * (9.0 if step == 1 else 4.0 / step), **turns}}
            for step in (1, 2, 3)
        ]
        (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        looks = [(0, 1.0, 5.0, 2**30), (1, 20.0 * slow, 30.0, count * 2**30), (1, 21.0, 31.0, 0), (2, 30.0, 36.0, 0)]
        (out / models.COSTS).write_text(
            "".join(
                json.dumps(dict(zip(("steps", "s", "cpu_s", "memory"), look, strict=True))) + "\n" for look in looks
            )
        )
        return 0

    monkeypatch.setattr(models, "_measure", run)
    assert cli.main(["bench", "models", "--models", "1,2", "--rounds", "2", "--out", str(tmp_path), "--json"]) == 0
    said = capsys.readouterr().out
    assert order == [1, 2, 2, 1]
    found = json.loads(said.splitlines()[-1])
    one = {"start_s": 20.0, "start_cpu_s": 30.0, "step_s": 1.3333, "step_cpu_s": 6.0, "turns": 10.0, "memory_gib": 1.0}
    assert found["models"]["1"] == one
    assert found["models"]["2"]["step_s"] == 2.6667 and found["models"]["2"]["memory_gib"] == 2.0
    assert found["ratio"]["2"]["step_s"] == 2.0 and found["ratio"]["2"]["start_s"] == 1.0
    assert found["a_model"]["memory_gib"] == 1.0
    assert "goals for 2 over 1, at most: start_s 1.3, step_s 1.25" in said


@pytest.mark.seconds
def test_the_watch_of_a_run_counts_its_processes(tmp_path: Path) -> None:
    import threading

    from verl_ext.lab.bench import models

    done = threading.Event()
    watching = threading.Thread(target=models.watch, args=(tmp_path, done))
    watching.start()

    def seen() -> list[dict[str, float]]:
        costs = tmp_path / models.COSTS
        lines = costs.read_text().split("\n")[:-1] if costs.exists() else []
        return [json.loads(line) for line in lines]

    def soon(condition: Callable[[dict[str, float]], bool]) -> None:
        until = time.monotonic() + 120
        while not any(map(condition, seen()[-1:])):
            assert time.monotonic() < until
            time.sleep(0.05)

    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burning:
            soon(lambda look: look["cpu_s"] > 0.1)
            burning.kill()
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as sleeping:
            soon(lambda look: look["steps"] == 1)
            sleeping.kill()
    finally:
        done.set()
        watching.join()
    looks = seen()
    assert looks[0]["steps"] == 0 and looks[-1]["steps"] == 1
    assert max(look["memory"] for look in looks) > 2**20
    assert looks[-1]["cpu_s"] >= looks[0]["cpu_s"] and looks[-1]["cpu_s"] > 0.1
