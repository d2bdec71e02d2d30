"""What is told: the event log, the reasons and the lines of the program that are in it."""
