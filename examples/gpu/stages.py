# SPDX-License-Identifier: Apache-2.0
"""What each stage of `run.py` does. A stage puts into its record what it has, as soon as it has it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import models
import trainer

from verl_ext.lab.demo.tasks import SECOND_TRY, SUMS, DemoTask, overrides

ROOT = Path(__file__).resolve().parents[2]

#: What a run on one GPU sets beside its recipe. Without flash attention, whose wheel is not brought, it pads.
ONE_GPU = [
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console,file]",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.use_remove_padding=false",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
    "actor_rollout_ref.actor.use_torch_compile=false",
    "actor_rollout_ref.ref.use_torch_compile=false",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "+ray_kwargs.ray_init.address=local",
]

#: What each engine takes beside that. Memory is plenty, so that nobody has to sleep.
ENGINES = {
    "sglang": [
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        # Needs neither flashinfer nor flash attention.
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.sampling_backend=pytorch",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.grammar_backend=none",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_memory_saver=false",
    ],
    "vllm": ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.free_cache_engine=false"],
    # On the machine's processors, with the trainer's weights in the trainer's precision.
    "embedded": [
        "actor_rollout_ref.rollout.name=embedded",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        "actor_rollout_ref.rollout.dtype=float32",
        f"+actor_rollout_ref.rollout.engine_kwargs.embedded.num_threads={max(1, (os.cpu_count() or 2) // 2)}",
    ],
}
#: Environment of a run with an engine.
VARIABLES = {"sglang": {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}}
ALWAYS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQ_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}


@dataclass(frozen=True)
class Settings:
    """Of one stage."""

    folder: Path
    device: str
    engine: str
    tiny: bool
    limit_s: float
    words: tuple[str, ...] = ()  #: of every run, applied last
    check: bool = False  #: only compose each run's configuration and put it through the checks before Ray's start


class Record:
    """A stage's JSON object, saved with every change."""

    def __init__(self, content: dict[str, Any], save: Callable[[dict[str, Any]], None]) -> None:
        self.content, self._save, self._started = content, save, time.monotonic()

    def put(self, **entries: Any) -> None:
        self.content |= entries
        self.content["seconds"] = round(time.monotonic() - self._started, 1)
        self._save(self.content)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


def recipe_words(settings: Settings, recipes: Sequence[str], engine: str, memory: float = 0.3) -> list[str]:
    """The recipes, and what device and engine want."""
    if settings.device == "cpu":
        return [f"+recipe=[{','.join([*recipes, 'cpu'])}]"]
    share = [] if engine == "embedded" else [f"actor_rollout_ref.rollout.gpu_memory_utilization={memory}"]
    return [f"+recipe=[{','.join(recipes)}]", *ONE_GPU, *ENGINES[engine], *share]


def task_words(
    settings: Settings,
    task: DemoTask,
    recipes: Sequence[str],
    engine: str,
    folder: Path,
    steps: int,
    memory: float = 0.3,
) -> list[str]:
    """A run of a task of the demo, whose model and questions are made unless they are in VERL_EXT_HOME."""
    assets = task.prepare()
    own = overrides(task, recipes, assets, folder, steps, 0)[1:]
    return [*recipe_words(settings, recipes, engine, memory), *own]


def run(
    settings: Settings,
    record: Record,
    name: str,
    words: Callable[[str, Path], list[str]],
    *,
    kill_after: int | None = None,
    share: float = 1.0,
) -> trainer.Run:
    """A run of the trainer; where its engine makes no first step, once more with the embedded engine.

    Args:
        settings, record: of the stage.
        name: of the run in the record.
        words: its overrides with an engine in a folder.
        kill_after: kill it after this step.
        share: of the stage's time that is left.
    """
    first = record.content.get("go_on_with", settings.engine)
    for engine in dict.fromkeys((first, "embedded")):
        if settings.check:
            valid([*words(engine, settings.folder), *settings.words])
            record.put(**{f"{name}_{engine}": "valid"})
            found = trainer.Run("", engine)
            continue
        folder = settings.folder / f"{name}_{engine}"
        limit = (settings.limit_s - record.seconds) * share
        found = trainer.train(
            [*words(engine, folder), *settings.words],
            folder,
            engine,
            limit_s=limit,
            # What is left is enough for the other engine.
            first_step_s=limit if engine == "embedded" else limit * 0.6,
            tell=lambda now, engine=engine: record.put(**{f"{name}_{engine}": asdict(now)}),
            kill_after=kill_after,
            environment={**ALWAYS, **VARIABLES.get(engine, {})},
        )
        if found.steps:
            break
        record.put(**{f"{name}_{engine}": asdict(found)}, go_on_with="embedded")
    return found


