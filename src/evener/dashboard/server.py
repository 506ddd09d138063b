"""The dashboard's server: the page, the document of each run, and requests to stop a run.

No content of a run is put into HTML: the page is the same for all runs, and its script sets names,
messages and numbers as text. The script polls the document of a run; the ETag shows whether it has
changed.
"""

import asyncio
import hmac
import secrets
import socket
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from evener.comm.addresses import LOOPBACK, is_loopback, open_port, parse_address
from evener.dashboard.lock_owner import ask_to_stop
from evener.dashboard.run_index import RunIndex
from evener.dashboard.watching import RunWatch
from evener.errors import LaunchError, UsageError
from evener.run_report.page import page, policy
from evener.team.terminal import say
from evener.version import __version__

#: The default port; if it is taken, the dashboard listens on a free one.
DEFAULT_PORT: Final = 8380

_MOST_CONNECTIONS: Final = 512
#: Most connections without an authorised request; beyond it, the oldest is closed.
_MOST_UNAUTHORISED: Final = 64
#: Runs that are kept in memory; the least recently requested one is dropped first.
_MOST_KEPT: Final = 16
_HEADERS: Final = [
    ("Content-Security-Policy", f"{policy(is_live=True)}; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
]


def serve(index: RunIndex, address: str | None, token: bytes) -> None:
    """Serve the dashboard until a signal ends this process.

    Args:
        index: The runs.
        address: ``HOST`` or ``HOST:PORT`` to listen on; loopback without it.
        token: Clients need it to stop runs and, on any address but loopback, to see them. If it
            is empty, which only loopback allows, a random one is printed.

    Raises:
        ConfigError: The address is invalid, or needs a token.
        LaunchError: The dashboard cannot listen there.
    """
    host, port = parse_address(address or LOOPBACK, "--bind", may_bind=True)
    is_open = is_loopback(host)
    fragment = "" if token else f"#{quote(token := secrets.token_urlsafe(16).encode())}"
    with _listen(host, port, is_guarded=not fragment) as listener:
        shown = f"[{host}]" if ":" in host else host
        say(f"evener: dashboard at http://{shown}:{listener.getsockname()[1]}/{fragment}")
        config = uvicorn.Config(
            Dashboard(index, token, is_open=is_open).app(),
            loop="asyncio",
            http=BrowserConnection,
            ws="none",
            lifespan="off",
            headers=_HEADERS,
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="critical",
            limit_concurrency=_MOST_CONNECTIONS,
            backlog=_MOST_UNAUTHORISED,  # asyncio accepts so many at once, each with a descriptor
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listener])


class BrowserConnection(H11Protocol):  # type: ignore[misc]
    """A connection that may be closed for a newer one, unless it serves an authorised request.

    Otherwise connections on which a request never ends would reach the limit of connections, and
    block all further ones.
    """

    @property
    def is_unauthorised(self) -> bool:
        """Whether it serves no authorised request."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return is_idle or not self.scope["state"].get("may_look")

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Close the oldest unauthorised connections, if there are too many with this one."""
        self.came_s = time.monotonic()
        super().connection_made(transport)
        unauthorised = [one for one in self.server_state.connections if one.is_unauthorised]
        unauthorised.sort(key=lambda one: one.came_s)
        for one in unauthorised[:-_MOST_UNAUTHORISED]:
            one.transport.abort()


class Dashboard:
    """Answers requests about runs.

    Args:
        index: The runs.
        token: See ``serve``.
        is_open: Whether clients on loopback may see runs without the token.
    """

    def __init__(self, index: RunIndex, token: bytes, *, is_open: bool) -> None:
        self._index = index
        self._token = token
        self._is_open = is_open
        self._watches: dict[Path, RunWatch] = {}

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/runs", self._list),
                Route("/runs/{name}", self._run),
                Route("/runs/{name}/stop", self._stop, methods=["POST"]),
            ]
        )

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(page())

    async def _list(self, request: Request) -> Response:
        if not self._may_look(request):
            return _refuse(401, "the token is missing or wrong")
        names = await asyncio.to_thread(self._index.names)
        return JSONResponse({"runs": names, "version": __version__})

    async def _run(self, request: Request) -> Response:
        if not self._may_look(request):
            return _refuse(401, "the token is missing or wrong")
        folder = await asyncio.to_thread(self._index.find, request.path_params["name"])
        if folder is None:
            return _refuse(404, "there is no such run here")
        watch = self._watches.pop(folder, None) or RunWatch(folder)
        self._watches[folder] = watch  # as the newest one
        for oldest in list(self._watches)[:-_MOST_KEPT]:
            del self._watches[oldest]
        answer = await asyncio.to_thread(watch.answer)
        headers = {"ETag": answer.tag}
        if request.headers.get("if-none-match") == answer.tag:
            return Response(status_code=304, headers=headers)
        body = answer.document
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"], body = "gzip", answer.packed
        return Response(body, headers=headers, media_type="application/json")

    async def _stop(self, request: Request) -> Response:
        if not self._has_token(request):
            return _refuse(401, "the token is missing or wrong")
        folder = await asyncio.to_thread(self._index.find, request.path_params["name"])
        if folder is None:
            return _refuse(404, "there is no such run here")
        try:
            message = await asyncio.to_thread(ask_to_stop, folder)
        except UsageError as error:
            return _refuse(409, str(error))
        return JSONResponse({"message": message})

    def _has_token(self, request: Request) -> bool:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = kind == "Bearer" and hmac.compare_digest(given.encode(), self._token)
        request.state.may_look = is_right
        return is_right

    def _may_look(self, request: Request) -> bool:
        # A page from another site can point its own host name at loopback (DNS rebinding); but
        # browsers send the host name that they asked for.
        is_local = self._is_open and is_loopback(request.url.hostname or "")
        request.state.may_look = is_local or self._has_token(request)
        return bool(request.state.may_look)


def _listen(host: str, port: int | None, *, is_guarded: bool) -> socket.socket:
    try:
        return open_port(host, port or DEFAULT_PORT, program="the dashboard", is_guarded=is_guarded)
    except LaunchError:
        if port is not None:
            raise
        return open_port(host, 0, program="the dashboard", is_guarded=is_guarded)


def _refuse(code: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=code)
