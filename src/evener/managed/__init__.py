"""``Ddp.builder``: evener owns the loop, and runs it in a process for each device."""
