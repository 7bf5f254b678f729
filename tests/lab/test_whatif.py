# SPDX-License-Identifier: Apache-2.0
"""Recorded batches, what `verl-ext whatif` says of them, and the records that it refuses."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl_ext import cli
from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.parts.advantage.columns import engine_columns
from verl_ext.integration.parts.outputs.record import Record as RecordPart
from verl_ext.integration.parts.outputs.record import plain, record_of, write
from verl_ext.integration.settings.options import OptionError
from verl_ext.lab.whatif import compare as comparing
from verl_ext.lab.whatif import show
from verl_ext.lab.whatif.compare import Comparison, compare
from verl_ext.lab.whatif.records import Record, RecordError, find, read
from verl_ext.lab.whatif.scale import signal

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import gradients_at_checkpoint

LENGTH, VOCABULARY = 3, 11


def config(**algorithm: Any) -> Any:
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "mix", "mix": {"trloo": 1.0}, "gamma": 1.0, **algorithm},
            "actor_rollout_ref": {
                "rollout": {"temperature": 0.5},
                "model": {"use_fused_kernels": False},
                "actor": {"strategy": "fsdp2"},
            },
            "verl_ext": {"record_dir": "records", "record_steps": 2},
        }
    )


def batch(rewards: list[list[float]], *, turns: int = 1, energies: bool = True) -> dict[str, Any]:
    """A record of prompts with these rewards of their samples, each of `turns` rows: the first by `a`, then by `b`."""
    generator = torch.Generator().manual_seed(0)
    samples = [(p, s) for p, prompt in enumerate(rewards) for s in range(len(prompt))]
    rows = [(p, s, turn) for p, s in samples for turn in range(turns)]
    size = len(rows)
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[1::2, -1] = 0
    token_rewards = torch.zeros(size, LENGTH)
    token_rewards[:, 0] = torch.tensor([rewards[p][s] for p, s, _ in rows])
    tokens = {
        "response_mask": mask,
        "token_level_rewards": token_rewards,
        "token_level_scores": token_rewards,
        "old_log_probs": -3 * torch.rand(size, LENGTH, generator=generator) * mask,
    }
    if energies:
        tokens["sum_pi_squared"] = 0.3 + 0.5 * torch.rand(size, LENGTH, generator=generator)
    keys = [f"u_{p}_{s}_{turn}" for p, s, turn in rows]
    active = ActiveBatch(
        columns={
            "traj_uid": np.array([f"u_{p}_{s}" for p, s, _ in rows], dtype=object),
            "turn_index": np.array([turn for _, _, turn in rows]),
            "turn_reward": np.array([rewards[p][s] * (turn == turns - 1) for p, s, turn in rows]),
            "agent_id": np.array(["ab"[turn > 0] for _, _, turn in rows], dtype=object),
            "valid_row": np.ones(size, dtype=bool),
        },
        missing={"anchor_obs": "all turns lack it"},
        extra_fields=[{"level": p % 2, "thing": object()} for p, _, _ in rows],
    )
    ids = {name: torch.randint(VOCABULARY, (size, LENGTH), generator=generator) for name in ("prompts", "responses")}
    return record_of(3, config(), keys, active, tokens, {name: list(one.unbind()) for name, one in ids.items()})


def compared(tmp_path: Path, record: dict[str, Any], *names: str, **more: Any) -> Comparison:
    write(tmp_path / "records", record, 0, keep=1)
    return compare([read(path) for path in find([tmp_path])], names, **more)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    made = batch([[1.0, 0.0], [0.5, 0.0]], turns=2)
    write(tmp_path, made, 0, keep=2)
    (path,) = find([tmp_path])
    found = read(path, ["algorithm.gamma=0.5"])
    assert path.name == "3.pt" and found.step == 3 and found.keys == made["keys"] and found.temperature == 0.5
    assert found.columns["turn_index"].tolist() == [0, 1] * 4 and found.columns["level"].tolist() == [0] * 4 + [1] * 4
    assert found.columns["agent_id"].tolist() == ["a", "b"] * 4 and "thing" not in found.columns
    assert found.missing == {"anchor_obs": "all turns lack it"} and found.algorithm.gamma == 0.5
    assert torch.equal(found.tokens["old_log_probs"], made["tokens"]["old_log_probs"])
    write(tmp_path, {**made, "step": 4}, 1, keep=2)
    assert [one.name for one in find([tmp_path])] == ["3.pt", "4.1.pt"]
    write(tmp_path, {**made, "step": 5}, 0, keep=2)
    assert [one.name for one in find([tmp_path])] == ["4.1.pt", "5.pt"]


def test_batches_of_a_run_that_was_given_up_go(tmp_path: Path) -> None:
    """A run that was killed at step 57 goes on from its checkpoint of step 50."""
    for name in ("46.pt", "47.pt", "50.1.pt", "51.1.pt", "57.pt", "notes.pt"):
        (tmp_path / name).touch()
    write(tmp_path, {"step": 51}, 0, keep=5)
    assert {path.name for path in tmp_path.iterdir()} == {"47.pt", "50.1.pt", "51.pt", "notes.pt"}


def test_padding_is_not_recorded_and_what_cannot_be_kept_is_named() -> None:
    columns = {"valid_row": np.array([True, False, True]), "anchor_obs": np.array([{1}, {2}, {3}], dtype=object)}
    mask = torch.ones(3, 2)
    ids = {name: [torch.tensor([row]) for row in range(3)] for name in ("prompts", "responses")}
    tokens = {"response_mask": mask, "entropy": torch.ones(3, 1)}
    found = record_of(1, config(), ["u_0_0", "u_1_0", "u_2_0"], ActiveBatch(columns), tokens, ids)
    assert found["keys"] == ["u_0_0", "u_2_0"] and [ids.tolist() for ids in found["responses"]] == [[0], [2]]
    assert found["tokens"]["entropy"].tolist() == [[1.0, 0.0], [1.0, 0.0]]  # as wide as the batch
    assert "a set is neither" in found["missing"]["anchor_obs"] and "anchor_obs" not in found["columns"]
    image = plain({"image": np.ones((2, 2), dtype=np.uint8), "at": (1, np.float32(2.0), None)})
    assert image["image"].dtype == torch.uint8 and image["at"] == [1, 2.0, None]


def test_the_key_is_checked_and_off_by_default() -> None:
    made = config()
    assert RecordPart.wanted(made) and RecordPart.check(made) == [] and engine_columns(made) == {"sum_pi_squared"}
    made.actor_rollout_ref.model.use_fused_kernels = True  # then the record does without
    assert engine_columns(made) == set()
    assert "will hold no sum_pi_squared" in RecordPart.check(made)[0]
    made.verl_ext.record_dir = None
    assert not RecordPart.wanted(made) and RecordPart.check(made) == []
    for wrong in (0, "all", True):
        made.verl_ext.record_steps = wrong
        with pytest.raises(OptionError, match=r"verl_ext\.record_steps is"):
            RecordPart.check(made)


def test_constant_rewards_teach_nothing(tmp_path: Path) -> None:
    found = compared(tmp_path, batch([[1.0] * 4, [0.0] * 4]), "trloo", "dr_mas", "maxrl", "grpo", "rloo")
    for one in found.estimators.values():
        assert one["zero_turn_share"] == 1.0 and one["std"] == one["max_abs"] == 0.0
        assert one["scale"] is None and one["noise"] is None and one["agents"] == {"a": 0.0}
        assert one["resampled"] == {"variance": None, "company": 0.0, "cosine": None}
    assert found.correlation["trloo"]["trloo"] is None


def test_single_turn_groups_of_one_size(tmp_path: Path) -> None:
    made = batch([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    found = compared(tmp_path, made, "trloo", "rloo", "grpo")
    assert found.reference == "trloo" and found.group == 2 and found.correlation["trloo"]["rloo"] == pytest.approx(1.0)
    for name in ("trloo", "rloo"):
        one = found.estimators[name]
        assert (one["scale"], one["noise"]) == pytest.approx((1.0, 1.0)) and one["max_abs"] == pytest.approx(1.0)
        assert one["resampled"]["variance"] == pytest.approx(1.0) and 0 < one["resampled"]["company"] < 1
        assert one["zero_turn_share"] == 0.0
    assert found.estimators["grpo"]["noise"] > 1 > found.correlation["grpo"]["trloo"]  # type: ignore[operator]

    tripled = {**made, "tokens": dict(made["tokens"]), "columns": dict(made["columns"])}
    for name in ("token_level_rewards", "token_level_scores"):
        tripled["tokens"][name] = 3 * made["tokens"][name]
    tripled["columns"]["turn_reward"] = 3 * made["columns"]["turn_reward"]
    larger = compared(tmp_path, tripled, "trloo", "grpo")
    for name, times in (("trloo", 3), ("grpo", 1)):
        assert larger.estimators[name]["std"] == pytest.approx(times * found.estimators[name]["std"], rel=1e-5)
    assert larger.estimators["trloo"]["noise"] == pytest.approx(1.0)


def test_the_mean_with_the_sample_itself_is_a_quarter_shorter(tmp_path: Path) -> None:
    write(tmp_path, batch([[1.0, 0.0, 0.0, 0.5]]), 0, keep=1)
    record = read(tmp_path / "3.pt", ["algorithm.trloo.baseline=mean"])
    one = compare([record], ["trloo"]).estimators["trloo"]
    assert one["scale"] == pytest.approx(0.75) and one["noise"] == pytest.approx(1.0, rel=1e-6)


def mask_of(record: Record) -> torch.Tensor:
    return record.tokens["response_mask"].double()


def every_outcome(energies: bool = False) -> dict[str, Any]:
    """All outcomes of four coins, a prompt each, so that sums over the prompts are expectations."""
    made = batch([list(one) for one in itertools.product((0.0, 1.0), repeat=4)], energies=energies)
    made["tokens"]["response_mask"][:] = 1
    for name in ("token_level_rewards", "token_level_scores"):
        made["tokens"][name] = made["tokens"][name].flip(1)
    return made


def with_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: dict[str, Any], baselines: dict[str, float], *names: str
) -> Comparison:
    """Compare with constant baselines, which are no estimators that anyone has registered."""
    as_it_is = comparing.advantages

    def advantages(record: Record, name: str, algorithm: Any = None) -> torch.Tensor:
        if name not in baselines:
            return as_it_is(record, name, algorithm)
        scores = record.tokens["token_level_rewards"].double().sum(1, keepdim=True)
        return (scores - baselines[name]) * record.tokens["response_mask"]

    monkeypatch.setattr(comparing, "advantages", advantages)
    monkeypatch.setattr(comparing, "known", lambda names, _: list(names))
    return compared(tmp_path, made, *baselines, *names)


def test_a_better_baseline_is_quieter_than_the_leave_one_out_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of coins: E(R - 1/2)^2 = 1/4, E R^2 = 1/2 and E L^2 = 1/4 (1 + 1/3), all unbiased."""
    names = ("trloo", "reinforce_plus_plus", "mean")
    made = every_outcome()
    found = with_baseline(monkeypatch, tmp_path, made, {"ideal": 0.5, "none": 0.0}, *names[:2]).estimators
    expected = {"ideal": (1.0, 0.75), "none": (1.0, 1.5), "trloo": (1.0, 1.0)}
    for name, one in expected.items():
        assert (found[name]["scale"], found[name]["noise"]) == pytest.approx(one), name
    assert found["reinforce_plus_plus"]["scale"] == pytest.approx(2, rel=0.05)  # its deviation is 1/2
    assert found["reinforce_plus_plus"]["noise"] == pytest.approx(0.75, rel=0.05)
    # Of two drawn from four Var(c) is E A^2 / 2 - (E A)^2 / 4, and the second moment of L is 1/2 at two, 1/3 at four.
    assert found["ideal"]["resampled"]["variance"] == pytest.approx((1 / 16) / (1 / 4 - 1 / 12), rel=0.1)

    record = read(tmp_path / "records/3.pt", ["algorithm.trloo.baseline=mean"])
    mean = compare([record], ["trloo"], draws=0).estimators["trloo"]
    assert (mean["scale"], mean["noise"]) == pytest.approx((0.75, 1.0))


