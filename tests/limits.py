"""How long a process that a test starts may take."""

PROCESS_S = 400
"""Against a process that hangs, and nothing else. Most of one is imports: ten seconds, and several times that where two whole
runs of verl have the machine's cores."""
