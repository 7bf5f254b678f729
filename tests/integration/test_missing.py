# SPDX-License-Identifier: Apache-2.0
"""Lost rollouts and rows that are taken out, through verl's own replay buffer and the store behind it."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_ext.integration import parts, store_notes
from verl_ext.integration.columns import ActiveBatch, BatchError, is_trained
from verl_ext.integration.compat import wraps
from verl_ext.integration.parts.advantage import columns
from verl_ext.integration.parts.recovery import missing
from verl_ext.integration.parts.update import updates
from verl_ext.integration.parts.update.pruning import Pruning
from verl_ext.integration.settings.options import OptionError
from verl_ext.integration.trainer import VerlExtTrainer
from verl_ext.recipes import recipe_root, verl_config_dir
from verl_ext.rollout.shared import worker

pytestmark = pytest.mark.slow  # starts Ray


@pytest.fixture
def clean(store: Any) -> Iterator[Any]:
    """The store, emptied after the test."""
    yield store
    for partition, keys in (store.kv_list() or {}).items():
        if keys:
            store.kv_clear(keys=list(keys), partition_id=partition)


class Worker:
    """Runs a session as verl's worker does: `_run_agent_loop` raises, or its rows are in the store afterwards."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, *, ends: str, **kwargs: Any) -> None:
        if ends == "raises":
            raise ValueError(f"the world of {kwargs['uid']} is gone")
        if ends == "exits":
            raise SystemExit(f"the world of {kwargs['uid']} is gone")
        if ends == "cancels":
            raise asyncio.CancelledError(f"the world of {kwargs['uid']} is gone")
        if ends == "rows":
            key = f"{kwargs['uid']}_{kwargs['session_id']}_0"
            partition = "val" if trajectory["validate"] else "train"
            await self.store.async_kv_put(key=key, partition_id=partition, tag={"status": "success", "seq_len": 3})

    run = worker.noting(_run_agent_loop)


def prompt(store: Any, uid: str, *ends: str, partition: str = "train") -> None:
    """One sampled prompt whose sessions end as said: ``rows``, ``raises`` or ``nothing`` (a loop that returns [])."""

    async def sessions() -> list[Any]:
        runs = (
            Worker(store).run(
                {}, {"validate": partition == "val"}, uid=uid, session_id=number, ends=end, data_source="toy"
            )
            for number, end in enumerate(ends)
        )
        return await asyncio.gather(*runs, return_exceptions=True)

    store.kv_batch_put(
        keys=[uid], partition_id=partition, tags=[{"is_prompt": True, "status": "running", "global_steps": 1}]
    )
    raised = [error for error in asyncio.run(sessions()) if error is not None]
    assert len(raised) == len([end for end in ends if end in ("raises", "exits", "cancels")])
    store.kv_batch_put(keys=[uid], partition_id=partition, tags=[{"status": "failure" if raised else "finished"}])


def sampler(share: Any = 0.05) -> tuple[Any, missing.Missing]:
    """verl's replay buffer with the part, as the trainer makes it."""
    buffer = ReplayBuffer("sync", OmegaConf.create({}), 1, "drop", OmegaConf.create({}), poll_interval=0.01)
    part = missing.Missing(OmegaConf.create({"verl_ext": {"max_missing_share": share}}))
    return part.replay_buffer(buffer), part


def sample(buffer: Any, prompts: int, partition: str = "train") -> Any:
    return buffer.sample(global_steps=1, partition_id=partition, batch_size=prompts)[0]


def test_a_prompt_that_lost_all_its_rollouts_counts(clean: Any) -> None:
    """verl's batch has rows of one prompt of two; counted by prompts with rows, 2 of 4 were missing and not 6 of 8."""
    prompt(clean, "a", "rows", "raises", "rows", "raises")
    prompt(clean, "b", "raises", "exits", "cancels", "raises")
    buffer, _ = sampler()
    message = (
        r"(?s)6 of 8 rollouts were lost.*max_missing_share=0\.05 allows 0\..* The first, a_1:\n.*the world of a is gone"
    )
    with pytest.raises(missing.MissingRollouts, match=message):
        sample(buffer, 2)


