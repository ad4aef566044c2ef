"""The parts that the HTTP servers of the scheduler and of the gateway share: bodies, browsers, files, the runner."""
