# SPDX-License-Identifier: Apache-2.0
"""Advantages of merged sequences are those of a sequence a call; loops with one output; gae over the gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from turn_advantages import VERLS, data_of, estimated
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_ext.integration import columns, turns
from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.parts.advantage.methods import complete, estimate
from verl_ext.integration.settings import merging
from verl_ext.integration.settings.options import OptionError
from verl_ext.methods import rejection
from verl_ext.methods.empg import empg
from verl_ext.recipes import recipe_root, verl_config_dir
from verl_ext.rollout.shared import one_output


def advantages(name: str, merged: bool, kl: bool = False) -> dict[str, torch.Tensor]:
    """Of each turn, by its key; and what `pack` and `unpack` make of them."""
    data, active, rows = estimated(name, merged, kl)
    back = {one: active.turns.unpack(data.batch[one]) for one in ("advantages", "returns")}
    mask = active.turns.unpack(data.batch["response_mask"]).bool()
    assert torch.equal(torch.where(mask, back["advantages"], 0), torch.where(mask, rows.batch["advantages"], 0))
    return {key: torch.stack([back[one][row][mask[row]] for one in back]) for row, key in enumerate(active.keys)}


@pytest.mark.parametrize(
    ("name", "kl"),
    [
        (name, kl)
        for name in (*ESTIMATORS, "mix", *VERLS)
        for kl in (False, True)
        if not (name == "maxrl" and kl)  # which refuses rewards below 0
    ],
)
def test_each_turn_gets_what_a_row_a_call_gets(name: str, kl: bool) -> None:
    apart, merged = advantages(name, False, kl), advantages(name, True, kl)
    assert sorted(apart) == sorted(merged) and any(found.any() for found in apart.values())
    for key, found in apart.items():  # sums over rows in another order round otherwise
        assert torch.allclose(found, merged[key], rtol=1e-6, atol=1e-6), key


def test_a_last_call_without_a_token_leaves_its_trajectory_the_signal_of_grpo() -> None:
    """verl's grpo would give all its turns the nothing of that call."""
    found = []
    for silent in (False, True):
        data, active = data_of(False)
        (last,) = [row for row, key in enumerate(active.keys) if key == "p0_0_1"]
        data.batch["response_mask"][last] *= int(not silent)
        complete(active, data)
        settings = {"num_repeat": 4, "norm_adv_by_std_in_grpo": True, "config": OmegaConf.create({})}
        rows = estimate(compute_advantage_for_multi_trajectories, data, list(active.keys), "grpo", active, **settings)
        found.append(rows.batch["advantages"])
    heard, silent = found
    assert not any(key.startswith("p0_0_2") for key in active.keys) and heard[last].any()
    assert not silent[last].any() and silent[last - 1].any()
    heard[last] = 0
    assert torch.equal(heard, silent)


