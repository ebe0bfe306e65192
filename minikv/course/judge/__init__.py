"""Runs a reader's code within limits, and says what differs from the reference, and why."""
