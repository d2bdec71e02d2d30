"""The programs of the tutorials in docs/tutorials, as the pages show them."""
