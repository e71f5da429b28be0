"""What the network computes, shared by rollout and update."""

import os

# Before CUDA is touched. Micro-batches of unlike sizes tear torch's pools otherwise: in an update at 4B 15 of 147 GB
# were reserved and could not be used.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
