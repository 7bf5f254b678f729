# SPDX-License-Identifier: Apache-2.0
"""A search team small enough to train in minutes on a CPU: hills of cities, and a model that half knows its parts.

    python examples/agents/small_searchers.py FOLDER

writes what examples/train_small_search_team_cpu.sh trains: ``model/``, ``corpus.jsonl``, ``train.parquet``,
``val.parquet`` (other cities) and ``examples.json``. The model has seen lessons of the three agents, one in five
wrong, in which the numbers of hills were drawn anew each time: it can read a number, and knows none by heart.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pandas
import torch
from transformers import LlamaForCausalLM

from verl_ext.demo.model import Codec, make_model, sample, save_model, seeded, sequence_loss, train_tokenizer
from verl_ext.rollout.orchestra.search import answerer, context, finding
from verl_ext.rollout.passages import Passage

TRAIN = (
    *("Rome", "Lyon", "Bath", "Porto", "Graz", "Siena", "Bern", "Cork", "Ghent", "Lund", "Metz", "Nice"),
    *("Pisa", "Riga", "Split", "Turin", "Ulm", "Vigo", "York", "Zagreb", "Basel", "Calais", "Delft", "Essen"),
)
VAL = ("Faro", "Genoa", "Halle", "Izmir", "Jena", "Kiel", "Linz", "Malmo")
CITIES = (*TRAIN, *VAL)
HILLS = {city: random.Random(city).randrange(1, 10) for city in CITIES}
ROLES = {"verifier": "Enough?", "searcher": "Search.", "answerer": "Answer."}
EXAMPLE = {"user": "Hills of Oslo?", "assistant": "<search>Oslo</search>"}
STEPS, MOST_STEPS, READS = 240, 600, 0.9


def question(city: str) -> str:
    """What the team is asked."""
    return f"How many hills has {city}?"


def passage(city: str, hills: int) -> Passage:
    """What the corpus says of a city."""
    return Passage(city, city, f"{city} has {hills} hills.")


def lesson(rng: random.Random, wrong_share: float = 0.2) -> tuple[list[dict[str, str]], str]:
    """What one of the agents is told, as chat messages, and what it says: mostly the right thing."""
    city, hills = rng.choice(CITIES), rng.randrange(1, 10)
    told = {False: context(question(city), []), True: context(question(city), [finding(city, [passage(city, hills)])])}
    name, searched, wrong = rng.choice(list(ROLES)), rng.random() < 0.5, rng.random() < wrong_share
    if name == "searcher":
        searched, said = False, "what ?" if wrong else f"<search>{city}</search>"
    elif name == "answerer":
        searched, said = True, f"<answer>{rng.randrange(1, 10) if wrong else hills}</answer>"
    else:
        said = f"<verify>{'yes' if searched != wrong else 'no'}</verify>"
    shown = [{"role": who, "content": EXAMPLE[who]} for who in ("user", "assistant")] if name == "searcher" else []
    return [{"role": "system", "content": ROLES[name]}, *shown, {"role": "user", "content": told[searched]}], said


def prompt_of(codec: Codec, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a prompt, as the agent loop makes them."""
    return list(codec.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def reading(model: LlamaForCausalLM, codec: Codec) -> float:
    """Share of numbers, other than the corpus's, that the answerer reads off a passage, greedily."""
    cases = [(city, hills) for city in CITIES[::4] for hills in range(1, 10) if hills != HILLS[city]]
    prompts = []
    for city, hills in cases:
        told = context(question(city), [finding(city, [passage(city, hills)])])
        prompts.append(prompt_of(codec, [{"role": "system", "content": "Answer."}, {"role": "user", "content": told}]))
    answers = sample(model, prompts, codec, generator=None)
    assert answerer.read is not None
    right = [answerer.read(codec.decode(ids)) == str(hills) for ids, (_, hills) in zip(answers, cases, strict=True)]
    return sum(right) / len(right)


def teach(model: LlamaForCausalLM, codec: Codec, rng: random.Random) -> None:
    """Supervised lessons, `STEPS` or more, until the answerer reads `READS` of the numbers right.

    Raises:
        RuntimeError: it does not after `MOST_STEPS`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, MOST_STEPS + 1):
        batch = []
        for messages, said in (lesson(rng) for _ in range(48)):
            asked, answer = prompt_of(codec, messages), codec.answer(said)
            batch.append(([*asked, *answer], [0] * len(asked) + [1] * len(answer)))
        loss = sequence_loss(model, batch, codec.pad_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= STEPS and step % 20 == 0 and reading(model, codec) >= READS:
            return
    raise RuntimeError(f"after {MOST_STEPS} steps the answerer reads {reading(model, codec):.2f} of the numbers right")


def build(folder: Path, seed: int = 0) -> Path:
    """Write model and task into a folder, which is made if it is not there."""
    rng = random.Random(seed)
    lessons = [lesson(rng) for _ in range(1200)]
    texts = [message["content"] for messages, _ in lessons for message in messages] + [said for _, said in lessons]
    codec = Codec(train_tokenizer(texts))
    with seeded(seed):
        model = make_model(codec, hidden_size=64, layers=2, heads=2, init_std=0.05)
        teach(model, codec, rng)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, codec, folder / "model")
    passages = [passage(city, hills) for city, hills in HILLS.items()]
    lines = [json.dumps({"id": one.id, "title": one.title, "text": one.text}) for one in passages]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "examples.json").write_text(json.dumps([EXAMPLE]) + "\n")
    _questions(TRAIN, folder / "train.parquet")
    _questions(VAL, folder / "val.parquet")
    return folder


def _questions(cities: Sequence[str], path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": question(city)}],
            "data_source": "hills",
            "reward_model": {"style": "rule", "ground_truth": [str(HILLS[city])]},
            "extra_info": {"index": index},
        }
        for index, city in enumerate(cities)
    ]
    pandas.DataFrame(rows).to_parquet(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    build(given.folder, given.seed)
