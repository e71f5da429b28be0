"""What a run leaves behind: metrics, trajectories."""
