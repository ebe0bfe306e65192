"""What the course measures: timing, workloads and the running table."""
