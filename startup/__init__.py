"""From the command line to a built run: its words, what is refused, what is constructed, the check before step 1."""
