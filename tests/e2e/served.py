# SPDX-License-Identifier: Apache-2.0
"""What verl's own servers, of vLLM and of SGLang, have sampled, against the weights that it was sampled with."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from copies import IMPORTS
from harness import REWARD, Lab, Run, make_data, make_model
from standing_ray import StandingRay, every_process

HERE = Path(__file__).resolve().parent
EDGE = 1e-5  # a token so near to the edge of the set is in it or not by the rounding of float32
# Each trajectory begins with words of its own; its later calls go on where an earlier one ended.
TALK = """
import uuid
import openai


def solve(task, *, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": f"{uuid.uuid4()} " * 4 + task["messages"][-1]["content"]}]
    used = []
    for _ in range(3):
        reply = client.chat.completions.create(model=model, messages=messages)
        used.append((reply.usage.prompt_tokens, reply.usage.prompt_tokens_details.cached_tokens))
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": "go on"}]
    later = {"asked": sum(asked for asked, _ in used[1:]), "cached": sum(cached for _, cached in used[1:])}
    return {"reward": 0.0, "info": {**later, "first_asked": used[0][0], "first_cached": used[0][1]}}
"""


def sharpen(folder: Path, factor: float = 8.0) -> None:
    """Scale the output layer, so that an untrained model has probable and improbable tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data.mul_(factor)
    model.save_pretrained(folder)


def make_lab(root: Path, python: str) -> Lab:
    """A sharpened model, data, and the recording loop by name, for runs in the environment of `python`."""
    model = make_model(root / "model")
    sharpen(model)
    data = make_data(root)
    reward = root / "reward.py"
    reward.write_text(REWARD)
    (root / "loops.yaml").write_text("- {name: recording, _target_: recording_loop.Recording}\n")
    (root / "talk.py").write_text(TALK)
    return Lab(model=model, data=data, reward=reward, root=root, python=python)


def standing(lab: Lab, environment: Mapping[str, str], imports: Path) -> Iterator[Lab]:
    """A lab whose runs share a Ray, and one import of an engine, which the file `imports` does."""
    path = os.pathsep.join(filter(None, [str(imports.parent), os.environ.get("PYTHONPATH")]))
    variables = {**every_process(), **environment, "PYTHONPATH": path}
    ray = StandingRay(variables, lab.python, f"{IMPORTS},{imports.stem}")
    yield replace(lab, standing=ray)
    ray.end()


def start(
    engine: str, lab: Lab, name: str, recipe: str, overrides: list[str], paths: Sequence[Path] = (), **more: Any
) -> Run:
    """A run with the recording loop on a server of `engine`."""
    environment = {
        "PYTHONPATH": f"{os.pathsep.join(map(str, [HERE, *paths]))}:{os.environ.get('PYTHONPATH', '')}",
        "RECORD": str(lab.root / f"{name}.jsonl"),
    }
    return lab.run(
        name,
        recipe,
        [
            f"actor_rollout_ref.rollout.name={engine}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={lab.root / 'loops.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=recording",
            *overrides,
        ],
        environment=environment,
        **more,
    )


def records(lab: Lab, name: str, weights: int) -> list[dict[str, Any]]:
    """What was sampled with the weights of training step `weights` (0: the ones before training)."""
    lines = (lab.root / f"{name}.jsonl").read_bytes().splitlines()
    return [record for record in map(json.loads, lines) if (record["weights"] or 0) == weights]


@functools.cache
def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def true_log_probs(
    folder: Path, record: dict[str, Any], rho: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [T] of a record's answer, its log-probability ratios to the most probable token [T], and where
    no token is at the edge of the set [T].

    By transformers in float64, of the policy pruned at `rho`.
    """
    ids = torch.tensor([record["prompt"] + record["answer"]])
    first = len(record["prompt"]) - 1
    logits = load(folder)(ids).logits[0, first:-1]
    below_max = logits - logits.amax(-1, keepdim=True)
    answer = torch.tensor(record["answer"])[:, None]
    ratio = below_max.gather(-1, answer)[:, 0]
    clear = torch.ones(len(answer), dtype=torch.bool)
    if rho:
        clear = (below_max - math.log(rho)).abs().amin(-1) > EDGE
        below_max = below_max.masked_fill(below_max < math.log(rho), -math.inf)
    return torch.log_softmax(below_max, -1).gather(-1, answer)[:, 0], ratio, clear


def worst_difference(folder: Path, found: list[dict[str, Any]], rho: float = 0.0) -> float:
    differences = []
    for record in found:
        expected, _, clear = true_log_probs(folder, record, rho)
        differences.append((expected - torch.tensor(record["log_probs"]))[clear].abs())
    assert sum(map(len, differences)) > 0.9 * sum(len(record["answer"]) for record in found)
    return float(torch.cat(differences).max())


def trained_as_sampled(folder: Path, record: dict[str, Any], rho: float) -> bool:
    """Trainer and sampler agree on the tokens of a recorded batch, but where the rounding of float32 decides.

    Returns: whether there are none of these.
    """
    everywhere = True
    for row, (prompt, answer) in enumerate(zip(record["prompts"], record["responses"], strict=True)):
        asked = {"prompt": prompt.tolist(), "answer": answer.tolist()}
        clear = true_log_probs(folder, asked, rho)[2]
        sampled, trained = (
            record["tokens"][name][row, : len(answer)][clear] for name in ("rollout_log_probs", "old_log_probs")
        )
        torch.testing.assert_close(trained, sampled, rtol=0, atol=1e-5)
        everywhere = everywhere and bool(clear.all())
    return everywhere


def finite(step: dict[str, Any]) -> bool:
    return all(math.isfinite(value) for value in step.values() if isinstance(value, int | float))


def agree(step: dict[str, Any]) -> None:
    """Sampler and trainer have the same log-probabilities, to float32 rounding."""
    assert step["training/rollout_probs_diff_max"] <= 1e-5
    assert abs(step["rollout_corr/log_ppl_diff_max"]) <= 1e-5 and abs(step["rollout_corr/log_ppl_diff_min"]) <= 1e-5
