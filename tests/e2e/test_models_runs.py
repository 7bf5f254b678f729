# SPDX-License-Identifier: Apache-2.0
"""Several models in one run of verl's real trainer, against the same team on one model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from chat_server import Served
from harness import Lab, Run, other_tokenizer
from test_main_job import finite
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
MACHINE = ("timing", "perf/", "actor/perf", "throughput")


def overrides(lab: Lab) -> list[str]:
    """The team `four`, in an order and with seeds that do not depend on which rollout ends first."""
    loops = lab.root / "seeded_team.yaml"
    loops.write_text("- {name: seeded_team, _target_: seeded_team.SeededTeam}\n")
    return [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded_team",
        "+verl_ext.orchestra.name=four",
        "+verl_ext.orchestra.modules=[seeded_team]",
        "++actor_rollout_ref.rollout.engine_kwargs.embedded.max_batch_size=1",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'sorted_buffer.py'}",
        "trainer.v1.sampler.custom_sampler.name=SortedReplayBuffer",
        "data.train_batch_size=1",
        "data.max_prompt_length=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "verl_ext.updates_per_batch=1",
        "verl_ext.agent_gradients=true",
        "trainer.save_freq=1",
        "trainer.length_lr.warmup_steps=2",
    ]


def train(lab: Lab, name: str, *more: str, recipe: str = "[dr_mas,simpletir,length_lr,cpu]") -> Run:
    environment = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    return lab.run(name, recipe=recipe, overrides=[*overrides(lab), *more], environment=environment).check()


def weights(
    run: Run, model: str = "", kind: str = "actor", step: int = 2, rank: int = 0, ranks: int = 1
) -> dict[str, torch.Tensor]:
    folder = run.folder / f"checkpoints/global_step_{step}" / kind / model
    path = folder / f"model_world_size_{ranks}_rank_{rank}.pt"
    state = torch.load(path, weights_only=False)
    return {name: getattr(value, "_local_tensor", value) for name, value in state.items()}


def same_metrics(shared: Run, other: Run, model: str) -> None:
    """What the run with one model reports, the other does of this model, to the last bit."""
    for step in (1, 2):
        one = {k: v for k, v in shared.metrics[step].items() if not k.startswith(MACHINE)}
        two = other.metrics[step]
        for key, value in one.items():
            group, _, rest = key.partition("/")
            assert two.get(key, two.get(f"{group}/{model}/{rest}")) == value, key
        assert len(one) > 60


def same_weights(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_each_agent_trains_the_model_that_it_has(standing_lab: Lab) -> None:
    lab = standing_lab
    other = other_tokenizer(lab.root / "other")
    shared = train(lab, "models_shared")
    idle = [f"+verl_ext.models.other.model.path={other}", "+verl_ext.orchestra.agents.spare.model=other"]
    # Two commands: the second one goes on from the checkpoint of all models.
    train(lab, "models_idle", "trainer.total_training_steps=1", *idle)
    waiting = train(lab, "models_idle", *idle)
    team = ("writer", "critic", "judge", "spare", "guest")
    moved = train(
        lab,
        "models_moved",
        "+verl_ext.models.twin.trained=true",
        *(f"+verl_ext.orchestra.agents.{agent}.model=twin" for agent in team),
    )
    far = Served((200, "I see."))  # one of the four speaks by a model that this run does not serve
    apart = train(
        lab,
        "models_apart",
        *(f"+verl_ext.models.far.endpoint.{key}={value}" for key, value in far.models()["strong"]["endpoint"].items()),
        "+verl_ext.orchestra.agents.spare.model=far",
        f"+verl_ext.models.still={{trained: false, model: {{path: {other}}}}}",
        "+verl_ext.orchestra.agents.guest.model=still",
        "+verl_ext.orchestra.options.spare_speaks=true",
        *(f"+verl_ext.models.{name}.model.path={path}" for name, path in (("twin", lab.model), ("other", other))),
        *(
            f"+verl_ext.orchestra.agents.{agent}.model={name}"
            for agent, name in (("critic", "twin"), ("judge", "other"))
        ),
        "verl_ext.rollouts_dir=" + str(lab.root / "models_apart" / "rollouts"),
        "verl_ext.agent_gradients=false",  # a model's gradient is its agent's
        "+algorithm.rejection.trm=true",
        "+algorithm.trm.divergence=exact",  # each engine compares with the sampler over its own vocabulary
        "+verl_ext.models.other.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.val_before_train=true",
        "data.val_max_samples=2",
    )
    far.close()

    # A model that nobody asks changes nothing, bit for bit, and a resume neither.
    same_metrics(shared, waiting, "policy")
    for step in (1, 2):
        two = waiting.metrics[step]
        assert two["model/other/sequences"] == 0 and not any(k.startswith("actor/other/") for k in two)
    alone = weights(shared)
    assert [shared.metrics[step]["length_lr/factor"] for step in (1, 2)] == [0.5, 1.0]
    one, two = (torch.load(run.folder / "checkpoints/global_step_2/verl_ext.pt") for run in (shared, waiting))
    assert one == two and one["LengthLearningRate"]["length_count"] == 2  # the resumed one has the first step's too
    assert same_weights(alone, weights(waiting, "policy"))

    # Nor does it matter which of two models all agents have: the one that nobody asks stays as it was.
    same_metrics(shared, moved, "twin")
    assert same_weights(alone, weights(moved, "twin"))
    start = AutoModelForCausalLM.from_pretrained(lab.model).state_dict()
    assert same_weights(start, weights(moved, "policy")) and not same_weights(start, alone)
    for step in (1, 2):
        assert moved.metrics[step]["model/policy/sequences"] == 0
        assert not any(k.startswith("actor/policy/") for k in moved.metrics[step])

    # One model an agent: rows of the first step and each agent's part of the gradient are those of the shared model.
    rows = [
        [
            (r["agent_id"], r["score"], r["advantage"], r["response_tokens"])
            for r in run.rows(1)
            if r["agent_id"] not in ("judge", "guest")
        ]
        for run in (shared, apart)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 8 and any(row[2] for row in rows[0])
    models = {"writer": "policy", "critic": "twin", "judge": "other", "guest": "still"}
    assert {(r["agent_id"], r["model"]) for r in apart.rows(1)} == set(models.items())
    for agent, model in (("writer", "policy"), ("critic", "twin")):
        part = shared.metrics[1][f"agent/{agent}/grad_norm/mean"]
        assert part > 0 and apart.metrics[1][f"actor/{model}/grad_norm"] == pytest.approx(part, rel=1e-5)
    for run in (shared, apart):  # the first sample's trajectory is rejected, in the gradients above as well
        assert run.metrics[1]["rejection/kept_share"] == run.metrics[1]["rejection/simpletir/kept_share"] == 0.75
    assert apart.metrics[1]["rejection/trm/kept_share"] == 1.0
    assert apart.metrics[1]["rejection/trm/statistic_max/p95"] < 1e-4
    assert shared.metrics[1]["rejection/skipped_updates/count"] == 0
    states = {name: weights(apart, name) for name in ("policy", "twin", "other")}
    assert any(not torch.equal(states["policy"][name], states["twin"][name]) for name in states["policy"])

    # A model that is not trained is served and no more: it has rows, and no engine, metric of one or checkpoint.
    for step in (1, 2):
        of_still = {key for key in apart.metrics[step] if "/still" in key and not key.startswith("timing_s")}
        assert of_still == {f"model/still/{what}" for what in ("sequences", "tokens", "agent/guest/sequences")}
        assert apart.metrics[step]["model/still/sequences"] == 4
    assert sorted(one.name for one in (apart.folder / "checkpoints/global_step_2/actor").iterdir()) == sorted(states)

    # Each engine has the weights of its own model, and each row is in the words of its own tokenizer.
    for step in (1, 2):
        assert finite(apart.metrics[step])
        for name in states:
            assert apart.metrics[step][f"model/{name}/sequences"] == 4
            assert apart.metrics[step][f"rejection/{name}/skipped_updates/count"] == 0
            assert apart.metrics[step][f"training/{name}/rollout_probs_diff_max"] < 1e-4
            assert apart.metrics[step][f"actor/{name}/grad_norm"] > 0
            assert apart.metrics[step][f"actor/{name}/lr"] == pytest.approx(1e-4 * step / 2)
        kl = {name: apart.metrics[step].get(f"actor/{name}/kl_loss") for name in states}
        assert kl["policy"] is kl["twin"] is None and (abs(kl["other"]) < 1e-6 if step == 1 else kl["other"] > 0)
    assert any(key.startswith("val-") for key in apart.metrics[0])

    # transformers alone can load each as it was exported (by verl in bfloat16), with its tokenizer.
    for name, words in (("policy", 259), ("twin", 259), ("other", 359)):
        exported = apart.folder / "checkpoints/global_step_2/actor" / name / "huggingface"
        loaded = AutoModelForCausalLM.from_pretrained(exported).state_dict()
        assert same_weights(loaded, {key: value.bfloat16() for key, value in states[name].items()})
        assert len(AutoTokenizer.from_pretrained(exported)) == words

    validated = 2
    played = sum(len({row["traj_uid"] for row in apart.rows(step)}) for step in (1, 2))
    assert len(far.asked) == validated + played == 10
    assert all([one["role"] for one in request["messages"]] == ["system", "user"] for request in far.asked)
    for line in (apart.folder / "rollouts" / "1.jsonl").read_bytes().splitlines():
        for turn in json.loads(line)["turns"]:
            assert turn["prompt"].startswith("<|im_start|>system\n")  # token 1 in both, but the rest differs
            assert turn["more"]["model"] == models[turn["agent"]]


def test_models_on_two_ranks_while_rollouts_go_on(standing_lab: Lab) -> None:
    """`colocate_async`, whose servers stop what they are at for the update; the rows of a model are no even number."""
    lab = standing_lab
    run = lab.run(
        "models_ranks",
        recipe="[dr_mas,kpo,cpu]",
        overrides=[
            "trainer.v1.trainer_mode=colocate_async",
            "trainer.n_gpus_per_node=2",
            "trainer.save_freq=1",
            "data.train_batch_size=3",
            "data.max_prompt_length=128",
            "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            "verl_ext.updates_per_batch=2",
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
            "+verl_ext.orchestra.name=four",
            "+verl_ext.orchestra.modules=[seeded_team]",
            f"+verl_ext.models.other.model.path={other_tokenizer(lab.root / 'ranks_other')}",
            "+verl_ext.models.other.actor.policy_loss.kalman_q=1e-3",
            "+verl_ext.orchestra.agents.critic.model=other",
        ],
        environment={"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
    ).check()
    assert sorted(run.metrics) == [1, 2]
    for step, metrics in run.metrics.items():
        assert finite(metrics) and 0 <= metrics["training/off_policy/trajectory_staleness/max"] < step
        for name, rows in (("policy", 18), ("other", 9)):
            assert metrics[f"model/{name}/sequences"] == rows and metrics[f"updates/{name}/per_batch"] == 2
            assert metrics[f"actor/{name}/grad_norm"] > 0 and f"actor/{name}/kpo/log_ratio_abs_max" in metrics
            assert step == 2 or metrics[f"training/{name}/rollout_probs_diff_max"] < 1e-4
    for name in ("policy", "other"):
        for rank in (0, 1):
            one, two = (weights(run, name, step=step, rank=rank, ranks=2) for step in (1, 2))
            assert all(not torch.equal(one[key], two[key]) for key in one)


def value_model(lab: Lab) -> tuple[Path, torch.Tensor]:
    """The lab's model with a value head, so that every critic has the same start, and its weights."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(2)
    made = AutoModelForTokenClassification.from_pretrained(lab.model, num_labels=1)
    made.save_pretrained(lab.root / "value")
    AutoTokenizer.from_pretrained(lab.model).save_pretrained(lab.root / "value")
    return lab.root / "value", flat(made.state_dict())


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


