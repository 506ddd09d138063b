"""The dashboard's server: what it answers to browsers, to strangers, and about damaged runs."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from evener.cli import main
from helpers.dashboards import Served, serve
from helpers.event_cases import committed_window, started, to_line
from helpers.launched import Sandbox
from helpers.limits import PATIENCE_S

#: It holds a run folder as a rank does, tells of signals, and ends.
OWNER = """
import sys
from pathlib import Path
from evener.config.folders import FolderLock
from evener.team.signals import StopSignals
with FolderLock(Path(sys.argv[1])) as lock, StopSignals() as signals:
    lock.require()
    tell("ready")
    while signals.requested is None:
        time.sleep(0.01)
    tell(signals.requested.name)
"""


def write(folder: Path, data: bytes, mode: str = "wb") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open(mode) as stream:
        stream.write(data)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path_factory.mktemp("dashboard"))
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def runs(sandbox: Sandbox) -> Path:
    root = sandbox.folder / "runs"
    windows = b"".join(to_line(committed_window(k)) for k in range(50))
    write(root / "good", to_line(started(run="good")) + windows)
    write(root / "<img src=x onerror=alert(1)>", to_line(started(run="other")))
    write(sandbox.folder / "outside", to_line(started()))
    return root


@pytest.fixture(scope="module")
def served(sandbox: Sandbox, runs: Path) -> Iterator[Served]:
    dashboard = serve(sandbox, runs, "--bind", "127.0.0.1")
    yield dashboard
    dashboard.end()


def test_the_page_runs_its_own_script_and_asks_this_server_alone(served: Served) -> None:
    status, headers, page = served.request("/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert b'<script type="application/json" id="numbers">null</script>' in page


def test_runs_are_listed_and_sent_when_they_change(served: Served, runs: Path) -> None:
    _, _, listed = served.request("/runs")
    assert sorted(listed["runs"]) == sorted(path.name for path in runs.iterdir())
    documents = served.documents("good")
    assert next(documents)["run"]["windows"] == 50
    _, headers, _ = served.request("/runs/good")
    status, _, body = served.request("/runs/good", **{"If-None-Match": headers["ETag"]})
    assert (status, body) == (304, b"")
    write(runs / "good", to_line(committed_window(50)), "ab")
    found = next(documents)
    assert (found["run"]["windows"], found["notes"]) == (51, [])


@pytest.mark.parametrize(
    "path",
    [
        *("/runs/../outside", "/runs/..%2foutside", "/runs/%2e%2e", "/runs/%2Fetc"),
        *("/runs/good%00", "/runs/absent", "/runs/good/events.jsonl", "/runs/good/more", "/%ff%fe"),
        *("/assets/../server.py", "/etc/passwd", "//etc/passwd"),
    ],
)
def test_no_path_leads_out(served: Served, path: str) -> None:
    status, headers, _ = served.request(path)
    assert status == 404
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_another_name_than_loopbacks_gets_nothing(served: Served) -> None:
    assert served.request("/runs", host=f"evil.example:{served.port}")[0] == 401
    assert served.request("/runs/good", host="evil.example")[0] == 401
    assert served.request("/runs", host=f"localhost:{served.port}")[0] == 200


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer x", "Basic x", "Bearer \xe4"])
def test_stopping_needs_the_token(served: Served, header: str | None) -> None:
    given = {} if header is None else {"authorization": header}
    assert served.request("/runs/good/stop", "POST", **given)[0] == 401
    assert served.request("/runs/good/stop", "GET", **given)[0] == 405


def test_a_run_is_asked_to_stop_as_by_ctrl_c(served: Served, sandbox: Sandbox, runs: Path) -> None:
    token = {"authorization": f"Bearer {served.token}"}
    status, _, answer = served.request("/runs/good/stop", "POST", **token)
    assert status == 409
    assert "press Ctrl-C in the terminal in which the run was started" in answer["error"]
    assert served.request("/runs/absent/stop", "POST", **token)[0] == 404
    owner = sandbox.start(sys.executable, sandbox.script(OWNER), runs / "good")
    assert sandbox.mailbox.read(1) == ["0 ready"]
    documents = served.documents("good")
    assert next(found for found in documents if found["is_running"])
    status, _, answer = served.request("/runs/good/stop", "POST", **token)
    assert (status, answer["message"].split(" to ")[0]) == (
        200,
        f"asked process {owner.process.pid}",
    )
    assert sandbox.mailbox.read(1) == [f"0 {signal.SIGTERM.name}"]
    assert owner.end().code == 0
    assert next(found for found in documents if not found["is_running"])


def test_who_locks_a_folder_cannot_have_others_signalled(
    served: Served, sandbox: Sandbox, runs: Path
) -> None:
    script = sandbox.script(OWNER)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        named = {**sandbox.environ, "EVENER_PARENT_PID": str(other.pid)}
        owner = subprocess.Popen([sys.executable, str(script), str(runs / "good")], env=named)
        assert sandbox.mailbox.read(1) == ["0 ready"]
        token = {"authorization": f"Bearer {served.token}"}
        status, _, answer = served.request("/runs/good/stop", "POST", **token)
        assert (status, other.poll(), owner.poll()) == (409, None, None)
        assert f"names process '{other.pid}' as its launcher" in answer["error"]
        owner.terminate()
        owner.wait(PATIENCE_S)
    assert sandbox.mailbox.read(1) == [f"0 {signal.SIGTERM.name}"]


def test_noise_and_requests_that_never_end_keep_nobody_out(served: Served) -> None:
    with ExitStack() as opened:
        unended = b"GET /runs HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
        noise = b"", b"\x16\x03\x01" + bytes(range(256)), b"GET / HTTP/9\r\n\r\n", b"{" * 99
        for text in (*noise, *unended):
            for _ in range(1 if text in noise else 300):
                visitor = socket.create_connection(("127.0.0.1", served.port), PATIENCE_S)
                opened.enter_context(visitor).sendall(text)
        assert served.request("/runs")[0] == 200


def test_another_address_needs_the_token_for_everything(
    sandbox: Sandbox, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboard", str(runs), "--bind", "0.0.0.0"]) == 2
    assert "--token-file" in capsys.readouterr().err
    assert main(["dashboard", str(runs / "absent")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    path = sandbox.token_file("a token of some length\n")
    dashboard = serve(sandbox, runs, "--bind", "0.0.0.0", "--token-file", path)
    assert dashboard.token == "", "a token that the user has chosen is not printed"
    assert dashboard.request("/")[0] == 200
    assert dashboard.request("/runs")[0] == 401
    assert dashboard.request("/runs/good")[0] == 401
    token = {"authorization": "Bearer a token of some length"}
    assert dashboard.request("/runs", **token)[0] == 200
    assert next(dashboard.documents("good", **token))["name"] == "good"
    dashboard.end()
    assert not psutil.pid_exists(dashboard.running.process.pid)
