# SPDX-License-Identifier: Apache-2.0
"""Programs as answers: judged by their output, outside of the process that runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from verl.utils.reward_score import default_compute_score

from verl_ext.rewards.code import FIRST, _same_word, compute_score
from verl_ext.rewards.judge import REASONS

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", ["7"]]}
ADD = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]]}


def score(source: str, tests: Any = SUMS, **kwargs: Any) -> dict[str, float]:
    return compute_score("apps", source, tests, **kwargs)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        (
            "Here:\n```python\nimport sys\nsys.stdout.write('%.1f' % sum(map(float, sys.stdin.read().split())))\n```",
            1.0,
        ),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))\nsys.exit()", 1.0),
        ("print(sum(map(int, open(0).read().split())))", 1.0),
        ("with open('/dev/stdin') as file: print(sum(map(int, file.readline().split())))", 1.0),
        ("print(sum(map(int, open(0, 'rb').read().split())))", 1.0),
        ("import os\nos.write(1, b'%d' % sum(map(int, os.read(0, 99).split())))", 1.0),
        (
            "import io, os\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\n"
            "print(sum(map(int, input().split())))",
            1.0,
        ),
        ("import os, sys\nprint(sum(map(int, os.fdopen(sys.stdin.fileno()).read().split())))", 1.0),
        (
            "import os, sys\nfast = os.read(sys.stdin.fileno(), 9) if 'r' in sys.stdin.mode else b''\n"
            "os.write(sys.stdout.fileno(), b'%d' % sum(map(int, fast.split())))",
            1.0,
        ),
        ("```python\n    print(sum(map(int, input().split())))\n```", 1.0),
        ("\ufeffprint(sum(map(int, input().split())))", 1.0),
        ("import fileinput\nfor line in fileinput.input(): print(sum(map(int, line.split())))", 1.0),
        ("print(3)", 0.5),
        ("print(3, 7)", 0.0),
        ("nan", 0.0),
    ],
)
def test_what_it_prints_is_compared(source: str, expected: float) -> None:
    found = score(source, json.dumps(SUMS))
    assert found["score"] == expected and found["acc"] == float(expected == 1.0)
    assert found["sandbox_calls"] == 2.0 and found["sandbox_seconds"] > 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", 1.0),
        (
            "from dataclasses import dataclass\n@dataclass\nclass Two:\n    a: int\n    b: int\n"
            "def add(a, b):\n    two = Two(a, b)\n    return two.a + two.b",
            1.0,
        ),
        ("def add(a, b):\n    return object()", 0.0),
        ("add = 3", 0.0),
    ],
)
def test_what_a_function_returns_is_compared(source: str, expected: float) -> None:
    assert score(source, ADD)["score"] == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "timeout"),
        ("x = bytearray(1 << 40)", "memory"),
        ("import os; os._exit(0)", "crashed"),
        (
            "import os\nfor f in range(3, 64):\n    try: os.write(f, b'r')\n    except OSError: pass\nos._exit(0)",
            "crashed",
        ),
        ("print('x' * (1 << 23))", "output"),
        ("#" + "\U0001f600" * 360_000, "input"),
        ("raise SystemExit(1)", ""),
        ("open('{file}', 'w')", "error"),
        ("import os; os.system('touch {file}')", "error"),
        ("import ctypes; ctypes.string_at(0)", "crashed"),
    ],
)
def test_what_it_does_to_its_process_is_wrong_and_counted(source: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "made"
    limit = 0.3 if reason == "timeout" else 60.0  # on a slow machine nothing else may be late
    found = score(source.replace("{file}", str(file)), timeout_s=limit)
    assert found["score"] == 0.0 and not file.exists()
    # os.system raises nothing: the shell is not started, and nothing is printed.
    assert sum(found[f"judge_{one}"] for one in REASONS) == (2.0 if reason and "os.system" not in source else 0.0), (
        found
    )
    assert not reason or "os.system" in source or found[f"judge_{reason}"] == 2.0, found


PRINT = "print(sum(map(int, input().split())))"
RECURSION = "def deep(n): return n and 1 + deep(n - 1)\ndeep(20_000)"
AS_VERL = {
    "names of modules": "first, *rest = map(int, sys.stdin.readline().split())\nprint(int(math.fsum([first, *rest])))",
    "names in modules": "print(reduce(lambda a, b: a + b, Counter(map(int, stdin.read().split())).elements(), 0))",
    "a module, not its function": "datetime.datetime(2020, 1, 1), bisect.bisect([1], 1), copy.copy(1)\n" + PRINT,
    "Python's own before all": f"assert pow(2, 3, 5) == 3 and open and compile('1', '', 'eval')\n{PRINT}",
    "an exit with a code": f"import sys\n{PRINT}\nsys.exit(1)",
    "what it says to itself": f"print('...', file=sys.stderr)\n{PRINT}",
    "an exit with a word": f"{PRINT}\nsys.exit('done')",
    "a thread for its stack": "import threading\nthreading.stack_size(1 << 27)\nfrom functools import lru_cache\n"
    f"@lru_cache(None)\n{RECURSION.splitlines()[0]}\ndef main():\n    deep(20_000)\n    {PRINT}\n"
    "one = threading.Thread(target=main)\none.start()\none.join()\nassert not one.is_alive()",
    "a pool": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n"
    "    print(sum(pool.map(int, input().split())))",
    "another pool": "from multiprocessing.dummy import Pool\nwith Pool(2) as pool:\n"
    "    print(sum(pool.map(int, input().split())))",
    "a pool's later call": "from multiprocessing.pool import ThreadPool\npool = ThreadPool(2)\n"
    "found = pool.starmap_async(pow, [(int(one), 1) for one in input().split()])\npool.close()\npool.join()\n"
    "assert found.ready() and found.successful()\nprint(sum(found.get(timeout=9)))",
    "a thread without a class": f"import _thread, time\ndone = []\ndef main():\n    {PRINT}\n    done.append(1)\n"
    "_thread.start_new_thread(main, ())\nwhile not done: time.sleep(0.01)",
    "an event loop": "import asyncio\nasync def main():\n    await asyncio.sleep(0.001)\n    return input()\n"
    "print(sum(map(int, asyncio.run(main()).split())))",
    "depth": f"{RECURSION}\n{PRINT}",
    "numpy": "import numpy as np\nprint(np.array(input().split(), dtype=int).sum())",
    "the main block": f"def main():\n    {PRINT}\n\nif __name__ == '__main__':\n    main()",
}
"""Right programs that verl's judge lets pass."""


