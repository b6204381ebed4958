"""A Hugging Face hub on loopback with one commit per repository, and a cache that starts empty.

`huggingface_hub` itself talks to it, so a cache that it fills has the layout of a real one.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest


class FakeHub:
    """The repositories of a hub: for each name, the folder with its files."""

    def __init__(self, repositories: dict[str, Path], cache: Path) -> None:
        self.repositories = repositories
        self.cache = cache
        self.requests: list[str] = []
        """The paths of all requests so far."""

    def commit(self, repo: str) -> str:
        """The commit of a repository, which changes with the names and contents of its files."""
        files = [(path, self.read(repo, path)) for path in self.paths(repo)]
        return hashlib.sha1(repr(files).encode()).hexdigest()

    def paths(self, repo: str) -> list[str]:
        folder = self.repositories[repo]
        return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

    def read(self, repo: str, path: str) -> bytes:
        return (self.repositories[repo] / path).read_bytes()

    def fetched(self) -> set[str]:
        """The files that were downloaded so far."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.requests if "/resolve/" in path}

    def snapshot(self, repo: str) -> Path:
        """The folder of the cache that holds the commit of now."""
        return self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / self.commit(repo)

    def answer(self, path: str) -> tuple[dict[str, str], bytes] | None:
        """The headers and the body of a response; None for 404."""
        match re.split(r"/(revision|tree|resolve)/", path.partition("?")[0].removeprefix("/api/models")):
            case [name, "revision", revision] if self._has(name, revision):
                return {}, json.dumps({"id": name[1:], "sha": self.commit(name[1:]), "siblings": []}).encode()
            case [name, "tree", revision] if self._has(name, revision):
                files = [(path, self.read(name[1:], path)) for path in self.paths(name[1:])]
                entries = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in files
                ]
                return {}, json.dumps(entries).encode()
            case [name, "resolve", rest] if rest.partition("/")[2] in self.paths(name[1:]):
                data = self.read(name[1:], rest.partition("/")[2])
                etag = hashlib.sha1(data).hexdigest()
                return {"etag": f'"{etag}"', "x-repo-commit": self.commit(name[1:])}, data
            case _:
                return None

    def _has(self, name: str, revision: str) -> bool:
        return name[1:] in self.repositories and revision in ("main", self.commit(name[1:]))


@contextmanager
def fake_hub(
    monkeypatch: pytest.MonkeyPatch, cache: Path, repositories: dict[str, Path]
) -> Iterator[FakeHub]:
    """Within the block, `huggingface_hub` reaches this hub and no other; afterwards it reaches none."""
    hub = FakeHub(repositories, cache)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append(self.path)
            answer = hub.answer(self.path)
            headers, body = answer or ({"x-error-code": "RepoNotFound"}, b"{}")
            self.send_response(404 if answer is None else 200)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    use_cache(monkeypatch, cache)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _use_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        huggingface_hub.close_session()


def use_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """A cache of its own, and a hub that cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    _use_endpoint(monkeypatch, "http://127.0.0.1:9")  # The discard port: nothing listens.


def _use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        url + "/{repo_id}/resolve/{revision}/{filename}",
    )
