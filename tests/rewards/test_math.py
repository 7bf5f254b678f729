# SPDX-License-Identifier: Apache-2.0
"""The mathematics reward: verdicts, and what happens to answers that keep a computer algebra system busy for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from verl.utils.import_utils import load_extern_object

from verl_ext.rewards import math as math_reward
from verl_ext.rewards.math import compute_score


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"So the answer is \boxed{0.5}.", "1/2", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        ("There are 72 apples.", "72", 1.0),
        (r"\boxed{13}", "12", 0.0),
        (r"\boxed{12}", 12, 1.0),
        (r"\boxed{12}", ["11", "12"], 1.0),
        (r"\boxed{12}", np.array(["12"], dtype=object), 1.0),
        ("", "12", 0.0),
        ("no number", "12", 0.0),
    ],
)
def test_verdicts(answer: str, truth: Any, score: float) -> None:
    result = compute_score("math", answer, truth)
    assert result["score"] == result["acc"] == score and result["judge_timeout"] == 0.0
    assert all(type(value) is float for value in result.values())


def test_unparsable_is_told_from_wrong() -> None:
    assert compute_score("math", "no number", "12")["parsed"] == 0.0
    assert compute_score("math", r"\boxed{13}", "12")["parsed"] == 1.0


@pytest.mark.parametrize("answer", [r"\boxed{9^{9^{9}}}", r"\boxed{9^{9^{9^{9}}}}"])
def test_a_tower_of_powers_is_stopped_and_the_next_answer_is_judged(answer: str) -> None:
    compute_score("math", r"\boxed{2}", "3")  # the process is there
    started = time.monotonic()
    result = compute_score("math", answer, "3", timeout_s=0.5)
    assert result == {"score": 0.0, "acc": 0.0, "parsed": 0.0, "judge_timeout": 1.0}
    assert time.monotonic() - started < 20
    assert compute_score("math", r"\boxed{\frac{6}{2}}", "3")["score"] == 1.0


def test_long_answers_are_read_from_their_end() -> None:
    text = r"\boxed{7}" + "x" * 200 + r"\boxed{\frac{6}{2}}"
    assert compute_score("math", text, "3", max_chars=60)["score"] == 1.0
    assert compute_score("math", text, "7", max_chars=60)["score"] == 0.0


def test_from_many_threads() -> None:
    results: dict[int, float] = {}

    def judge(i: int) -> None:
        results[i] = compute_score("math", rf"\boxed{{\frac{{{2 * i}}}{{2}}}}", str(i if i % 2 else i + 1))["score"]

    threads = [threading.Thread(target=judge, args=(i,)) for i in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: float(i % 2) for i in range(1, 17)}


def test_a_judge_that_dies_is_replaced() -> None:
    compute_score("math", r"\boxed{2}", "3")
    process = math_reward._judge._process
    assert process is not None
    process.kill()
    process.wait()
    assert compute_score("math", r"\boxed{\frac{6}{2}}", "3")["score"] == 1.0


def test_the_judge_ends_with_its_owner() -> None:
    code = (
        "from verl_ext.rewards import math\n"
        "math.compute_score('m', '\\\\boxed{2}', '3')\n"
        "print(math._judge._process.pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120)
    pid = int(done.stdout)

    def alive() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    until = time.monotonic() + 20
    while alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive()


def test_a_fork_does_not_talk_to_its_parents_judge() -> None:
    compute_score("math", r"\boxed{2}", "3")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(compute_score("math", r"\boxed{\frac{6}{2}}", "3")["score"]).encode())
            math_reward._judge.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"1.0"
    assert compute_score("math", r"\boxed{\frac{8}{2}}", "4")["score"] == 1.0


def test_as_verl_loads_it() -> None:
    function: Any = load_extern_object("pkg://verl_ext.rewards.math", "compute_score")
    arguments = {"data_source": "math", "solution_str": r"\boxed{3}", "ground_truth": "3", "extra_info": {}}
    assert function(**arguments, reward_router_address=None, reward_model_tokenizer=None)["score"] == 1.0
    with pytest.raises(TypeError, match="reward_kwargs.time_limit is not an option .*known options: timeout_s"):
        function(**arguments, time_limit=1)
    with pytest.raises(ValueError, match="timeout_s=0"):
        function(**arguments, timeout_s=0)
    with pytest.raises(ValueError, match="no answer to compare with: the ground truth is None"):
        function(**{**arguments, "ground_truth": None})
