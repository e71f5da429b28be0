"""`main.py audit RUN`: a run recomputed by separate code from what it stored.

Runs none of the code that produced the figures. `main.py replay` (replay.py) samples a trajectory again.
"""
