"""What surrounds a run: recipes, launch, run folders, rewards, plan, data, evaluation, report. Hosts never import it."""