def valid(words: Sequence[str]) -> None:
    """Compose a run's configuration and have it checked, by verl and by this package, as at its start."""
    import verl.trainer.main_ppo  # noqa: F401  (registers what configurations name)
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from verl_ext.integration import launch

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=list(words))
    launch.prepare(config)
    OmegaConf.resolve(config)
    validate_config(config, need_reference_policy(config), need_critic(config))


def mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def demo(settings: Settings, record: Record) -> None:
    """The reward rises, and sampler and trainer agree."""
    steps = 2 if settings.tiny else SUMS.settings.steps
    small = ["actor_rollout_ref.rollout.n=2", "trainer.test_freq=-1", "trainer.val_before_train=false"]

    def words(engine: str, folder: Path) -> list[str]:
        own = task_words(settings, SUMS, ["trloo"], engine, folder, steps)
        return [*own, "trainer.save_freq=-1", *(small if settings.tiny else [])]

    found = run(settings, record, "demo", words)
    reward, width = found.column("reward"), max(1, min(5, len(found.steps) // 2))
    record.put(
        result={
            "engine": found.engine,
            "steps": len(found.steps),
            "reward": [mean(reward[:width]), mean(reward[-width:])],
            "sampler and trainer, largest difference in probability": max(found.column("prob_diff_max"), default=None),
            "seconds a step": mean(found.column("step_s")[1:]),
            "seconds to the first step": found.first_step_s,
        }
    )


def other_engine(settings: Settings, record: Record) -> None:
    """With vLLM where it is installed, else with the embedded engine on the processors, which nothing has to bring."""
    other = "vllm" if settings.engine != "vllm" and importlib.util.find_spec("vllm") else "embedded"
    if other == settings.engine:
        record.put(result="there is no other engine")
        return
    demo(replace(settings, engine=other), record)
    record.content.pop("go_on_with", None)
    record.put()


def table(settings: Settings, record: Record) -> None:
    """Generation by a run of the trainer; the passes of every variant by verl's engine, in one process of its own."""
    shape = models.TINY if settings.tiny else models.HALF_BILLION
    made = models.make(settings.folder.parent / "made" / shape.name, shape)
    rows = (4, 2, 8) if settings.tiny else (64, 8, 512)

    command = [sys.executable, str(Path(__file__).with_name("passes.py")), str(made.model), settings.device]
    command += [str(settings.folder / "passes.json"), *map(str, (*rows, 1 if settings.tiny else 3))]
    if not settings.check:
        within(settings.limit_s * 0.5, command)
    passes = models.read_json(settings.folder / "passes.json")
    record.put(passes=passes)

    def words(engine: str, folder: Path) -> list[str]:
        prompts, samples, tokens = rows
        return [
            *recipe_words(settings, ["grpo"], engine, 0.4),
            *models.words(made, prompts=prompts, samples=samples, prompt_tokens=64, tokens=tokens, folder=folder),
            "trainer.total_training_steps=2" if settings.tiny else "trainer.total_training_steps=3",
            "actor_rollout_ref.rollout.ignore_eos=true",
        ]

    judged = {"engine": None, "passes": passes.get("variants"), "one_pass": one_pass(passes.get("variants", {}))}
    # 32,768 tokens of half a billion parameters take the processors minutes.
    if settings.device == "cpu" or record.content.get("go_on_with", settings.engine) != "embedded":
        found = run(settings, record, "steps", words)
        names = ("gen_s", "old_log_prob_s", "update_s", "step_s", "peak_gb")
        last = {name: mean(found.column(name)[1:]) for name in names}
        judged |= {"engine": found.engine, "ended": found.ended, "of the steps after the first": last}
    record.put(result=judged)


def one_pass(variants: dict[str, Any]) -> dict[str, Any]:
    """Seconds of both passes with ours over those with verl's code, by which ``verl_ext.one_pass: auto`` is decided."""

    def over(ours: str, theirs: str) -> float | None:
        both = [variants.get(name, {}) for name in (ours, theirs)]
        if not all("update_s" in one for one in both):
            return None
        mine, other = (one["old_log_prob_s"] + one["update_s"] for one in both)
        return round(mine / other, 3)

    return {"over verl": over("grpo", "verl"), "over verl, with the sum of squares": over("otb", "otb_verl")}


def merged_turns(settings: Settings, record: Record) -> None:
    """The same conversations of 16 turns, merged and a sequence a call."""
    shape = models.TINY if settings.tiny else models.SMALL
    made = models.make(settings.folder.parent / "made" / shape.name, shape)
    turns = 3 if settings.tiny else 16

    def words(merge: str) -> Callable[[str, Path], list[str]]:
        return lambda engine, folder: [
            *recipe_words(settings, ["trloo"], engine),
            *models.words(made, prompts=4 if settings.tiny else 16, samples=2 if settings.tiny else 4,
                          prompt_tokens=96 + 128 * turns, tokens=8, folder=folder, conversation=True),
            f"+actor_rollout_ref.rollout.custom.multi_turn.max_turns={turns}",
            "verl_ext.updates_per_batch=1",
            "trainer.total_training_steps=2",
            f"verl_ext.merge_turns={merge}",
        ]  # fmt: skip

    apart = run(settings, record, "row_a_call", words("false"), share=0.5)
    record.put(result={"a sequence a call": summary(apart)})
    together = run(settings, record, "merged", words("true"))
    record.put(result={"a sequence a call": summary(apart), "merged": summary(together)})


def summary(found: trainer.Run) -> dict[str, Any]:
    """How it ended, and means over the steps after the first."""
    names = ("sequences", "tokens", "gen_s", "old_log_prob_s", "update_s", "step_s", "peak_gb", "grad_norm")
    return {"ended": found.ended, **{name: mean(found.column(name)[1:]) for name in names}}


def resume(settings: Settings, record: Record) -> None:
    """All processes are killed just after a step; the same command goes on from the last checkpoint."""

    def words(engine: str, folder: Path) -> list[str]:
        own = task_words(settings, SUMS, ["trloo"], engine, folder, 3 if settings.tiny else 6)
        few = ["actor_rollout_ref.rollout.n=2"] if settings.tiny else []
        return [*own, "trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false", *few]

    before = run(settings, record, "killed", words, kill_after=2 if settings.tiny else 3, share=0.6)
    record.content["go_on_with"] = before.engine
    after = run(settings, record, "killed", words) if before.steps else before
    record.put(killed_before=asdict(before), result={
        "engine": before.engine,
        "steps before": sorted(before.steps),
        "and after": sorted(after.steps),
        "ended": after.ended,
    })  # fmt: skip


def two_models(settings: Settings, record: Record) -> None:
    """The demo's team of two with a model each, in one pool, on one GPU."""

    def words(engine: str, folder: Path) -> list[str]:
        own = task_words(settings, SECOND_TRY, ["dr_mas"], engine, folder, 2 if settings.tiny else 3, 0.2)
        few = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"] if settings.tiny else []
        return [
            *own,
            *few,
            "verl_ext.agent_gradients=false",
            "+verl_ext.models.small.trained=true",
            "+verl_ext.orchestra.agents.reviser.model=small",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
        ]

    found = run(settings, record, "team", words)
    record.put(result={"engine": found.engine, "steps": len(found.steps), **summary(found)})


def gpu_tests(settings: Settings, record: Record) -> None:
    """What needs a GPU and no engine: the judge of Triton kernels and the pass over the logits."""
    if settings.check:
        return
    words = [] if settings.device == "cuda" else ["--collect-only"]
    done = subprocess.run(
        ["make", "test-gpu", f"PYTHON_GPU={sys.executable}", f"ARGS={' '.join(words)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=settings.limit_s,
    )
    lines = done.stdout.splitlines()[-30:] + done.stderr.splitlines()[-10:]
    record.put(
        code=done.returncode, said=lines, result=next((line for line in reversed(lines) if " in " in line), None)
    )


def logits(settings: Settings, record: Record) -> None:
    """Share of the copy's bandwidth by tile, warps and stages; beside verl's fused losses."""
    if settings.check:
        return
    path = settings.folder / "logits.json"
    command = [sys.executable, str(Path(__file__).with_name("logits.py")), settings.device, str(path)]
    within(settings.limit_s, [*command, *(["--tiny"] if settings.tiny else [])])
    found = models.read_json(path)
    record.put(logits=found, result=found.get("result"))


def within(seconds: float, command: Sequence[str]) -> None:
    """Run a program that writes its results as it goes; what it has when its time is over is its result."""
    try:
        subprocess.run(command, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        print(error, flush=True)
