"""What every process shares: settings, front, the link to the engine, listening, connections, metrics."""
