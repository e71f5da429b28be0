"""The Python tool's kernel-enforced box: broker, zygote, single-use children, and the wire between them.

Standard library only, and no import of ours from outside this package, so that each process starts fast and clean.
README.md in this folder says what is contained and what is not.
"""
