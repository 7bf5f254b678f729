# SPDX-License-Identifier: Apache-2.0
"""Retrievers: passages for queries, from a local BM25 index or from a retrieval server over HTTP.

A retriever that is down must not end a run. `Retriever.search` therefore never raises for what happens outside: the
failure is in the result (`Retrieval.failure`), where an orchestration decides and the metrics count it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import json
import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_ext.common.cache import home
from verl_ext.integration.settings.options import read
from verl_ext.methods.options import AtLeastOne, Count, NotNegative, Positive
from verl_ext.rollout.passages import MappedPassages, Passage, passage_of, read_corpus

logger = logging.getLogger(__name__)

TIMEOUT = "retriever_timeout"
ERROR = "retriever_error"


@dataclass(frozen=True)
class Retrieval:
    """What one query found.

    Attributes:
        passages: best first, at most ``top_k``; empty when nothing matched or the search failed.
        failure: ``""``, `TIMEOUT` or `ERROR`.
        detail: one line on the failure.
    """

    passages: tuple[Passage, ...] = ()
    failure: str = ""
    detail: str = ""


class Retriever(Protocol):
    """Anything that finds passages."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[Retrieval]:
        """One `Retrieval` for each query, in order."""


def make_retriever(node: Mapping[str, Any]) -> Retriever:
    """A retriever of a config node, one object for equal nodes in a process.

    Args:
        node: ``{kind: bm25, corpus: FILE, ...}`` (keys: `Bm25Options`), ``{kind: http, url: URL, ...}`` (keys:
            `HttpOptions`), or ``{kind: "my_package.module:make", ...}``: your own function or class, called with the
            other keys, returns a `Retriever`.

    Raises:
        ValueError: unknown kind or key, or a bad value.
        FileNotFoundError: the corpus is not there.
        ImportError: ``bm25s`` is not installed.
    """
    kinds: dict[str, tuple[type, type]] = {"bm25": (Bm25Options, Bm25Retriever), "http": (HttpOptions, HttpRetriever)}
    kind = node.get("kind")
    given = {key: value for key, value in node.items() if key != "kind" and value is not None}
    if isinstance(kind, str) and ":" in kind:
        return _own(kind, json.dumps(given, sort_keys=True))
    if kind not in kinds:
        raise ValueError(f"kind is {kind!r}; choose one of {', '.join(kinds)}, or name your own as package.module:make")
    options_type, retriever = kinds[kind]
    try:
        options: Any = read({kind: given}, kind, options_type, where="retriever")
    except TypeError as error:
        raise ValueError(f"the {kind} retriever {str(error).rpartition('__init__() ')[2]}") from error
    return _shared(retriever, options)


@functools.cache
def _shared(kind: type, options: Any) -> Any:
    return kind(options)


@functools.cache
def _own(path: str, keys: str) -> Retriever:
    module, _, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ValueError(f"kind is {path!r}, but {error}") from error
    return make(**json.loads(keys))


@dataclass(frozen=True)
class Bm25Options:
    """Local BM25.

    Attributes:
        corpus: a ``.jsonl`` or ``.parquet`` file with ``id``, ``title`` and ``text`` a passage (``id`` and ``title``
            may be missing; Search-R1's ``contents``, a quoted title in the first line, is read too).
        cache_dir: where indices are kept, a folder for each state of a corpus file; null: ``bm25`` in the package's
            cache (`verl_ext.common.cache.home`).
        k1, b: BM25's saturation and length normalisation.
        stopwords: a language of ``bm25s`` (``en``), or null for none.
    """

    corpus: str
    cache_dir: str | None = None
    k1: NotNegative = 1.5
    b: NotNegative = 0.75
    stopwords: str | None = "en"

    def __post_init__(self) -> None:
        if Path(self.corpus).suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"corpus is {self.corpus!r}; give a .jsonl or .parquet file")


