"""A dashboard as users start it, and requests to it without a browser."""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
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

    def documents(self, name: str, **headers: str) -> Iterator[dict[str, Any]]:
        """The documents of a run, whenever there is a new one."""
        tag = ""
        while True:
            asked = {**headers, "If-None-Match": tag}
            status, found, body = self.request(f"/runs/{quote(name)}", **asked)
            assert status in (200, 304), body
            if status == 200:
                tag = found["ETag"]
                yield body["runs"][0]
            time.sleep(0.1)

    def end(self) -> None:
        """Ends it as Ctrl-C does."""
        self.running.press_ctrl_c()
        self.running.process.communicate(timeout=PATIENCE_S)


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
