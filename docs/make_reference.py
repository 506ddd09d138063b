"""Write ``docs/reference/``: what the code says of its names, keys, commands and events.

    python docs/make_reference.py

A test compares the files with the code, so that they are never out of date.
"""

import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from pydantic import BaseModel

import evener
from evener.cli import app
from evener.config.runs import ClassifyRunConfig, RunConfig
from evener.config.settings import LOCAL_OPTIONS, DdpConfig
from evener.observe import events
from evener.observe.events import RankRow

FOLDER = Path(__file__).resolve().parent / "reference"

#: Public names by what they are for; names that are in no group are an error.
GROUPS = {
    "Your own loop": "Ddp DdpConfig WindowResult Progress Member RankRecord",
    "Policies and backends": "ApplyPolicy AverageBackend ElChe DivergenceGuard Verdict",
    "Managed runs": "DdpBuilder DdpHandle EpochMetrics EpochContext TrainedState record_scalar",
    "Averaging by hand": "Replicas",
    "Jobs and tasks": "pretrain PretrainResult classify ClassifyResult Task Job run_task "
    "TaskResult",
    "Language models in your own loop": "DistributedTrainer DistributedComm "
    "DistributedTrainConfig DistributedRole DistributedBackend TransformerTrainer LMBatch "
    "shard_batches shard_files",
    "Classifiers in your own loop": "DataParallelCoordinator ClassifyPipeline ClassifyConfig "
    "Sample BatchResult",
    "Events": "Sink JsonlSink",
    "Errors": "EvenerError UserError ConfigError DataError CheckpointError LaunchError UsageError "
    "NonFiniteGradientError ReplicasDifferError ProtocolError CollectiveError PeerLostError "
    "CollectiveTimeoutError CollectiveMismatchError TeamRefusedError RunEndedError LeftOutError "
    "CoordinatorLostError WorkerError",
}
NOTE = "<!-- written by docs/make_reference.py: change the code, and run it -->\n"


def main() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    found = {"api.md": api, "keys.md": keys, "commands.md": commands, "events.md": event_page}
    return {name: f"{NOTE}\n{make().strip()}\n" for name, make in found.items()}


# ── public names ──────────────────────────────────────────────────────────────────────────────────


def api() -> str:
    """Return the page of public names, whose docstrings Sphinx fills in."""
    listed = [name for names in GROUPS.values() for name in names.split()]
    if sorted(listed) != sorted(set(evener.__all__) - {"__version__"}):
        missing = set(evener.__all__) ^ {*listed, "__version__"}
        raise SystemExit(
            f"GROUPS of docs/make_reference.py lacks or has too many: {sorted(missing)}"
        )
    parts = [
        "# Public names",
        "Everything that `evener` exports, and nothing else, is public. `evener.__version__` is "
        "the version.",
    ]
    for group, names in GROUPS.items():
        parts += [f"## {group}", *(_directive(name) for name in names.split())]
    parts += ["## Ray Train", _block("automodule", "evener.ray", members="")]
    parts += [
        "## Hugging Face's Trainer",
        "`evener.hf.Trainer` and `evener.hf.TrainerMixin` take the place of transformers' "
        "`Trainer`: [how](../huggingface.md).",
    ]
    return "\n\n".join(parts)


def _directive(name: str) -> str:
    value = getattr(evener, name)
    if not isinstance(value, type):
        return _block("autofunction", f"evener.{name}")
    options = {"members": ""}
    if name == "Ddp":
        options["inherited-members"] = ""
    if issubclass(value, Exception):  # its base says how to catch it
        options["show-inheritance"] = ""
    return _block("autoclass", f"evener.{name}", **options)


def _block(directive: str, target: str, **options: str) -> str:
    lines = [f":{name}: {value}".rstrip() for name, value in options.items()]
    return "\n".join(
        ["```{eval-rst}", f".. {directive}:: {target}", *(f"   {x}" for x in lines), "```"]
    )


# ── keys of YAML files, options of DdpConfig ──────────────────────────────────────────────────────


