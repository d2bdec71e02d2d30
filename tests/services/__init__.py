"""What tests of real servers stand on: where their programs come from, a browser, and which of them may be skipped."""
