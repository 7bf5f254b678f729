# SPDX-License-Identifier: Apache-2.0
"""Transcripts of rollouts: what is written, what is read, the text, and the page in a real headless browser."""

from __future__ import annotations

import copy
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from verl_ext import cli
from verl_ext.common.transcripts import (
    TranscriptWriter,
    outcome_of,
    trajectories,
    write_records,
)
from verl_ext.lab.transcripts import page
from verl_ext.lab.transcripts.read import Choice, TranscriptError, as_text, read, visible

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import browser as headless  # noqa: E402

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script>--> &lt;b&gt; \u2028\u2029 ${1+1} \x1b[31mred\x1b[0m \x00 \U0001f600 \u202egnirts http://example.org/a.png"
)

# ---- writing -------------------------------------------------------------------------------------------------------


def batch() -> dict[str, Any]:
    """Rows of two trajectories out of order, one masked turn and one row of padding."""
    keys = ["q_10_1", "q_2_0", "q_10_0", "pad_0_0", "q_10_2"]
    valid = np.array([True, True, True, False, False])
    columns = {
        "traj_uid": np.array([key.rsplit("_", 1)[0] for key in keys], dtype=object),
        "turn_index": np.array([1, 0, 0, 0, 2]),
        "valid_row": valid,
        "is_action_valid": np.array([True, False, True, True, True]),
        "turn_reward": np.array([0.5, 0.0, 0.25, 0.0, 0.0]),
        "agent_id": np.array(["critic", "writer", "writer", "writer", "critic"], dtype=object),
    }
    extra: list[dict[str, Any]] = [{} for _ in keys]
    extra[4] = {"reward_extra_info": {"acc": np.float64(0.0), "note": "x"}, "stop_reason": "max_turns"}
    extra[1] = {
        "failure": "env_timeout",
        "action": {"move": "up"},
        "anchor_obs": "a room",
        "steps": 3,
        "global_steps": 7,
        "turn_scores": [1.0],
    }
    return {
        "step": 4,
        "keys": keys,
        "columns": columns,
        "extra_fields": extra,
        "score": np.array([0.75, 0.0, 0.75, 0.0, 0.75]),
        "advantage": np.array([1.0, -1.0, 2.0, 9.0, 0.0]),
        "padding": [False, False, False, True, False],
    }


def test_rows_become_trajectories_in_order() -> None:
    first, second = trajectories(**batch())
    assert (first["trajectory"], first["prompt_uid"], first["outcome"]) == ("q_2", "q", "error")
    assert first["failure"] == "env_timeout" and first["agents"] == ["writer"] and first["reward"] == 0.0
    turn = first["turns"][0]
    assert turn["action"] == {"move": "up"} and turn["observation"] == "a room" and turn["more"] == {"steps": 3}
    assert turn["valid"] is False and turn["counted"] is True and turn["row"] == 1
    # acc says 0, so the reward above 0 does not make it a success.
    assert (second["trajectory"], second["outcome"], second["reward"]) == ("q_10", "failure", 0.75)
    assert second["agents"] == ["writer", "critic"] and second["info"] == {"acc": 0.0}
    assert second["stop_reason"] == "max_turns"
    assert [(turn["turn"], turn["row"], turn["counted"]) for turn in second["turns"]] == [
        (0, 2, True),
        (1, 0, True),
        (2, 4, False),
    ]
    assert [turn["advantage"] for turn in second["turns"]] == [2.0, 1.0, 0.0]


def test_without_rewards_of_turns_the_score_counts() -> None:
    given = batch()
    for name in ("turn_reward", "agent_id"):
        del given["columns"][name]
    given["extra_fields"] = [{} for _ in given["keys"]]
    first, second = trajectories(**given)
    assert first["outcome"] == "failure" and second["reward"] == 0.75 and second["outcome"] == "success"
    assert second["agents"] == [] and second["turns"][0]["reward"] is None


@pytest.mark.parametrize(
    ("failure", "success", "reward", "outcome"),
    [("", None, 0.1, "success"), ("", None, 0.0, "failure"), ("", 0.5, -1.0, "success"), ("x", 1.0, 1.0, "error")],
)
def test_outcome(failure: str, success: float | None, reward: float, outcome: str) -> None:
    assert outcome_of(failure, success, reward) == outcome


def words(ids: list[list[int]]) -> list[str]:
    return [" ".join(map(str, row)) for row in ids]


def test_text_is_decoded_and_written_beside_the_training(tmp_path: Path) -> None:
    threads = []

    def decode(ids: list[list[int]]) -> list[str]:
        threads.append(threading.current_thread())
        return words(ids)

    writer = TranscriptWriter(tmp_path / "rollouts", decode)
    prompts = [torch.arange(row + 1) for row in range(5)]
    responses = [[row] * 2 for row in range(5)]
    for start in (True, False):
        writer.add(trajectories(**batch()), prompts, responses, start=start)
    writer.close()
    assert threading.main_thread() not in threads
    records = read(tmp_path, Choice())
    assert len(records) == 4 and records[:2] == records[2:]
    turns = records[1]["turns"]
    assert [(turn["prompt"], turn["response"]) for turn in turns] == [
        ("0 1 2", "2 2"),
        ("0", "0 0"),
        ("0 1 2 3 4", "4 4"),
    ]
    assert [(turn["prompt_tokens"], turn["response_tokens"]) for turn in turns] == [(3, 2), (1, 2), (5, 2)]
    writer = TranscriptWriter(tmp_path / "rollouts", words)
    writer.add(trajectories(**batch()), prompts, responses, start=True)  # after a kill, the step is done again
    writer.close()
    assert len(read(tmp_path, Choice())) == 2


def test_a_full_disk_is_said_and_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    writer = TranscriptWriter(tmp_path / "rollouts", words)
    with caplog.at_level(logging.ERROR):
        for _ in range(4):  # more than may wait
            writer.add(trajectories(**batch()), [[1]] * 5, [[2]] * 5, start=True)
        writer.close()
    assert caplog.text.count("transcripts could not be written") == 4 and "verl_ext.rollouts_dir" in caplog.text


# ---- reading -------------------------------------------------------------------------------------------------------


def turn(number: int, agent: str, prompt: str, response: str, **changes: Any) -> dict[str, Any]:
    plain = {"reward": 0.0, "valid": True, "counted": True, "advantage": 0.25 * (-1) ** number, "more": {}}
    tokens = {"prompt_tokens": len(prompt), "response_tokens": len(response)}
    return {"turn": number, "agent": agent, "prompt": prompt, "response": response, **plain, **tokens, **changes}


def record(step: int, uid: str, session: int, outcome: str = "failure", **changes: Any) -> dict[str, Any]:
    prompt = f"<|im_start|>user\nquestion {uid}<|im_end|>\n"
    more = f"\n<|im_start|>user\nlook again {uid}<|im_end|>\n"
    return {
        "step": step,
        "trajectory": f"{uid}_{session}",
        "prompt_uid": uid,
        "outcome": outcome,
        "reward": float(outcome == "success"),
        "score": 0.0,
        "agents": ["solver", "verifier"],
        "failure": "retriever_down" if outcome == "error" else "",
        "stop_reason": "",
        "info": {"acc": float(outcome == "success")},
        "turns": [
            turn(0, "solver", prompt, f"answer {session}", observation={"room": [1, "red"]}, action="go <north>"),
            turn(1, "verifier", prompt + f"answer {session}" + more, "no", valid=False, more={"stop_detail": "x"}),
        ],
        **changes,
    }


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of three steps; the last holds text that means harm and an agent of its own."""
    folder = tmp_path / "my <b>run"
    for step in (1, 2, 10):
        records = [
            record(step, f"aaaaaaaa{step}", 0, "success"),
            record(step, f"aaaaaaaa{step}", 1),
            record(step, f"bbbbbbbb{step}", 0, "error"),
        ]
        if step == 10:
            bad = turn(0, "<i>judge</i>", "", HOSTILE, observation=HOSTILE, action=HOSTILE, more={HOSTILE: HOSTILE})
            records.append(record(step, "cccccccc", 3, agents=["<i>judge</i>"], turns=[bad], stop_reason=HOSTILE))
        write_records(folder / "rollouts", records, start=True)
    return folder


def names(records: list[dict[str, Any]]) -> list[str]:
    return [record["trajectory"] for record in records]


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        (Choice(steps=(2, 2), outcome="success"), ["aaaaaaaa2_0"]),
        (Choice(steps=(1, 2), outcome="error"), ["bbbbbbbb1_0", "bbbbbbbb2_0"]),
        (Choice(trajectory="aaaaaaaa10_1"), ["aaaaaaaa10_1"]),
        (Choice(trajectory="aaaa_1", steps=(1, 1)), ["aaaaaaaa1_1"]),
        (Choice(agent="<i>judge</i>"), ["cccccccc_3"]),
    ],
)
def test_choosing(run_folder: Path, choice: Choice, found: list[str]) -> None:
    assert names(read(run_folder, choice)) == found
    assert names(read(run_folder / "rollouts", choice)) == found


def test_a_whole_id_is_that_trajectory_alone(tmp_path: Path) -> None:
    write_records(tmp_path, [record(1, "abcd", number) for number in (0, 1, 10, 11)], start=True)
    assert names(read(tmp_path, Choice(trajectory="abcd_1"))) == ["abcd_1"]
    assert names(read(tmp_path, Choice(trajectory="abcd"))) == ["abcd_0", "abcd_1", "abcd_10", "abcd_11"]
    with pytest.raises(TranscriptError, match="no trajectory is chosen; there are 0 with success, 1 with failure"):
        read(tmp_path, Choice(trajectory="abcd_1", outcome="success"))


def test_steps_are_in_the_order_of_numbers(run_folder: Path) -> None:
    assert [record["step"] for record in read(run_folder, Choice())] == [1] * 3 + [2] * 3 + [10] * 4
    assert len(read(run_folder / "rollouts" / "2.jsonl", Choice())) == 3


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(steps=(3, 9)), r"no transcripts of step 3-9; there are steps 1-2, 10"),
        (Choice(agent="critic"), r"no agent 'critic' .* solver, verifier"),
        (Choice(trajectory="zz"), r"no trajectory 'zz' in these steps; the first is aaaaaaaa1_0"),
        (Choice(trajectory="cccc", outcome="success"), r"3 with success, 4 with failure, 3 with error"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(run_folder: Path, choice: Choice, message: str) -> None:
    with pytest.raises(TranscriptError, match=message):
        read(run_folder, choice)


def test_files_without_a_trajectory_are_said(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text("", encoding="utf-8")
    for choice in (Choice(), Choice(trajectory="abc"), Choice(agent="solver")):
        with pytest.raises(TranscriptError, match="no trajectory in these steps: their files are empty"):
            read(tmp_path, choice)


def test_other_files_are_told_apart(tmp_path: Path, run_folder: Path) -> None:
    with pytest.raises(TranscriptError, match=r"no transcripts in .*verl_ext\.rollouts_dir="):
        read(tmp_path / "nothing", Choice())
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "1.jsonl").write_text('{"input": "a", "output": "b", "score": 1.0}\n')
    with pytest.raises(TranscriptError, match="line 1 is not a transcript .*trainer.rollout_data_dir"):
        read(tmp_path, Choice())
    path = run_folder / "rollouts" / "2.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:50])  # a run that was killed while it wrote
    assert len(read(path, Choice())) == 3
    path.write_text(whole[:50] + "\n" + whole)
    with pytest.raises(TranscriptError, match="line 1 is not JSON"):
        read(path, Choice())


def test_any_value_survives_writing(tmp_path: Path) -> None:
    odd = record(1, "u", 0, info={"a": float("nan"), "b": np.float32(0.5)})
    odd["turns"][0]["observation"] = {"grid": np.eye(2), 3: {1}, "half": "\ud800", "deep": (None, True)}
    write_records(tmp_path, [odd], start=True)
    (found,) = read(tmp_path, Choice())
    assert found["info"] == {"a": "nan", "b": 0.5}
    observation = found["turns"][0]["observation"]
    assert observation["grid"] == [[1.0, 0.0], [0.0, 1.0]] and observation["3"] == "{1}"
    assert observation["half"] == "\ud800" and observation["deep"] == [None, True]
    assert "\\ud800" in as_text(found) and "\\ud800" in page.render([found], "odd")


# ---- text ----------------------------------------------------------------------------------------------------------


def test_text_shows_each_turn_and_repeats_no_prompt() -> None:
    text = as_text(record(3, "abc", 2))
    assert text.count("question abc") == 1 and "prompt, continued:" in text
    assert "look again abc" in text and "--- turn 1, verifier, reward 0, advantage -0.25" in text
    assert "INVALID ACTION" in text and "stop_detail=x" in text and "| go <north>" in text
    assert '| {"room": [1, "red"]}' in text and "failure, reward 0, 2 turns, agents solver, verifier" in text
    assert as_text(record(3, "abc", 2), full=True).count("question abc") == 2


def test_no_control_character_of_a_model_reaches_the_terminal() -> None:
    assert visible("a\tb\n\x1b[2J\x07\u202e\x9b") == "a\tb\n\\x1b[2J\\x07\\u202e\\x9b"
    shown = as_text(record(1, "u", 0, turns=[turn(0, "\x1b[1m", HOSTILE, HOSTILE)], failure="\x1b", agents=["\x1b[1m"]))
    assert not any(c != "\n" and c != "\t" and not c.isprintable() for c in shown)


def test_command_lists_the_last_step_and_shows_one(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollouts", str(run_folder)]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("10 ")]) == 4
    assert "error (retriever_down)" in out and "\x1b" not in out and "aaaaaaaa_1" in out
    assert cli.main(["rollouts", str(run_folder), "--step", "1-2", "--outcome", "error", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "bbbbbbbb_0" in out and "the last 1 of 2 trajectories; --limit 2 shows all" in out
    assert cli.main(["rollouts", str(run_folder), "--step", "10", "--trajectory", "aaaaaaaa_1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 10, trajectory aaaaaaaa10_1") and "LAST RESPONSE" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--step", "5"], 1, "verl-ext rollouts: no transcripts of step 5; there are steps 1-2, 10"),
        (["--step", "5-2"], 2, "'5-2' is not a step (7) or a range of steps (3-7)"),
        (["--limit", "0"], 2, "'0' is not a whole number of at least 1"),
        (["--outcome", "won"], 2, "invalid choice: 'won'"),
        (["--html", "page.txt"], 1, "name a file that ends in .html"),
    ],
)
def test_command_says_what_is_wrong(
    run_folder: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.main(["rollouts", str(run_folder), *arguments])
    except SystemExit as error:
        found = error.code  # type: ignore[assignment]
    assert found == code and message in capsys.readouterr().err


# ---- the page ------------------------------------------------------------------------------------------------------


def test_no_text_of_a_model_is_markup_in_the_file(run_folder: Path) -> None:
    text = page.render(read(run_folder, Choice()), "a <b>title</b> & more")
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text and "<i>" not in text
    assert "a &lt;b&gt;title&lt;/b&gt; &amp; more" in text and "http" not in text.replace("http-equiv", "").replace(
        "http://example.org", ""
    )
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data[-1]["turns"][0]["response"] == HOSTILE


def test_a_prompt_that_goes_on_is_kept_once() -> None:
    plain = record(1, "u" * 4000, 0)
    before = copy.deepcopy(plain)
    text = page.render([plain], "t")
    assert plain == before
    # uid: in trajectory, prompt_uid, the first prompt and what the second adds
    assert text.count("u" * 4000) == 4


@pytest.fixture(scope="module")
def browser() -> Iterator[headless.Browser]:
    with headless.running(Path(__file__).resolve().parents[2] / "build" / "browser") as running:
        yield running


@pytest.fixture
def opened(browser: headless.Browser, run_folder: Path, tmp_path: Path) -> headless.Page:
    target = tmp_path / "page.html"
    assert cli.main(["rollouts", str(run_folder), "--html", str(target)]) == 0
    return browser.open(target.as_uri(), width=1200, height=800)


def current(page: headless.Page) -> str:
    return page.texts("#detail h2")[0]


@pytest.mark.slow
def test_browser_filters_by_step_agent_outcome_and_text(opened: headless.Page) -> None:
    assert opened.texts("#count") == ["10 trajectories"] and len(opened.texts("#list li")) == 10
    opened.choose("#outcome", "error")
    assert opened.texts("#count") == ["3 of 10 trajectories"]
    assert (
        current(opened) == "step 1, trajectory bbbbbbbb1_0" and "ended by retriever_down" in opened.texts(".facts")[0]
    )
    opened.choose("#step", "10")
    assert opened.texts("#count") == ["1 of 10 trajectories"] and current(opened).endswith("bbbbbbbb10_0")
    opened.choose("#outcome", "")
    opened.choose("#agent", "<i>judge</i>")
    assert opened.texts("#count") == ["1 of 10 trajectories"] and current(opened).endswith("cccccccc_3")
    for name in ("#step", "#agent"):
        opened.choose(name, "")
    opened.type("#text", "LOOK AGAIN bbbbbbbb2")
    opened.until("document.querySelector('#count').textContent === '1 of 10 trajectories'")
    assert current(opened) == "step 2, trajectory bbbbbbbb2_0"
    opened.choose("#outcome", "success")
    assert opened.texts("#list li") == [] and "No trajectory is chosen" in opened.texts("#detail")[0]
    assert opened.complaints() == []


@pytest.mark.slow
def test_browser_shows_the_turns_of_the_one_that_is_clicked(opened: headless.Page) -> None:
    opened.click("#list button", 1)
    assert current(opened) == "step 1, trajectory aaaaaaaa1_1"
    assert opened.texts(".turn strong") == ["turn 0 · solver", "turn 1 · verifier"]
    heads = opened.texts(".turn > header")
    assert "advantage 0.25" in heads[0] and "advantage -0.25" in heads[1] and "invalid action" in heads[1]
    blocks = opened.texts(".turn pre")
    assert blocks[0] == '{"room":[1,"red"]}' and blocks[2] == "answer 1" and blocks[3] == "go <north>"
    assert "prompt, continued" in opened.texts(".turn h3") and not any("question" in text for text in blocks[4:])
    opened.click("details summary")  # the whole prompt, on demand
    whole = "<|im_start|>user\nquestion aaaaaaaa1<|im_end|>\nanswer 1\n"
    opened.until(f"document.querySelector('details pre')?.innerText.startsWith({json.dumps(whole)})")
    opened.key("ArrowDown")
    assert current(opened) == "step 1, trajectory bbbbbbbb1_0"
    opened.key("ArrowUp")
    assert current(opened) == "step 1, trajectory aaaaaaaa1_1"
    assert opened.run("document.querySelectorAll('[aria-current=true]').length") == 1


@pytest.mark.slow
def test_browser_names_each_agent_with_its_model_where_there_are_several(
    browser: headless.Browser, tmp_path: Path
) -> None:
    one = record(1, "aaaaaaaa", 0)
    one["turns"][1]["more"] = {"model": "<b>small"}
    (tmp_path / "models.html").write_text(page.render([one], "models"), encoding="utf-8")
    opened = browser.open((tmp_path / "models.html").as_uri(), width=1200, height=800)
    assert opened.texts(".turn strong") == ["turn 0 · solver (policy)", "turn 1 · verifier (<b>small)"]
    assert "agents solver (policy), verifier (<b>small)" in opened.texts(".facts")[0]
    assert opened.complaints() == []


@pytest.mark.slow
def test_browser_takes_hostile_text_as_text_and_asks_for_nothing(
    opened: headless.Page, browser: headless.Browser, tmp_path: Path
) -> None:
    opened.choose("#agent", "<i>judge</i>")
    title = opened.run("document.title")
    assert title == "Rollouts of my <b>run" and opened.texts("h1") == [title]
    response = opened.run("document.querySelector('.response').textContent")
    assert response == HOSTILE
    assert opened.run("document.querySelectorAll('img, i:not(.bar i), b, #detail script').length") == 0
    assert opened.requests() == [(tmp_path / "page.html").as_uri()]
    assert opened.complaints() == []
    # The policy holds even for a script that gets into the page some other way, and for a request.
    opened.run(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.owned = 1'}))"
    )
    opened.run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/a.png'}))")
    opened.until("true")
    assert opened.run("window.owned === undefined")
    assert any("Content Security Policy" in text for text in opened.complaints())
    # Filters are in the address: a link shows what was chosen.
    again = browser.open(opened.run("location.href"), width=1200, height=800)
    assert again.texts("#count") == ["1 of 10 trajectories"] and current(again).endswith("cccccccc_3")


@pytest.mark.slow
def test_browser_keeps_its_place_when_the_page_is_made_anew(browser: headless.Browser, tmp_path: Path) -> None:
    records = [record(step, f"uid{number}", 0) for step in (2, 3) for number in range(60)]
    target = tmp_path / "page.html"
    target.write_text(page.render(records, "before"), encoding="utf-8")
    opened = browser.open(target.as_uri(), width=1200, height=400)
    opened.click("#list button", 100)
    chosen, places = current(opened), "['list', 'detail'].map(name => Math.round($(name).scrollTop))"
    assert chosen == "step 3, trajectory uid40_0"
    opened.run("$('detail').scrollTop = 77")
    before = opened.run(places)
    assert before[0] > 1000 and before[1] == 77
    target.write_text(page.render([*records, record(4, "uid40", 0)], "after"), encoding="utf-8")
    opened.call("Page.reload")
    opened.until("document.title === 'after' && document.readyState === 'complete'")
    assert current(opened) == chosen and opened.run(places) == before
    # One that comes before it, and a link for somebody else.
    target.write_text(page.render([record(1, "uid40", 0), *records], "again"), encoding="utf-8")
    again = browser.open(opened.run("location.href"), width=1200, height=400)
    assert current(again) == chosen and again.run(places)[0] > 1000
    assert opened.complaints() == again.complaints() == []


@pytest.mark.slow
def test_browser_opens_many_trajectories_at_once(browser: headless.Browser, tmp_path: Path) -> None:
    records = [record(step, f"uid{number}", 0) for step in range(10) for number in range(200)]
    (tmp_path / "many.html").write_text(page.render(records, "many"), encoding="utf-8")
    opened = browser.open((tmp_path / "many.html").as_uri(), width=1200, height=800)
    assert opened.texts("#count") == ["2000 trajectories"] and len(opened.texts("#list li")) == 301
    opened.click("#list li:last-child button")
    assert len(opened.texts("#list li")) == 601
    opened.choose("#step", "7")
    assert opened.texts("#count") == ["200 of 2000 trajectories"] and len(opened.texts("#list li")) == 200
    assert opened.complaints() == []
