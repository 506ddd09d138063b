"""Windows of policy SYNC: one optimizer step of the whole team."""
