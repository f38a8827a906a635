"""The parts that serve HTTP: processes and connections, and the API of a node behind them."""
