# SPDX-License-Identifier: Apache-2.0
"""The demo's search team: hills of cities in a BM25 index, and a model that half knows the parts of the orchestra
:mod:`verl_ext.rollout.orchestra.search`.

The warm-up gives lessons of the three agents, some of them wrong, in which the numbers of hills are drawn anew each
time: the model can read a number, and knows none by heart. Validation asks for other cities than training.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.model import (
    RESPONSE_LENGTH,
    Codec,
    make_model,
    sample,
    save_model,
    seeded,
    sequence_loss,
    train_tokenizer,
)
from verl_ext.lab.demo.recipes import SearchTeamRecipe
from verl_ext.rollout.environments.data import write_parquet
from verl_ext.rollout.orchestra.loop import AGENT_NAME
from verl_ext.rollout.orchestra.search import answerer, context, finding
from verl_ext.rollout.passages import Passage

TRAIN = (
    *("Rome", "Lyon", "Bath", "Porto", "Graz", "Siena", "Bern", "Cork", "Ghent", "Lund", "Metz", "Nice"),
    *("Pisa", "Riga", "Split", "Turin", "Ulm", "Vigo", "York", "Zagreb", "Basel", "Calais", "Delft", "Essen"),
)
VAL = ("Faro", "Genoa", "Halle", "Izmir", "Jena", "Kiel", "Linz", "Malmo")
CITIES = (*TRAIN, *VAL)
HILLS = {city: random.Random(city).randrange(1, 10) for city in CITIES}
#: Tokens of the longest prompt: two searches, and queries that ramble.
PROMPT_LENGTH = 160
#: Lessons from which the tokenizer learns its words.
_VOCABULARY_SAMPLE = 1200


def question(city: str) -> str:
    """What the team is asked."""
    return f"How many hills has {city}?"


def passage(city: str, hills: int) -> Passage:
    """What the corpus says of a city."""
    return Passage(city, city, f"{city} has {hills} hills.")


def read_of(city: str, hills: int) -> str:
    """What an agent is told after a search that found the city."""
    return context(question(city), [finding(city, [passage(city, hills)])])


def lesson(recipe: SearchTeamRecipe, rng: random.Random) -> tuple[list[dict[str, str]], str]:
    """What one of the agents is told, as chat messages, and what it says: mostly the right thing."""
    city, hills = rng.choice(CITIES), rng.randrange(1, 10)
    name, searched, wrong = rng.choice(list(recipe.roles)), rng.random() < 0.5, rng.random() < recipe.wrong_share
    if name == "searcher":
        searched, said = False, "what ?" if wrong else f"<search>{city}</search>"
    elif name == "answerer":
        searched, said = True, f"<answer>{rng.randrange(1, 10) if wrong else hills}</answer>"
    else:
        said = f"<verify>{'yes' if searched != wrong else 'no'}</verify>"
    shown = [{"role": who, "content": text} for who, text in recipe.example.items()] if name == "searcher" else []
    told = read_of(city, hills) if searched else context(question(city), [])
    return [{"role": "system", "content": recipe.roles[name]}, *shown, {"role": "user", "content": told}], said


def prompt_of(codec: Codec, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a prompt, as the agent loop makes them."""
    return list(codec.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def reading(model: LlamaForCausalLM, codec: Codec, recipe: SearchTeamRecipe) -> float:
    """Share of numbers, other than the corpus's, that the answerer reads off a passage, greedily."""
    cases = [(city, hills) for city in CITIES[::4] for hills in range(1, 10) if hills != HILLS[city]]
    role = {"role": "system", "content": recipe.roles["answerer"]}
    prompts = [prompt_of(codec, [role, {"role": "user", "content": read_of(*case)}]) for case in cases]
    answers = sample(model, prompts, codec, generator=None)
    assert answerer.read is not None
    right = [answerer.read(codec.decode(ids)) == str(hills) for ids, (_, hills) in zip(answers, cases, strict=True)]
    return sum(right) / len(right)


def warm_up(
    model: LlamaForCausalLM, codec: Codec, recipe: SearchTeamRecipe, rng: random.Random, tell: Progress
) -> dict[str, float | int]:
    """Supervised lessons until the answerer reads ``recipe.reads`` of the numbers right.

    Args:
        model: trained in place.
        rng: of the lessons.
        tell: called with a line at each measurement.

    Returns:
        Share of numbers that the answerer reads, steps.

    Raises:
        RuntimeError: it does not after ``recipe.max_warm_up_steps``.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    right = 0.0
    for step in range(1, recipe.max_warm_up_steps + 1):
        batch = []
        for messages, said in (lesson(recipe, rng) for _ in range(recipe.batch_size)):
            asked, answer = prompt_of(codec, messages), codec.answer(said)
            batch.append(([*asked, *answer], [0] * len(asked) + [1] * len(answer)))
        loss = sequence_loss(model, batch, codec.pad_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= recipe.warm_up_steps and step % recipe.eval_every == 0:
            right = reading(model, codec, recipe)
            tell(f"  warm-up: step {step}, loss {float(loss.detach()):.3f}, numbers read {right:.2f}")
            if right >= recipe.reads:
                return {"reads": round(right, 4), "steps": step}
    raise RuntimeError(
        f"after {recipe.max_warm_up_steps} steps the answerer reads {right:.2f} of the numbers right; wanted "
        f"{recipe.reads}. Another seed, or more max_warm_up_steps in the recipe, may reach it."
    )


def build_search_team(folder: Path, recipe: SearchTeamRecipe, seed: int, tell: Progress) -> dict[str, Any]:
    """Make the team's task, corpus and model; a :data:`~verl_ext.lab.demo.assets.Build`. Raises ImportError: bm25s is
    missing; the message names the command. RuntimeError: see :func:`warm_up`.
    """
    if importlib.util.find_spec("bm25s") is None:
        raise ImportError("the search team has an index of bm25s: pip install 'verl-ext[search]'")
    rng = random.Random(seed)
    lessons = [lesson(recipe, rng) for _ in range(_VOCABULARY_SAMPLE)]
    texts = [message["content"] for messages, _ in lessons for message in messages] + [said for _, said in lessons]
    with seeded(seed):
        codec = Codec(train_tokenizer(texts))
        model = make_model(codec, recipe.hidden_size, recipe.layers, recipe.heads, recipe.init_std)
        tell(f"search_team: warming up a Llama of {sum(p.numel() for p in model.parameters()):,} parameters")
        measured = warm_up(model, codec, recipe, rng, tell)
    save_model(model, codec, folder / "model")
    write_parquet(rows(TRAIN), folder / "data" / "train.parquet")
    write_parquet(rows(VAL), folder / "data" / "val.parquet")
    passages = [passage(city, hills) for city, hills in HILLS.items()]
    lines = [json.dumps({"id": one.id, "title": one.title, "text": one.text}) for one in passages]
    (folder / "data" / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "task": "search_team",
        "agent_loop": AGENT_NAME,
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "measured": measured,
    }


def rows(cities: Sequence[str]) -> list[dict[str, Any]]:
    """Dataset rows that ask for the cities."""
    return [
        {
            "data_source": "hills",
            "agent_name": AGENT_NAME,
            "prompt": [{"role": "user", "content": question(city)}],
            "reward_model": {"style": "rule", "ground_truth": [str(HILLS[city])]},
            "extra_info": {"index": index},
        }
        for index, city in enumerate(cities)
    ]
