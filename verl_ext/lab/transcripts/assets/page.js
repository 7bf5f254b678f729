// SPDX-License-Identifier: Apache-2.0
// The list and the turns of the transcripts in the page; see lab/transcripts/page.py.
const all = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const PAGE = 300, FILTERS = ["step", "agent", "outcome", "text"];
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
const several = all.some(record => record.turns.some(turn => (turn.more.model || "policy") !== "policy"));
function speaker(turn) { return turn.agent + (several && turn.agent ? " (" + (turn.more.model || "policy") + ")" : ""); }
function options(select, values) {
  select.append(...values.map(value => new Option(value, value)));
}
function holds(record, want) {
  if (want.step && String(record.step) !== want.step) return false;
  if (want.agent && !record.agents.includes(want.agent)) return false;
  if (want.outcome && record.outcome !== want.outcome) return false;
  if (!want.text) return true;
  const text = want.text.toLowerCase();
  return record.trajectory.toLowerCase().includes(text) || record.turns.some(
    turn => (turn.prompt + "\n" + turn.response).toLowerCase().includes(text));
}
function apply(keep) {
  const before = shown[current];
  const want = Object.fromEntries(FILTERS.map(name => [name, $(name).value]));
  shown = all.filter(record => holds(record, want));
  current = Math.max(0, keep && before ? shown.indexOf(before) : 0);
  room = Math.max(PAGE, current + 1);
  list();
  detail();
}
// What is chosen is in the address; the trajectory by its name, as others come before it when a page is made anew.
function address() {
  const hash = new URLSearchParams(), record = shown[current];
  for (const name of FILTERS) if ($(name).value) hash.set(name, $(name).value);
  if (record) { hash.set("trajectory", record.trajectory); hash.set("of", record.step); }
  if (location.hash.slice(1) !== String(hash)) history.replaceState(null, "", "#" + hash);
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
    button.append(make("span", "", "step " + record.step + " \u00b7 " + shortId(record.trajectory)),
      make("span", record.outcome, record.outcome),
      make("small", "", [record.turns.length + (record.turns.length === 1 ? " turn" : " turns"),
        record.agents.join(", ")].filter(Boolean).join(" \u00b7 ")),
      make("small", "", "reward " + number(record.reward)));
    button.addEventListener("click", () => choose(index));
    target.append(item(button));
  });
  if (shown.length > room) {
    const more = make("button", "", "show more (" + (shown.length - room) + ")");
    more.type = "button";
    more.addEventListener("click", () => { room += PAGE; list(); });
    target.append(item(more));
  }
}
function item(button) { const node = make("li"); node.append(button); return node; }
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
  address();
  target.replaceChildren();
  target.scrollTop = 0;
  if (!record) { target.append(make("p", "", "No trajectory is chosen by these filters.")); return; }
  target.append(make("h2", "", "step " + record.step + ", trajectory " + record.trajectory));
  const facts = make("p", "facts");
  facts.append(make("span", record.outcome, record.outcome), ", reward " + number(record.reward));
  if (record.agents.length) facts.append(", agents " + [...new Set(record.turns.map(speaker))].filter(Boolean).join(", "));
  if (record.failure || record.stop_reason) facts.append(", ended by " + (record.failure || record.stop_reason));
  for (const [name, value] of Object.entries(record.info)) facts.append(", " + name + " " + number(value));
  target.append(facts);
  const largest = Math.max(...record.turns.map(turn => Math.abs(Number(turn.advantage)) || 0));
  for (const turn of record.turns) {
    const card = make("article", turn.counted ? "turn" : "turn masked"), head = make("header"), body = make("section");
    head.append(make("strong", "", "turn " + turn.turn + (turn.agent ? " \u00b7 " + speaker(turn) : "")));
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
        make("pre", "", more.map(([name, value]) => name + " = " + words(value)).join("\n")));
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
  for (const name of FILTERS) {
    $(name).value = hash.get(name) || "";
    if ($(name).selectedIndex === -1) $(name).value = "";
  }
  const named = record => record.trajectory === hash.get("trajectory") && String(record.step) === hash.get("of");
  shown = all.filter(named);
  current = 0;
  apply(true);
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
  find();
});
function find() {
  const chosen = document.querySelector("#list button[aria-current=true]");
  if (chosen) chosen.scrollIntoView({ block: "nearest" });
}
// How far a reader has scrolled outlives a page that loads itself again.
const PLACES = ["list", "detail"];
window.addEventListener("pagehide", () =>
  sessionStorage.setItem(location.href, JSON.stringify(PLACES.map(name => $(name).scrollTop))));
restore();
find();
try {
  const places = JSON.parse(sessionStorage.getItem(location.href) || "[]");
  PLACES.forEach((name, k) => { $(name).scrollTop = places[k] || $(name).scrollTop; });
} catch { /* a browser that keeps nothing */ }
