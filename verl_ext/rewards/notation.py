# SPDX-License-Identifier: Apache-2.0
"""What models write in a box, in the notation that math-verify reads: signs, units, separators, mixed numbers.

Texts only; nothing is evaluated.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

_COMMANDS = {
    **{"∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "±": "pm", "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div"},
    **{"∪": "cup", "∩": "cap", "∈": "in", "∅": "emptyset", "π": "pi", "θ": "theta", "√": "sqrt", "∛": "sqrt[3]"},
    **{"⩽": "le", "⩾": "ge", "ℝ": "mathbb{R}", "ℤ": "mathbb{Z}", "ℚ": "mathbb{Q}", "ℕ": "mathbb{N}", "ℂ": "mathbb{C}"},
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
LONGEST = 1000
"""Characters beyond which a text is left as it is: some patterns take time that grows with the square."""
_CIRC = r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})"
_ANGLE = r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d+\}?)?\s*(?:\\left\s*)?[({]?\s*-?)(\d+(?:\.\d+)?)"
_FIXED = (
    (re.compile(r"^(-?)\s*US\s*\\?\$"), r"\1"),
    (re.compile(r"~|\\\$"), " "),
    (re.compile(r"^(?:\s|\\[ ,;:!])+|(?:\s|\\[ ,;:!\\]|[.,;:])+$"), ""),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\^?\\degrees?(?![A-Za-z])"), r"^\\circ"),
    (re.compile(rf"{_ANGLE}{_CIRC}"), r"\1\\frac{\2\\pi}{180}"),
    (re.compile(rf"({_CIRC})\s*(?:\\(?:text|mathrm)\s*\{{\s*[CF]\s*\}}|[CF])$"), r"\1"),
    (re.compile(r"^([A-Za-z])\)$"), r"\1"),  # a choice
    (re.compile(r"^(\*\*|`)([^*`]+)\1$"), r"\2"),
    (re.compile(r"\\\\\[-?[\d.]+(?:pt|em|ex|mm|cm)\]|\\cr(?![A-Za-z])"), r"\\\\"),  # the end of a matrix's row
    (re.compile(r"\\(?:l|c)?dots[bcmio]?(?![A-Za-z])|\.\.\.|…"), r"\\ldots"),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(rf"(?<![\d.,])(\d{{1,3}})((?:{_SPACE}\d{{3}})+)(?![\d/])"), lambda m: m[1] + re.sub(r"\D", "", m[2])),
    (
        re.compile(r"^([+-]?\d{1,3})((?:(?:,|\{,\}|,\\!|\\text\{,\})\d{3})+)(?![\d,])"),
        lambda m: m[1] + re.sub(r"\D", "", m[2]),
    ),
    (re.compile(rf"(?<![\d./])(\d+){_SPACE}+(\d+)/(\d+)(?![\d.])"), r"\1 \\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])"), lambda m: rf"{m[1]} \times 10^{{{int(m[2])}}}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\text\{\s*\(?([A-Za-z])\)?[.:]?\s*\}"), r"\\text{\1}"),
    (re.compile(r"^\\text\{([A-Za-z][A-Za-z ]*)[.:;,!]\s*\}$"), r"\\text{\1}"),
    (re.compile(r"^([\[(\]])([^;,()\[\]]+);([^;,()\[\]]+)([\])\[])$"), r"\1\2,\3\4"),
    (re.compile(r"^\]([^\[\]()]*,[^\[\]()]*)([\[\]])$"), r"(\1\2"),
    (re.compile(r"^([\[(])([^\[\]()]*,[^\[\]()]*)\[$"), r"\1\2)"),
)
_ROOT = re.compile(r"\\sqrt(\[\d+\])?\s*(?:\(([^()]*)\)|(?<=[\s\]])(\d+|\w))")
_REPEATING = (
    re.compile(r"(\d+)\.(\d*)\\(?:overline|bar)\{(\d{1,18})\}"),
    re.compile(r"(\d+)\.(\d*)\\dot\{?(\d)\}?(?!\d|\\dot)"),
    re.compile(r"^-?(\d+)\.(\d*)\((\d{1,18})\)$"),
    re.compile(r"(\d+)\.(\d{0,9}?)(\d{1,6}?)\3\3+\s*(?:\.\.\.|…|\\[lc]?dots(?![A-Za-z]))"),
)
_SHORT = "cm|mm|km|ft|mi|yd|kg|mg|lb|lbs|oz|ml|hr|hrs|min|sec|mph|kph|sq|m/s|km/h|cents?|USD|EUR|GBP|CNY|INR|JPY"
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
    return rf"{'-' * match[0].startswith('-')}\frac{{{value.numerator}}}{{{value.denominator}}}"


_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED = re.compile("[₀-₉]+")


def _sign(one: str) -> str:
    """A fraction in one sign as LaTeX, a wide or a mathematical letter as a plain one, a sign that is not seen as
    nothing, any script's digit as ours, another sign as it is."""
    plain, kind = unicodedata.normalize("NFKD", one), unicodedata.category(one)
    top, slash, bottom = plain.partition("\u2044")
    if slash and top.isdigit():
        return rf" \frac{{{top}}}{{{bottom or 1}}}"
    if kind in ("Cf", "Nd"):
        return str(unicodedata.decimal(one)) if kind == "Nd" else ""
    wide = unicodedata.east_asian_width(one) == "F" or "\U0001d400" <= one <= "\U0001d7ff"
    return plain if wide else one


