"""What is written down: what is known of an op, calls taken apart and what they return, nodes of a stream, remembered
streams, and the time that goes into it."""