def test_energies_that_differ_leave_the_scale_of_a_constant_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baselines = {"ideal": 0.5, "none": 0.0, "odd": -3.0}
    found = with_baseline(monkeypatch, tmp_path, every_outcome(energies=True), baselines, "trloo")
    scales = [one["scale"] for one in found.estimators.values()]
    assert scales[0] == pytest.approx(scales[1]) == pytest.approx(scales[2])
    assert scales == pytest.approx([1.0] * 4, rel=0.05)
    assert found.estimators["ideal"]["noise"] == pytest.approx(0.75, rel=0.1)


def test_few_draws_are_enough_for_a_direction(tmp_path: Path) -> None:
    """Small groups' leave-one-out means point where the whole ones' do."""
    made = batch([list(one) for one in itertools.product((0.0, 1.0), repeat=4)] * 20, energies=False)
    for draws, near in ((4, 0.04), (256, 0.003)):
        one = compared(tmp_path, made, "trloo", draws=draws).estimators["trloo"]["resampled"]
        assert one["cosine"] == pytest.approx(1.0, abs=near)


@pytest.mark.parametrize("change", ["", "algorithm.trloo.batch_std=true"])
def test_draws_of_an_estimator_of_the_batch_are_batches(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, batch([[1.0, 0.0, 0.0, 0.5], [4.0, 0.0, 1.0, 1.0]]), 0, keep=1)
    record = read(tmp_path / "3.pt", [change] if change else [])
    names, calls = ["trloo" if change else "reinforce_plus_plus", "grpo"], []
    as_it_is = comparing._calls

    def counted(*arguments: Any) -> Any:
        found = list(as_it_is(*arguments))
        calls.append((arguments[3], len(found)))
        return found

    monkeypatch.setattr(comparing, "_calls", counted)
    found = compare([record], names, draws=8)
    assert (names[0], 8) in calls and ("grpo", 1) in calls
    monkeypatch.setattr(comparing, "TOKENS_AT_ONCE", 1)
    apart = compare([record], names, draws=8)
    for name in names:
        assert found.estimators[name]["resampled"] == pytest.approx(apart.estimators[name]["resampled"], rel=1e-5)


