"""What the documents show runs, and what they point to exists."""

import re
import runpy
from pathlib import Path

import pytest

from helpers.limits import PATIENCE_S
from helpers.markdown import blocks, is_example_of_a_loop, run_blocks
from helpers.source import ROOT, tracked_files

DOCUMENTS = [path for path in tracked_files() if path.suffix == ".md"]
#: Documents whose code takes a minute and more on a busy machine; their commands are tested in
#: tests/processes, too.
LONG = {
    "classification.md",
    "managed.md",
    "pretraining.md",
    "trainers.md",
    "tutorial-team.md",
    "tutorial-two-gpus.md",
}
WITH_CODE = [
    pytest.param(path, marks=[pytest.mark.long] if path.name in LONG else [])
    for path in DOCUMENTS
    if path.name == "README.md" or path.is_relative_to(ROOT / "docs")
    if any(b.language in {"python", "console"} for b in blocks(path.read_text()))
]


TOP = {"benchmarks", "docs", "examples", "recipes", "src", "tests"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", WITH_CODE, ids=relative)
def test_code_blocks_run(document, tmp_path):
    """Those that train in a loop run in ``tests/recipes``, on three ranks."""
    for entry in {ROOT / path.relative_to(ROOT).parts[0] for path in tracked_files()}:
        (tmp_path / entry.name).symlink_to(entry)
    run_blocks(document, tmp_path, timeout_s=PATIENCE_S, leave_out=is_example_of_a_loop)


def test_links_lead_somewhere():
    wrong = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(document)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            if not file.exists() or (anchor and anchor not in anchors(file)):
                wrong.append(f"{relative(document)}: {target}")
    assert wrong == []


def test_files_that_are_named_exist():
    wrong = []
    for document in DOCUMENTS:
        for name in re.findall(r"`((?:\w[\w.-]*/)*[\w.-]+/?)`", without_blocks(document)):
            if name.partition("/")[0] in TOP and "/" in name:
                places = [ROOT / name]
            elif re.fullmatch(r"[\w-]+\.md", name):
                places = [ROOT / name, ROOT / "docs" / name]
            else:
                continue
            if not any(place.exists() for place in places):
                wrong.append(f"{relative(document)}: {name}")
    assert wrong == []


def test_the_contents_lead_to_every_document_and_the_recipes_are_listed():
    contents = (ROOT / "docs" / "index.md").read_text()
    for path in tracked_files():
        folder = path.parent.relative_to(ROOT)
        if folder == Path("docs") and path.suffix == ".md" and path.name != "index.md":
            assert f"\n{path.stem}\n" in contents, f"docs/index.md does not lead to {path.name}"
        if folder == Path("recipes") and path.suffix == ".py":
            assert f"`{relative(path)}`" in contents, f"docs/index.md lacks {relative(path)}"


def test_the_picture_of_the_readme_is_that_of_the_table():
    picture = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    drawn = picture["draw"](picture["TABLE"].read_text())
    assert picture["PICTURE"].read_text() == drawn, "run python benchmarks/picture.py"


def without_blocks(document: Path) -> str:
    return re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ── the machinery itself ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```console\n$ echo so; false\n```\n", r"sample.md:1: 'echo so; false' ended .*\nso"),
        (
            "\n```python\nraise ValueError(7)\n```\n",
            r"sample.md:2: 'block.py' ended .*\n(.*\n)*.*7",
        ),
        ("```console\necho\n```\n", "no line starts with"),
        ("```console\n$ python3 dev.py test --all\n```\n", "would run this test again"),
    ],
)
def test_a_failing_block_is_named(tmp_path, text, message):
    document = tmp_path / "sample.md"
    document.write_text(text)
    with pytest.raises(AssertionError, match=message):
        run_blocks(document, tmp_path, timeout_s=PATIENCE_S)
