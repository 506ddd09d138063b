"""What tests share: ranks in processes, small models, leak checks."""