class Bm25Retriever:
    """BM25 over a corpus in a file (Robertson and Zaragoza 2009, Lucene's variant, by ``bm25s``).

    The index is built once for a corpus file and kept on disk with the passages; both are mapped into memory at the
    first search, so that the processes of a node share them (each has the vocabulary of its own). One process builds,
    others wait; the folder is put in place by a rename.

    Args:
        options: see `Bm25Options`.

    Raises:
        FileNotFoundError: the corpus is not there.
        ImportError: ``bm25s`` is not installed.
    """

    def __init__(self, options: Bm25Options) -> None:
        self.options = options
        self.corpus = Path(options.corpus).expanduser()
        if not self.corpus.is_file():
            raise FileNotFoundError(f"the corpus {str(self.corpus)!r} is not there")
        try:
            import bm25s  # noqa: F401
        except ImportError as error:
            raise ImportError("the bm25 retriever needs the package bm25s: pip install 'verl-ext[search]'") from error
        self._lock = threading.Lock()
        self._loaded: tuple[Any, MappedPassages] | None = None
        # One thread: a search takes less than a millisecond, and the index is not made for concurrent use.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bm25")

    async def search(self, queries: Sequence[str], top_k: int) -> list[Retrieval]:
        """See `Retriever`. The event loop goes on meanwhile."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.find, list(queries), top_k)
        except Exception as error:
            logger.warning("BM25 search in %s failed: %s: %s", self.corpus, type(error).__name__, error)
            return [Retrieval(failure=ERROR, detail=f"{type(error).__name__}: {error}")] * len(queries)

    def find(self, queries: Sequence[str], top_k: int) -> list[Retrieval]:
        """The same, at once.

        Raises:
            ValueError: the corpus can't be read.
        """
        import bm25s

        index, passages = self.load()
        tokens = bm25s.tokenize(
            list(queries), stopwords=self.options.stopwords or [], return_ids=False, show_progress=False
        )
        found = []
        for words in tokens:
            words = [word for word in words if word in index.vocab_dict]
            if not words:
                found.append(Retrieval())
                continue
            ids, scores = index.retrieve([words], k=min(top_k, len(passages)), show_progress=False, n_threads=0)
            hits = [
                dataclasses.replace(passages[int(i)], score=float(score))
                for i, score in zip(ids[0], scores[0], strict=True)
                if score > 0
            ]
            found.append(Retrieval(tuple(hits)))
        return found

    def load(self) -> tuple[Any, MappedPassages]:
        """The index and the passages; built and written to the cache if they are not there."""
        with self._lock:
            if self._loaded is None:
                import bm25s

                folder = self.cache_folder()
                folder.parent.mkdir(parents=True, exist_ok=True)
                with _alone(folder.parent):
                    if not folder.is_dir():
                        self._build(folder, read_corpus(self.corpus))
                index = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
                self._loaded = index, MappedPassages(folder)
            return self._loaded

    def cache_folder(self) -> Path:
        """Folder of the index: its name tells apart corpora (by content) and settings."""
        import bm25s

        digest = hashlib.sha256()
        with self.corpus.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        settings = self.options.k1, self.options.b, self.options.stopwords, bm25s.__version__, MappedPassages.FORMAT
        digest.update(repr(settings).encode())
        root = Path(self.options.cache_dir).expanduser() if self.options.cache_dir else home() / "bm25"
        return root / f"{self.corpus.stem}-{digest.hexdigest()[:20]}"

    def _build(self, folder: Path, passages: Sequence[Passage]) -> None:
        import bm25s

        tokens = bm25s.tokenize(
            [f"{p.title} {p.text}" for p in passages], stopwords=self.options.stopwords or [], show_progress=False
        )
        index = bm25s.BM25(k1=self.options.k1, b=self.options.b)
        index.index(tokens, show_progress=False)
        work = tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent)
        try:
            index.save(work, show_progress=False)
            MappedPassages.write(Path(work), passages)
            os.replace(work, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same index
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of the node at a time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class HttpOptions:
    """A retrieval server with the interface of Search-R1's.

    Attributes:
        url: of its route, such as ``http://localhost:8000/retrieve``.
        timeout_s: seconds for one attempt, connecting included.
        retries: further attempts after a connection error, a timeout, or an answer with status 429 or 5xx.
        backoff_s: pause before the first further attempt; it doubles each time.
        max_concurrent: requests under way at once in a process.
    """

    url: str
    timeout_s: Positive = 10.0
    retries: Count = 2
    backoff_s: NotNegative = 0.5
    max_concurrent: AtLeastOne = 64

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; it begins with http:// or https://")


class _TryAgain(Exception):
    """An answer that may be better next time."""


class HttpRetriever:
    """Passages from a server: POST ``{"queries": [...], "topk": k, "return_scores": true}`` to its URL.

    The answer is ``{"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}``, one list a query; documents
    without scores, and ``title``/``text`` in place of ``contents``, are read too. A call ends after at most
    ``(retries + 1) * timeout_s`` seconds and the pauses between, and then reports `TIMEOUT` or `ERROR`.

    Args:
        options: see `HttpOptions`.
    """

    def __init__(self, options: HttpOptions) -> None:
        self.options = options
        # A semaphore belongs to one event loop.
        self._of_loop: tuple[Any, asyncio.Semaphore] | None = None

    async def search(self, queries: Sequence[str], top_k: int) -> list[Retrieval]:
        """See `Retriever`."""
        failure, detail = ERROR, ""
        for attempt in range(self.options.retries + 1):
            if attempt:
                await asyncio.sleep(self.options.backoff_s * 2 ** (attempt - 1))
            try:
                return await self._once(list(queries), top_k)
            except asyncio.TimeoutError:
                failure, detail = TIMEOUT, f"no answer from {self.options.url} within {self.options.timeout_s} s"
            except _TryAgain as error:
                failure, detail = ERROR, str(error)
            except ValueError as error:  # an answer that no further attempt would mend
                failure, detail = ERROR, f"{self.options.url}: {error}"
                break
        logger.warning("retrieval failed (%s): %s", failure, detail)
        return [Retrieval(failure=failure, detail=detail)] * len(queries)

    async def _once(self, queries: list[str], top_k: int) -> list[Retrieval]:
        import aiohttp

        payload = {"queries": queries, "topk": top_k, "return_scores": True}
        # A connection for each call: none is left open when an event loop or the process ends.
        timeout = aiohttp.ClientTimeout(total=self.options.timeout_s)
        async with self._semaphore(), aiohttp.ClientSession(timeout=timeout) as session:
            try:
                async with session.post(self.options.url, json=payload) as answer:
                    if answer.status == 429 or answer.status >= 500:
                        raise _TryAgain(f"{self.options.url} answered {answer.status}")
                    if answer.status != 200:
                        raise ValueError(f"answered {answer.status}: {(await answer.text())[:200]}")
                    body = await answer.json(content_type=None)
            except aiohttp.ClientError as error:
                raise _TryAgain(f"{self.options.url}: {type(error).__name__}: {error}") from error
        return _results(body, len(queries), top_k)

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._of_loop is None or self._of_loop[0] is not loop:
            self._of_loop = loop, asyncio.Semaphore(self.options.max_concurrent)
        return self._of_loop[1]


def _results(body: Any, queries: int, top_k: int) -> list[Retrieval]:
    """Retrievals of a server's answer.

    Raises:
        ValueError: the answer does not have the server's form.
    """
    lists = body.get("result") if isinstance(body, Mapping) else None
    if not isinstance(lists, list) or len(lists) != queries or not all(isinstance(one, list) for one in lists):
        raise ValueError(f"expected {{'result': [a list for each of {queries} queries]}}, got {str(body)[:200]}")
    found = []
    for hits in lists:
        passages = []
        for hit in hits[:top_k]:
            scored = isinstance(hit, Mapping) and "document" in hit
            score = hit.get("score") if scored else None
            number = float(score) if isinstance(score, int | float | str) else math.nan
            passages.append(passage_of(hit["document"] if scored else hit, score=number))
        found.append(Retrieval(tuple(passages)))
    return found
