"""What is written down: nodes of a stream, calls taken apart, remembered streams, and the time that goes into it."""
