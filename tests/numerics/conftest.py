"""Numbers are the same whether gradients travel after backward or during it."""

import pytest

from evener.engine import sync
from evener.planning.pieces import Pieces
from helpers import teams


def let_travel(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if when == "during":
        monkeypatch.setattr(teams, "OVERLAP", "on")
        # A piece for each parameter, so that some have left while others are being computed.
        monkeypatch.setattr(sync, "choose_pieces", lambda *known: Pieces(1, 0.0, 0.0))


@pytest.fixture(params=["after", pytest.param("during", marks=pytest.mark.long)])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients travel after backward, and with ``--all`` also during it."""
    let_travel(request.param, monkeypatch)


@pytest.fixture(params=["after", "during"])
def both_exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients travel after backward, and during it."""
    let_travel(request.param, monkeypatch)