@pytest.mark.seconds
@pytest.mark.parametrize("name", AS_VERL)
def test_a_program_has_what_verls_judge_provides(name: str) -> None:
    tests = json.dumps({**SUMS, "outputs": ["3\n", "7\n"]})
    assert score(AS_VERL[name], tests)["score"] == default_compute_score("apps", AS_VERL[name], tests) == 1.0


PROVIDED = {"fn_name": "gcd", "inputs": ["4\n6"], "outputs": ["2"]}
FIND = {"fn_name": "search", "inputs": ["[1, 2]\n2\n"], "outputs": ["1"]}
KEYS = {"fn_name": "after", "inputs": ['{"1": 2}'], "outputs": ['{"2": 2}']}


@pytest.mark.parametrize(
    ("source", "tests", "expected"),
    [
        (
            "class Solution:\n    def search(self, of: List[int], one: Optional[int]):\n        return of.index(one)",
            FIND,
            1.0,
        ),
        ("def after(known: Dict[int, int]):\n    return {one + 1: known[one] for one in known}", KEYS, 1.0),
        ("", PROVIDED, 0.0),  # verl's judge takes what it provides for an answer
        ("import sys\ndef gcd(a, b):\n    sys.exit(0)", PROVIDED, 0.0),
        (f"{PRINT}\nraise ValueError", SUMS, 0.0),
        (f"import threading\n{PRINT}\nthreading.Thread(target=lambda: 1 / 0).start()", SUMS, 1.0),
        (f"import threading\nthreading.Thread(target=lambda: 1 / 0).start()\n{PRINT[:-1]} + 1)", SUMS, 0.0),
    ],
)
def test_what_is_provided_is_no_answer(source: str, tests: Any, expected: float) -> None:
    assert score(source, tests)["score"] == expected


