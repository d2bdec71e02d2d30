"""What only XLA:CPU needs: compiling in a process of its own, and executables without what only its compiler reads."""
