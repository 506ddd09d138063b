"""``docs/coming-from.md`` points to what is there, and calls nothing missing that is there."""

import re
from operator import attrgetter

import evener
from helpers.source import ROOT

TEXT = (ROOT / "docs" / "coming-from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("|---")
]
NAMES = {
    name
    for row in ROWS
    for name in re.findall(r"`([A-Za-z]\w*(?:\.\w+)?)(?:\([^`]*\))?`", row[1])
    if name.partition(".")[0] in evener.__all__
}
OPTIONS = re.findall(r"`(\w+)\((\w+)=\.\.\.\)`", TEXT)


def test_what_the_tables_name_is_here() -> None:
    """Each name and option of a row, and nothing of a row that says "not yet"."""
    for name in NAMES:
        attrgetter(name)(evener)
    for owner, option in OPTIONS:
        assert option in getattr(evener, owner).__dataclass_fields__
    missing = [row[0] for row in ROWS if row[-1] == "not yet"]
    assert not {name for head in missing for name in re.findall(r"`(\w+)`", head)} & {
        *evener.__all__
    }


#: Names of either system under which readers look for a row.
LOOKED_FOR = """
TrainerConfig ElCheConfig forward_batch next_metrics save_path resume_from speed_hint max_grad_norm
TrainedState EpochMetrics meta-controller ConvergenceGuard
DistributedCudaTrainer CudaTransformerTrainer GradientMessage SafetySample create_local_comm_pair
primary_pipeline_ref DistributedTrainConfig BatchResult
C-DDP-001 C-RING-001 C-SHARD-001 C-WIRE-002 C-DP-001 C-DP-002 C-ZERO-001 C-ELASTIC-001 C-TP-001
C-PIPE-001 C-SP-001 C-STREAMSYNC-001
F-DP-001 F-DP-002 F-DP-003 F-DP-004 F-DP-005 F-HET-001 F-HET-002
"""


def test_what_readers_look_for_heads_a_row() -> None:
    heads = {word for row in ROWS for word in re.findall(r"[\w-]+", row[0])}
    assert not set(LOOKED_FOR.split()) - heads


def test_what_changes_without_a_word_comes_first() -> None:
    sections = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert sections[0] == "What changes if you say nothing"
    first = TEXT.split("## ")[1]
    for default in ("policy", "`batch_size`", "learning rate"):
        assert f"\n| {default} |" in first
