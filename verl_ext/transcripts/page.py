# SPDX-License-Identifier: Apache-2.0
"""One HTML file of transcripts that a browser opens from disk.

The file holds everything: style, script and data, and asks the network for nothing; its content security policy
allows this one script and this one style, by their hashes, and no request at all. Text of the model is data in it:
the script puts it on the page as text nodes, never as markup.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.html_page import page
from verl_ext.transcripts.read import OUTCOMES, new_part

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --good: #1a7f37; --bad: #b35900; --error: #c0262d; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #e3a008; --error: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.45 system-ui, sans-serif; height: 100vh; display: flex; flex-direction: column; }
header { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: center; padding: .6rem 1rem;
  border-bottom: 1px solid var(--line); }
h1 { font-size: 1rem; margin: 0 auto 0 0; }
label { display: flex; gap: .35rem; align-items: center; }
select, input, button { font: inherit; padding: .15rem .4rem; }
main { flex: 1; min-height: 0; display: grid; grid-template-columns: minmax(18rem, 24rem) 1fr; }
#list { margin: 0; padding: 0; list-style: none; overflow-y: auto; border-right: 1px solid var(--line); }
#list button { display: grid; grid-template-columns: 1fr auto; gap: 0 .6rem; width: 100%; text-align: left;
  padding: .4rem 1rem; border: 0; border-bottom: 1px solid var(--line); background: none; color: inherit; }
#list button:hover { background: var(--soft); }
#list button[aria-current=true] { background: #8883; box-shadow: inset 3px 0 0 currentColor; }
#list button :nth-child(even) { justify-self: end; }
#list small, .facts { opacity: .75; }
#detail { overflow-y: auto; padding: 1rem 1.4rem 4rem; }
#detail h2 { font-size: 1rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }
.success { color: var(--good); } .failure { color: var(--bad); } .error { color: var(--error); }
.success, .failure, .error { font-weight: 600; }
.turn { border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; overflow: hidden; }
.turn > header { background: var(--soft); padding: .4rem .8rem; gap: .2rem .9rem; }
.turn.masked { opacity: .55; }
.turn section { padding: .3rem .8rem .6rem; }
.turn h3 { font-size: .8rem; margin: .4rem 0 .2rem; opacity: .7; font-weight: 600; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.response { border-left: 3px solid #8888; padding-left: .7rem; }
.invalid { color: var(--error); font-weight: 600; }
.bar { display: inline-block; width: 6rem; height: .55rem; background: var(--soft); position: relative; }
.bar i { position: absolute; top: 0; bottom: 0; background: var(--good); }
.bar i.less { background: var(--error); }
details summary { cursor: pointer; opacity: .75; }
"""

