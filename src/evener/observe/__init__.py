"""What people see: events, and the sinks that store or show them where they are told to."""

from evener.observe.events import Event, RankRow, Sink
from evener.observe.jsonl import JsonlSink, read_events
from evener.observe.lineage import check_exactly_once, effective_events, lineage
from evener.observe.progress import ProgressSink
from evener.observe.summary import (
    RankSummary,
    RunSummary,
    closing_table,
    time_saved_s,
    verdict,
)
from evener.observe.tally import EventTally, MemberTotals, Speed
from evener.observe.tensorboard import TensorBoardSink

__all__ = [
    "Event",
    "EventTally",
    "JsonlSink",
    "MemberTotals",
    "ProgressSink",
    "RankRow",
    "RankSummary",
    "RunSummary",
    "Sink",
    "Speed",
    "TensorBoardSink",
    "check_exactly_once",
    "closing_table",
    "effective_events",
    "lineage",
    "read_events",
    "time_saved_s",
    "verdict",
]
