"""``evener report`` as users call it, and the page's structure; browsers are tried elsewhere."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from evener import cli
from evener.observe.events import make_event
from evener.run_report.document import figures
from evener.run_report.history import RunHistory
from evener.run_report.page import page
from evener.run_report.summary_facts import SummaryFacts
from evener.run_report.writing import report
from helpers.event_cases import committed_window, started, to_line

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\0\ud800"


class Parsed(HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def write_run(folder: Path, *events, summary: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def windows(count: int = 5):
    return [committed_window(k, t=k + 1.0) for k in range(count)]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def numbers_in(page: str):
    (data,) = re.findall(
        r'<script type="application/json" id="numbers">(.*?)</script>', Path(page).read_text()
    )
    return json.loads(data)


def made(*arguments: str, code: int = 0) -> None:
    assert cli.main(["report", *arguments]) == code


def test_a_page_is_made_and_named(capsys):
    write_run(Path("runs/first"), started(), *windows(), summary={"tokens_per_s": 5.0})
    made("runs/first")
    said = capsys.readouterr()
    assert said.err == "report.html\n"
    assert max(map(len, said.out.splitlines())) <= 80
    worth, waits, change = said.out.replace("\n  ", " ").splitlines()
    assert worth == "The team does 1.17× rank 0 alone, 77% of all ranks together: rank 1 adds 17%."
    assert waits.startswith("Rank 0 (a) waits for rank 1 (b): 1.0 s, 10.0% of the ranks' time.")
    assert change.startswith("10 samples can be split 7/3 at best, which loses 5.9% to waiting.")
    assert change.endswith("Set batch_size=80.")
    assert numbers_in("report.html")["runs"][0]["name"] == "first"


def test_the_page_asks_for_nothing_and_runs_its_own_script_only():
    write_run(Path("first"), started(), *windows())
    made("first")
    text = Path("report.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe" not in policy[1]
    parsed = Parsed(text)
    links = [a[key] for _, a in parsed.elements for key in ("src", "href") if key in a]
    assert links == ["data:,"]
    assert not [
        a for _, a in parsed.elements for name in a if name.startswith("on") or name == "style"
    ]


def test_the_summary_of_an_earlier_session_is_left_out():
    figures = {"steps": 3, "elapsed_s": 2.5}
    ends = [
        make_event("run_finished", t=6.0, window=5, reason=reason, message=None)
        for reason in ("stopped", "failed")
    ]
    for end, is_shown in zip([ends[:1], [], ends[1:]], [True, False, False], strict=True):
        write_run(Path("first"), started(), *windows(), *end, summary=figures)
        (run,) = report([Path("first")])["runs"]
        assert run["run"]["steps"] == (3 if is_shown else None)
        assert run["run"]["elapsed_s"] == (2.5 if is_shown else 6 if end else 5)
        assert ["earlier session" in note for note in run["notes"]] == [True] * (not is_shown)


def test_numbers_are_those_of_the_page(capsys):
    write_run(Path("first"), started(), *windows())
    made("first", "--json", "-o", "page.html")
    printed = json.loads(capsys.readouterr().out)
    assert numbers_in("page.html") == printed
    assert printed["runs"][0]["team"]["speed"] == 100
    assert not Path("report.html").exists()


def test_several_runs_stand_side_by_side():
    write_run(Path("a/run"), started(), *windows())
    write_run(Path("b/run"), started(policy="cadence"), *windows())
    made("a/run", "b/run")
    # Runs of one name are told apart by their folders.
    assert {run["name"] for run in numbers_in("report.html")["runs"]} == {
        str(Path("a/run").absolute()),
        str(Path("b/run").absolute()),
    }


def test_what_runs_say_of_themselves_is_text_never_markup():
    events = [
        started(run=EVIL, policy=EVIL, unit=EVIL, members=[EVIL, "b"]),
        make_event("worker_started", t=0.0, rank=0, member=EVIL, pid=1, host=EVIL, device=EVIL),
        make_event("checkpoint", t=3.0, window=1, path=EVIL, num_bytes=9, write_s=2.5),
        make_event("worker_lost", t=5.5, rank=EVIL, member=EVIL, window=1, reason=EVIL),
        make_event("run_finished", t=6.0, window=2, reason=EVIL, message=EVIL),
    ]
    evil = committed_window(0, t=1.0)
    evil["ranks"][0]["member"] = EVIL
    summary = {
        "labels": [EVIL], "confusion": [[1]], "versions": {EVIL: EVIL}, "machine": {"x": [EVIL]},
    }  # fmt: skip
    folder = write_run(Path("<b>&'"), events[0], evil, *events[1:], summary=summary)
    made(str(folder))
    text = Path("report.html").read_text()
    parsed = Parsed(text)
    assert parsed.count("script") == 2
    assert parsed.count("img") == parsed.count("b") == 0
    assert "alert(1)</script><img" not in text


def test_damaged_lines_are_named_and_left_out():
    folder = write_run(Path("first"), started(), *windows(3))
    with (folder / "events.jsonl").open("ab") as stream:
        stream.write(b'{"t": 1, "type": "window"}\n[]\nnot json\n\xff\n{"t": NaN, "type": "x"}\n')
        stream.write(b"[" * 10_000 + b"\n")
        good = to_line(committed_window(3, t=4.0))
        stream.write(good.replace(b'"compute_s":', b'"compute_s":-'))
        stream.write(b'{"t": 4.5, "type": "unknown", "x": 1}\n')
        stream.write(good)
        stream.write(b'{"t": 5, "type": "wind')
    (folder / "summary.json").write_text("{")
    (run,) = report([folder])["runs"]
    assert run["run"]["windows"] == 4
    assert len(run["notes"]) == 5
    assert run["notes"][0].startswith("line 5 of events.jsonl is left out")
    assert run["notes"][3] == "4 further lines are left out"
    assert run["notes"][4].startswith("summary.json is left out")


@pytest.mark.parametrize("content", ["", "null\n", "\0" * 5000])
def test_a_file_without_events_gives_a_page(content):
    Path("first").mkdir()
    Path("first/events.jsonl").write_text(content)
    made("first")
    assert numbers_in("report.html")["runs"][0]["run"]["state"] == "no end recorded"


def test_what_is_not_a_run_is_an_error_with_the_remedy(capsys):
    write_run(Path("runs/first"), started())
    made("runs", code=2)
    assert "the runs in it are first; give a folder such as runs/NAME" in capsys.readouterr().err
    made("nowhere", code=2)
    assert "nowhere is not the folder of a run" in capsys.readouterr().err
    made(code=2)
    made("runs/first", "-o", "no/such/folder.html", code=2)
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "plan"])
def test_events_that_cannot_be_read_are_an_error_of_the_user(command, capsys):
    Path("run/events.jsonl").mkdir(parents=True)
    for run in ("run", "run/events.jsonl", "n" * 300):
        assert cli.main([command, run]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: event file")
        assert "cannot be read" in said


def test_only_a_page_of_the_same_runs_is_replaced(capsys):
    write_run(Path("first"), started())
    write_run(Path("second"), started(), *windows())
    Path("report.html").write_text("mine")
    for runs in (["first"], ["second"], ["first/events.jsonl"], ["first", "second"], ["second"]):
        made(*runs)
    written = [2, 3, 2, 4, 3]
    assert capsys.readouterr().err.splitlines() == [f"report-{k}.html" for k in written]
    assert Path("report.html").read_text() == "mine"
    assert numbers_in("report-2.html")["runs"][0]["name"] == "first"
    made("first", "-o", "report.html")
    assert Path("report.html").read_text() != "mine"


def test_a_trace_is_made_of_one_run(capsys):
    write_run(Path("first"), started(), *windows())
    write_run(Path("second"), started())
    made("first", "--trace", "trace.json")
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert not Path("report.html").exists()
    made("first", "second", "--trace", "trace.json", code=2)
    assert "--trace takes one run" in capsys.readouterr().err


def test_a_long_run_is_a_page_of_less_than_10_megabytes():
    history = RunHistory()
    history.add(started())
    for k in range(50_000):
        times = ((0.0912345, 0.0123456, 0.00345678), (0.1034567, 0.0001234, 0.00345678))
        history.add(committed_window(k, t=0.1071234 * k, times_s=times))
    document = figures("long", history, SummaryFacts(), [])
    assert len(page({"version": "0", "runs": [document]})) < 10_000_000
    assert document["timeline"]["merged"] == 1
