"""Figures of a run, computed again from the lines of its events: an independent reference.

It shares no code with ``src`` and uses no library; it follows what docs/report.md says.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def recompute(path: Path) -> dict[str, Any]:
    """The figures of a run by name; those of ranks by rank, for the team at the end."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    windows, evaluations, team = _lineage(events)
    measured = _measured(windows, team)
    newest = windows[-1]["ranks"]
    found = _speeds(windows, measured, evaluations, {row["rank"] for row in newest})
    parked = set(windows[-1].get("parked", ()))
    found |= _adds(found, parked)
    found |= _times(windows, newest)
    found["samples"] = sum(row["samples"] for one in windows for row in one["ranks"])
    found["windows"] = len(windows)
    losses = [row for row in newest if row["weight"] > 0]
    weight = sum(row["weight"] for row in losses)
    found["last_loss"] = sum(row["loss"] * row["weight"] for row in losses) / weight
    return found


def _lineage(events: list[Row]) -> tuple[list[Row], list[Row], list[str]]:
    """The windows that count, each with its session; evaluations; and the members at the end."""
    windows: list[Row] = []
    evaluations: list[Row] = []
    session, teams = 0, {0: None}
    for event in events:
        kind = event["type"]
        if kind in ("run_started", "run_resumed", "reformed"):
            session += 1
            teams[session] = event.get("members", teams[session - 1])
        if kind in ("run_resumed", "reformed"):
            windows = [one for one in windows if one["window"] < event["window"]]
        if kind == "window":
            windows.append({**event, "session": session})
        if kind == "eval":
            evaluations.append(event)
    for one in windows:
        one["team"] = teams[one["session"]]
    return windows, evaluations, teams[session] or []


def _measured(windows: list[Row], team: list[str]) -> list[int]:
    """Places of the windows of this team, without the first ones of each session."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(windows):
        members = {row["member"] for row in one["ranks"]}
        if set(one["team"] or ()) == set(team) and members <= set(team):
            places[one["session"]].append(place)
    kept = []
    for session in places.values():
        first = min(3, (len(session) - 1) // 2) + 1
        kept += session[first:]
    return kept


def _speeds(
    windows: list[Row], measured: list[int], evaluations: list[Row], ranks: set[int]
) -> dict[str, Any]:
    seconds = weight = 0.0
    own: dict[int, dict[str, float]] = {rank: defaultdict(float) for rank in ranks}
    for place in measured:
        begin_t, end_t = windows[place - 1]["t"], windows[place]["t"]
        between = [e for e in evaluations if begin_t <= e["t"] < end_t]
        seconds += end_t - begin_t - sum(e["elapsed_s"] for e in between)
        for row in windows[place]["ranks"]:
            weight += row["weight"]
            if row["weight"] > 0:
                update_s = min(row.get("update_s", 0.0), row["compute_s"])
                sums = own[row["rank"]]
                sums["weight"] += row["weight"]
                sums["pass_s"] += row["compute_s"] - update_s
                sums["update_s"] += update_s * max(1, windows[place].get("update_parts", 1))
                sums["windows"] += 1
    alone = {
        rank: weight
        / (
            sums["pass_s"] * weight / sums["weight"]
            + sums["update_s"] * len(measured) / sums["windows"]
        )
        for rank, sums in own.items()
        if sums["weight"] > 0
    }
    speed = weight / seconds
    return {
        "speed": speed,
        "alone": alone,
        "multiple": speed / max(alone.values()),
        "of_ideal": speed / sum(alone.values()),
    }


def _adds(found: dict[str, Any], parked: set[int]) -> dict[str, Any]:
    active = {rank: s for rank, s in found["alone"].items() if rank not in parked}
    part = min(1.0, found["speed"] / sum(active.values()))
    adds = {}
    for rank in active:
        others = [s for other, s in active.items() if other != rank]
        if others:
            adds[rank] = found["speed"] / max(max(others), part * sum(others)) - 1
    return {"adds": adds}


def _times(windows: list[Row], newest: list[Row]) -> dict[str, Any]:
    spans = ("data_s", "compute_s", "wait_s", "sync_s")
    spent = dict.fromkeys(spans, 0.0)
    weights: dict[str, float] = defaultdict(float)
    waited_for: dict[str, float] = defaultdict(float)
    for one in windows:
        for row in one["ranks"]:
            weights[row["member"]] += row["weight"]
            for span in spans:
                spent[span] += row.get(span, 0.0)
        at_work = [row for row in one["ranks"] if row["compute_s"] > 0]
        if len(at_work) > 1:
            last = min(at_work, key=lambda row: row["wait_s"])
            for row in at_work:
                waited_for[last["member"]] += row["wait_s"] - last["wait_s"]
    total_s, total = sum(spent.values()), sum(weights.values())
    return {
        "lost_waiting": spent["wait_s"] / total_s,
        "exchange": spent["sync_s"] / total_s,
        "data": spent["data_s"] / total_s,
        "shares": {row["rank"]: weights[row["member"]] / total for row in newest},
        "waited_for_s": {row["rank"]: waited_for[row["member"]] for row in newest},
    }
