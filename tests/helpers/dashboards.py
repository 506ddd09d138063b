"""A dashboard as users start it, and requests to it without a browser."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote

from helpers.launched import Running, Sandbox
from helpers.limits import PATIENCE_S


@dataclass(frozen=True)
class Served:
    """A dashboard that listens."""

    running: Running
    url: str
    port: int
    token: str

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and body of an answer; the path goes out as it is."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, headers={k.title(): v for k, v in headers.items()})
            answer = connection.getresponse()
            body = answer.read()
        kind = answer.headers.get_content_type()
        return answer.status, answer.headers, json.loads(body) if "json" in kind else body

    @contextmanager
    def documents(self, name: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        """What a reader of a run is sent."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request("GET", f"/runs/{quote(name)}/events", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield events_of(answer)

    def end(self) -> None:
        """Ends it as Ctrl-C does."""
        self.running.press_ctrl_c()
        self.running.process.communicate(timeout=PATIENCE_S)


def events_of(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def serve(sandbox: Sandbox, folder: Path, *options: object) -> Served:
    """Starts a dashboard and waits until it listens."""
    reading, writing = os.pipe()
    running = sandbox.evener("dashboard", folder, *options, stderr=writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        line = said.readline()
    found = re.fullmatch(r"evener: dashboard at (http://[\w.\[\]:]+:(\d+)/)(?:#(.*))?\n", line)
    assert found, line
    return Served(running, found[1], int(found[2]), found[3] or "")
