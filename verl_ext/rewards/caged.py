# SPDX-License-Identifier: Apache-2.0
"""What runs in the sandbox: verifiers of math-verify, reasoning-gym and verl, and programs; each call a process.

Some of them evaluate the answer (``eval``; sympy's ``parse_expr`` is an ``eval`` as well). The sandbox keeps that from
the machine, but the verdict is made in the same process, so code in an answer could still write its own verdict. Here
it does not get to run: `only_expressions` lets through what answers are made of, numbers, lists and expressions with
sympy's own functions, and nothing that Python needs for more.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import importlib.metadata
import json
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from verl_ext.rewards.furniture import connect, furnish
from verl_ext.rewards.notation import KNOWN, bare, bounds, boxed, normal, readings

_PLAIN = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop),
)
_TEXT = re.compile(r"[\w .,+\-]*")


def check_expression(source: str, names: Callable[[str], bool] | None = None) -> None:
    """Raise unless a text is data: constants, lists and operators, and with `names` also names and calls of them.

    Args:
        source: of one Python expression.
        names: which names may be used. None: none, and no calls.

    Raises:
        SyntaxError: it is no expression.
        ValueError: it holds something else: an attribute, an index, a function of its own, a comprehension, a text
            that could be code, a name that is not allowed.
    """
    for node in ast.walk(ast.parse(source.strip(), mode="eval")):
        if isinstance(node, _PLAIN):
            if names and isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                # sympy evaluates texts once more, and prints the names of symbols into code of its own.
                if not isinstance(node.value, str) or "__" in node.value or not _TEXT.fullmatch(node.value):
                    raise ValueError(f"a text in the answer could be code: {node.value!r:.80}")
            continue
        if names and isinstance(node, ast.Name) and names(node.id):
            continue
        if names and isinstance(node, ast.keyword):
            continue
        if names and isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            continue
        raise ValueError(f"the answer is more than data: {type(node).__name__} in {source!r:.80}")


@functools.cache
def _sympy_name(name: str) -> bool:
    """Whether a name is a number, a function or a class of sympy's mathematics (not of its tools, which run code)."""
    import sympy

    if name in ("sqrt", "cbrt", "root", "real_root", "binomial", "max", "min", "abs", "True", "False", "None"):
        return True
    value = getattr(sympy, name, None)
    return isinstance(value, sympy.Basic) or (isinstance(value, type) and issubclass(value, sympy.Basic))


def _plain_eval(source: Any, *_: Any) -> Any:
    """``eval`` for the modules of the verifiers: data, without any name."""
    check_expression(source)
    return builtins.eval(source, {"__builtins__": {}})


def only_expressions(*modules: str) -> None:
    """From here on this process evaluates expressions only, in sympy's parser and in `modules`.

    It cannot be undone: for a process that ends with its call. sympy 1.13 and 1.14: ``parse_expr`` evaluates what
    ``stringify_expr`` returns (sympy/parsing/sympy_parser.py), in this module's namespace.

    Args:
        modules: names of imported modules whose ``eval`` becomes one of plain data.

    Raises:
        RuntimeError: sympy's parser has no such function any more.
    """
    from sympy.parsing import sympy_parser

    original = getattr(sympy_parser, "stringify_expr", None)
    if original is None or "stringify_expr" not in sympy_parser.parse_expr.__code__.co_names:
        raise RuntimeError("sympy.parsing.sympy_parser.parse_expr no longer goes through stringify_expr")

    def stringify_expr(text: str, local: dict[str, Any], known: dict[str, Any], transformations: Any) -> str:
        code = original(text, local, known, transformations)
        check_expression(code, lambda name: name in local or _sympy_name(name))
        return code

    sympy_parser.stringify_expr = stringify_expr
    for name in modules:
        vars(sys.modules[name])["eval"] = _plain_eval


def math(answer: str, accepted: list[str]) -> dict[str, Any]:
    """Whether math-verify finds an answer in a text that equals one of the accepted ones.

    Args:
        answer: a text; math-verify finds the answer in it (``\\boxed{}`` first).
        accepted: reference expressions.

    Returns:
        ``right`` and ``parsed``, bool.
    """
    only_expressions()
    return _judged(answer, accepted)


