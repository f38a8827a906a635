"""What one types: the command line, the check of a machine, the load of an endpoint."""
