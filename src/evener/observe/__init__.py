"""What people see: events, and the sinks that store or show them where they are told to."""
