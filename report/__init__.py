"""What a run leaves behind, and what people look at: metrics, trajectories, console, HTML report, replay."""