SCRIPT = """
"use strict";
const all = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const PAGE = 300;
let shown = [], current = 0, room = PAGE;

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}
function number(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
}
function words(value) { return typeof value === "string" ? value : JSON.stringify(value); }
function shortId(id) {
  const cut = id.lastIndexOf("_");
  return cut > 0 ? id.slice(0, Math.min(8, cut)) + id.slice(cut) : id;
}
function options(select, values) {
  for (const value of values) {
    const option = make("option", "", String(value));
    option.value = String(value);
    select.append(option);
  }
}
function filters() {
  return { step: $("step").value, agent: $("agent").value, outcome: $("outcome").value, text: $("text").value };
}
function holds(record, want) {
  if (want.step && String(record.step) !== want.step) return false;
  if (want.agent && !record.agents.includes(want.agent)) return false;
  if (want.outcome && record.outcome !== want.outcome) return false;
  if (!want.text) return true;
  const text = want.text.toLowerCase();
  return record.trajectory.toLowerCase().includes(text) || record.turns.some(
    turn => (turn.prompt + "\\n" + turn.response).toLowerCase().includes(text));
}
function apply(keep) {
  const before = shown[current];
  const want = filters();
  shown = all.filter(record => holds(record, want));
  current = Math.max(0, keep && before ? shown.indexOf(before) : 0);
  room = Math.max(PAGE, current + 1);
  const hash = new URLSearchParams();
  for (const [name, value] of Object.entries(want)) if (value) hash.set(name, value);
  if (location.hash.slice(1) !== String(hash)) history.replaceState(null, "", "#" + hash);
  list();
  detail();
}
function list() {
  const target = $("list");
  target.replaceChildren();
  $("count").textContent = shown.length === all.length
    ? all.length + " trajectories" : shown.length + " of " + all.length + " trajectories";
  shown.slice(0, room).forEach((record, index) => {
    const button = make("button");
    button.type = "button";
    button.setAttribute("aria-current", String(index === current));
    button.append(make("span", "", "step " + record.step + " \\u00b7 " + shortId(record.trajectory)),
      make("span", record.outcome, record.outcome),
      make("small", "", [record.turns.length + (record.turns.length === 1 ? " turn" : " turns"),
        record.agents.join(", ")].filter(Boolean).join(" \\u00b7 ")),
      make("small", "", "reward " + number(record.reward)));
    button.addEventListener("click", () => choose(index));
    target.append(make("li"));
    target.lastElementChild.append(button);
  });
  if (shown.length > room) {
    const more = make("button", "", "show more (" + (shown.length - room) + ")");
    more.type = "button";
    more.addEventListener("click", () => { room += PAGE; list(); });
    target.append(make("li"));
    target.lastElementChild.append(more);
  }
}
function choose(index) {
  current = index;
  if (current >= room) { room = current + PAGE; list(); }
  document.querySelectorAll("#list button").forEach((button, position) =>
    button.setAttribute("aria-current", String(position === current)));
  detail();
}
function block(target, title, text, className) {
  target.append(make("h3", "", title), make("pre", className, words(text)));
}
function bar(value, largest) {
  const box = make("span", "bar"), fill = make("i", value < 0 ? "less" : "");
  const width = largest > 0 ? 50 * Math.abs(value) / largest : 0;
  fill.style.left = (value < 0 ? 50 - width : 50) + "%";
  fill.style.width = width + "%";
  box.append(fill);
  return box;
}
function detail() {
  const target = $("detail"), record = shown[current];
  target.replaceChildren();
  target.scrollTop = 0;
  if (!record) { target.append(make("p", "", "No trajectory is chosen by these filters.")); return; }
  target.append(make("h2", "", "step " + record.step + ", trajectory " + record.trajectory));
  const facts = make("p", "facts");
  facts.append(make("span", record.outcome, record.outcome), ", reward " + number(record.reward));
  if (record.agents.length) facts.append(", agents " + record.agents.join(", "));
  if (record.failure || record.stop_reason) facts.append(", ended by " + (record.failure || record.stop_reason));
  for (const [name, value] of Object.entries(record.info)) facts.append(", " + name + " " + number(value));
  target.append(facts);
  const largest = Math.max(...record.turns.map(turn => Math.abs(Number(turn.advantage)) || 0));
  for (const turn of record.turns) {
    const card = make("article", turn.counted ? "turn" : "turn masked"), head = make("header"), body = make("section");
    head.append(make("strong", "", "turn " + turn.turn + (turn.agent ? " \\u00b7 " + turn.agent : "")));
    if (turn.reward !== null) head.append(make("span", "", "reward " + number(turn.reward)));
    head.append(make("span", "", "advantage " + number(turn.advantage)), bar(Number(turn.advantage) || 0, largest));
    if (!turn.valid) head.append(make("span", "invalid", "invalid action"));
    if (!turn.counted) head.append(make("span", "", "not counted"));
    head.append(make("small", "facts", turn.prompt_tokens + " + " + turn.response_tokens + " tokens"));
    if (turn.observation !== undefined) block(body, "observation", turn.observation);
    if (turn.continued) {
      block(body, "prompt, continued", turn.added);
      const whole = make("details");
      whole.append(make("summary", "", "the whole prompt"));
      whole.addEventListener("toggle", () => {
        if (whole.open && whole.children.length === 1) whole.append(make("pre", "", turn.prompt));
      });
      body.append(whole);
    } else block(body, "prompt", turn.prompt);
    block(body, "response", turn.response, "response");
    if (turn.action !== undefined) block(body, "action", turn.action);
    const more = Object.entries(turn.more);
    if (more.length) {
      const rest = make("details");
      rest.append(make("summary", "", "more"),
        make("pre", "", more.map(([name, value]) => name + " = " + words(value)).join("\\n")));
      body.append(rest);
    }
    card.append(head, body);
    target.append(card);
  }
}
for (const record of all) {
  let before = null;
  for (const turn of record.turns) {
    if (turn.continued) turn.prompt = before.prompt + before.response + turn.added;
    before = turn;
  }
}
options($("step"), [...new Set(all.map(record => record.step))]);
options($("agent"), [...new Set(all.flatMap(record => record.agents))].sort());
function restore() {
  const hash = new URLSearchParams(location.hash.slice(1));
  for (const name of ["step", "agent", "outcome", "text"]) {
    $(name).value = hash.get(name) || "";
    if ($(name).selectedIndex === -1) $(name).value = "";
  }
  apply(false);
}
for (const name of ["step", "agent", "outcome"]) $(name).addEventListener("change", () => apply(true));
$("text").addEventListener("input", () => apply(true));
window.addEventListener("hashchange", restore);
document.addEventListener("keydown", event => {
  if (["SELECT", "INPUT"].includes(event.target.tagName)) return;
  const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
  if (!move || current + move < 0 || current + move >= shown.length) return;
  event.preventDefault();
  choose(current + move);
  const chosen = document.querySelector("#list button[aria-current=true]");
  if (chosen) chosen.scrollIntoView({ block: "nearest" });
});
restore();
"""

BODY = """<header>
<h1>{title}</h1>
<span id="count"></span>
<label>step <select id="step"><option value="">all</option></select></label>
<label>agent <select id="agent"><option value="">all</option></select></label>
<label>outcome <select id="outcome"><option value="">all</option>{outcomes}</select></label>
<label>text <input id="text" type="search" placeholder="in prompts, responses, ids"></label>
</header>
<main>
<ol id="list"></ol>
<div id="detail"></div>
</main>
<noscript>This page needs its own script to show the transcripts it holds.</noscript>"""


def render(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """The page.

    Args:
        records: transcripts, as `verl_ext.transcripts.read.read` returns them.
        title: of the page.
    """
    outcomes = "".join(f'<option value="{name}">{name}</option>' for name in OUTCOMES)
    return page(
        title=title,
        style=STYLE,
        body=BODY.format(title=html.escape(title), outcomes=outcomes),
        data=[_condensed(record) for record in records],
        script=SCRIPT,
    )


def _condensed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with each prompt that continues the turn before it cut to what is new; the script puts it back."""
    turns = []
    before = None
    for turn in record["turns"]:
        continued, added = new_part(turn, before)
        if continued:
            turns.append({**{name: value for name, value in turn.items() if name != "prompt"}, "added": added})
        else:
            turns.append(dict(turn))
        turns[-1]["continued"] = continued
        before = turn
    return {**record, "turns": turns}
