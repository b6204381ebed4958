"""Images by link: fetched within limits, from public addresses, once in a session."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from branchline.gateway.config import GatewayConfig
from branchline.gateway.image_urls import ImageFetcher, is_public_address
from tests.chat.generic.test_images import open_codec
from tests.chat.test_vision import make_image
from tests.gateway.harness import agent, run
from tests.hang import HANG_S

PNG = make_image(60, 60).payload


class ImageServer(ThreadingHTTPServer):
    """Serves an image and other responses on loopback."""

    image = PNG

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.paths.append(self.path)
                location = self.path.partition("to=")[2]
                self.send_response(302 if location else 404 if self.path == "/missing" else 200)
                if location:
                    self.send_header("location", location)
                self.send_header("content-type", "image/png; charset=x")
                self.end_headers()
                if self.path == "/slow":
                    server.release.wait(HANG_S)
                self.wfile.write(server.image)

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[ImageServer]:
    with ImageServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


def test_an_image_is_fetched_also_after_a_redirect(server: ImageServer) -> None:
    fetcher = ImageFetcher("any")
    assert fetcher.fetch(f"{server.url}/cat.png?size=1") == (PNG, "image/png")
    assert fetcher.fetch(f"{server.url}/?to=/cat.png") == (PNG, "image/png")
    assert server.paths == ["/cat.png?size=1", "/?to=/cat.png", "/cat.png"]
    with pytest.raises(ValueError, match="more than 3 redirects"):
        fetcher.fetch(f"{server.url}/?to=/?to=/?to=/?to=/?to=/")


def test_what_exceeds_a_limit_or_fails_is_refused(server: ImageServer) -> None:
    with pytest.raises(ValueError, match="status 404"):
        ImageFetcher("any").fetch(f"{server.url}/missing")
    with pytest.raises(ValueError, match="more than 100 bytes"):
        ImageFetcher("any", max_bytes=100).fetch(f"{server.url}/")
    with pytest.raises(TimeoutError):
        ImageFetcher("any", timeout_s=0.2).fetch(f"{server.url}/slow")
    for url in ("file:///etc/hostname", "ftp://h/x", "http:///x"):
        with pytest.raises(ValueError, match="expected http://HOST"):
            ImageFetcher("any").fetch(url)


def test_local_addresses_are_refused_also_behind_a_public_name(server: ImageServer) -> None:
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        with pytest.raises(ValueError, match="expected a public address"):
            ImageFetcher("public").fetch(url)
    # One of several addresses is local.
    fetcher = ImageFetcher("public", resolve_host=lambda *_: ["8.8.8.8", "192.168.0.1"])
    with pytest.raises(ValueError, match=r"is at 192.168.0.1, expected a public address"):
        fetcher.fetch("http://example.com/")
    assert server.paths == []


def test_a_redirect_to_a_local_address_is_refused(server: ImageServer) -> None:
    class Fetcher(ImageFetcher):
        def _connect(self, target: Any, deadline: float) -> Any:
            if target.hostname == "public.example":
                policy, self.policy = self.policy, "any"
                try:
                    return super()._connect(target, deadline)
                finally:
                    self.policy = policy
            return super()._connect(target, deadline)

    fetcher = Fetcher("public", resolve_host=lambda *_: ["127.0.0.1"])
    port = server.server_address[1]
    with pytest.raises(ValueError, match=r"inner.example is at 127.0.0.1, expected a public address"):
        fetcher.fetch(f"http://public.example:{port}/?to=http://inner.example:{port}/")
    assert len(server.paths) == 1


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "224.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "::ffff:127.0.0.1", "2002:7f00:1::",
     "64:ff9b::7f00:1"],
)  # fmt: skip
def test_addresses_of_local_networks_are_not_public(address: str) -> None:
    assert not is_public_address(address)


def test_public_addresses_are_public() -> None:
    assert is_public_address("93.184.216.34")
    assert is_public_address("2606:2800:220:1::1")


def image_link(url: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": "look "}, {"type": "image_url", "image_url": {"url": url}}],
    }


def test_a_link_is_fetched_once_in_a_session_also_after_a_restart(
    server: ImageServer, tmp_path: Path
) -> None:
    async def test() -> None:
        config = GatewayConfig(image_urls="any")
        journal = tmp_path / "run.journal"
        question = image_link(f"{server.url}/cat.png")
        async with agent("one", "two", codec=open_codec(), config=config, journal=journal, id="s") as one:
            await one.ask_text(question)
            server.image = make_image(150, 60, 5).payload  # the image changes at its source
            await one.ask_text(question, "one", "and?")
            (first, second) = one.engine.received_images
            assert [span.media.payload for span in (*first, *second)] == [PNG, PNG]
            assert server.paths == ["/cat.png"]
            (line,) = await one.timelines()
            admin = one.gateway.admin_key
        async with agent(
            "three",
            codec=open_codec(),
            config=GatewayConfig(image_urls="any", admin_key=admin),
            journal=journal,
        ) as again:
            again.session = None  # type: ignore[assignment]
            response = await again.http.post(
                f"{again.gateway.url}/sessions/s/v1/chat/completions",
                json={"messages": [question, *(_turns("one", "and?", "two", "more?"))]},
                headers={"authorization": f"Bearer {admin}"},
            )
            assert response.status_code == 200, response.text
            assert again.engine.received_images[0][0].media.payload == PNG
            assert again.engine.received_prompts[0][: len(line["ids"])].tolist() == line["ids"]
        assert server.paths == ["/cat.png"]

    run(test)


def _turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if n % 2 else "assistant", "content": text} for n, text in enumerate(texts)]


def test_a_link_that_may_not_or_cannot_be_fetched_is_a_400(server: ImageServer) -> None:
    async def test() -> None:
        for policy, path, reason in (
            ("none", "/cat.png", "got an image by link"),
            ("public", "/cat.png", "expected a public address"),
            ("any", "/missing", "status 404"),
        ):
            config = GatewayConfig(image_urls=policy)  # type: ignore[arg-type]
            async with agent("one", codec=open_codec(), config=config) as one:
                response = await one.ask(image_link(server.url + path))
                assert response.status_code == 400
                assert reason in response.json()["error"]["message"]

    run(test)
