"""The parts of ``oar demo``: a small task, a small model that half knows it, and a readable report."""
