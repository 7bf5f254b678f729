# SPDX-License-Identifier: Apache-2.0
"""Start-up: what the plugin adds to `import verl`.

Each measurement is `import verl` in a fresh Python process, once with the plugin and once without any
(``VERL_USE_EXTERNAL_PLUGINS``), in alternating order so that a drift of the machine's load falls on both alike. The
first pair warms the file cache and is not counted. On a busy machine the wall-clock difference of two imports drowns in
noise: look at the CPU rows, and at the last row, which times the plugin's entry point by itself once verl is imported.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from verl_ext.lab.bench._shared import Parser, alternate

MIN_PAIRS = 3
DEFAULT_PAIRS = 9

_PROBE = """
import json, sys, time
wall, cpu = time.perf_counter(), time.process_time()
import verl
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
loaded, alone = "verl_ext.plugin" in sys.modules, 0.0
if not loaded:
    start = time.perf_counter()
    from importlib.metadata import entry_points
    for entry_point in entry_points(group="verl.plugins"):
        if entry_point.name == "verl_ext":
            entry_point.load()
    alone = time.perf_counter() - start
print("\\n" + json.dumps({"wall": wall, "cpu": cpu, "alone": alone, "plugin": loaded}))
"""


def time_import(plugin: bool) -> dict[str, float]:
    """Seconds of one `import verl` in a fresh process: ``wall`` clock, ``cpu``, and (``plugin=False`` only) ``alone``,
    the wall-clock time of loading the plugin's entry point afterwards.

    Raises:
        RuntimeError: the import failed, or the plugin was (not) loaded against what was asked for.
    """
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "verl_ext" if plugin else "none"}
    environment.pop("VERL_USE_EXTERNAL_MODULES", None)
    done = subprocess.run([sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`import verl` failed in a fresh process:\n{done.stderr.strip()}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if result["plugin"] is not plugin:
        state = "was not loaded: is verl-ext installed (`pip show verl-ext`)?" if plugin else "was loaded all the same."
        raise RuntimeError(f"`import verl`: the plugin {state}")
    return {clock: float(result[clock]) for clock in ("wall", "cpu", "alone")}


def measure(pairs: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """``pairs`` measurements (without the plugin, with it), after one pair that is thrown away."""
    calls = [partial(time_import, plugin) for plugin in (False, True)]
    return list(zip(*alternate(lambda call: call(), calls, pairs), strict=True))


def _row(name: str, values: Sequence[float]) -> str:
    return f"{name:<34}{statistics.median(values):>9.3f}{min(values):>9.3f}{max(values):>9.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and, with ``--json``, one JSON object on the last line. Returns the exit code."""
    parser = Parser("import", __doc__)
    parser.add_argument("--pairs", type=int, default=DEFAULT_PAIRS, help="measured pairs (default: %(default)s)")
    args = parser.parsed(argv)
    if args.pairs < MIN_PAIRS:
        parser.error(f"--pairs {args.pairs}: a median needs at least {MIN_PAIRS}")
    try:
        results = measure(args.pairs)
    except RuntimeError as error:
        print(f"verl-ext bench import: {error}", file=sys.stderr)
        return 1
    print(f"import verl, {args.pairs} pairs of fresh processes, seconds")
    print(f"{'':<34}{'median':>9}{'min':>9}{'max':>9}")
    figures: dict[str, float] = {}
    for clock, label in (("wall", ""), ("cpu", " (CPU)")):
        without = [pair[0][clock] for pair in results]
        with_plugin = [pair[1][clock] for pair in results]
        added = [b - a for a, b in zip(without, with_plugin, strict=True)]
        print(_row(f"without plugins{label}", without))
        print(_row(f"with the plugin{label}", with_plugin))
        print(_row(f"added, pair by pair{label}", added))
        suffix = "_s" if clock == "wall" else "_cpu_s"
        figures[f"import_verl{suffix}"] = round(statistics.median(without), 4)
        figures[f"with_plugin{suffix}"] = round(statistics.median(with_plugin), 4)
        figures[f"added{suffix}"] = round(statistics.median(added), 4)
    alone = [pair[0]["alone"] for pair in results]
    print(_row("plugin alone, after verl", alone))
    figures["plugin_alone_s"] = round(statistics.median(alone), 4)
    if args.json:
        print(json.dumps({**figures, "pairs": args.pairs}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
