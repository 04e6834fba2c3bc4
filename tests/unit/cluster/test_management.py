"""Whatever answers at the URL of a management API, in whatever way, a question ends in time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sharding.cluster.management import ClusterView, Management, NoAnswer

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and what it was asked with which login."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", asked
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def saying(what: Any) -> Answer:
    body = what if isinstance(what, bytes) else json.dumps(what).encode()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_an_answer_that_ends_early_is_none() -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "10")
        handler.end_headers()

    with server(cut) as (url, _), pytest.raises(NoAnswer, match="10 bytes too early"):
        Management(url).get("overview")


@pytest.mark.parametrize("part", ["body", "head"])
def test_an_answer_that_drips_ends_at_the_deadline(part: str) -> None:
    """Each byte came in time, and the question never ended."""
    done = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        if part == "body":
            handler.end_headers()
        else:
            handler.flush_headers()
        try:
            while not done.wait(0.05):
                handler.wfile.write(b" ")
        except OSError:
            pass

    with server(drip) as (url, _):
        try:
            with pytest.raises(NoAnswer, match="timed out") as caught:
                Management(url).get("overview", timeout=0.4)
        finally:
            done.set()
    assert not caught.value.in_time


def test_a_login_does_not_go_along_with_a_redirect() -> None:
    with server(saying({})) as (elsewhere, asked):

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", f"{elsewhere}/api/overview")
            handler.end_headers()

        with server(redirect) as (url, _), pytest.raises(NoAnswer, match="302 a redirect"):
            Management(url).get("overview")
        assert asked == []


ODD: list[Any] = [
    [],
    None,
    "x",
    {},
    5,
    [None],
    [{}],
    [{"name": None}],
    [{"name": "no at"}],
    b"<html>",
]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_answers_are_none(odd: Any) -> None:
    with server(saying(odd)) as (url, _):
        api = Management(url)
        view = ClusterView([api])
        with pytest.raises(NoAnswer):
            view.members()
        for ask in (view.knows_queue, view.knows_connection):
            with suppress(NoAnswer):
                assert not ask(api, "/", "amq.gen-1")


def test_a_queue_is_known_by_who_names_it() -> None:
    with server(saying({"name": "q", "vhost": "/"})) as (url, _):
        api = Management(url)
        assert ClusterView([api]).knows_queue(api, "/", "q")
        assert not ClusterView([api]).knows_queue(api, "other", "q")
