"""``Ddp.wrap``: averaging by hand, for loops that no window fits."""
