"""Is a response's final answer right? `answer` finds what is graded, `equality` compares it, `pool` keeps that from hanging.

The answer is looked for with the functions that importance uses (`credit.answer`): what is paid is what OAR probes.
"""
