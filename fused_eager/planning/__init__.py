"""The stream into regions: which ops share one, in which order, where it is cut; and ops as plain values."""
