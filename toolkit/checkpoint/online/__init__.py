"""What a run saves while it trains."""
