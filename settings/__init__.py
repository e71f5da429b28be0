"""The sections of the settings and the machinery that reads them; config.py holds the other sections and the whole.

Standard library only: a bad setting is refused before anything heavy is imported.
"""
