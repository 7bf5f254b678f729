# SPDX-License-Identifier: Apache-2.0
"""Recorded batches, what `verl-ext whatif` says of them, and the records that it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl_ext import cli
from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.options import OptionError
from verl_ext.integration.parts.columns import engine_columns
from verl_ext.integration.parts.record import Record as RecordPart
from verl_ext.integration.parts.record import plain, record_of, write
from verl_ext.whatif import compare as comparing
from verl_ext.whatif.compare import Comparison, compare
from verl_ext.whatif.exact import exact
from verl_ext.whatif.records import RecordError, find, read

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
        missing={"anchor_obs": "all rows lack it"},
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
    assert found.missing == {"anchor_obs": "all rows lack it"} and found.algorithm.gamma == 0.5
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
        assert one["zero_row_share"] == 1.0 and one["std"] == one["max_abs"] == one["scale"] == 0.0
        assert one["noise"] is None and one["agents"] == {"a": 0.0}
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
        assert one["zero_row_share"] == 0.0
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


def test_noise_and_shares_are_those_of_the_text(tmp_path: Path) -> None:
    made = batch([[1.0, 0.0, 0.2], [0.0, 1.0, 1.0]], turns=2)
    found = compared(tmp_path, made, "otb", "trloo", draws=0)
    (a,), (loo,) = found.advantages["otb"], found.leave_one_out
    mask, old, squares = (made["tokens"][name] for name in ("response_mask", "old_log_probs", "sum_pi_squared"))
    w = (1 - 2 * old.double().exp() + squares.double()).clamp(min=0) * mask
    mean, mean_loo = a.sum(1) / mask.sum(1), loo.sum(1) / mask.sum(1)
    scale = float((mean * mean_loo).sum() / mean_loo.square().sum())
    one = found.estimators["otb"]
    assert one["scale"] == pytest.approx(scale)
    assert one["noise"] == pytest.approx(float((w * a**2).sum() / scale**2 / (w * loo**2).sum()))
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
    times, total, squares = comparing._sums(record, chosen, "trloo", True)
    expected = np.zeros((2, 10))
    for draw in chosen:
        for i, j in itertools.permutations(np.flatnonzero(draw[0:10:2]), 2):
            a = rewards[0][i] - rewards[0][j]
            expected[:, 2 * i : 2 * i + 2] += np.array([a, a * a])[:, None]
    assert times[:, 0].tolist() == chosen.sum(0).tolist()
    assert total[:10, 0].numpy() == pytest.approx(expected[0]) and squares[:10, 0].numpy() == pytest.approx(expected[1])


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    found = compared(tmp_path, batch([[1.0, 0.0, 0.5]], energies=False))
    assert not found.energies and {"trloo", "dr_mas", "maxrl", "grpo", "rloo", "opo"} <= set(found.estimators)
    assert "sum_pi_squared" in found.refused["otb"] and found.refused["gae"] == "needs a critic"
    assert "anchor_obs" in found.refused["gigpo"] and "all rows lack it" in found.refused["gigpo"]
    assert "reward_baselines" in found.refused["remax"] and not set(found.refused) & set(found.estimators)


def small_model(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    model.save_pretrained(folder)
    return model.eval()


def test_gradients_at_a_checkpoint_are_those_of_autograd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(tmp_path / "model")
    made = batch([[1.0, 0.0, 0.5]], turns=2)
    found = compared(tmp_path, made, "otb", "trloo")
    mask = made["tokens"]["response_mask"]
    gradients = {}
    for name in ("otb", "trloo"):
        (a,) = found.advantages[name]
        each = []
        for first in range(0, 6, 2):
            model.zero_grad()
            for row in (first, first + 1):
                answer = made["responses"][row].long()
                logits = model(torch.cat([made["prompts"][row].long(), answer])[None]).logits[0, 2:5] / 0.5
                log_probs = logits.log_softmax(-1)[range(LENGTH), answer]
                (log_probs * a[row] * mask[row]).sum().backward()
            each.append(torch.cat([one.grad.flatten() for one in model.parameters()]).double())
        gradients[name] = torch.stack(each)
    exactly = exact(found, tmp_path / "model")
    mean = {name: one.mean(0) for name, one in gradients.items()}
    loo = mean["trloo"]
    for name, one in gradients.items():
        numbers = exactly[name]
        assert numbers["norm"] == pytest.approx(float(mean[name].norm()), rel=1e-4)
        assert numbers["variance"] == pytest.approx(float(one.var(0).sum() / 3), rel=1e-4)
        assert numbers["bias"] == pytest.approx(float((mean[name] - loo).norm() / loo.norm()), rel=1e-4, abs=1e-6)
        assert numbers["cosine"] == pytest.approx(float(mean[name] @ loo / mean[name].norm() / loo.norm()), rel=1e-4)
    assert exactly["trloo"]["noise"] == pytest.approx(1.0) and exactly["trloo"]["scale"] == pytest.approx(1.0)

    monkeypatch.chdir(tmp_path)
    assert cli.main(["whatif", ".", "--estimators", "otb", "--checkpoint", "nowhere"]) == 1
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("memory", (), {"available": 1000}))
    with pytest.raises(ValueError, match="name fewer with --estimators"):
        exact(found, tmp_path / "model")


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
    assert "16 rows of 2 prompts, 40 model tokens (step 3), recorded under trloo" in said
    assert "smaller groups: 2 trajectories a prompt" in said and "Share of |A| by agent" in said
    assert "hgpo: hgpo needs the row field 'anchor_obs'" in said and "the same as a page: out/page.html" in said
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
    assert cli.main(["whatif", *arguments]) == 1
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


BROKEN = {
    "another version": ({"format": 0}, "not a record of format 1"),
    "a part is gone": ({"responses": None}, "responses"),
    "fewer keys": ({"keys": ["u_0_0_0"]}, "must have a row for each of 1 keys"),
    "a key of another form": ({"keys": ["a", "b"]}, "'a' does not read"),
    "a short column": ({"columns": {"agent_id": ["a"]}}, "a row field has 1 entries for 2 rows"),
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
