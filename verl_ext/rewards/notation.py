# SPDX-License-Identifier: Apache-2.0
"""What models write in a box, in the notation that math-verify reads: signs, units, separators, mixed numbers.

Texts only; nothing is evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_COMMANDS = {
    **{"∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "±": "pm", "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div"},
    **{"∪": "cup", "∩": "cap", "∈": "in", "∅": "emptyset", "π": "pi", "θ": "theta", "√": "sqrt"},
}
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–﹣－", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        **dict.fromkeys("€£¥₹₩₽¢", ""),
        **{sign: rf"\{name} " for sign, name in _COMMANDS.items()},
        "°": r"^\circ",
        "％": r"\%",
        "∕": "/",
        "⁄": "/",
    }
)
_SPACE = r"(?:[ ~]|\\[,;: ])"
_FIXED = (
    (re.compile(r"~|\\\$"), " "),
    (re.compile(r"^(?:\s|\\[ ,;:!])+|(?:\s|\\[ ,;:!\\]|[.,;:])+$"), ""),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\^?\\degrees?(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"^([A-Za-z])\)$"), r"\1"),  # a choice
    (re.compile(rf"(?<![\d.,])(\d{{1,3}})((?:{_SPACE}\d{{3}})+)(?![\d/])"), lambda m: m[1] + re.sub(r"\D", "", m[2])),
    (re.compile(r"^([+-]?\d{1,3})((?:(?:,|\{,\}|,\\!)\d{3})+)(?![\d,])"), lambda m: m[1] + re.sub(r"\D", "", m[2])),
    (re.compile(rf"(?<![\d./])(\d+){_SPACE}+(\d+)/(\d+)(?![\d.])"), r"\1 \\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])"), lambda m: rf"{m[1]} \times 10^{{{int(m[2])}}}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\text\{\s*\(?([A-Za-z])\)?[.:]?\s*\}"), r"\\text{\1}"),
)
_REPEATING = re.compile(r"(\d+)\.(\d*)\\overline\{(\d{1,18})\}")
_SHORT = "cm|mm|km|ft|mi|yd|kg|mg|lb|lbs|oz|ml|hr|hrs|min|sec|mph|kph|sq|m/s|km/h|cents?"
_UNIT = re.compile(rf"(.*[\d}})])\s+((?:(?:[A-Za-z]{{4,}}|{_SHORT})(?:\^\{{?\d\}}?)?\s*)+)")
_WORD = re.compile(r"[A-Za-z]{4,}|(?i:yes|no|on|off|one|two|six|ten)")
_MEANT = frozenset(
    "pi sqrt sin cos tan cot sec csc log ln lg exp or and mod inf infinity percent percentage pct to".split()
)


def _repeating(match: re.Match[str]) -> str:
    """A decimal fraction that repeats, as a fraction."""
    whole, fixed, again = match[1], match[2], match[3]
    scale = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), scale) + Fraction(int(again), scale * (10 ** len(again) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")


def _sign(one: str) -> str:
    """A fraction in one sign as LaTeX, another sign as it is."""
    top, slash, bottom = unicodedata.normalize("NFKD", one).partition("\u2044")
    return rf" \frac{{{top}}}{{{bottom or 1}}}" if slash and top.isdigit() else one


def normal(text: str) -> str:
    """An answer or a reference, without what is around it, as math-verify reads it best."""
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKD', m[0])}}}", text)
    text = "".join(one if one.isascii() else _sign(one) for one in text).translate(_SIGNS)
    text = _REPEATING.sub(_repeating, re.sub(r"\\sqrt\s+(\d+|\w)", r"\\sqrt{\1}", text))
    for pattern, instead in _FIXED:
        text = pattern.sub(instead, text)
    text = text.strip()
    found = _UNIT.fullmatch(text)
    if found and not _MEANT & set(found[2].lower().split()):
        return found[1]
    return rf"\text{{{text}}}" if _WORD.fullmatch(text) and text.lower() not in _MEANT else text


_UPRIGHT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def bare(text: str) -> str:
    """A normalised text without its fonts: what is the same then is the same, whatever else can be read in it."""
    return " ".join(re.sub(rf"{_SPACE}", " ", _UPRIGHT.sub(r"\1", text)).split())


_NUMBER = r"[^<>=A-Za-z]*(?:\\[A-Za-z]+[^<>=A-Za-z]*)*"
_THAN = r"(?:<|>|\\(?:l|g)(?:eqslant|eq|e|t)(?![A-Za-z]))\s*"
_BOUNDS = re.compile(rf"(?:{_NUMBER}{_THAN})?[A-Za-z]\s*{_THAN}{_NUMBER}|{_NUMBER}{_THAN}[A-Za-z]")


def bounds(text: str) -> bool:
    """Whether an answer is a name between numbers, which is an interval; any other inequality may be the question."""
    return bool(_BOUNDS.fullmatch(text))


_PERCENT = re.compile(r"([^%]*[^%\s\\])\s*(?:\\?%|percent(?:age)?|pct|\\text\{\s*(?:\\?%|percent(?:age)?|pct)\s*\})")


def readings(reference: str, answer: str) -> list[tuple[str, str]]:
    """Pairs of which one has to be equal: a percentage is the number before its sign, or its hundredth, but beside
    another percentage, with which it shares the sign.
    """
    percents = [_PERCENT.fullmatch(one) for one in (reference, answer)]
    if not any(percents):
        return [(reference, answer)]
    bare = [one if found is None else found[1] for one, found in zip((reference, answer), percents, strict=True)]
    pairs = [(bare[0], bare[1])]
    if not all(percents):
        of_hundred = [
            one if found is None else rf"\frac{{{one}}}{{100}}" for one, found in zip(bare, percents, strict=True)
        ]
        pairs.append((of_hundred[0], of_hundred[1]))
    return pairs


def boxed(text: str) -> list[str]:
    """What the last box of a text holds, then the same with boxes right before it ("\\boxed{1} and \\boxed{2}").

    Empty if the last is, or never closes: an answer that was cut in it has none, as verl's MATH reward has it, and the
    box before was another one's.
    """
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    box = text[start:].split("ed" if text[start + 1] == "b" else "box", 1)[1]
    if box.lstrip()[:1] != "{":  # as verl reads it
        return [box.split("$")[0].strip()]
    depth = 0
    for place, one in enumerate(box.lstrip()):
        depth += (one == "{") - (one == "}")
        if depth == 0:
            last = box.lstrip()[1:place]
            return list(dict.fromkeys([last, extract_boxed_content(text, "last")])) if last.strip() else []
    return []


KNOWN = (
    (r"\frac{1}{2}", "0.5", True),
    ("50", r"50\%", True),
    (r"50\%", "0.5", True),
    (r"50\%", "50", True),
    ("50", "0.5", False),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("(1,2)", "(2,1)", False),
    ("1500", "1.5e3", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    ("[1,2)", "[1,2]", False),
    ("x=1", "1", True),
    ("x>1", r"(1,\infty)", True),
    (r"(1,\infty)", "x>1", True),
    (r"\text{yes}", "no", False),
    (r"\sin(x)+\pi", r"\pi+\sin x", True),
    ("3+4i", "4i+3", True),
    ("10^{10}", "10000000000", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
    (r"1\frac{1}{2}", "1.5", True),
    ("1,000", "1000", True),
    (r"5\text{ cm}", "5", True),
    (r"90^\circ", "90", True),
    ("5!", "120", True),
    (r"10\%,20\%", r"20\%,10\%", True),
    ("x", "y", False),
)
"""References and answers whose equality is known; they also have math-verify build its grammars."""
