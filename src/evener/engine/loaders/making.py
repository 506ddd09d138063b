"""Makes the loader that fits the way in which a team trains."""

from evener.engine.engine import Engine
from evener.engine.loaders.local import LocalLoader
from evener.engine.loaders.planned import Feed, SyncLoader, TeamLoader
from evener.engine.local import LocalEngine
from evener.engine.sync import WindowEngine


def make_loader(engine: Engine, feed: Feed) -> TeamLoader:
    """A loader over what ``feed`` describes; see ``Ddp.loader``."""
    if isinstance(engine, LocalEngine):
        return LocalLoader(engine, feed)
    assert isinstance(engine, WindowEngine)
    return SyncLoader(engine, feed)
