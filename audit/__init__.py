"""`main.py audit RUN`: a run recomputed by separate code from what it stored.

Imports nothing that produced the figures: neither reward.py nor data.py nor objectives/.
"""
