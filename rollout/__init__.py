"""Sampling: multi-turn trajectories from the live training weights.

Letters in shape comments: B sequences, T tokens of one trajectory, N tokens of a packed batch, V vocabulary, H hidden
width, L layers, G key/value heads, D head width, P pages.
"""
