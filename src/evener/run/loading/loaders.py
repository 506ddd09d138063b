"""Makes the loader that fits the way in which a team trains."""

from evener.run.loading.local_loop import LocalLoader
from evener.run.loading.team_loop import Feed, SyncLoader, TeamLoader
from evener.run.local.engine import LocalEngine
from evener.run.sync.engine import WindowEngine
from evener.run.windows.base import Engine


def make_loader(engine: Engine, feed: Feed) -> TeamLoader:
    """A loader over what ``feed`` describes; see ``Ddp.loader``."""
    if isinstance(engine, LocalEngine):
        return LocalLoader(engine, feed)
    assert isinstance(engine, WindowEngine)
    return SyncLoader(engine, feed)