def test_each_model_has_a_critic_of_its_own(standing_lab: Lab) -> None:
    lab, rate = standing_lab, 1e-3
    path, start = value_model(lab)
    critic = [
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        f"critic.model.path={path}",
        *(f"critic.optim.{key}" for key in ("optimizer=SGD", f"lr={rate}", "weight_decay=0", "clip_grad=1e9")),
        "verl_ext.agent_gradients=false",
        "trainer.length_lr.warmup_steps=0",
    ]
    twin = [
        "+verl_ext.models.twin.actor.optim.lr=2e-4",
        "+verl_ext.models.twin.model.lora_rank=4",
        "+verl_ext.orchestra.agents.critic.model=twin",
    ]
    shared = train(lab, "critics_shared", *critic, "trainer.total_training_steps=1", recipe="[length_lr,cpu]")
    apart = train(lab, "critics_apart", *critic, *twin, recipe="[length_lr,cpu]")
    kept = lab.root / "critics_resumed" / "checkpoints"
    shutil.copytree(apart.folder / "checkpoints/global_step_1", kept / "global_step_1")
    (kept / "latest_checkpointed_iteration.txt").write_text("1")
    pool = "+verl_ext.models.twin.pool.n_gpus_per_node=1"
    resumed = train(lab, "critics_resumed", *critic, *twin, pool, recipe="[length_lr,cpu]")

    # The same rows, values and advantages; what moved the shared critic is what moved the two together.
    rows = [run.rows(1) for run in (shared, apart)]
    assert [row["agent_id"] for row in rows[0]] == [row["agent_id"] for row in rows[1]] and len(rows[0]) == 12
    assert {(row["agent_id"], row["model"]) for row in rows[1]} == {
        ("writer", "policy"),
        ("critic", "twin"),
        ("judge", "policy"),
    }
    assert [row["advantage"] for row in rows[1]] == pytest.approx([row["advantage"] for row in rows[0]], abs=1e-5)
    assert any(abs(row["advantage"]) > 0.1 for row in rows[0])
    for what in ("values", "returns"):
        for how in ("mean", "min", "max"):
            key = f"critic/{what}/{how}"
            assert apart.metrics[1][key] == pytest.approx(shared.metrics[1][key], abs=1e-5)
    moved = {name: flat(weights(apart, name, "critic", 1)) - start for name in ("policy", "twin")}
    whole = flat(weights(shared, kind="critic", step=1)) - start
    assert (moved["policy"] + moved["twin"] - whole).norm() < 1e-4 * whole.norm()
    for name, own in moved.items():
        assert apart.metrics[1][f"critic/{name}/grad_norm"] == pytest.approx(float(own.norm()) / rate, rel=1e-4)
        assert own.norm() > 0.01 * whole.norm()
        for step in (1, 2):
            metrics = apart.metrics[step]
            assert finite(metrics) and metrics[f"critic/{name}/vf_loss"] > 0
            assert metrics[f"critic/{name}/lr"] == pytest.approx(rate)
            assert metrics[f"actor/{name}/lr"] == pytest.approx(1e-4 if name == "policy" else 2e-4)
    assert not torch.equal(flat(weights(apart, "twin", "critic", 2)), flat(weights(apart, "twin", "critic", 1)))

    # One of the two trains an adapter alone.
    for step in (1, 2):
        adapter, full = ({name for name in weights(apart, model, step=step)} for model in ("twin", "policy"))
        assert sum(".lora_" in name for name in adapter) > 10 and not any(".lora_" in name for name in full)
    one, two = (weights(apart, "twin", step=step) for step in (1, 2))
    assert all(torch.equal(one[name], two[name]) != (".lora_" in name) for name in one)

    # A resume goes on with all of them, bit for bit, also where one has moved to a pool of its own.
    for kind in ("actor", "critic"):
        for name in ("policy", "twin"):
            assert same_weights(*(weights(run, name, kind) for run in (apart, resumed)))
    for key in ("critic/twin/vf_loss", "critic/policy/grad_norm", "critic/values/mean", "actor/twin/grad_norm"):
        assert resumed.metrics[2][key] == apart.metrics[2][key]
