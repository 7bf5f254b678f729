# SPDX-License-Identifier: Apache-2.0
"""Runs of verl's real trainer for the end-to-end tests: a model and data made here, a command, what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import copies
from metric_names import collisions
from standing_ray import StandingRay

from verl_ext.cpu.platform import fork_worker

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def readme_code(first_line: str) -> str:
    """The Python in README.md or docs/ that begins with this line: what they teach is what runs."""
    root = Path(__file__).resolve().parents[2]
    text = "".join(page.read_text(encoding="utf-8") for page in [root / "README.md", *root.glob("docs/*.md")])
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if code.startswith(first_line)]
    return found


def small_llama(tokenizer: Any, seed: int = 0) -> Any:
    """An untrained Llama of two layers for this tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_model(folder: Path, seed: int = 0) -> Path:
    """An untrained Llama of 100k parameters with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    small_llama(tokenizer, seed).save_pretrained(folder)
    return folder


def other_tokenizer(folder: Path) -> Path:
    """`make_model` with another vocabulary: pairs of digits and letters are tokens too, and ids are others."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_model(folder, seed=1))
    pairs = [f"{a}{b}" for a in "0123456789" for b in "0123456789"]
    assert tokenizer.add_tokens(pairs) == 100
    tokenizer.save_pretrained(folder)
    small_llama(tokenizer, seed=1).save_pretrained(folder)
    return folder


def make_data(folder: Path, rows: int = 32, agent_loop: str | None = None, source: str = "toy") -> Path:
    """Single-turn prompts whose reward is `REWARD`, or what verl has for another data source."""
    import pandas

    records = [
        {
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "data_source": source,
            "reward_model": {"style": "rule", "ground_truth": "7" if source != "toy" else ""},
            "extra_info": {"index": i},
            **({"agent_name": agent_loop} if agent_loop else {}),
        }
        for i in range(rows)
    ]
    path = folder / f"{agent_loop or 'plain'}{'' if source == 'toy' else source}.parquet"
    pandas.DataFrame(records).to_parquet(path)
    return path


ENDED_BY_RAY = "The actor is dead because all references to the actor were removed"

# No two answers are likely to get the same: then every update has a gradient, whatever was sampled.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(map(ord, solution_str)) % 97 / 97
"""


def _hear_interrupts() -> None:
    """Ctrl-C works as in a terminal; a shell starts background jobs with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Run:
    """What a run left behind."""

    folder: Path
    code: int
    seconds: float

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace")

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        merged: dict[int, dict[str, Any]] = {}
        path = self.folder / "metrics.jsonl"
        for line in path.read_bytes().splitlines() if path.exists() else []:
            record = json.loads(line)
            merged.setdefault(record["step"], {}).update(record["data"])
        assert not collisions(name for step in merged.values() for name in step)
        return merged

    def rows(self, step: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "rows" / f"{step}.jsonl").read_bytes().splitlines()]

    def check(self) -> Run:
        assert self.code == 0, self.log[-6000:]
        return self