def test_a_share_below_the_limit_is_counted_and_told_once(clean: Any) -> None:
    prompt(clean, "a", "rows", "raises", "rows", "rows")
    buffer, part = sampler(0.25)
    batch = sample(buffer, 1)
    part.on_sample(batch)
    assert part.metrics == {"rollout/missing_trajectories": 1, "rollout/trajectories": 3}
    prompt(clean, "b", "rows", "rows")
    clean.kv_clear(keys=batch.keys, partition_id="train")
    sample(buffer, 1)
    assert part.metrics["rollout/missing_trajectories"] == 0


def test_what_was_lost_in_the_run_that_wrote_the_checkpoint_does_not_count(
    clean: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Say with its node: the rollouts of a run that goes on would be ended by those of the run that died."""
    prompt(clean, "a", "rows", "raises", "raises")
    clean.save_checkpoint(str(tmp_path / "store"))
    missing.take_lost("train")
    clean.load_checkpoint(str(tmp_path / "store"))
    buffer, part = sampler(0)
    with part.around_fit():
        assert "2 rollouts of the checkpoint were lost in the run that wrote it" in caplog.text
        assert "The first, a_1:" in caplog.text and "the world of a is gone" in caplog.text
        prompt(clean, "b", "rows", "rows")
        part.on_sample(sample(buffer, 2))
        assert part.metrics == {"rollout/missing_trajectories": 0, "rollout/trajectories": 3}
        prompt(clean, "c", "rows", "raises")
        with pytest.raises(missing.MissingRollouts, match=r"(?s)1 of \d rollouts were lost.*the world of c is gone"):
            sample(buffer, 1)


def test_what_is_left_out_on_purpose_is_not_missing(clean: Any) -> None:
    """A loop that returns nothing, and a prompt with fewer samples than the others (``__rollout_n__``)."""
    prompt(clean, "a", "rows", "nothing", "nothing", "rows")
    prompt(clean, "b", "rows")
    buffer, part = sampler(0)
    part.on_sample(sample(buffer, 2))
    assert part.metrics == {"rollout/missing_trajectories": 0, "rollout/trajectories": 3}


def test_a_batch_without_a_row_ends_with_the_reason_too(clean: Any) -> None:
    prompt(clean, "a", "raises", "raises")
    with pytest.raises(missing.MissingRollouts, match=r"(?s)2 of 2 rollouts were lost.*the world of a is gone"):
        sample(sampler(1)[0], 1)


def test_losses_that_nobody_noted_are_not_believed_to_be_none(clean: Any) -> None:
    prompt(clean, "a", "rows", "raises")
    clean.kv_clear(keys=["a_1"], partition_id=store_notes.LOST)
    with pytest.raises(RuntimeError, match="verl says that rollouts of 1 prompts raised .*none of them was noted"):
        sample(sampler(1)[0], 1)


def test_prompts_that_verl_replaces_for_ever_end_the_run(clean: Any) -> None:
    """In the asynchronous modes a prompt that lost a rollout is dropped whole, and another begins in its place."""
    begun: list[str] = []

    def refill(count: int) -> None:
        for _ in range(count):
            begun.append(f"p{len(begun)}")
            prompt(clean, begun[-1], "rows", "raises" if len(begun) < good else "rows")

    sync = {"trainer": {"v1": {"sampler": {}}}}
    for good, share in ((1000, 0.5), (4, 0.8)):
        config = {"verl_ext": {"max_missing_share": share}, "data": {"train_batch_size": 2}}
        config |= {"actor_rollout_ref": {"rollout": {"n": 2}}}
        buffer = ReplayBufferAsync(
            "colocate_async", OmegaConf.create(sync), 8, "drop", OmegaConf.create({}), refill_fn=refill,
            poll_interval=0.01,
        )  # fmt: skip
        part = missing.Missing(OmegaConf.create(config))
        buffer = part.replay_buffer(buffer)
        begun.clear()
        refill(2)
        if good == 1000:
            with pytest.raises(missing.MissingRollouts, match=r"(?s)6 of 10 rollouts were lost.*of p0 is gone"):
                sample(buffer, 2)
        else:
            batch = sample(buffer, 2)
            part.on_sample(batch)
            assert part.metrics["rollout/missing_trajectories"] == 3 and part.metrics["rollout/trajectories"] == 4
        clean.kv_clear(keys=begun, partition_id="train")


@pytest.mark.parametrize("lost", [1, 2])
def test_what_the_filter_leaves_out_is_due_too(clean: Any, lost: int) -> None:
    """DAPO keeps one prompt of three here: counted over its rollouts, one lost was 1 of 4, and ended the run."""
    begun: list[str] = []

    def refill(count: int) -> None:
        for _ in range(count):
            begun.append(f"d{len(begun)}")
            same = len(begun) < 3
            kept = ["raises"] * lost + ["rows"] * (4 - lost)
            prompt(clean, begun[-1], *(["rows"] * 4 if same else kept))
            keys = [key for key in clean.kv_list()["train"] if key.startswith(f"{begun[-1]}_")]
            scores = [1.0] * 4 if same else [0.0, 1.0, 0.0, 1.0]
            fields = TensorDict({"rm_scores": torch.tensor(scores[: len(keys)])[:, None]}, batch_size=len(keys))
            clean.kv_batch_put(keys=keys, partition_id="train", fields=fields)

    buffer = ReplayBuffer(
        "sync", OmegaConf.create({}), 1, "drop", OmegaConf.create({}), poll_interval=0.01, refill_fn=refill,
        filter_groups_metric="reward", train_batch_size=1, gen_batch_size=1,
    )  # fmt: skip
    config = {"verl_ext": {"max_missing_share": 0.1}, "data": {"train_batch_size": 1}}
    part = missing.Missing(OmegaConf.create(config | {"actor_rollout_ref": {"rollout": {"n": 4}}}))
    buffer = part.replay_buffer(buffer)
    refill(1)
    if lost == 1:
        batch = sample(buffer, 1)
        assert len(batch.keys) == 3 and part.metrics["rollout/missing_trajectories"] == 1
    else:
        with pytest.raises(missing.MissingRollouts, match="2 of 12 rollouts were lost"):
            sample(buffer, 1)


VERL_COUNTS = "expected_acc_counts" in inspect.signature(process_validation_metrics).parameters
"""Whether verl knows how many rollouts validation asked for; a checkout of August 2026 does not."""


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of a metric that is NaN
@pytest.mark.parametrize("counted", [False, True] if VERL_COUNTS else [False])
def test_a_score_does_not_rise_by_crashing(clean: Any, counted: bool) -> None:
    """Validation of two prompts with two rollouts each: one ends with reward 1, and three crash."""
    prompt(clean, "a", "rows", "raises", partition="val")
    prompt(clean, "b", "raises", "raises", partition="val")
    buffer, part = sampler(0)  # validation goes on, whatever the share
    assert sample(buffer, 2, "val").keys == ["a_0_0"]
    expected = {"expected_acc_counts": {("toy", "a"): 2, ("toy", "b"): 2}} if counted else {}
    sources, uids = ["toy"], ["a"]
    values: dict[str, list[Any]] = {"reward": [1.0], "acc": [1.0], "success": [1.0], "steps": [7.0], "pred": ["x"]}
    part.on_validation(sources, uids, values, **expected)
    assert part.metrics == {"val-aux/missing_rollouts": 3}
    found = process_validation_metrics(sources, uids, values, **expected)
    assert list(found) == ["toy"]
    for name in ("reward", "acc", "success"):  # without the part reward and success are 1.0
        assert found["toy"][name]["mean@2"] == 0.25
    if counted:
        assert found["toy"]["steps"]["mean@1"] == 7.0 and found["toy"]["acc_success_only"]["mean@1"] == 1.0
    else:
        assert math.isnan(found["toy"]["steps"]["mean@2"])
    again: dict[str, list[Any]] = {"reward": [1.0]}
    part.on_validation(["toy"], ["a"], again)
    assert again == {"reward": [1.0]} and part.metrics == {"val-aux/missing_rollouts": 0}


def test_the_tasks_of_a_validation_stand_beside_its_dump(clean: Any, tmp_path: Path) -> None:
    """Also that of a prompt which lost all of its rollouts."""
    prompt(clean, "a", "rows", "raises", partition="val")
    prompt(clean, "b", "raises", "raises", partition="val")
    buffer, part = sampler(0)
    part.config = OmegaConf.create({"trainer": {"validation_data_dir": str(tmp_path / "validation")}})
    part.trainer = SimpleNamespace(global_steps=5)
    assert sample(buffer, 2, "val").keys == ["a_0_0"]
    part.on_validation(["toy"], ["a"], {"reward": [1.0]})
    (path,) = (tmp_path / "validation").iterdir()
    assert path.name == "5.tasks.json" and json.loads(path.read_text()) == {"a": "toy", "b": "toy"}


@pytest.mark.parametrize("value", [-0.1, 1.1, "half", True])
def test_bad_shares_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"verl_ext\.max_missing_share is .*from 0 to 1"):
        missing.Missing.check(OmegaConf.create({"verl_ext": {"max_missing_share": value}}))


# ---- requests that do not go through the client of the run ----------------------------------------------------------


def test_the_first_step_refuses_rollouts_of_a_client_without_min_p(clean: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's client, balancer and store: an agent loop with a client of its own, and one with that of the run."""
    import ray

    class Server:
        def generate(self, **given: Any) -> TokenOutput:
            return TokenOutput(
                token_ids=[1], log_probs=[0.0], extra_fields={"global_steps": 1}, stop_reason="completed"
            )

    monkeypatch.setenv(wraps.STRICT, "1")
    monkeypatch.setattr(store_notes, "_guarded", False)
    with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
        given = [f"hydra.searchpath=[file://{recipe_root()}]", "+recipe=[dvp,grpo,cpu]", "dvp.rho=0.9"]
        config = compose("ppo_trainer", overrides=given)
    balancer = ray.remote(GlobalRequestLoadBalancer).remote({"server": ray.remote(Server).remote()})
    own, of_the_run = (LLMServerClient(config=config, load_balancer_handle=balancer) for _ in range(2))
    part = Pruning(config)
    part.client(of_the_run)
    batch = rows(clean, True, True)
    for client, refused in ((own, True), (of_the_run, False)):
        answer = asyncio.run(client.generate("r", prompt_ids=[1, 2], sampling_params={"temperature": 1.0}))
        assert answer.token_ids == [1]
        if refused:
            with pytest.raises(RuntimeError, match=r"dvp\.rho=0\.9: .*no agent loop has sent a request .* with min_p"):
                part.on_sample(batch)
        else:
            assert part.on_sample(batch) is batch


# ---- rows that their agent loop takes out --------------------------------------------------------------------------


def rows(store: Any, *valid: Any) -> Any:
    """A batch in verl's store, one row of three model tokens for each value of ``valid_row``."""
    from transfer_queue import KVBatchMeta

    keys = [f"u_{number}_0" for number in range(len(valid))]
    fields = [
        {
            "response_mask": torch.ones(2 + number, dtype=torch.int64),
            "loss_mask": torch.ones(2 + number, dtype=torch.int64),
            "extra_fields": {} if value is None else {"valid_row": value},
        }
        for number, value in enumerate(valid)
    ]
    tags = [{"status": "success", "seq_len": 5} for _ in keys]
    store.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


CONFIG = OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}, "verl_ext": {}})