def test_modifier_and_rules_decide_by_turn() -> None:
    found = {}
    for merged in (False, True):
        data, active = data_of(merged)
        rows = turns.unpacked(data, active.turns)
        old, sampled, mask = (rows.batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
        kept = rejection.ln_trm(old, sampled, mask, epsilon=0.1, delta=0.1, threshold=0.05)
        changed = empg(
            rows.batch["sum_pi_squared"] * mask,
            rows.batch["sum_pi_squared"],
            mask,
            index=rows.non_tensor_batch["uid"],
            traj_uid=active.columns["traj_uid"],
            turn_index=active.columns["turn_index"],
            valid_row=active.columns["valid_row"],
        )
        sums = zip(
            active.keys, kept.kept.tolist(), kept.response_mask.sum(-1).tolist(), changed.sum(-1).tolist(), strict=True
        )
        found[merged] = {key: pytest.approx(values, rel=1e-6) for key, *values in sums}
        packed = active.turns.pack(kept.response_mask)
        assert (
            torch.equal(active.turns.unpack(packed), kept.response_mask)
            and packed.shape == data.batch["response_mask"].shape
        )
    assert {key: value.expected for key, value in found[False].items()} == found[True]


# ---- loops with one output -----------------------------------------------------------------------------------------


class Words:
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def single(mask: list[int], **said: Any) -> AgentLoopOutput:
    """The only output of a trajectory, with the reward 0.75."""
    ids = list(range(len(mask)))
    more = {"reward_extra_info": {}, **said}
    return AgentLoopOutput(
        prompt_ids=[8, 9],
        response_ids=ids,
        response_mask=mask,
        reward_score=0.75,
        metrics=AgentLoopMetrics(),
        extra_fields=more,
    )


@pytest.mark.parametrize(
    ("said", "rewards"),
    [
        ({}, [0.0, 0.75]),
        ({"turn_rewards": [0.1, 0.2]}, [0.1, 0.2]),
        ({"turn_scores": [0.3, 0.4], "tool_rewards": [1.0]}, [0.3, 0.4]),
        ({"tool_rewards": [1.0]}, [1.0, 0.75]),
        ({"tool_rewards": [1.0, 0.5]}, [1.0, 1.25]),
        ({"tool_rewards": [1.0, 2.0, 3.0]}, [0.0, 0.75]),
        ({"turn_reward": 2.0}, [0.0, 2.0]),
    ],
)
def test_turns_of_one_output_and_their_rewards(said: dict[str, Any], rewards: list[float]) -> None:
    output = single([1, 1, 0, 0, 1, 0], **said)
    one_output.lay_out(output, {"agent_id", "anchor_obs"}, Words())
    found = output.as_dict()
    tag = {"prompt_len": 2, "response_len": 6}
    layout = turns.lay_out(["u_0_0"], [tag], [found["extra_fields"]])
    assert layout.keys == ["u_0_0", "u_0_1"]
    assert [one["turn_reward"] for one in layout.said] == pytest.approx(rewards)
    assert [one["anchor_obs"] for one in layout.said] == ["8 9", "2 3"]
    assert {one["agent_id"] for one in layout.said} == {"agent"}
    scores = layout.turns.rewards(found["rm_scores"][None])
    assert scores.tolist() == [[0.0, 0.75], [0.75, 0.0]]  # the outcome on each turn's last token
    assert layout.turns.pack(layout.turns.unpack(found["response_mask"][None])).tolist() == [[1, 1, 0, 0, 1, 0]]


def test_one_output_of_one_turn_stays_as_it_is() -> None:
    output = single([1, 1, 0])
    one_output.lay_out(output, (), Words())
    assert output.extra_fields == {"reward_extra_info": {}}
    empty = single([0, 0])  # the engine gave nothing, and a loop put a token there
    one_output.lay_out(empty, {"anchor_obs"}, Words())
    assert "turns" not in empty.extra_fields and "anchor_obs" in empty.extra_fields
    with pytest.raises(ValueError, match="turn_rewards of 1 entries.* 0 runs of 1"):
        one_output.lay_out(single([0, 0], turn_rewards=[1]), (), Words())
    with pytest.raises(ValueError, match="turn_rewards of 3 entries.* 2 runs of 1"):
        one_output.lay_out(single([1, 0, 1], turn_rewards=[1, 2, 3]), (), Words())
    # Beside others of several turns, such a row has earned the outcome.
    other = single([1, 0, 1])
    one_output.lay_out(other, (), Words())
    said = [output.extra_fields, other.extra_fields]
    tags = [{"prompt_len": 2, "response_len": 3}] * 2
    layout = turns.lay_out(["u_0_0", "u_1_0"], tags, said)
    found, missing = columns.row_fields(layout.keys, layout.tags, layout.said)
    assert "turn_reward" in missing
    active = ActiveBatch(columns=found, missing=missing, extra_fields=layout.said, turns=layout.turns)
    rm_scores = torch.stack([one.as_dict()["rm_scores"] for one in (output, other)])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    batch = dict.fromkeys(("rm_scores", "token_level_scores", "token_level_rewards"), rm_scores) | {
        "response_mask": mask
    }
    uid = np.array(["u", "u"], dtype=object)
    data = DataProto(batch=TensorDict(batch, batch_size=2), non_tensor_batch={"uid": uid})
    complete(active, turns.unpacked(data, active.turns))
    assert active.columns["turn_reward"].tolist() == [0.75, 0.0, 0.75] and "turn_reward" not in active.missing


# ---- gae along a sequence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_gae_over_the_gaps_is_the_enumeration(known: bool) -> None:
    gamma, lam = 0.9, 0.8
    data, active = data_of(True, kl=True)
    active.along = True
    rows, keys = turns.unpacked(data, active.turns), list(active.keys)
    complete(active, rows)
    if not known:
        del active.columns["turn_reward"]
    config = OmegaConf.create({"adv_estimator": "gae"})
    settings = {"gamma": gamma, "lam": lam, "num_repeat": 4, "norm_adv_by_std_in_grpo": True, "config": config}
    rows = estimate(compute_advantage_for_multi_trajectories, rows, keys, "gae", active, **settings)
    turn = active.columns["turn_index"]
    mask = rows.batch["response_mask"].bool()
    every = []
    sequence = active.turns.sequence.numpy()
    for number in range(len(active.stored)):
        own = sorted(np.flatnonzero(sequence == number), key=lambda row: turn[row])
        steps = []  # (row, token, reward, value) in time
        for row in own:
            places = mask[row].nonzero()[:, 0].tolist()  # none of a turn that was taken out
            kl = rows.batch["token_level_rewards"][row] - rows.batch["token_level_scores"][row]
            share = float((rows.batch["token_level_rewards"] - rows.batch["token_level_scores"])[row].double().sum())
            outcome = float(rows.batch["token_level_scores"][row].sum()) if row == own[-1] else 0.0
            earned = active.columns["turn_reward"][row] - share if known else outcome
            for place in places:
                last = place == places[-1]
                value = float(rows.batch["values"][row, place])
                steps.append((row, place, float(kl[place]) + (earned if last else 0.0), value))
        ahead = next_value = 0.0
        for row, place, reward, value in reversed(steps):
            ahead = reward + gamma * next_value - value + gamma * lam * ahead
            next_value = value
            assert float(rows.batch["returns"][row, place]) == pytest.approx(ahead + value, abs=1e-5)
            every.append((row, place, ahead))
    raw = torch.tensor([one for *_, one in every], dtype=torch.float64)
    found = torch.stack([rows.batch["advantages"][row, place] for row, place, _ in every]).double()
    white = (raw - raw.mean()) / torch.sqrt(raw.var(unbiased=True) + 1e-8)
    assert torch.allclose(found, white, atol=1e-4)
    assert not rows.batch["advantages"][~mask].any()


# ---- whether a run merges ------------------------------------------------------------------------------------------


def run_config(**changes: Any) -> Any:
    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "vanilla"}}},
            "verl_ext": {"merge_turns": "auto"},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


