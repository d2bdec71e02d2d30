"""The doors: how ops arrive. One folder each; what is behind them is one pipeline."""