def keys() -> str:
    """Return the page of keys and options."""
    pretraining, classifying = dict(_keys(RunConfig)), dict(_keys(ClassifyRunConfig))
    common = {k: row for k, row in pretraining.items() if classifying.get(k) == row}
    sections = {
        "Keys of every task": common,
        "Keys of `evener pretrain`": {k: r for k, r in pretraining.items() if k not in common},
        "Keys of `evener classify`": {k: r for k, r in classifying.items() if k not in common},
    }
    parts = [
        "# Keys and options",
        "Keys of a run's YAML file. `--set KEY=VALUE` sets one on the command line. An unknown "
        "key or an invalid value is an error that names it. Keys with * act in `cadence` and "
        "`async` alone.",
    ]
    for title, rows in sections.items():
        parts += [f"## {title}", "| key | default | meaning |\n|---|---|---|\n" + _table(rows)]
    options = {field.name: _option(field) for field in dataclasses.fields(DdpConfig)}
    parts += [
        "## Options of `DdpConfig`",
        "Fields of `DdpConfig(...)`, and keywords and methods of `Ddp.builder`.",
        "| option | default | meaning |\n|---|---|---|\n" + _table(options),
    ]
    return "\n\n".join(parts)


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[str, str]]]:
    described = attributes(section)
    defaults = section().model_dump(mode="json")
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, (_yaml(defaults[name]), described[name])


def _option(field: "dataclasses.Field[Any]") -> tuple[str, str]:
    value = (
        "{}"
        if field.default is dataclasses.MISSING
        else repr(DdpConfig().__getattribute__(field.name))
    )
    return value, attributes(DdpConfig)[field.name]


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _table(rows: dict[str, tuple[str, str]]) -> str:
    lines = []
    for name, (default, meaning) in rows.items():
        star = " *" if name in LOCAL_OPTIONS else ""
        text = meaning.replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}`{star} | `{default}` | {text} |")
    return "\n".join(lines)


def attributes(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say of its attributes."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = re.search(
            r"\n\s+Attributes:\n(.*?)(?:\n\s*\n\s+\w+:\n|\Z)", base.__doc__ or "", re.DOTALL
        )
        for name, meaning in re.findall(
            r"^ {8}(\w+): (.*?)(?=^ {8}\w+: |\Z)", text[1] if text else "", re.DOTALL | re.MULTILINE
        ):
            found[name] = " ".join(meaning.split())
    return found


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


def commands() -> str:
    """Return the page of commands, as their ``--help`` describes them."""
    group = typer.main.get_command(app)
    parts = ["# Commands", _help(group, "evener")]
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        parts += [f"## evener {name}", _help(command, f"evener {name}")]
    return "\n\n".join(parts)


def _help(command: Any, name: str) -> str:
    context = command.make_context(name, [], resilient_parsing=True, terminal_width=80)
    return f"```text\n{command.get_help(context)}\n```"


# ── events ────────────────────────────────────────────────────────────────────────────────────────


def event_page() -> str:
    """Return the page of events: each type with its fields and the comment above it."""
    parts = [
        "# Events",
        "Each line of `events.jsonl` is a JSON object with `t` (unix seconds) and `type`; a `Sink` "
        "receives the same as a dict. Types have these fields, and some have more, which the text "
        "names. Names that end in `_s` are seconds. New fields may be added; none changes its "
        "meaning.",
    ]
    for kind, text in described_events().items():
        fields = ", ".join(f"`{name}`" for name in events.FIELDS[kind].split())
        parts += [f"## {kind}", f"Fields: {fields}.", text.replace("``", "`")]
    parts += ["## Rows of a window", "`ranks` of a `window` has a row for each rank:"]
    rows = attributes(RankRow)
    parts.append(
        "| key | meaning |\n|---|---|\n"
        + "\n".join(
            f"| `{name}` | {rows[name].replace('``', '`')} |" for name in RankRow.__annotations__
        )
    )
    return "\n\n".join(parts)


def described_events() -> dict[str, str]:
    """Return the comment above each type of event in the source of ``FIELDS``.

    A type without one shares that of the type above it.
    """
    source = Path(events.__file__).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("#: "))
        elif token.type == tokenize.STRING and (kind := token.string.strip('"')) in events.FIELDS:
            shared = list(found.values())[-1:]
            found.setdefault(kind, " ".join(comment or shared))
            comment = []
        elif token.string == "{":
            comment = []  # what precedes the table
    return found


if __name__ == "__main__":
    main()
