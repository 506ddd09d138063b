"""What the documents show runs, and what they point to exists."""

import re
from pathlib import Path

import pytest

from helpers.markdown import blocks, commands, run_blocks
from helpers.source import ROOT, tracked_files

DOCUMENTS = [path for path in tracked_files() if path.suffix == ".md"]
WITH_CODE = [
    path
    for path in DOCUMENTS
    if path.name == "README.md" or path.is_relative_to(ROOT / "docs")
    if any(b.language in {"python", "console"} for b in blocks(path.read_text()))
]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", WITH_CODE, ids=relative)
def test_code_blocks_run(document, tmp_path):
    for entry in {ROOT / path.relative_to(ROOT).parts[0] for path in tracked_files()}:
        (tmp_path / entry.name).symlink_to(entry)
    run_blocks(document, tmp_path, timeout_s=180)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_to_files_lead_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target) and not target.startswith("#"):
            assert (document.parent / target.split("#")[0]).exists(), f"{target} does not exist"


# ── the machinery itself ─────────────────────────────────────────────────────────────────────────

SAMPLE = """
# Sample

<!-- file: hello.py -->
```python
print("hello", end="")
```

```console
$ python hello.py > said
$ test "$(cat said)" = \\
    hello
hello
```

```python
from pathlib import Path
here = Path("said").read_text()
```

<!-- continues -->
```python
assert here == "hello"
```

<!-- not run: needs two machines -->
```console
$ false
```

```text
nothing
```
"""


def test_scripts_files_and_commands_run_in_order(tmp_path):
    document = tmp_path / "sample.md"
    document.write_text(SAMPLE)
    assert run_blocks(document, tmp_path, timeout_s=20) == 4


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
        run_blocks(document, tmp_path, timeout_s=20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n", "line 1: this block is not closed"),
        ("<!-- not run -->\n```console\n```\n", "line 1: 'not run' needs a value"),
        ("<!-- skip: me -->\n```console\n```\n", "line 1: unknown comment 'skip'"),
    ],
)
def test_a_misspelt_document_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        list(blocks(text))


def test_commands_may_go_on_in_the_next_line():
    assert commands("$ a \\\n    b\nout\n$ c\n") == ["a  b", "c"]