def _judged(answer: str, accepted: list[str]) -> dict[str, Any]:
    from math_verify import parse, verify

    def read(text: str) -> Any:
        # Its own time limits are signals, and end no sympy in one large power; the sandbox keeps the time here.
        return parse(text, parsing_timeout=None)

    pairs: list[tuple[str, str]] = []
    if "\\boxed" in answer or "\\fbox" in answer:
        contents = [normal(content) for content in boxed(answer)]
        pairs = [pair for content in contents for one in accepted for pair in readings(_plain(one), content)]
        read_as = {text: read(f"\\boxed{{{text}}}") for text in dict.fromkeys(one for pair in pairs for one in pair)}
        found = [read_as[content] for _, content in pairs]
        compared = [(read_as[reference], read_as[content], bounds(content)) for reference, content in pairs]
    else:
        found = [read(answer)]
        compared = [(read(f"\\boxed{{{_plain(one)}}}"), found[0], False) for one in accepted]
    right = any(bare(content) and bare(reference) == bare(content) for reference, content in pairs) or any(
        bool(one) and verify(reference, one, timeout_seconds=None, allow_set_relation_comp=interval)
        for reference, one, interval in compared
    )
    return {"right": right, "parsed": any(found)}


def _plain(reference: str) -> str:
    """A reference without the box or the signs of mathematics around it, normalised."""
    if "\\boxed" in reference:
        reference = (boxed(reference) or [reference])[0]
    inner = reference.strip().removeprefix("$").removesuffix("$")
    return normal(inner if "$" not in inner.replace("\\$", "") else reference)


