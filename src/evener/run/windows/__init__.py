"""What windows of every policy have in common: shares, results, schedules, memory, habits."""
