"""The `tensorcache` command."""
