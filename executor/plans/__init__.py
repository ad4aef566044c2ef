"""Plans: their codec, the check of every rule that they must keep, and the state that they are checked against."""
