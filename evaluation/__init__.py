"""Scores on problems that are not trained on: how they are taken, with which tool treatment, and how sure they are."""
