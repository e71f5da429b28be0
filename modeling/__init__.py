"""What the network computes, shared by rollout and update."""
