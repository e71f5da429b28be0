"""Sampling: multi-turn trajectories from the live training weights.

Letters in shape comments: B rows, T tokens of one trajectory, N tokens of a packed line, V vocabulary, H hidden width,
L layers, G key/value heads, D head width, P pages.
"""
