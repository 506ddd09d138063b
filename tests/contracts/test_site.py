"""The site: its reference is that of the code, and it builds without a warning or a dead link."""

import importlib.util
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
import typer
from pydantic import BaseModel

import evener
from evener.cli import app
from evener.config.runs import ClassifyRunConfig, RunConfig
from evener.config.settings import DdpConfig
from evener.observe.event_lines import _EventFields
from evener.observe.events import FIELDS, RankRow
from helpers.limits import PATIENCE_S
from helpers.source import ROOT

DOCS = ROOT / "docs"


def make_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_code() -> None:
    pages = make_reference().pages()
    assert {path.name for path in (DOCS / "reference").iterdir()} == set(pages)
    for name, text in pages.items():
        assert (DOCS / "reference" / name).read_text() == text, "run python3 dev.py docs"


def keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    """Every key of a section of the configuration."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= keys(kind, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_every_key_and_option_has_a_row() -> None:
    rows = dict(
        re.findall(r"^\| `([\w.]+)`(?: \*)? \| `.*?` \| (.*) \|$", read("keys.md"), re.MULTILINE)
    )
    wanted = keys(RunConfig) | keys(ClassifyRunConfig) | set(DdpConfig.__dataclass_fields__)
    assert set(rows) == wanted
    assert all(rows.values())


def test_every_event_and_field_has_an_entry() -> None:
    text = read("events.md")
    sections = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for kind, fields in FIELDS.items():
        entry, said = sections[kind].split("\n\n")[:2]
        assert all(f"`{name}`" in entry for name in fields.split()), kind
        assert len(said) > 20, kind
    for name in [*_EventFields.__annotations__, *RankRow.__annotations__]:
        assert f"`{name}`" in text, name


def test_every_command_and_option_has_an_entry() -> None:
    text = read("commands.md")
    for name, command in typer.main.get_command(app).commands.items():
        section = text.partition(f"## evener {name}\n")[2].partition("\n## ")[0]
        assert "Example" in section, name
        options = [o for p in command.params for o in p.opts if o.startswith("--")]
        assert [o for o in options if o not in section] == [], name


def test_every_public_name_has_an_entry() -> None:
    found = re.findall(r"^.. auto\w+:: (\S+)$", read("api.md"), re.MULTILINE)
    assert {f"evener.{name}" for name in evener.__all__} - {"evener.__version__"} <= set(found)
    assert "evener.ray" in found


def read(name: str) -> str:
    return (DOCS / "reference" / name).read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S * 4,
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "html"
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    api = pages[site / "reference" / "api.html"]
    for name in set(evener.__all__) - {"__version__"}:
        assert re.search(rf'id="evener\.(?:[\w.]+\.)?{name}"', api), name
    wrong = [
        f"{page.relative_to(site)}: {target}"
        for page, text in pages.items()
        for target in re.findall(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]+)"', text)
        if not leads_somewhere(page, unescape(target), pages)
    ]
    assert wrong == []
    assert (site / "searchindex.js").stat().st_size > 10_000


def leads_somewhere(page: Path, target: str, pages: dict[Path, str]) -> bool:
    """Whether a link inside the site has a file and an anchor; other sites are not asked."""
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = target.partition("#")
    file = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
    if not file.exists():
        return False
    return not anchor or f'id="{unquote(anchor)}"' in pages.get(file, "")