@functools.cache
def load_math() -> None:
    """Import what `math` needs and see whether it judges as it should, once for all calls: a second each otherwise.

    Raises:
        ImportError: math-verify is not installed.
        RuntimeError: it does not know what it should (`KNOWN`), as with a parser that fails on everything.
    """
    try:
        from latex2sympy2_extended.antlr_parser import PSParser
        from math_verify import parse, verify  # noqa: F401
    except ImportError as error:
        raise ImportError("the reward function needs math-verify: pip install 'verl-ext[math]'") from error
    if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
        # latex2sympy2_extended 1.11 has no such rule in its parser for ANTLR 4.9, the version that Hydra wants, and
        # asks for it before it asks for a percentage (latex2sympy2.py, convert_atom): none is read.
        PSParser.AtomContext.FUNC_GAMMA = lambda self: None
    for reference, answer, equal in KNOWN:
        if _judged(f"\\boxed{{{answer}}}", [reference])["right"] is not equal:
            packages = ("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "sympy")
            versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
            said = (
                "takes {answer!r} for {reference!r}" if not equal else "does not see that {answer!r} is {reference!r}"
            )
            raise RuntimeError(
                f"math-verify {said.format(answer=answer, reference=reference)}, with {versions}: no verdict of it can "
                "be trusted. Install the versions that verl_ext is tested with (requirements/lock.txt)"
            )


@functools.cache
def load_verls() -> None:
    """Import verl's reward functions that evaluate, for `verls`."""
    from verl.utils.reward_score import prime_math  # noqa: F401

    _warm_sympy()


def verls(data_source: str, answer: str, reference: str) -> float:
    """What ``verl.utils.reward_score.default_compute_score`` gives to an answer.

    Args:
        data_source: by which it chooses the function.
        answer: of the model.
        reference: the ground truth.

    Raises:
        RuntimeError: verl's functions are not what they were.
    """
    from verl.utils.reward_score import default_compute_score, prime_math
    from verl.utils.reward_score.prime_math import grader

    # verl 0.9.1 has a process for each comparison, to end it in time. The sandbox keeps the time and allows none.
    plain = getattr(prime_math.are_equal_under_sympy, "__wrapped__", None)
    if plain is None:
        raise RuntimeError("verl.utils.reward_score.prime_math.are_equal_under_sympy is no longer a wrapped function")
    vars(prime_math)["are_equal_under_sympy"] = plain
    only_expressions(grader.__name__)
    return float(default_compute_score(data_source, answer, reference))


def _whole_keys(value: Any) -> Any:
    """An argument that has whole numbers for keys, which JSON has as texts."""
    with contextlib.suppress(ValueError):
        return {int(key): one for key, one in value.items()} if isinstance(value, dict) else value
    return value


def program(source: str, given: Any, function: str | None = None) -> Any:
    """Run a program, or call a function of it. It learns nothing but its input, so the caller judges what comes out.

    Args:
        source: of Python. What verl's judge provides is there without being imported.
        given: its standard input; with `function` its arguments.
        function: a method of its class ``Solution``, or a name of the program.

    Returns:
        What it has printed, also if it then exits, whatever its code; with `function` what this returned.
    """
    module = types.ModuleType("answer" if function else "__main__")
    sys.modules[module.__name__] = module  # where dataclasses and type hints look names up
    sys.argv = ["answer.py"]
    printed = connect("" if function else str(given))
    furnish()
    try:
        exec(compile(source, "<answer>", "exec", dont_inherit=True), vars(module))
    except SystemExit:
        if function:
            raise
    if function:
        solution: Any = vars(module).get("Solution")
        found = getattr(solution(), function) if hasattr(solution, function) else vars(module)[function]
        return found(*map(_whole_keys, given))
    return printed.getvalue().decode()


@functools.cache
def _warm_sympy() -> None:
    """Have sympy's parser import and cache what it needs."""
    import sympy

    for text in ("2*3 + 7 - 4/2", "x**2 - sin(x)/3 + C"):
        sympy.simplify(sympy.diff(sympy.parse_expr(text), sympy.Symbol("x")))


@functools.lru_cache(maxsize=64)
def load_dataset(name: str, config_json: str) -> Any:
    """Build a reasoning-gym dataset, once per name and configuration in a process.

    Args:
        name: the dataset's registered name, e.g. ``chain_sum``.
        config_json: its configuration as a JSON object.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: unknown dataset or configuration key.
    """
    try:
        # One of its dependencies has invalid comparisons in its source, reported each time it is compiled.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as e:
        raise ImportError("the task needs the package reasoning-gym: pip install 'reasoning-gym==0.1.25'") from e
    _warm_sympy()
    try:
        return reasoning_gym.create_dataset(name, **json.loads(config_json))
    except (TypeError, AssertionError, ValueError) as e:
        raise ValueError(f"reasoning-gym dataset {name!r} can't be built with {config_json}: {e}") from e


@functools.lru_cache(maxsize=64)
def only_compares(name: str, config_json: str) -> bool:
    """Whether a dataset's verifier evaluates nothing: reasoning-gym's own comparison of texts, or of decimal numbers.

    Told by the names that the verifier's code uses, so that one that changes goes through the sandbox again.
    """
    from reasoning_gym.factory import ProceduralDataset

    verifier = type(load_dataset(name, config_json)).score_answer
    return verifier is ProceduralDataset.score_answer or set(verifier.__code__.co_names) == _DECIMALS


_DECIMALS = {"utils", "compute_decimal_reward"}
"""``return utils.compute_decimal_reward(answer, oracle_answer=entry["answer"], strip_commas=True)``"""


_NAN = re.compile(r"(?<![a-z])nan(?![a-hk-z])", re.IGNORECASE)
"""Not a number, also as a factor of i or j."""


def reasoning_gym(name: str, config_json: str, answer: str, entry: dict[str, Any]) -> float:
    """The score that a reasoning-gym dataset's own verifier gives to an answer.

    Args:
        name, config_json: see `load_dataset`.
        answer: of the model.
        entry: as generated: ``question``, ``answer``, ``metadata``.

    Raises:
        ValueError: the score is not in [0, 1], so that it is no verdict on this answer. (spell_backward adds ninths to
            1.0000000000000002 for nine right letters with others after them.)
    """
    dataset = load_dataset(name, config_json)
    only_expressions(*(cls.__module__ for cls in type(dataset).__mro__ if cls.__module__.startswith("reasoning_gym.")))
    if _NAN.search(answer) and not _NAN.search(str(entry["answer"])):
        return 0.0  # no distance from it is large, and complex_arithmetic takes it for none
    score = float(dataset.score_answer(answer, entry))
    if not 0.0 <= score <= 1.0:  # also NaN
        raise ValueError(f"the verifier of {name} gave the score {score}; expected one in [0, 1]")
    return score
