# SPDX-License-Identifier: Apache-2.0
"""Dr. MAS, GiGPO and HGPO: oracle vectors, hand-computed cases and their options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vector_cases import assert_expected, case_name, load_cases, row_field, row_fields, token_field

from verl_ext.methods.dr_mas import dr_mas_advantage, normalised
from verl_ext.methods.gigpo import gigpo_advantage, step_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.observations import similarity_clusters, step_returns
from verl_ext.methods.rows import RowFieldError, Rows

STEP_FIELDS = ("traj_uid", "turn_index", "anchor_obs", "turn_reward", "is_action_valid", "valid_row")


def check_row_and_token_fields(case, advantages, returns):
    assert_expected(case, "advantages", advantages)
    assert_expected(case, "row_advantage", advantages[:, 0])
    assert returns is advantages
    assert advantages.dtype == torch.float32


def tensors(case):
    return (
        token_field(case, "token_level_rewards"),
        token_field(case, "response_mask", torch.int64),
        row_field(case, "index"),
    )


@pytest.mark.parametrize("case", load_cases("dr_mas"), ids=case_name)
def test_dr_mas_vectors(case):
    config = case["config"]
    advantages, returns = dr_mas_advantage(
        *tensors(case),
        **row_fields(case, "traj_uid", "turn_index", "agent_id", "is_action_valid", "valid_row"),
        level="agent" if config["group_by_agent"] else "global",
        norm_by_std=config["norm_by_std"],
        invalid_action_penalty_coef=config["invalid_action_penalty_coef"],
        epsilon=config["epsilon"],
    )
    check_row_and_token_fields(case, advantages, returns)


@pytest.mark.parametrize("case", load_cases("gigpo"), ids=case_name)
def test_gigpo_vectors(case):
    config = case["config"]
    options = {k: config[k] for k in ("mode", "gamma", "invalid_action_penalty_coef", "epsilon")}
    fields = row_fields(case, *STEP_FIELDS)
    advantages, returns = gigpo_advantage(
        *tensors(case),
        **fields,
        **options,
        step_advantage_w=config["step_advantage_w"],
        episode_stats=config["episode_stats"],
        enable_similarity=config["enable_similarity"],
    )
    check_row_and_token_fields(case, advantages, returns)
    check_parts(case, fields, options)


@pytest.mark.parametrize("case", load_cases("hgpo"), ids=case_name)
def test_hgpo_vectors(case):
    config = case["config"]
    options = {k: config[k] for k in ("mode", "gamma", "invalid_action_penalty_coef", "epsilon")}
    fields = row_fields(case, *STEP_FIELDS)
    advantages, returns = hgpo_advantage(
        *tensors(case),
        **fields,
        **options,
        history_length=config["history_length"],
        length_weight_alpha=config["length_weight_alpha"],
        base_group=config["base_group"],
        level_weights=config["level_weights"],
    )
    check_row_and_token_fields(case, advantages, returns)
    check_parts(case, fields, options)


def check_parts(case, fields, options):
    rewards, _, index = tensors(case)
    rows = Rows(len(index), index=index, **fields)
    *_, step_return = step_returns(rows, rewards, options["gamma"], 0.0)
    assert_expected(case, "step_return", step_return)
    coefficient = options["invalid_action_penalty_coef"]
    *_, penalty, target = step_returns(rows, rewards, options["gamma"], coefficient)
    assert_expected(case, "step_return_after_penalty", target)
    scale = {"by_std": options["mode"] == "mean_std_norm", "epsilon": options["epsilon"]}
    if "episode_advantage" in case["expected"]:
        got = normalised(rows.scores(rewards) - penalty, rows.ids("index"), **scale)
        assert_expected(case, "episode_advantage", got)
    if "step_advantage" in case["expected"]:
        assert_expected(case, "step_advantage", step_advantage(target, rows.keys(["index", "anchor_obs"]), **scale))


def tokens(scores, length=2):
    rewards = torch.zeros(len(scores), length)
    rewards[:, -1] = torch.tensor(scores)
    return rewards, torch.ones(len(scores), length, dtype=torch.int64)


def test_dr_mas_levels_differ_in_samples():
    # Trajectory t (reward 1) has three rows, trajectory u (reward 0) one.
    rewards, mask = tokens([1.0, 1.0, 1.0, 0.0])
    fields = {"traj_uid": list("tttu"), "agent_id": ["x", "x", "y", "x"]}

    def row(**options):
        return dr_mas_advantage(rewards, mask, ["a"] * 4, **fields, norm_by_std=False, **options)[0][:, 0].tolist()

    assert row(level="global") == [0.5, 0.5, 0.5, -0.5]
    assert row(level="global_rows") == [0.25, 0.25, 0.25, -0.75]
    assert row(level="agent") == pytest.approx([1 / 3, 1 / 3, 1.0, -2 / 3])
    assert row(level="agent", group_by=["index"]) == row(level="global_rows")
    assert row(level="global", group_by=["index", "agent_id"]) == [0.5, 0.5, 1.0, -0.5]


def test_dr_mas_singleton_keeps_its_penalised_reward():
    rewards, mask = tokens([1.0, 1.0])
    options = {"agent_id": ["x", "y"], "is_action_valid": [True, False], "invalid_action_penalty_coef": 0.1}
    advantages, _ = dr_mas_advantage(rewards, mask, ["a", "a"], **options)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.0, 0.9]) / (1 + 1e-6))
    advantages, _ = dr_mas_advantage(rewards, mask, ["a", "a"], norm_by_std=False, **options)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.0, 0.9]))


def test_dr_mas_takes_one_statistic_of_the_agent_and_the_other_of_the_trajectories():
    # Outcomes 3, 1, 0, 0; the solver x speaks in all, the reviser y in the last three and twice in the second.
    rewards, mask = tokens([3.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    fields = {"traj_uid": list("abbbccdd"), "agent_id": list("xxyyxyxy")}
    outcomes, own = np.array([3.0, 1, 0, 0]), {"x": np.array([3.0, 1, 0, 0]), "y": np.array([1.0, 1, 0, 0])}

    def row(**options):
        return dr_mas_advantage(rewards, mask, ["u"] * 8, **fields, **options)[0][:, 0].numpy()

    for std, ddof in (("released", 1), ("paper", 0)):
        for statistics, mean_of, std_of in (("both", own, own), ("mean", own, None), ("std", None, own)):
            expected = [
                (r - (mean_of[a] if mean_of else outcomes).mean())
                / ((std_of[a] if std_of else outcomes).std(ddof=ddof) + 1e-6)
                for r, a in zip(rewards[:, -1].numpy(), fields["agent_id"], strict=True)
            ]
            np.testing.assert_allclose(row(statistics=statistics, std=std), expected, rtol=1e-6, err_msg=statistics)
        expected = (rewards[:, -1].numpy() - 1.0) / (outcomes.std(ddof=ddof) + 1e-6)
        np.testing.assert_allclose(row(level="global", std=std), expected, rtol=1e-6)
    # Without the deviation the mean alone is left to choose.
    np.testing.assert_array_equal(row(statistics="std", norm_by_std=False), row(level="global", norm_by_std=False))
    np.testing.assert_array_equal(row(statistics="mean", norm_by_std=False), row(norm_by_std=False))


def test_dr_mas_divides_by_no_deviation_that_is_zero():
    """An agent whose rewards are all the same has no scale: 0, and not a difference of means over epsilon."""
    rewards, mask = tokens([1.0, 0.0, 0.0, 0.0])
    fields = {"traj_uid": list("abac"), "agent_id": list("xxyy")}
    by_agent, _ = dr_mas_advantage(rewards, mask, ["u"] * 4, **fields, statistics="std")
    assert by_agent[2:].abs().sum() == 0 and by_agent[:2].abs().min() > 0.1
    single = {"traj_uid": list("ab"), "agent_id": list("xy")}
    for statistics, first in (("mean", 1 / (0.5**0.5 + 1e-6)), ("std", 0.5 / (1 + 1e-6))):
        got, _ = dr_mas_advantage(*tokens([1.0, 0.0]), ["u", "u"], **single, statistics=statistics)
        assert got[0, 0].item() == pytest.approx(first, rel=1e-6), "an agent's only row: mean 0, deviation 1"


def test_dr_mas_errors():
    rewards, mask = tokens([1.0, 0.0])
    with pytest.raises(RowFieldError, match="agent_id"):
        dr_mas_advantage(rewards, mask, ["a", "a"])
    with pytest.raises(RowFieldError, match="traj_uid.*level=global_rows"):
        dr_mas_advantage(rewards, mask, ["a", "a"], level="global")
    with pytest.raises(RowFieldError, match="traj_uid.*statistics=mean"):
        dr_mas_advantage(rewards, mask, ["a", "a"], agent_id=["x", "y"], statistics="mean")
    with pytest.raises(ValueError, match="statistics='std' is of level='agent', and level='global'"):
        dr_mas_advantage(rewards, mask, ["a", "a"], traj_uid=["t", "u"], level="global", statistics="std")
    with pytest.raises(ValueError, match="level='team'"):
        dr_mas_advantage(rewards, mask, ["a", "a"], level="team")
    with pytest.raises(ValueError, match="invalid_action_penalty_coef=-1"):
        dr_mas_advantage(rewards, mask, ["a", "a"], level="global_rows", invalid_action_penalty_coef=-1)


def episode(scores, steps):
    """Trajectories of `steps` rows; the score is the reward of the last step and the episode return of all."""
    rewards, mask = tokens([s for s in scores for _ in range(steps)])
    turn_reward = [s if t == steps - 1 else 0.0 for s in scores for t in range(steps)]
    return (
        (rewards, mask, ["a"] * (len(scores) * steps)),
        {
            "traj_uid": [f"t{i}" for i in range(len(scores)) for _ in range(steps)],
            "turn_index": list(range(steps)) * len(scores),
            "turn_reward": turn_reward,
        },
    )


def test_gigpo_trajectory_statistics_take_one_sample_a_trajectory():
    data, fields = episode([1.0, 0.0], 2)
    rewards, mask, index = (d[:3] for d in data)
    fields = {k: v[:3] for k, v in fields.items()} | {"anchor_obs": ["p", "q", "r"]}
    options = {"mode": "mean_norm", "gamma": 1.0}
    by_rows, _ = gigpo_advantage(rewards, mask, index, **fields, **options)
    by_trajectories, _ = gigpo_advantage(rewards, mask, index, **fields, **options, episode_stats="trajectories")
    torch.testing.assert_close(by_rows[:, 0], torch.tensor([1 / 3, 1 / 3, -2 / 3]))
    torch.testing.assert_close(by_trajectories[:, 0], torch.tensor([0.5, 0.5, -0.5]))


def test_gigpo_similarity_joins_the_first_cluster():
    texts = ["go to the red door", "go to the red floor", "look around", "go to the red door", "go to the red doors"]
    group = np.zeros(5, dtype=np.int64)
    assert similarity_clusters(texts, group, 0.85).tolist() == [0, 0, 1, 0, 0]
    assert similarity_clusters(texts, group, 1.0).tolist() == [0, 1, 2, 0, 3]
    assert similarity_clusters(texts, np.array([0, 1, 1, 1, 0]), 0.85).tolist() == [0, 1, 2, 1, 0]
    data, fields = episode([1.0, 0.0], 1)
    close, far = ["go to the red door", "go to the red floor"], ["go to the red door", "look around"]
    options = {"mode": "mean_norm", "enable_similarity": True, "similarity_thresh": 0.85}
    assert gigpo_advantage(*data, **fields, anchor_obs=close, **options)[0][:, 0].tolist() == [1.0, -1.0]
    assert gigpo_advantage(*data, **fields, anchor_obs=far, **options)[0][:, 0].tolist() == [0.5, -0.5]
    with pytest.raises(RowFieldError, match="anchor_obs.*must be text.*got int"):
        gigpo_advantage(*data, **fields, anchor_obs=[1, 2], **options)
    with pytest.raises(ValueError, match="similarity_thresh=0"):
        gigpo_advantage(*data, **fields, anchor_obs=close, enable_similarity=True, similarity_thresh=0)


def test_penalty_never_reaches_earlier_steps():
    data, fields = episode([1.0, 1.0], 2)
    advantages, _ = gigpo_advantage(
        *data,
        **fields,
        anchor_obs=["p", "q", "p", "q"],
        is_action_valid=[True, False, True, True],
        mode="mean_norm",
        gamma=1.0,
        invalid_action_penalty_coef=0.4,
    )
    # Episode part: scores 1, 0.6, 1, 1 (mean 0.9). Step part: turn 0 equal, turn 1 differs by 0.4.
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.1, -0.3 - 0.2, 0.1, 0.1 + 0.2]))


def test_hgpo_level_weights_and_alpha():
    # Four trajectories share the first observation; two of them share the second.
    data, fields = episode([4.0, 0.0, 2.0, 0.0], 2)
    options = {"gamma": 1.0, "mode": "mean_norm", "history_length": 1}
    obs = ["s", "x", "s", "x", "o", "x", "o", "x"]

    def second_steps(**extra):
        return hgpo_advantage(*data, **fields, anchor_obs=obs, **options, **extra)[0][1::2, 0]

    level_1 = torch.tensor([2.5, -1.5, 0.5, -1.5])  # all four second steps see x
    level_2 = torch.tensor([2.0, -2.0, 1.0, -1.0])  # pairs with the same history
    torch.testing.assert_close(second_steps(), (2 * level_1 + 3 * level_2) / (5 + 1e-6))
    torch.testing.assert_close(second_steps(level_weights="paper"), (level_1 + 2 * level_2) / (3 + 1e-6))
    torch.testing.assert_close(second_steps(length_weight_alpha=0.0), (level_1 + level_2) / (2 + 1e-6))
    base = torch.tensor([2.5, -1.5, 0.5, -1.5])
    torch.testing.assert_close(second_steps(base_group=True), (base + 2 * level_1 + 3 * level_2) / (6 + 1e-6))
    torch.testing.assert_close(
        second_steps(base_group=True, level_weights="paper"), (base + level_1 + 2 * level_2) / (4 + 1e-6)
    )


def test_hgpo_lone_trajectory_without_revisits_is_zero_and_revisits_count():
    data, fields = episode([1.0], 3)
    assert (hgpo_advantage(*data, **fields, anchor_obs=["p", "q", "r"])[0] == 0).all()
    advantages, _ = hgpo_advantage(*data, **fields, anchor_obs=["p", "q", "p"], gamma=0.5, mode="mean_norm")
    scale = 2 / (2 + 1e-6)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-0.375, 0.0, 0.375]) * scale)


def test_hgpo_groups_never_cross_prompts_and_split_by_agent():
    rewards, mask = tokens([1.0, 0.0])
    fields = {"traj_uid": ["t", "t"], "turn_index": [0, 0], "turn_reward": [1.0, 0.0], "anchor_obs": ["s", "s"]}
    assert (hgpo_advantage(rewards, mask, ["a", "b"], **fields)[0] == 0).all()
    fields["traj_uid"] = ["t", "u"]
    assert (hgpo_advantage(rewards, mask, ["a", "a"], **fields)[0] != 0).all()
    options = {"group_by": ["index", "agent_id"], "row_fields": {"agent_id": ["x", "y"]}}
    assert (hgpo_advantage(rewards, mask, ["a", "a"], **fields, **options)[0] == 0).all()


def test_step_methods_on_single_turn_rows():
    rewards, mask = tokens([1.0, 0.0])
    step = hgpo_advantage(rewards, mask, ["a", "a"], anchor_obs=["s", "s"], mode="mean_norm")[0]
    torch.testing.assert_close(step[:, 0], torch.tensor([0.5, -0.5]) * 2 / (2 + 1e-6))
    both = gigpo_advantage(rewards, mask, ["a", "a"], anchor_obs=["s", "s"], mode="mean_norm")[0]
    torch.testing.assert_close(both[:, 0], torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("method", [hgpo_advantage, gigpo_advantage])
def test_step_methods_name_what_is_missing(method):
    data, fields = episode([1.0, 0.0], 2)
    fields["anchor_obs"] = list("sxsx")
    for name in ("turn_index", "traj_uid", "turn_reward", "anchor_obs"):
        with pytest.raises(RowFieldError, match=f"'{name}'"):
            method(*data, **{k: v for k, v in fields.items() if k != name})
    with pytest.raises(RowFieldError, match="anchor_obs.*compared by value"):
        method(*data, **(fields | {"anchor_obs": [object()] * 4}))
    with pytest.raises(ValueError, match="mode='std'"):
        method(*data, **fields, mode="std")
    bad = fields | {"turn_reward": [0.0, float("nan"), 0.0, 0.0]}
    with pytest.raises(
        ValueError, match=r"turn_reward' must be .*finite.*, got nan in row 1 \(uid a, trajectory t0, turn 1\)"
    ):
        method(*data, **bad)
