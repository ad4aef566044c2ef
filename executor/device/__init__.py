"""The device and the one thread that uses it: takes plans from a queue, runs them, and has the results delivered."""