LOOK = """
import gc, sys
seen, frame = repr(sys.argv) + repr(gc.get_objects()), sys._getframe()
while frame:
    seen, frame = seen + repr(frame.f_locals), frame.f_back
print("drowssap" [::-1] if "drowssap" [::-1] in seen else "not found")
"""


def test_a_value_may_be_a_text_that_is_no_json() -> None:
    """As the datasets have them beside lists of arguments."""
    turned = {"fn_name": "turn", "inputs": [["ab"], ["c"]], "outputs": ["ba", ["c"]]}
    assert score("def turn(text):\n    return text[::-1]", turned)["acc"] == 1.0
    assert score("def turn(text):\n    return text", turned)["score"] == 0.5


def test_it_cannot_find_what_is_expected() -> None:
    """The expected output is in no frame, object or argument of the program's process."""
    assert score(LOOK, {"inputs": [""], "outputs": ["not found"]})["score"] == 1.0
    assert score(LOOK, {"inputs": [""], "outputs": ["password"]})["score"] == 0.0


def test_the_first_tests_decide_whether_the_others_run() -> None:
    tests = {"inputs": [str(i) for i in range(FIRST + 5)], "outputs": [str(i) for i in range(FIRST + 5)]}
    wrong = score("n = int(input())\nprint(n if n != 3 else 0)", tests)
    assert wrong["score"] == pytest.approx(9 / 15) and wrong["sandbox_calls"] == FIRST
    late = score("n = int(input())\nprint(min(n, 13))", tests)
    assert late["score"] == pytest.approx(14 / 15) and late["acc"] == 0.0
    assert score("print(input())", tests)["acc"] == 1.0


def test_a_crash_earns_no_reward() -> None:
    """A program that stops early, so that fewer tests are run, gets no more than one that goes on."""
    tests = {"inputs": [str(i) for i in range(40)], "outputs": [str(i) if i < FIRST else "no" for i in range(40)]}
    assert score("print(input())", tests)["score"] == FIRST / 40
    assert score("n = int(input())\nassert n\nprint(n)", tests)["score"] == (FIRST - 1) / 40


def test_a_test_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match=r"input of a test is too long by itself: .* verl_ext\.sandbox\.input_kb=4096"):
        score("print(1)", {"inputs": ["1" * (5 << 20)], "outputs": ["1"]})
    long = {"inputs": [str(5 << 20)], "outputs": ["1" * (5 << 20)]}
    assert score("print(1)", long)["score"] == 0.0
    with pytest.raises(ValueError, match=r"expects 5120 KiB of output; raise verl_ext\.sandbox\.output_kb above it"):
        score("print('1' * int(input()))", long)
    assert score("print('1' * int(input()))", {"inputs": [str(1 << 20)], "outputs": ["1" * (1 << 20)]})["score"] == 1.0


@pytest.mark.parametrize("truth", ["", "no JSON", {}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}])
def test_rows_without_tests_are_named(truth: Any) -> None:
    with pytest.raises(ValueError, match="the ground truth of a program is"):
        score("print(1)", truth)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match=r"reward_kwargs\.timeout is not an option.*timeout_s"):
        score("print(1)", timeout=1)


@pytest.mark.parametrize(
    ("word", "wanted", "same"),
    [
        ("3.0", "3", True),
        ("0.333333333", "0.3333333334", True),
        ("007", "7", True),
        ("7" * 400, "7" * 400, True),
        ("9" * 400, "7" * 400, False),
        ("inf", "7" * 400, False),
        ("nan", "nan", True),
        ("1000000500", "1000000007", False),
        ("1000000500.0", "1000000007", False),
        ("1.0000005e9", "1000000007", False),
        ("1000000007.0", "1000000007", True),
        ("1e9", "1000000000", True),
        ("999999", "1000000", False),
        ("0.9999999", "1", True),
        ("0.33333", "0.333333333", True),
        ("0.3333", "0.333333333", False),
        ("100000.0", "100001", False),
        ("1000000007.5", "1000000007.4", True),
        ("one", "1000000007", False),
        ("1e999", "1e998", False),
        ("1e99999999999999999999", "1", False),
    ],
)
def test_numbers_by_value_and_whole_ones_exactly(word: str, wanted: str, same: bool) -> None:
    """A float of 310 digits is infinite: one program that prints inf would have passed all such tests."""
    assert _same_word(word, wanted) is same