@dataclass
class Lab:
    """Starts runs in a folder of their own, with the settings that every test shares.

    `copied` is the name and the address of a process of `copies`, for `run`.
    """

    model: Path
    data: Path
    reward: Path
    root: Path
    python: str = sys.executable
    standing: StandingRay | None = None
    copied: tuple[str, str] | None = None

    def arguments(self, folder: Path, recipe: str, overrides: Sequence[str]) -> list[str]:
        return [
            *([f"+recipe={recipe}"] if recipe else []),
            f"data.train_files={self.data}",
            f"data.val_files={self.data}",
            f"actor_rollout_ref.model.path={self.model}",
            f"reward.custom_reward_function.path={self.reward}",
            "reward.custom_reward_function.name=compute_score",
            "data.train_batch_size=4",
            "data.max_prompt_length=64",
            "data.max_response_length=8",
            "data.seed=1",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "trainer.total_training_steps=2",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
            f"hydra.run.dir={folder / 'hydra'}",
            *([f"verl_ext.rows_dir={folder / 'rows'}"] if recipe else []),
            *overrides,
        ]

    def run(
        self,
        name: str,
        recipe: str = "[trloo,cpu]",
        overrides: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        kill_when: Callable[[Path], bool] | None = None,
        kill_with: int = signal.SIGKILL,
        timeout: float = 600,
    ) -> Run:
        """Run `main_ppo`; with `kill_when`, send `kill_with` to the launcher once that holds for the run's folder.

        Without a Ray that stands, the run is the command that a user types, from its imports to the end of its Ray;
        with `copied` it has a Ray of its own, and imports of what is neither Ray nor verl nor ours are copied. A run
        that outlives `timeout` seconds is killed and fails the test.
        A run in the Ray that stands which Ray itself has ended is done again in a Ray of its own, with a warning.
        """
        run = self._run(name, recipe, overrides, environment, kill_when, kill_with, timeout)
        if self.standing is not None and run.code != 0 and ENDED_BY_RAY in run.log:
            warnings.warn(f"{name} was ended by the Ray that stands ({ENDED_BY_RAY}); it runs again", stacklevel=2)
            for left in ("rows", "checkpoints"):
                shutil.rmtree(run.folder / left, ignore_errors=True)
            for file in ("log.txt", "metrics.jsonl"):
                if (run.folder / file).exists():
                    (run.folder / file).rename(run.folder / f"ended_by_ray.{file}")
            alone = replace(self, standing=None)
            run = alone._run(name, recipe, overrides, environment, kill_when, kill_with, timeout)
        return run

    def _run(
        self,
        name: str,
        recipe: str,
        overrides: Sequence[str],
        environment: dict[str, str] | None,
        kill_when: Callable[[Path], bool] | None,
        kill_with: int,
        timeout: float,
    ) -> Run:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        variables = {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"), **(environment or {})}
        command = [self.python, "-m", "verl.trainer.main_ppo"]
        said, pid = folder / "exit_code", folder / "exit_code.pid"
        for left in (said, pid):
            left.unlink(missing_ok=True)
        if self.standing is not None:
            variables = self.standing.environment(variables)
            command = [*self.standing.command(), self.standing.copied_workers()]
        elif self.copied is not None:
            source, variables[fork_worker.FROM] = self.copied
            command = copies.command(source, Path("exit_code"), *command[1:])
        copied = command[0] == "env"
        command += self.arguments(folder, recipe, overrides)
        started = time.monotonic()
        with (folder / "log.txt").open("ab") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                preexec_fn=_hear_interrupts,
            )
            try:
                while child.poll() is None:
                    time.sleep(0.1)
                    if kill_when is not None and (pid.exists() or not copied) and kill_when(folder):
                        # A copy would outlive a SIGKILL of its stand-in.
                        os.kill(int(pid.read_text()) if copied else child.pid, kill_with)
                        kill_when = None
                    if time.monotonic() - started > timeout:
                        child.terminate()  # reaches a copy too, whose stand-in this is
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            child.wait(10)
                        raise AssertionError(
                            f"{name} did not end in {timeout} s:\n{(folder / 'log.txt').read_text()[-6000:]}"
                        )
            finally:
                if child.poll() is None:
                    child.kill()
                child.wait()
        code = child.returncode
        if copied:
            code = int(said.read_text()) if said.exists() else -signal.SIGKILL
        return Run(folder, code, time.monotonic() - started)


def marked(run_folder: Path, cwd: Path | None = None) -> dict[int, str]:
    """Command lines of the processes that a run started and that still live: they have a variable of its launcher, or,
    as copies of a process without it, its working directory, which is the run's folder."""
    mark = f"VERL_FILE_LOGGER_PATH={run_folder / 'metrics.jsonl'}".encode()
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                environment = (path / "environ").read_bytes()
                here = (path / "cwd").readlink() == (cwd or run_folder)
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if state != "Z" and (here or mark in environment.split(b"\0")):
                found[int(path.name)] = line[:200]
    return found


def processes(run_folder: Path, cwd: Path | None = None) -> list[str]:
    return list(marked(run_folder, cwd).values())


def shared_memory() -> set[str]:
    """Files in shared memory that no process maps: what a run has left, and not what another one is using."""
    names = set(os.listdir("/dev/shm"))
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            names -= {line.rpartition("/")[2] for line in path.read_text().splitlines() if "/dev/shm/" in line}
        except OSError:
            continue
    return names


def steps_logged(folder: Path) -> int:
    """Lines of a run's metrics so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether `condition` comes to hold within `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
