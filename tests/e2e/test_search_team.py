# SPDX-License-Identifier: Apache-2.0
"""The search team through verl's real trainer: a small model that half knows its parts, a BM25 index, the QA reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from harness import Lab
from test_main_job import finite

from verl_ext.lab.demo.prepare import prepare_search_team
from verl_ext.lab.demo.recipes import SearchTeamRecipe
from verl_ext.lab.demo.search_team import CITIES, HILLS, question
from verl_ext.lab.transcripts.read import Choice, read
from verl_ext.rewards.qa import exact_match
from verl_ext.rollout.orchestra.search import answerer, searcher, verifier

pytestmark = pytest.mark.e2e

ROLES, EXAMPLE = SearchTeamRecipe().roles, SearchTeamRecipe().example


def test_the_search_team_trains(standing_lab: Lab) -> None:
    """Rows of each agent, searches in the index, rewards by exact match and what the transcripts and metrics say."""
    assets = prepare_search_team(standing_lab.root / "search_team")
    folder = Path(assets.folder)
    (folder / "examples.json").write_text(json.dumps([EXAMPLE]))
    settings = {
        "name": "search",
        "retriever.kind": "bm25",
        "retriever.corpus": "data/corpus.jsonl",  # relative to where the run was started, in every process
        "retriever.cache_dir": "index",
        "options.max_steps": 3,
        "options.top_k": 1,
        "agents.searcher.examples": "examples.json",
        **{f"agents.{name}.role": role for name, role in ROLES.items()},
    }
    run = standing_lab.run(
        "search_team",
        recipe="[dr_mas,cpu]",
        overrides=[
            f"actor_rollout_ref.model.path={assets.model_path}",
            f"data.train_files={assets.train_file}",
            f"data.val_files={assets.train_file}",
            "data.max_prompt_length=160",
            "reward.custom_reward_function.path=pkg://verl_ext.rewards.qa",
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
            "trainer.total_training_steps=3",
            "verl_ext.updates_per_batch=2",
            f"verl_ext.rollouts_dir={folder / 'rollouts'}",
            *(f"+verl_ext.orchestra.{key}={value}" for key, value in settings.items()),
        ],
    ).check()
    assert len(list((folder / "index").iterdir())) == 1  # one index of one corpus
    readers = {one.name: one.read for one in (verifier, searcher, answerer)}
    seen: Counter[str] = Counter()
    for step in (1, 2, 3):
        metrics, rows = run.metrics[step], run.rows(step)
        assert finite(metrics)
        records = read(folder, Choice(steps=(step, step)))
        assert metrics["rollout/trajectories"] == len(records) == 16 and metrics["rollout/turns"] == len(rows)
        assert metrics["rollout/failed_trajectories"] == 0.0 and metrics["trajectory/prompts_cut"] == 0.0
        calls = Counter(row["agent_id"] for row in rows)
        assert all(metrics[f"agent/{name}/turns"] == calls[name] for name in ROLES)
        for record in records:
            turns, info = record["turns"], record["info"]
            order = "".join(turn["agent"][0] for turn in turns)
            assert re.fullmatch("va|vsva|vsvsa", order)
            values = [readers[turn["agent"]](turn["response"]) for turn in turns]
            assert [turn["valid"] for turn in turns] == [value is not None for value in values]
            (city,) = [city for city in CITIES if question(city) in turns[0]["prompt"]]
            queries = [
                value for turn, value in zip(turns, values, strict=True) if turn["agent"] == "searcher" and value
            ]
            last = turns[-1]["prompt"]
            assert info["searches"] == len(queries)
            assert info["searched_first"] == float(order[:2] == "vs" and values[1] is not None)
            assert info["searches_found"] == last.count("<information>\nDoc 1 (Title: ")
            assert info["answer_retrieved"] == float(re.search(rf"Doc 1 .* {HILLS[city]} hills", last) is not None)
            assert all(f"<search>{query}</search>" in last for query in queries)
            assert all(EXAMPLE["assistant"] in turn["prompt"] for turn in turns if turn["agent"] == "searcher")
            expected = exact_match(values[-1] or "", [str(HILLS[city])])
            assert record["score"] == record["reward"] == info.get("acc", 0.0) == expected
            seen.update(searched=bool(queries), found=bool(info["answer_retrieved"]), right=bool(expected), all=True)
        mean = sum(record["info"]["searches"] for record in records) / 16
        assert metrics["trajectory/searches"] == pytest.approx(mean)
        assert metrics["critic/score/mean"] >= 0.0
    assert any(run.metrics[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    # Each case was there: the model is made to say each part wrong in one of five lessons, and samples.
    assert 0 < seen["right"] < seen["all"] == 48 and 0 < seen["found"] < 48 and 0 < seen["searched"] < 48
