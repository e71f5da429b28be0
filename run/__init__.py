"""What keeps a run going and what ends it: files, ranks, signals, the schedule, DeepSpeed's settings, spoilt steps."""
