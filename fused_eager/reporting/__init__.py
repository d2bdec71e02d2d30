"""Reports: everything that reads the event log. Nothing in here is imported until somebody asks for a report."""