def test_an_estimator_of_the_batch_is_known_by_any_record(tmp_path: Path) -> None:
    nothing = batch([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    some = batch([[1.0, 0.0, 0.0, 0.5], [4.0, 0.0, 1.0, 1.0]])
    found = []
    for place, order in (("a", (nothing, some)), ("b", (some, nothing))):
        for number, made in enumerate(order):
            write(tmp_path / place / str(number), made, 0, keep=1)
        records = [read(tmp_path / place / str(number) / "3.pt") for number in (0, 1)]
        found.append(compare(records, ["reinforce_plus_plus"], draws=64).estimators["reinforce_plus_plus"]["resampled"])
    assert found[0]["company"] == pytest.approx(found[1]["company"], rel=0.5) and found[0]["company"] > 1e-4


def test_rounding_is_no_signal(tmp_path: Path) -> None:
    """OTB leaves A = G epsilon / (W + epsilon) where all rewards are the same."""
    found = compared(tmp_path, batch([[1.0, 1.0, 1.0], [1.0, 0.0, 0.5]]), "otb", "optimal_token_baseline", draws=0)
    for one in found.estimators.values():
        assert one["zero_turn_share"] == 0.5


def test_runs_of_different_estimators_are_all_named(tmp_path: Path) -> None:
    made = batch([[1.0, 0.0, 0.5]])
    write(tmp_path / "a", made, 0, keep=1)
    write(tmp_path / "b", {**made, "algorithm": {**made["algorithm"], "mix": {"dr_mas": 1.0}}}, 0, keep=1)
    found = compare([read(path) for path in find([tmp_path / "b", tmp_path / "a"])], ["trloo", "dr_mas"], draws=0)
    assert show.headline(found)[0].endswith("recorded under dr_mas, trloo")
    assert "with trloo" in show.table(found)


def test_noise_and_shares_are_those_of_the_text(tmp_path: Path) -> None:
    made = batch([[1.0, 0.0, 0.2], [0.0, 1.0, 1.0]], turns=2)
    found = compared(tmp_path, made, "otb", "trloo", draws=0)
    (a,), (loo,) = found.advantages["otb"], found.leave_one_out
    mask, old, squares = (made["tokens"][name] for name in ("response_mask", "old_log_probs", "sum_pi_squared"))
    w = (1 - 2 * old.double().exp() + squares.double()).clamp(min=0) * mask
    one = found.estimators["otb"]
    (swap,), power = found.swaps, w.sum(1).numpy()
    inside, unit = (
        signal(found.rows[0], power, (w * tokens).sum(1).numpy(), *swap[:2], found.alphas[name][0])
        for name, tokens in (("otb", a), ("", loo))
    )
    scale = inside / unit
    assert one["scale"] == pytest.approx(scale, rel=1e-5)
    assert one["noise"] == pytest.approx(float((w * a**2).sum() / scale**2 / (w * loo**2).sum()), rel=1e-5)
    assert one["agents"]["b"] == pytest.approx(float(a[1::2].abs().sum() / a.abs().sum()))
    assert list(one["turns"]) == ["0", "1"] and one["resampled"] is None and found.group == 0
    assert sum(one["turns"].values()) == pytest.approx(1.0)
    tokens = np.corrcoef(a[mask.bool()], loo[mask.bool()])[0, 1]
    assert found.correlation["otb"]["trloo"] == pytest.approx(tokens)


def test_small_groups_are_drawn_whole_and_summed_right(tmp_path: Path) -> None:
    """Against RLOO written out for each pair that was drawn."""
    rewards = [[1.0, 0.0, 0.25, 0.0, 0.5], [0.0, 1.0]]  # the second prompt has none to leave out
    write(tmp_path, batch(rewards, turns=2), 0, keep=1)
    record = read(tmp_path / "3.pt")
    chosen = comparing._chosen(record, 40, 2, np.random.default_rng(0))
    assert chosen.shape == (40, 14) and not chosen[:, 10:].any()
    assert (chosen[:, 0:10:2] == chosen[:, 1:10:2]).all() and (chosen.sum(1) == 4).all()
    assert len({tuple(draw) for draw in chosen[:, ::2].tolist()}) > 5
    (rows,) = compare([record], ["trloo"], draws=0).rows
    found = comparing._sums(comparing._Batch(record, mask_of(record), rows), chosen, "trloo", True, False)
    times, total, squares = found.sums
    expected = np.zeros((2, 10))
    for draw in chosen:
        for i, j in itertools.permutations(np.flatnonzero(draw[0:10:2]), 2):
            a = rewards[0][i] - rewards[0][j]
            expected[:, 2 * i : 2 * i + 2] += np.array([a, a * a])[:, None]
    assert times[:, 0].tolist() == chosen.sum(0).tolist()
    assert total[:10, 0].numpy() == pytest.approx(expected[0]) and squares[:10, 0].numpy() == pytest.approx(expected[1])
    signal, length, R = 0.0, mask_of(record).sum(1).numpy(), np.array(rewards[0])
    for draw in chosen:
        for turn in (0, 1):
            drawn, w = draw[turn:10:2], length[turn:10:2]
            mu = (w * R)[~drawn].sum() / w[~drawn].sum()
            pairs = itertools.permutations(np.flatnonzero(drawn), 2)
            signal += sum(w[i] * (R[i] - R[j]) * (R[i] - mu) for i, j in pairs)
    assert found.signal == pytest.approx(signal)


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    found = compared(tmp_path, batch([[1.0, 0.0, 0.5]], energies=False))
    assert not found.energies and {"trloo", "dr_mas", "maxrl", "grpo", "rloo", "opo"} <= set(found.estimators)
    assert "sum_pi_squared" in found.refused["otb"] and found.refused["gae"] == "needs a critic"
    assert "anchor_obs" in found.refused["gigpo"] and "all turns lack it" in found.refused["gigpo"]
    assert "reward_baselines" in found.refused["remax"] and not set(found.refused) & set(found.estimators)


def small_model(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    model.save_pretrained(folder)
    return model.eval()


def test_gradients_at_a_checkpoint_are_those_of_autograd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model(tmp_path / "model")
    made = batch([[1.0, 0.0, 0.5], [0.0, 0.25, 0.0]], turns=2)
    found = compared(tmp_path, made, "otb", "trloo", draws=0)
    mask = made["tokens"]["response_mask"]
    gradients = {}
    for name in ("otb", "trloo"):
        (a,) = found.advantages[name]
        each = []
        for first in range(0, 12, 2):
            model.zero_grad()
            for row in (first, first + 1):
                answer = made["responses"][row].long()
                logits = model(torch.cat([made["prompts"][row].long(), answer])[None]).logits[0, 2:5] / 0.5
                log_probs = logits.log_softmax(-1)[range(LENGTH), answer]
                (log_probs * a[row] * mask[row]).sum().backward()
            each.append(torch.cat([one.grad.flatten() for one in model.parameters()]).double())
        gradients[name] = torch.stack(each)
    exactly = gradients_at_checkpoint.exact(found, tmp_path / "model")
    mean = {name: one.mean(0) for name, one in gradients.items()}
    loo = mean["trloo"]
    assert exactly[""]["norm"] == pytest.approx(float(loo.norm()), rel=1e-4)
    for name, one in gradients.items():
        numbers = exactly[name]
        assert numbers["norm"] == pytest.approx(float(mean[name].norm()), rel=1e-4)
        assert numbers["variance"] == pytest.approx(float(one.var(0).sum() / 6), rel=1e-4)
        difference = one / numbers["scale"] - gradients["trloo"]
        assert numbers["bias"] == pytest.approx(float(difference.mean(0).norm() / loo.norm()), rel=1e-4, abs=1e-6)
        error = (difference.view(2, 3, -1).mean(1).var(0).sum() / 2).sqrt() / loo.norm()  # of the mean of two prompts
        assert numbers["bias_error"] == pytest.approx(float(error), rel=1e-4, abs=1e-3)
        assert numbers["cosine"] == pytest.approx(float(mean[name] @ loo / mean[name].norm() / loo.norm()), rel=1e-4)
    assert exactly["trloo"]["noise"] == pytest.approx(1.0) and exactly["trloo"]["scale"] == pytest.approx(1.0)

    monkeypatch.chdir(tmp_path)
    command = gradients_at_checkpoint.main
    assert command([".", "--estimators", "otb", "--checkpoint", "nowhere"]) == 1
    capsys.readouterr()
    assert command([".", "--estimators", "otb", "--checkpoint", "model"]) == 0
    said = capsys.readouterr().out
    length, variance = float(loo.norm()) ** 2, float(gradients["trloo"].var(0).sum() / 6)
    assert f"leave-one-out gradient of squared length {length:.3g}, of variance {variance:.3g}" in said
    assert ("bias and cosine say nothing" in said) == (length < 2 * variance)
    (tmp_path / "actor/huggingface").mkdir(parents=True)
    shutil.copy(tmp_path / "model/config.json", "actor/huggingface")
    (tmp_path / "actor/model_world_size_1_rank_0.pt").touch()
    shutil.copytree("actor/huggingface", "bare")
    merge = "merge --backend fsdp --local_dir actor --target_dir"
    for folder, words in (("actor/huggingface", merge), ("bare", "no model can be loaded")):
        assert command([".", "--estimators", "otb", "--checkpoint", folder]) == 1
        err = capsys.readouterr().err
        assert words in err and "Traceback" not in err
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("memory", (), {"available": 1000}))
    with pytest.raises(ValueError, match="name fewer with --estimators"):
        gradients_at_checkpoint.exact(found, tmp_path / "model")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("run/records"), batch([[1.0, 0.0, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]], turns=2), 0, keep=1)
    assert (
        cli.main(["whatif", "run", "--estimators", "otb,trloo,dr_mas,hgpo", "--json", "--html", "out/page.html"]) == 0
    )
    said = capsys.readouterr().out
    last = json.loads(said.splitlines()[-1])
    assert list(last["estimators"]) == ["otb", "trloo", "dr_mas"]
    assert last["correlation"]["otb"]["otb"] == pytest.approx(1.0) and list(last["refused"]) == ["hgpo"]
    assert "16 turns of 2 prompts, 40 model tokens (step 3), recorded under trloo" in said
    assert "smaller groups: 2 trajectories a prompt" in said and "Share of |A| by agent" in said
    assert "hgpo: hgpo needs the turn field 'anchor_obs'" in said and "the same as a page: out/page.html" in said
    page = Path("out/page.html").read_text()
    assert page.startswith("<!doctype html>") and "<td>" in page and "http" not in page.replace("http-equiv", "")
    assert cli.main(["whatif", "run", "--set", "algorithm.gamma=2"]) == 1
    assert "the discount must lie in [0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: there is no record"),
        (["run", "--estimators", "trlo"], "no estimator 'trlo' is registered; did you mean 'trloo'?"),
        (["run", "--set", "trainer.n=1"], "give algorithm.KEY=VALUE"),
        (["run", "--set", "algorithm.gamma"], "give algorithm.KEY=VALUE"),
        (["run", "--set", "algorithm.gama=1"], "--set algorithm.gama: no estimator has such an option Did"),
        (["run", "--set", "algorithm.otb.basline=leave_one_out"], "Did you mean 'algorithm.otb.baseline'?"),
        (["run", "--set", "algorithm.mix.trlo=1"], "algorithm.mix.trlo: no estimator"),
        (["run", "--group", "2"], "--group 2: no prompt has the three trajectories"),
        (["four", "--group", "4"], "--group 4: give 2 to 3; the prompt with the most has 4 trajectories"),
        (["four", "--group", "1"], "--group 1: give 2 to 3"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("run/records"), batch([[1.0, 0.0]]), 0, keep=1)
    write(Path("four/records"), batch([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0]]), 0, keep=1)
    assert cli.main(["whatif", *arguments]) == 1
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


