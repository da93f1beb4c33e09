"""Math problems: their data sets, and the comparison of answers."""
