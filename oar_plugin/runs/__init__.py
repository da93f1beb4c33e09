"""What surrounds a run: recipes, launch, run folders, rewards, plan, data, evaluation. Hosts never import it."""