def normal(text: str) -> str:
    """An answer or a reference, without what is around it, as math-verify reads it best; as it is beyond `LONGEST`."""
    if len(text) > LONGEST:
        return text
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKD', m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKD', m[0])}}}", text)
    text = "".join(one if one.isascii() else _sign(one) for one in text).translate(_SIGNS)
    text = _ROOT.sub(lambda m: rf"\sqrt{m[1] or ''}{{{m[2] or m[3]}}}", text)
    for pattern in _REPEATING:
        text = pattern.sub(_repeating, text)
    for pattern, instead in _FIXED:
        text = pattern.sub(instead, text)
    text = _several(text.strip())
    found = _UNIT.fullmatch(text)
    if found and not _MEANT & set(found[2].lower().split()):
        return found[1]
    return rf"\text{{{text}}}" if _WORD.fullmatch(text) and text.lower() not in _MEANT else text


_GROUP = re.compile(r"\d\s*\\(?:text|mathrm|mbox)\s*\{(?!\s*(?:and|or|to)?\W*\})[^{}]*\}\s*(?=\d)")
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+){2,}")


def _several(text: str) -> str:
    """Several quantities with units between ("2 hours 30 minutes") as words, a ratio of more than two as a tuple, and
    "x<1 or x>2" as intervals: math-verify takes one number, or one inequality, for the whole."""
    parts = _OR.split(text)
    if len(parts) > 1 and all(spans := [_interval(one.strip()) for one in parts]):
        return r"\cup ".join(spans)
    if _GROUP.search(text):
        return rf"\text{{{bare(text)}}}"
    if _RATIO.fullmatch(text):
        numbers = [int(one) for one in text.split(":")]
        common = math.gcd(*numbers) or 1
        return f"({','.join(str(one // common) for one in numbers)})"
    return text


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


_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|\bor\b")


def _interval(text: str) -> str:
    """The interval of a name between numbers; empty if it is something else."""
    if not bounds(text):
        return ""
    parts = [one.strip() for one in re.split(rf"({_THAN})", text)]
    turned = {one.lstrip("\\")[0] in ">g" for one in parts[1::2]}
    if len(turned) > 1:
        return ""
    if True in turned:  # from the smaller to the larger
        parts.reverse()
    if len(parts) == 3:
        parts = ["-\\infty", "<", *parts] if parts[0].isalpha() else [*parts, "<", "\\infty"]
    low, above_low, _, below_high, high = parts
    return f"{'[' if 'e' in above_low else '('}{low},{high}{']' if 'e' in below_high else ')'}"


_CLOCK = re.compile(r"(\d[\d:.]*)\s*([AaPp])\.?\s?[Mm]\.?")
_BASE = re.compile(r"\(?(\d[0-9A-Fa-f]*|[A-F][0-9A-F]+)\)?\s*_\s*\{?\s*(\d{1,2}|[a-z]{3,7})\s*\}?")
_NAMED = "zero one two three four five six seven eight nine ten eleven twelve".split()


def _tag(text: str) -> str:
    """An hour with its half of the day, or a number with its base; empty if it is something else."""
    if found := _CLOCK.fullmatch(bare(text)):
        return f"{found[1]} {found[2].lower()}m"
    if found := _BASE.fullmatch(bare(text)):
        base = str(_NAMED.index(found[2])) if found[2] in _NAMED else found[2]
        return f"{found[1].lower()} base {base}"
    return ""


_PERCENT = re.compile(r"([^%]*[^%\s\\])\s*(?:\\?%|percent(?:age)?|pct|\\text\{\s*(?:\\?%|percent(?:age)?|pct)\s*\})")


def readings(reference: str, answer: str) -> list[tuple[str, str]]:
    """Pairs of which one has to be equal: a percentage is the number before its sign, or its hundredth, but beside
    another percentage, with which it shares the sign. Of two hours, or two numbers with a base, nothing is left out.
    """
    tags = [_tag(one) for one in (reference, answer)]
    if all(tags):
        return [(rf"\text{{{tags[0]}}}", rf"\text{{{tags[1]}}}")]
    percents = [_PERCENT.fullmatch(one) for one in (reference, answer)]
    if not any(percents):
        return [(reference, answer)]
    plain = [one if found is None else found[1] for one, found in zip((reference, answer), percents, strict=True)]
    pairs = [(plain[0], plain[1])]
    if not all(percents):
        of_hundred = [
            one if found is None else rf"\frac{{{one}}}{{100}}" for one, found in zip(plain, percents, strict=True)
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
