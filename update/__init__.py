"""What an update minimises, and what is measured of it: which trajectories, with which weight, by which loss.

groups.py and minibatch.py choose trajectories and fix denominators; batch.py packs them; losses.py holds the table of
losses; teacher.py scores trajectories for distillation; measures.py holds the figures. update.py runs them. Formulas
and sources: docs/objectives.md. The divergences of distillation are in modeling/divergence.py.
"""
