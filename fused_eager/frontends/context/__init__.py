"""The front door: contexts and threads, the mode, calls that no dispatcher sees, signals, the end of the process, and
the compiled follower taken up."""