BROKEN = {
    "another version": ({"format": 0}, "not a record of format 1"),
    "a part is gone": ({"responses": None}, "responses"),
    "fewer keys": ({"keys": ["u_0_0_0"]}, "must have a row for each of 1 keys"),
    "a key of another form": ({"keys": ["a", "b"]}, "'a' does not read"),
    "a short column": ({"columns": {"agent_id": ["a"]}}, "a turn field has 1 entries for 2 rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    made = {key: value for key, value in {**batch([[1.0, 0.0]]), **change}.items() if value is not None}
    torch.save(made, tmp_path / "1.pt")
    with pytest.raises(RecordError, match=r"1\.pt: ") as caught:
        read(tmp_path / "1.pt")
    assert said in str(caught.value)


def test_tokens_that_do_not_fit_are_refused_and_no_code_is_run(tmp_path: Path) -> None:
    for name, change, said in (
        ("old_log_probs", torch.zeros(2, 2), r"old_log_probs has the shape \(2, 2\)"),
        ("old_log_probs", torch.full((2, LENGTH), torch.nan), "old_log_probs holds NaN"),
        ("response_mask", torch.full((2, LENGTH), 2), "other than 0 and 1"),
    ):
        made = batch([[1.0, 0.0]])
        made["tokens"][name] = change
        torch.save(made, tmp_path / "1.pt")
        with pytest.raises(RecordError, match=said):
            read(tmp_path / "1.pt")
    torch.save({"format": 1, "harm": Path("x")}, tmp_path / "1.pt")
    with pytest.raises(RecordError, match="not a record"):
        read(tmp_path / "1.pt")
    (tmp_path / "1.pt").write_text("{}")
    with pytest.raises(RecordError, match="not a record"):
        read(tmp_path / "1.pt")
