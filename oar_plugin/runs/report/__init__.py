"""Reports of runs: metrics read from logs, findings, the page."""
