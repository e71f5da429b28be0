"""The teacher of on-policy distillation: its pass over the policy's trajectories, and where its weights wait.

What is learnt from it, the divergence, is computed in modeling/divergence.py; see docs/objectives.md.
"""
