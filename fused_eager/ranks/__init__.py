"""The other ranks of a job: whether they live, where they are, and whether they call the same collectives."""
