"""What an update minimises, and what is measured of it: which trajectories, with which weight, by which loss.

groups.py and minibatch.py choose trajectories and fix denominators; losses.py and corrections.py are the terms of a
token; reference.py is what `loss.kl_coef` measures against; measures.py and entropies.py are figures. update.py runs
them. Formulas and sources: docs/objectives.md. The divergences of distillation are in modeling/divergence.py.
"""