def test_rows_taken_out_have_no_mask_before_any_pass(clean: Any) -> None:
    part, active = columns.Columns(CONFIG), ActiveBatch(columns={})
    batch = part.on_sample(rows(clean, True, False, None, 0))
    data = clean.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["response_mask", "loss_mask"])
    for name in ("response_mask", "loss_mask"):
        masks = [row.tolist() for row in data[name].unbind()]
        assert masks == [[1, 1], [0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert [is_trained(tag) for tag in batch.tags] == [True, False, True, False]
    # verl rebuilds the batch from its store, whose tags must know it too
    again = clean.kv_batch_put(keys=batch.keys, partition_id="train", fields=TensorDict({"a": torch.zeros(4)}, [4]))
    assert [is_trained(tag) for tag in again.tags] == [True, False, True, False] and again.tags[1]["seq_len"] == 5
    part.on_batch(again, active, {})
    assert active.columns["valid_row"].tolist() == [True, False, True, False]


@pytest.mark.parametrize("value", ["False", "0", float("nan"), 2])
def test_values_that_are_not_true_or_false_are_refused(clean: Any, value: Any) -> None:
    with pytest.raises(BatchError, match=r"valid_row of turn u_1_0 is .*gives true or false"):
        columns.Columns(CONFIG).on_sample(rows(clean, True, value))


def test_row_fields_are_read_in_the_order_that_the_estimators_see() -> None:
    """`Updates` deals rows to mini-batches; fields read before that would belong to other rows."""
    assert parts.all_parts().index(updates.Updates) < parts.all_parts().index(columns.Columns)
    run: Any = SimpleNamespace(_rows=ActiveBatch(columns={}, stored=["a_0_0", "b_0_0"]))
    compute = VerlExtTrainer._advantage(run, None)
    with pytest.raises(RuntimeError, match="another order after their turn fields were read"):
        compute(None, ["b_0_0", "a_0_0"], "grpo")
