"""Makes the loader that fits the way in which a team trains."""

from evener.data.cursor import Cursor
from evener.data.loader import Fetcher
from evener.run.loading.intake import Order
from evener.run.loading.local_loop import LocalLoader
from evener.run.loading.team_loop import SyncLoader, TeamLoader
from evener.run.local.engine import LocalEngine
from evener.run.sync.engine import WindowEngine
from evener.run.windows.base import Engine


def make_loader(
    engine: Engine,
    fetcher: Fetcher,
    cursor: Cursor,
    order: Order,
    *,
    batch_size: int,
    micro_batch_size: int,
    max_steps: int | None,
    pin_memory: bool = False,
) -> TeamLoader:
    """A loader over what ``fetcher`` fetches; see ``Ddp.loader``."""
    if isinstance(engine, LocalEngine):
        return LocalLoader(
            engine,
            fetcher,
            cursor,
            order,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            max_steps=max_steps,
            pin_memory=pin_memory,
        )
    assert isinstance(engine, WindowEngine)
    return SyncLoader(
        engine,
        fetcher,
        cursor,
        order,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        max_steps=max_steps,
        pin_memory=pin_memory,
        probe=engine.team.world_size > 1 and not engine.policy.is_calibrated,
    )
