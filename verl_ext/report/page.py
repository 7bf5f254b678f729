# SPDX-License-Identifier: Apache-2.0
"""One HTML file that compares runs and that a browser opens from disk.

The file holds everything: style, script and numbers, and asks the network for nothing; its content security policy
allows this one script and this one style, by their hashes. Names come from the data and are put on the page as text
nodes, never as markup. The charts are drawn by the script as SVG.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from verl_ext.html_page import page

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --text: #333; --error: #c0262d; --back: #fff; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --error: #ff7b72; --back: #16181c; } }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); }
header { position: sticky; top: 0; z-index: 2; background: var(--back); border-bottom: 1px solid var(--line);
  padding: .5rem 1rem; }
.row { display: flex; flex-wrap: wrap; gap: .4rem 1.1rem; align-items: center; }
h1 { font-size: 1rem; margin: 0 auto 0 0; overflow-wrap: anywhere; }
label { display: flex; gap: .35rem; align-items: center; }
select, input, button { font: inherit; color: inherit; }
button { background: none; border: 1px solid var(--line); border-radius: 4px; padding: .05rem .5rem; cursor: pointer; }
button:hover { background: var(--soft); }
button[aria-pressed=true] { background: #8883; }
#legend { margin-top: .4rem; gap: .3rem; }
#legend button { display: flex; gap: .4rem; align-items: center; border-radius: 1rem; }
#legend button[aria-pressed=false] { opacity: .4; background: none; text-decoration: line-through; }
#legend svg { width: 26px; height: 8px; }
main { padding: 0 1rem 3rem; }
h2 { font-size: 1rem; margin: 1.2rem 0 .5rem; display: flex; gap: .8rem; align-items: center; }
h2 button { font-weight: normal; font-size: .85rem; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)); gap: .8rem; }
.panel { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .6rem .3rem; margin: 0; min-width: 0; }
.panel figcaption { display: flex; gap: .5rem; align-items: baseline; }
.panel figcaption div { flex: 1; min-width: 0; }
.panel strong { display: block; font-size: .87rem; overflow-wrap: anywhere; }
.panel code { font-size: .72rem; opacity: .75; overflow-wrap: anywhere; }
.panel button { font-size: .75rem; }
.panel .plot { position: relative; }
.panel svg { display: block; width: 100%; height: 220px; overflow: hidden; }
.panel .note { margin: 0; font-size: .75rem; opacity: .85; min-height: 1.1em; overflow-wrap: anywhere; }
svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.tip { position: absolute; pointer-events: none; background: var(--back); border: 1px solid var(--line);
  border-radius: 4px; padding: .2rem .45rem; font-size: .75rem; white-space: pre; z-index: 1; max-width: 100%;
  overflow: hidden; box-shadow: 0 1px 4px #0003; }
.tip div { display: flex; gap: .4rem; align-items: center; }
.tip i { width: 10px; height: 10px; border-radius: 2px; flex: none; }
details { margin-top: .8rem; }
summary { cursor: pointer; }
#list { columns: 20rem; max-height: 22rem; overflow-y: auto; border: 1px solid var(--line); padding: .4rem .6rem;
  margin-top: .4rem; }
#list label { font-size: .8rem; break-inside: avoid; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin-top: .4rem; }
th, td { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
.problems { color: var(--error); white-space: pre-line; overflow-wrap: anywhere; }
"""

BODY = """<header>
<div class="row">
<h1>{title}</h1>
<label>x <select id="x"></select></label>
<label title="trailing mean over so many steps">smoothing <input id="smooth" type="range" min="0" max="100">
<output id="window"></output></label>
<label>seeds <select id="band">
<option value="std">mean and standard deviation</option>
<option value="range">mean and range</option>
<option value="none">mean alone</option>
<option value="runs">each its own line</option>
</select></label>
<label><input id="log" type="checkbox"> logarithmic</label>
</div>
<div class="row" id="legend"></div>
</header>
<main>
<p class="problems" id="problems"></p>
<details id="picker"><summary></summary>
<p><input id="search" type="search" placeholder="part of a metric's name" size="40"></p>
<div id="list"></div>
</details>
<div id="sections"></div>
<details id="runs"><summary></summary><table><thead><tr><th></th><th>run</th><th>group</th><th>steps</th><th>read
from</th><th>problems</th></tr></thead><tbody></tbody></table></details>
<p class="note" id="about"></p>
</main>"""


def render(data: Mapping[str, Any]) -> str:
    """The page.

    Args:
        data: of `verl_ext.report.data.page_data`.
    """
    from verl_ext.report.script import SCRIPT

    return page(
        title=data["title"], style=STYLE, body=BODY.format(title=html.escape(data["title"])), data=data, script=SCRIPT
    )
