"""From a region to what can be called: its key, its executable, the cache that keeps it; when and why it is compiled,
and what is told and measured of it."""