ACTOR = "actor_rollout_ref__actor__"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({f"{ACTOR}loss_agg_mode": "token-sum"}, None),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}, "seq-mean-token-mean averages over sequences"),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-sum"}, "averages over sequences"),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-sum", "verl_ext__updates_per_batch": 2}, None),
        ({f"{ACTOR}policy_loss__loss_mode": "kpo"}, None),
        ({f"{ACTOR}policy_loss__loss_mode": "cispo"}, None),
        ({f"{ACTOR}policy_loss__loss_mode": "gspo"}, "loss_mode=gspo is a loss of sequences"),
        ({f"{ACTOR}policy_loss__loss_mode": "geo_mean"}, "loss_mode=geo_mean is a loss of sequences"),
        ({f"{ACTOR}policy_loss__loss_mode": "sapo"}, "averages over sequences"),
        ({"algorithm__adv_estimator": "gae"}, "critic"),
        ({"algorithm__rollout_correction__rollout_is": "token"}, None),
        ({"algorithm__rollout_correction__rollout_is": "sequence"}, "weighs whole sequences"),
        ({"algorithm__rollout_correction__rollout_rs": "token_k1,token_k2"}, None),
        ({"algorithm__rollout_correction__rollout_rs": "token_k1,seq_mean_k1"}, "rejects whole sequences"),
        ({"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}, "kl_ctrl.type=adaptive"),
        ({"distillation__enabled": True}, "teacher of distillation"),
        ({"reward__reward_model__enable": True}, "scores each sequence"),
    ],
)
def test_auto_merges_where_no_number_changes(changes: dict[str, Any], said: str | None) -> None:
    config = run_config(**changes)
    why, told = merging.why_not(config), merging.statement(config)
    assert merging.merges(config) is (said is None)
    if said is None:
        merged = "verl_ext.merge_turns=auto: turns that continue each other are one sequence"
        cut = "; verl's mini-batches are of sequences, so a batch gets fewer updates"
        assert why is None and told.startswith(merged)
        assert (cut in told) == ("verl_ext__updates_per_batch" not in changes)
    else:
        assert why is not None and said in why and why in told and "merge_turns=true merges all the same" in told
    off = run_config(**changes, verl_ext__merge_turns=False)
    assert not merging.merges(off) and not merging.sees_turns(off, ours=True)
    on = run_config(**changes, verl_ext__merge_turns=True)
    if "reward__reward_model__enable" in changes:
        with pytest.raises(
            OptionError, match="reward_model.enable=true without a resource pool.*enable_resource_pool=true"
        ):
            merging.merges(on)
    else:
        assert merging.merges(on) and merging.sees_turns(on, ours=False)


def test_kpo_as_its_recipe_has_it_says_why_it_does_not_merge() -> None:
    with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
        config = compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{recipe_root()}]", "+recipe=[trloo,kpo]"])
    assert merging.statement(config) == (
        "verl_ext.merge_turns=auto: each model call is a sequence, since actor_rollout_ref.actor.loss_agg_mode="
        "seq-mean-token-mean averages over sequences; verl_ext.merge_turns=true merges all the same"
    )


def test_auto_sees_turns_of_one_output_for_our_estimators() -> None:
    assert merging.sees_turns(run_config(), ours=True) and not merging.sees_turns(run_config(), ours=False)
    with pytest.raises(OptionError, match="verl_ext.merge_turns is 'sometimes'"):
        merging.merges(run_config(verl_ext__merge_turns="sometimes"))
