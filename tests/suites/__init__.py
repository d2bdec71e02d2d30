"""torch's own suites of modules and optimizers, run through the runtime."""
