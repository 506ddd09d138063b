"""What is averaged, and with what weight."""
